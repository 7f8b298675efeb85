"""The numerics contract of token_divergence on both backends (what a side excludes: test_divergence_support.py)."""

import math

import hypothesis.strategies as st
import pytest
import reference
import torch
from cases import BACKENDS, both, logits_of, targets_of
from hypothesis import given, settings

from crest_ops import token_divergence, token_stats

pytestmark = pytest.mark.usefixtures("poisoned_memory")
KINDS = ["reverse_kl", "forward_kl", "jsd"]
kinds = pytest.mark.parametrize("kind", KINDS)
OUTPUTS = ("logp", "entropy", "teacher_logp", "gap", "divergence")


def exact_of(x, teacher, y, kind, jsd_weight=0.5, **transform):
    """(logp, entropy, teacher_logp, gap, divergence) in float64, by torch.distributions where it has them."""
    width = transform.pop("vocab_size", None) or x.shape[-1]
    p, q = (
        torch.distributions.Categorical(logits=reference.scaled(z, vocab_size=width, **transform)) for z in (x, teacher)
    )
    log_p, log_q = p.logits, q.logits
    if kind == "jsd":
        log_m = torch.logaddexp(log_p + math.log(1 - jsd_weight), log_q + math.log(jsd_weight))
        to_p, to_q = ((r.exp() * (r - log_m)).sum(-1) for r in (log_p, log_q))
        divergence = (1 - jsd_weight) * to_p + jsd_weight * to_q
    else:
        divergence = torch.distributions.kl_divergence(*((p, q) if kind == "reverse_kl" else (q, p)))
    logp, teacher_logp = p.log_prob(y.clamp(min=0)), q.log_prob(y.clamp(min=0)).detach()
    return logp, p.entropy(), teacher_logp, teacher_logp - logp, divergence


def gradient_of(x, teacher, y, weights, **arguments):
    """Gradient of weights . (logp, entropy, gap, divergence) by the student's logits."""
    leaf = x.detach().clone().requires_grad_()
    found = token_divergence(leaf, teacher, y, **arguments)
    outputs = found.logp, found.entropy, found.gap, found.divergence
    return torch.autograd.grad(sum((w * o).sum() for w, o in zip(weights, outputs, strict=True)), leaf)[0]


def exact_gradient_of(x, teacher, y, weights, kind, **arguments):
    leaf = x.detach().double().requires_grad_()
    logp, entropy, _, gap, divergence = exact_of(leaf, teacher, y, kind, **arguments)
    outputs = logp, entropy, gap, divergence
    return torch.autograd.grad(sum((w * o).sum() for w, o in zip(weights, outputs, strict=True)), leaf)[0]


def weights_of(*shape):
    return [logits_of(*shape, seed=20 + i, scale=1.0) for i in range(4)]


def pair_of(*shape, dtype=torch.float32, teacher_dtype=None, wider=0):
    return logits_of(*shape, dtype=dtype), logits_of(
        *shape[:-1], shape[-1] + wider, dtype=teacher_dtype or dtype, seed=3
    )


# values and gradients


@both
def test_divergences_worked_by_hand(backend):
    """p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2): both KLs ln(2) / 4; m = (3/8, 1/4, 3/8)."""
    x, teacher = torch.tensor([[0.5, 0.25, 0.25]]).log() + 7, torch.tensor([[0.25, 0.25, 0.5]]).log() - 3
    y = torch.tensor([0])
    found = token_divergence(x, teacher, y, backend=backend)
    assert found.reverse_kl.item() == pytest.approx(math.log(2) / 4, abs=1e-6)
    assert found.forward_kl.item() == pytest.approx(math.log(2) / 4, abs=1e-6)
    assert found.divergence.item() == found.reverse_kl.item()
    assert found.logp.item() == pytest.approx(-math.log(2), abs=1e-6)
    assert found.teacher_logp.item() == pytest.approx(-2 * math.log(2), abs=1e-6)
    assert found.gap.item() == pytest.approx(-math.log(2), abs=1e-6)
    jsd = token_divergence(x, teacher, y, kind="jsd", backend=backend)
    assert jsd.divergence.item() == pytest.approx(0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3), abs=1e-6)
    assert jsd.forward_kl is None and jsd.reverse_kl is None
    # d reverse / dz = p (log p/q - KL) = (3/8, -1/16, -5/16) ln 2;  d forward / dz = p - q
    weights = [torch.zeros(1)] * 3 + [torch.ones(1)]
    reverse = gradient_of(x, teacher, y, weights, kind="reverse_kl", backend=backend)
    assert reverse[0].tolist() == pytest.approx([c * math.log(2) for c in (3 / 8, -1 / 16, -5 / 16)], abs=1e-6)
    forward = gradient_of(x, teacher, y, weights, kind="forward_kl", backend=backend)
    assert forward[0].tolist() == pytest.approx([0.25, 0.0, -0.25], abs=1e-6)


@both
@kinds
@pytest.mark.parametrize(
    "dtypes", [(torch.float32,) * 2, (torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)]
)
@pytest.mark.parametrize("vocabulary", [1, 1000])
def test_values_and_gradients(backend, kind, dtypes, vocabulary):
    x, teacher = pair_of(2, vocabulary, dtype=dtypes[0], teacher_dtype=dtypes[1], wider=3)
    y, weights = targets_of(2, high=vocabulary), weights_of(2)
    arguments = dict(kind=kind, jsd_weight=0.3)
    found = token_divergence(x, teacher, y, backend=backend, **arguments)
    for name, exact in zip(OUTPUTS, exact_of(x, teacher, y, **arguments), strict=True):
        ours = getattr(found, name)
        assert ours.dtype == torch.float32 and (ours - exact).abs().max() < 2e-5, name
    gradient = gradient_of(x, teacher, y, weights, backend=backend, **arguments)
    exact = exact_gradient_of(x, teacher, y, weights, **arguments)
    assert torch.allclose(gradient.double(), exact, rtol=torch.finfo(x.dtype).eps, atol=3e-5)


@both
@kinds
@pytest.mark.parametrize("vocabulary", [5119, 5121, 10_300])
def test_vocabularies_around_the_step_of_a_kernel(backend, kind, vocabulary):
    x, teacher = pair_of(2, vocabulary, dtype=torch.bfloat16)
    y, weights = targets_of(2, high=vocabulary), weights_of(2)
    found = token_divergence(x, teacher, y, kind=kind, backend=backend)
    for name, exact in zip(OUTPUTS, exact_of(x, teacher, y, kind), strict=True):
        assert (getattr(found, name) - exact).abs().max() < 4e-5, name
    gradient = gradient_of(x, teacher, y, weights, kind=kind, backend=backend)
    exact = exact_gradient_of(x, teacher, y, weights, kind)
    assert torch.allclose(gradient.double(), exact, rtol=torch.finfo(x.dtype).eps, atol=3e-5)


@both
@kinds
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize(("per_token", "vocab_size"), [(False, 77), (True, None)])
def test_every_factor_of_the_chain_once(backend, kind, softcap, per_token, vocab_size):
    x, teacher = pair_of(3, 90, wider=-10 if vocab_size else 6)
    y, weights = targets_of(3, high=77), weights_of(3)
    temperature = torch.tensor([0.3, 1.0, 4.0]) if per_token else 0.6
    arguments = dict(
        kind=kind, temperature=temperature, softcap=softcap, logit_scale=1.7, vocab_size=vocab_size, jsd_weight=0.7
    )
    found = token_divergence(x, teacher, y, backend=backend, **arguments)
    for name, exact in zip(OUTPUTS, exact_of(x, teacher, y, **arguments), strict=True):
        assert (getattr(found, name) - exact).abs().max() < 4e-5, name
    gradient = gradient_of(x, teacher, y, weights, backend=backend, **arguments)
    assert (gradient - exact_gradient_of(x, teacher, y, weights, **arguments)).abs().max() < 1e-4
    if vocab_size:
        assert (gradient[:, vocab_size:] == 0).all()


@kinds
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("per_token", [False, True])
def test_gradcheck_of_the_definition(kind, softcap, per_token):
    x, teacher = (z.double() for z in pair_of(4, 9, wider=2))
    y = torch.tensor([0, 3, -100, 6])
    temperature = torch.tensor([0.5, 1.0, 2.0, 3.0]) if per_token else 0.6

    def run(logits):
        found = token_divergence(
            logits, teacher, y, kind=kind, jsd_weight=0.2, temperature=temperature, softcap=softcap, logit_scale=1.7,
            vocab_size=8,
        )  # fmt: skip
        kls = () if kind == "jsd" else (found.forward_kl, found.reverse_kl)
        return found.logp, found.entropy, found.gap, found.divergence, *kls

    assert torch.autograd.gradcheck(run, x.requires_grad_())
    assert run(x)[0].dtype == torch.float64


@both
@kinds
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-3), (torch.float16, 1e-4), (torch.float32, 1e-5)])
@pytest.mark.parametrize("shape", [(3, 128), (2, 5001)])
def test_no_worse_than_plain_torch_in_the_same_dtype(backend, kind, dtype, tolerance, shape):
    x, teacher = pair_of(*shape, dtype=dtype)
    y, weights = targets_of(shape[0], high=shape[1]), weights_of(shape[0])
    plain = x.clone().requires_grad_()
    log_p, log_q = torch.log_softmax(plain, -1), torch.log_softmax(teacher, -1)
    if kind == "jsd":
        log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        divergence = ((log_p.exp() * (log_p - log_m)).sum(1) + (log_q.exp() * (log_q - log_m)).sum(1)) / 2
    else:
        a, b = (log_p, log_q) if kind == "reverse_kl" else (log_q, log_p)
        divergence = (a.exp() * (a - b)).sum(1)
    (plain_gradient,) = torch.autograd.grad((weights[3] * divergence).sum(), plain)
    found, exact = token_divergence(x, teacher, y, kind=kind, backend=backend), exact_of(x, teacher, y, kind)
    reference.assert_no_worse_than(found.divergence, divergence.detach(), exact[4], tolerance)
    only = [torch.zeros(shape[0])] * 3 + [weights[3]]
    gradient = gradient_of(x, teacher, y, only, kind=kind, backend=backend)
    exact_gradient = exact_gradient_of(x, teacher, y, only, kind)
    rounding = torch.finfo(dtype).eps / 2 * exact_gradient.abs()
    reference.assert_no_worse_than(gradient, plain_gradient, exact_gradient, 1e-5 + rounding)


# equal and nearly equal rows, bounds, shifts


@both
@kinds
@pytest.mark.parametrize("teacher_dtype", [torch.bfloat16, torch.float32])
def test_student_equal_to_teacher_has_no_divergence_and_no_gradient(backend, kind, teacher_dtype):
    x, y = logits_of(2, 5300, dtype=torch.bfloat16), targets_of(2, high=5300)
    x[1, ::2] = -math.inf
    y[1] = 7
    for softcap in (None, 5.0):
        teacher = x.to(teacher_dtype)
        found = token_divergence(x, teacher, y, kind=kind, softcap=softcap, jsd_weight=0.3, backend=backend)
        assert (found.divergence == 0).all() and (found.gap == 0).all()
        only = [torch.zeros(2)] * 3 + [torch.full((2,), 1e3)]
        gradient = gradient_of(
            x, teacher, y, only, kind=kind, softcap=softcap, jsd_weight=0.3, backend=backend
        )  # fmt: skip
        assert (gradient == 0).all()


@both
@kinds
@pytest.mark.parametrize("size", [1e-1, 3e-3])
def test_nearly_equal_rows_keep_their_accuracy(backend, kind, size):
    x, y = logits_of(3, 2000), targets_of(3, high=2000)
    teacher = x + size * logits_of(3, 2000, seed=5, scale=1.0)
    found = token_divergence(x, teacher, y, kind=kind, backend=backend)
    exact = exact_of(x, teacher, y, kind)[4]
    assert (found.divergence - exact).abs().max() < 3e-7  # plain float32 torch: 1e-6
    gradient = gradient_of(x, teacher, y, [torch.zeros(3)] * 3 + [torch.ones(3)], kind=kind, backend=backend)
    exact_gradient = exact_gradient_of(x, teacher, y, [torch.zeros(3)] * 3 + [torch.ones(3)], kind)
    assert (gradient - exact_gradient).abs().max() < 1e-7 + 1e-5 * size


@both
@pytest.mark.parametrize("jsd_weight", [1e-6, 0.5, 0.9])
def test_jsd_is_at_most_the_entropy_of_its_weights(backend, jsd_weight):
    """Peaked on different ids: the bound itself. A gap of 200 would underflow in exp(log p) + exp(log q)."""
    x, teacher = torch.zeros(3, 40), torch.zeros(3, 40)
    for row, gap in enumerate((30.0, 200.0, 5e4)):
        x[row, 3], teacher[row, 9] = gap, gap
    y = torch.tensor([3, 9, 5])
    found = token_divergence(x, teacher, y, kind="jsd", jsd_weight=jsd_weight, backend=backend)
    bound = -jsd_weight * math.log(jsd_weight) - (1 - jsd_weight) * math.log1p(-jsd_weight)
    assert found.divergence.tolist() == pytest.approx([bound] * 3, rel=1e-3)
    assert (found.divergence <= bound * (1 + 1e-6)).all()
    gradient = gradient_of(x, teacher, y, [torch.ones(3)] * 4, kind="jsd", jsd_weight=jsd_weight, backend=backend)
    assert torch.isfinite(gradient).all()
    kls = token_divergence(x, teacher, y, backend=backend)
    assert kls.reverse_kl.tolist() == pytest.approx([30, 200, 5e4], rel=1e-5)
    assert kls.forward_kl.tolist() == pytest.approx([30, 200, 5e4], rel=1e-5)


@both
@kinds
@pytest.mark.parametrize("constants", [(-5e4, 5e4), (5e4, 1000.0)])
def test_adding_constants_to_both_rows_changes_nothing(backend, kind, constants):
    x, teacher = ((z * 16).round() / 16 for z in pair_of(2, 700))  # exact in float32 when shifted
    y, weights = targets_of(2, high=700), weights_of(2)
    shifted = x + constants[0], teacher + constants[1]
    one = token_divergence(x, teacher, y, kind=kind, backend=backend)
    other = token_divergence(*shifted, y, kind=kind, backend=backend)
    for name in OUTPUTS:
        assert (getattr(one, name) - getattr(other, name)).abs().max() < 2e-5, name
    gradient = gradient_of(x, teacher, y, weights, kind=kind, backend=backend)
    assert (gradient - gradient_of(*shifted, y, weights, kind=kind, backend=backend)).abs().max() < 2e-5


# rows, layout, masks


@both
@pytest.mark.parametrize("kind", ["reverse_kl", "jsd"])
def test_rows_are_bitwise_independent(backend, kind):
    x, teacher = pair_of(6, 5200, dtype=torch.bfloat16, teacher_dtype=torch.float32)
    y, weights = targets_of(6, high=5200), weights_of(6)
    whole = token_divergence(x, teacher, y, kind=kind, backend=backend)
    gradient = gradient_of(x, teacher, y, weights, kind=kind, backend=backend)
    x[3], teacher[4] = math.nan, math.nan
    x[5], teacher[2] = -math.inf, -math.inf
    for rows in ([0], [5, 4, 1, 3, 2]):
        part = token_divergence(x[rows], teacher[rows], y[rows], kind=kind, backend=backend)
        some = gradient_of(x[rows], teacher[rows], y[rows], [w[rows] for w in weights], kind=kind, backend=backend)
        for i, row in enumerate(rows):
            if row < 2:
                assert torch.equal(some[i], gradient[row])
                for name in OUTPUTS:
                    assert torch.equal(getattr(part, name)[i], getattr(whole, name)[row]), name
            assert part.divergence[i].isnan() == (row in (3, 4))
            assert part.logp[i].isnan() == (row == 3) and part.teacher_logp[i].isnan() == (row == 4)


@both
def test_any_strides(backend):
    base, other = pair_of(2, 3, 40)
    y, weights = targets_of(2, 3, high=32), weights_of(2, 3)
    views = {
        "transposed": lambda z: z.transpose(0, 1).contiguous().transpose(0, 1),
        "shifted, and columns of a wider buffer": lambda z: torch.cat([z, z[:, :1]], 1).repeat(1, 1, 2)[:, :3, :40],
        "last dimension not contiguous": lambda z: z.transpose(1, 2).contiguous().transpose(1, 2),
        "four dimensions": lambda z: z.view(2, 1, 3, 40),
        "rows": lambda z: z.reshape(6, 40),
    }
    whole = token_divergence(base, other, y, backend=backend)
    gradient = gradient_of(base, other, y, weights, backend=backend)
    for name, view in views.items():
        x = view(base)
        shape = x.shape[:-1]
        teacher = other.view(x.shape) if name == "transposed" else view(other)
        found = token_divergence(x, teacher, y.view(shape), backend=backend)
        assert torch.equal(found.divergence.view(2, 3), whole.divergence), name
        part = gradient_of(x, teacher, y.view(shape), [w.view(shape) for w in weights], backend=backend)
        assert torch.equal(part.reshape(2, 3, 40), gradient), name


@both
@kinds
def test_masked_rows_are_exactly_zero_and_not_looked_at(backend, kind):
    x, teacher = pair_of(5, 30)
    y, weights = targets_of(5, high=30), weights_of(5)
    mask = torch.tensor([True, False, True, True, False])
    y[3] = -100
    clean = token_divergence(x, teacher, y, mask=mask, kind=kind, backend=backend)
    dead = [1, 3, 4]
    x[dead], teacher[dead] = math.nan, math.nan
    y[1], y[4] = -1, 1000  # out of range where masked
    found = token_divergence(x, teacher, y, mask=mask, kind=kind, backend=backend)
    for name in OUTPUTS:
        assert torch.equal(getattr(found, name), getattr(clean, name))
        assert (getattr(found, name)[dead] == 0).all()
    gradient = gradient_of(x, teacher, y, weights, mask=mask, kind=kind, backend=backend)
    assert (gradient[dead] == 0).all() and torch.isfinite(gradient).all() and (gradient[[0, 2]] != 0).all()


@both
@kinds
def test_empty_and_fully_masked(backend, kind):
    none = torch.zeros(0, dtype=torch.int64)
    assert token_divergence(torch.zeros(0, 7), torch.zeros(0, 9), none, kind=kind, backend=backend).gap.shape == (0,)
    x = torch.full((3, 7), math.nan, requires_grad=True)
    found = token_divergence(x, x.detach(), torch.full((3,), -100), kind=kind, backend=backend)
    (found.logp + found.entropy + found.divergence).sum().backward()
    assert (x.grad == 0).all() and (found.divergence == 0).all()


# the autograd contract


@both
@kinds
def test_the_graph_can_be_kept_and_nothing_is_written(backend, kind):
    x, teacher = pair_of(4, 50)
    x, teacher = x.requires_grad_(), teacher.requires_grad_()
    y, before = targets_of(4, high=50), (x.detach().clone(), teacher.detach().clone())
    found = token_divergence(x, teacher, y, kind=kind, backend=backend)
    total = (found.divergence * logits_of(4, seed=6) + found.gap).sum()
    first = torch.autograd.grad(total, (x, teacher), retain_graph=True, allow_unused=True)
    second = torch.autograd.grad(total, (x, teacher), allow_unused=True)
    assert torch.equal(first[0], second[0]) and first[1] is None and second[1] is None
    assert torch.equal(x, before[0]) and torch.equal(teacher, before[1])
    assert not found.teacher_logp.requires_grad


@both
@kinds
def test_double_backward_raises(backend, kind):
    x, teacher = pair_of(4, 50)
    found = token_divergence(x.requires_grad_(), teacher, targets_of(4, high=50), kind=kind, backend=backend)
    (gradient,) = torch.autograd.grad(found.divergence.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.square().sum().backward()


@both
def test_any_upstream_gradient_of_both_kls_at_once(backend):
    x, teacher = pair_of(6, 80)
    y = targets_of(6, high=80)
    weights = logits_of(6, seed=7), logits_of(6, seed=8)
    leaf = x.clone().requires_grad_()
    found = token_divergence(leaf, teacher, y, backend=backend)
    outputs = [found.reverse_kl, found.forward_kl]
    (gradient,) = torch.autograd.grad(outputs, leaf, weights, retain_graph=True)
    exact = sum(
        exact_gradient_of(x, teacher, y, [torch.zeros(6)] * 3 + [weight], kind)
        for weight, kind in zip(weights, ("reverse_kl", "forward_kl"), strict=True)
    )
    assert (gradient - exact).abs().max() < 4e-5
    for scale in (0.0, -1.0, 1e3):
        (scaled,) = torch.autograd.grad(outputs, leaf, [scale * w for w in weights], retain_graph=True)
        assert torch.allclose(scaled, scale * gradient, rtol=1e-5, atol=1e-5 * abs(scale))
    (expanded,) = torch.autograd.grad(found.divergence, leaf, torch.ones(()).expand(6), retain_graph=True)  # stride 0
    ones = exact_gradient_of(x, teacher, y, [torch.zeros(6)] * 3 + [torch.ones(6)], "reverse_kl")
    assert (expanded - ones).abs().max() < 4e-5
    (logp_alone,) = torch.autograd.grad(found.logp.sum(), leaf)
    assert (logp_alone - reference.gradient(x, y, torch.ones(6), torch.zeros(6))).abs().max() < 1e-5


@both
def test_log_prob_and_entropy_are_those_of_token_stats(backend):
    x, teacher = pair_of(6, 900)
    y = targets_of(6, high=900)
    stats, found = token_stats(x, y, backend=backend), token_divergence(x, teacher, y, backend=backend)
    assert torch.allclose(found.logp, stats.logp, atol=2e-6) and torch.allclose(found.entropy, stats.entropy, atol=2e-6)
    assert not found.logp.requires_grad


# errors


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (dict(teacher_logits=torch.zeros(3, 4)), r"teacher_logits is \[3, 4\]"),
        (dict(teacher_logits=torch.zeros(2, 5)), "teacher_logits"),
        (dict(teacher_logits=torch.zeros(3, 5, dtype=torch.int64)), "teacher_logits"),
        (dict(teacher_logits=torch.zeros(3, 5, device="meta")), "teacher_logits"),
        (dict(teacher_logits=None), "teacher_logits"),
        (dict(logits=[[0.0]]), "logits"),
        (dict(targets=torch.tensor([0, 5, 1])), r"targets\[1\] is 5"),
        (dict(mask=torch.ones(3)), "mask"),
        (dict(temperature=0.0), "temperature"),
        (dict(softcap=-1.0), "softcap"),
        (dict(vocab_size=6), "vocab_size"),
        (dict(kind="kl"), "kind is 'kl', want one of 'reverse_kl', 'forward_kl', 'jsd'"),
        (dict(kind="jsd", jsd_weight=0.0), "jsd_weight is 0.0.*forward_kl"),
        (dict(kind="jsd", jsd_weight=1), "jsd_weight is 1.*reverse_kl"),
        (dict(kind="jsd", jsd_weight=math.nan), "jsd_weight"),
        (dict(backend="cuda"), "backend"),
        (dict(teacher_logits=torch.zeros(3, 5, dtype=torch.float64), backend="triton"), "backend"),
    ],
)
def test_bad_input_is_named(change, name):
    arguments = dict(
        logits=torch.zeros(3, 5), teacher_logits=torch.zeros(3, 5), targets=torch.zeros(3, dtype=torch.int64)
    )
    with pytest.raises(ValueError, match=name):
        token_divergence(**arguments | change)


# shapes and combinations


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 4),
    vocabulary=st.integers(1, 300),
    padding=st.integers(0, 9),
    teacher_padding=st.integers(0, 9),
    dtypes=st.tuples(*[st.sampled_from([torch.float16, torch.bfloat16, torch.float32])] * 2),
    kind=st.sampled_from(KINDS),
    jsd_weight=st.floats(0.01, 0.99),
    backend=st.sampled_from(BACKENDS),
    data=st.data(),
)
def test_random_shapes(rows, vocabulary, padding, teacher_padding, dtypes, kind, jsd_weight, backend, data):
    x = logits_of(rows, vocabulary + padding, dtype=dtypes[0], seed=data.draw(st.integers(0, 99)))
    teacher = logits_of(rows, vocabulary + teacher_padding, dtype=dtypes[1], seed=data.draw(st.integers(0, 99)))
    y = targets_of(rows, high=vocabulary)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)), dtype=torch.bool)
    arguments = dict(kind=kind, jsd_weight=jsd_weight, vocab_size=vocabulary)
    found = token_divergence(x, teacher, y, mask=mask, backend=backend, **arguments)
    for name, exact in zip(OUTPUTS, exact_of(x, teacher, y, **arguments), strict=True):
        assert torch.allclose(getattr(found, name).double(), torch.where(mask, exact, 0), atol=4e-5), name
    assert (found.divergence >= 0).all()
    weights = [w * mask for w in weights_of(rows)]
    gradient = gradient_of(x, teacher, y, weights, mask=mask, backend=backend, **arguments)
    exact = exact_gradient_of(x, teacher, y, weights, **arguments)
    assert torch.allclose(gradient.double(), exact, rtol=torch.finfo(x.dtype).eps, atol=4e-5)


# torch.library


@both
@pytest.mark.parametrize("jsd_weight", [0.0, 0.5])
def test_opcheck(backend, jsd_weight):
    x, teacher = pair_of(1, 4, 20, wider=3)
    y, scalars = torch.tensor([1, -1, 3, 19]), (20, 1.0, 0.0, jsd_weight)
    arguments = teacher, y, torch.ones(1)
    torch.library.opcheck(torch.ops.crest.token_divergence, (x.requires_grad_(), *arguments, *scalars, backend))
    with torch.no_grad():
        _, entropy, _, *saved = torch.ops.crest.token_divergence(x, *arguments, *scalars, backend)
        grads = torch.ones(4, 4).unbind()
        torch.library.opcheck(
            torch.ops.crest.token_divergence_grad, (x.detach(), *arguments, entropy, *saved, *grads, *scalars, backend)
        )


@kinds
def test_compiles_once_for_many_lengths(kind):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    def loss(logits, teacher, targets, weight):
        found = token_divergence(logits, teacher, targets, kind=kind, temperature=0.8)
        return (weight * found.divergence).sum() - 0.1 * (found.entropy + found.gap).mean()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=backend)
    for rows in (3, 5, 8, 13):
        x, teacher = pair_of(rows, 12, wider=2)
        arguments = x.requires_grad_(), teacher, targets_of(rows, high=12), logits_of(rows, seed=2)
        (found,) = torch.autograd.grad(compiled(*arguments), x)
        (eager,) = torch.autograd.grad(loss(*arguments), x)
        assert torch.allclose(found, eager, atol=1e-6)
    assert len(graphs) == 1
