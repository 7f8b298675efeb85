"""What token_divergence computes, on both backends (what a side excludes: test_divergence_support.py)."""

import math

import hypothesis.strategies as st
import pytest
import reference
import torch
from cases import BACKENDS, both, logits_of, targets_of
from divergence_cases import KINDS, OUTPUTS, exact_gradient_of, exact_of, gradient_of, kinds, pair_of, weights_of
from hypothesis import given, settings

from crest_ops import token_divergence

pytestmark = pytest.mark.usefixtures("poisoned_memory")


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
@pytest.mark.parametrize(("teacher_dtype", "softcap"), [(torch.bfloat16, None), (torch.float32, 5.0)])
def test_student_equal_to_teacher_has_no_divergence_and_no_gradient(backend, kind, teacher_dtype, softcap):
    x, y = logits_of(2, 5300, dtype=torch.bfloat16), targets_of(2, high=5300)
    x[1, ::2] = -math.inf
    y[1] = 7
    teacher, arguments = x.to(teacher_dtype), dict(kind=kind, softcap=softcap, jsd_weight=0.3, backend=backend)
    found = token_divergence(x, teacher, y, **arguments)
    assert (found.divergence == 0).all() and (found.gap == 0).all()
    only = [torch.zeros(2)] * 3 + [torch.full((2,), 1e3)]
    assert (gradient_of(x, teacher, y, only, **arguments) == 0).all()


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
