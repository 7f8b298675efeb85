"""Rows, layout, masks, autograd, errors and torch.library of token_divergence, on both backends."""

import math

import pytest
import reference
import torch
from cases import both, logits_of, targets_of
from divergence_cases import OUTPUTS, exact_gradient_of, gradient_of, kinds, pair_of, weights_of

from crest_ops import token_divergence, token_stats
from crest_ops.divergence_rows import buffers, divergence_rows, mixture_rows

pytestmark = pytest.mark.usefixtures("poisoned_memory")


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


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_shards_of_the_columns_add_up_to_the_kls_to_the_mixture(softcap):
    """The definition's rows with the normalisers of all columns, which `divergence_rows` finds."""
    x, y = (logits_of(4, 30, seed=seed, dtype=torch.float64) for seed in (1, 2))
    transform = torch.tensor([0.7], dtype=torch.float64), softcap, 0.9, 0.3
    scratch = buffers(x.dtype, 4, 30, x.device)
    *_, m, log_sum, teacher_m, teacher_log_sum = divergence_rows(x, y, torch.zeros(4).long(), *transform, scratch)
    normaliser = torch.stack([m, log_sum, teacher_m, teacher_log_sum])
    shards = [slice(0, 13), slice(13, 30)]
    found = sum(mixture_rows(x[:, at], y[:, at], *transform, normaliser, cut(scratch, at)) for at in shards)
    capped = (3 * (0.9 * z / 3).tanh() if softcap else 0.9 * z for z in (x, y))
    log_p, log_q = (torch.log_softmax(z / 0.7, -1) for z in capped)
    log_m = (0.7 * log_p.exp() + 0.3 * log_q.exp()).log()
    exact = torch.stack([(log.exp() * (log - log_m)).sum(-1) for log in (log_p, log_q)])
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-12)


def cut(scratch, at):
    return [buffer[:, at] for buffer in scratch]
