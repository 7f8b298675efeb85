"""Divergences where a row excludes columns, is peaked, or holds NaN."""

import math

import pytest
import torch
from cases import both, logits_of, targets_of

from crest_ops import token_divergence

pytestmark = pytest.mark.usefixtures("poisoned_memory")
KINDS = ["reverse_kl", "forward_kl", "jsd"]
kinds = pytest.mark.parametrize("kind", KINDS)
INF = math.inf


def run(x, teacher, y, backend, kind, **arguments):
    """(found, gradient of the divergences' sum by x)."""
    leaf = x.detach().clone().requires_grad_()
    found = token_divergence(leaf, teacher, y, kind=kind, backend=backend, **arguments)
    return found, torch.autograd.grad(found.divergence.sum(), leaf)[0]


@both
@kinds
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_columns_that_both_exclude_have_no_part(backend, kind, softcap, dtype):
    x, teacher = logits_of(2, 900, dtype=dtype), logits_of(2, 900, seed=3)
    keep = torch.arange(900) % 3 > 0
    x[:, ~keep], teacher[:, ~keep] = -INF, -INF
    y = torch.tensor([1, 2])
    found, gradient = run(x, teacher, y, backend, kind, softcap=softcap)
    position = torch.tensor([0, 1])
    kept, kept_gradient = run(x[:, keep], teacher[:, keep], position, backend, kind, softcap=softcap)
    assert torch.allclose(found.divergence, kept.divergence, atol=2e-6)
    assert torch.allclose(found.gap, kept.gap, atol=4e-6)
    assert (gradient[:, ~keep] == 0).all()
    assert torch.allclose(gradient[:, keep], kept_gradient, atol=1e-6, rtol=torch.finfo(dtype).eps)


@both
def test_whole_leading_blocks_excluded_by_both(backend):
    x, teacher = torch.full((2, 20_000), -INF), torch.full((2, 20_000), -INF)
    x[:, [15_000, 19_999]] = torch.tensor([0.0, math.log(3)])
    teacher[:, [15_000, 19_999]] = torch.tensor([math.log(3), 0.0])
    y = torch.tensor([15_000, 19_999])
    kl = 0.5 * math.log(3)  # p = (1/4, 3/4), q = (3/4, 1/4)
    jsd = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    for kind, expected in (("reverse_kl", kl), ("forward_kl", kl), ("jsd", jsd)):
        found, gradient = run(x, teacher, y, backend, kind)
        assert found.divergence.tolist() == pytest.approx([expected] * 2, abs=1e-6)
        assert found.gap.tolist() == pytest.approx([math.log(3), -math.log(3)], abs=1e-6)
        assert torch.count_nonzero(gradient) == 4 and torch.isfinite(gradient).all()


@both
@pytest.mark.parametrize(("at", "low"), [(3, -200.0), (6000, 0.0)])
def test_a_column_that_one_side_excludes(backend, at, low):
    """Infinite for the KL that charges it, whatever little mass it has there; the other KL and the JSD stay finite."""
    x, teacher = logits_of(3, 6100), logits_of(3, 6100, seed=3)
    x[:, at] = teacher[:, at] = low
    x[0, at] = -INF  # row 0: the student excludes it; row 1: the teacher; row 2: no one
    teacher[1, at] = -INF
    y = torch.tensor([5, 5, 5])
    expected = {}
    for row, (a, b) in enumerate(((x, teacher), (teacher, x))):
        log_a, log_b = (torch.log_softmax(z[row].double(), 0) for z in (a, b))
        finite = log_a > -INF
        expected[row] = (log_a.exp() * (log_a - log_b))[finite].sum().item()
    found, reverse = run(x, teacher, y, backend, "reverse_kl")
    assert found.reverse_kl[1] == INF and found.forward_kl[0] == INF
    assert found.reverse_kl[0].item() == pytest.approx(expected[0], rel=1e-5)
    assert found.forward_kl[1].item() == pytest.approx(expected[1], rel=1e-5)
    assert torch.isfinite(found.reverse_kl[2]) and torch.isfinite(found.forward_kl[2])
    assert (reverse[1] == 0).all() and reverse[0].abs().sum() > 0 and reverse[0, at] == 0
    _, forward = run(x, teacher, y, backend, "forward_kl")
    assert (forward[0] == 0).all() and forward[1].abs().sum() > 0
    q, p = (torch.softmax(z[1].double(), 0) for z in (teacher, x))
    assert (forward[1] - (p - q)).abs().max() < 1e-6
    found, gradient = run(x, teacher, y, backend, "jsd")
    assert torch.isfinite(found.divergence).all() and torch.isfinite(gradient).all() and gradient[0, at] == 0
    assert (found.divergence > 0).all() and (found.divergence < math.log(2)).all()


@both
def test_an_infinite_divergence_leaves_the_other_terms_their_gradient(backend):
    x, teacher = logits_of(2, 40), logits_of(2, 40, seed=3)
    teacher[:, 7] = -INF
    y = torch.tensor([1, 2])
    leaf = x.clone().requires_grad_()
    found = token_divergence(leaf, teacher, y, backend=backend)
    everything = (found.reverse_kl + found.forward_kl + found.logp + found.entropy).sum()
    (gradient,) = torch.autograd.grad(everything, leaf, retain_graph=True)
    (finite,) = torch.autograd.grad((found.forward_kl + found.logp + found.entropy).sum(), leaf)
    assert torch.equal(gradient, finite) and gradient.abs().sum() > 0


@both
def test_rows_without_support_and_targets_outside_it(backend):
    x, teacher = logits_of(4, 30), logits_of(4, 30, seed=3)
    x[0], teacher[1] = -INF, -INF
    x[2], teacher[2] = -INF, -INF
    x[3, 4], teacher[3, 4] = -INF, -INF
    y = torch.tensor([4, 4, 4, 4])
    found, reverse = run(x, teacher, y, backend, "reverse_kl")
    assert found.reverse_kl[:3].tolist() == [0.0, INF, 0.0] and found.forward_kl[:3].tolist() == [INF, 0.0, 0.0]
    assert torch.isfinite(found.reverse_kl[3]) and torch.isfinite(found.forward_kl[3])
    assert (found.logp == -INF).tolist() == [True, False, True, True]
    assert (found.teacher_logp == -INF).tolist() == [False, True, True, True]
    assert found.gap.tolist() == [INF, -INF, 0.0, 0.0]
    assert (reverse == 0).all()  # no support, infinite, no support, and the target outside it
    found, gradient = run(x, teacher, y, backend, "jsd")
    # q = 0: m = p / 2, so that KL(p || m) = ln 2 and the other term is 0
    assert found.divergence[:3].tolist() == pytest.approx([math.log(2) / 2, math.log(2) / 2, 0.0], abs=1e-6)
    assert (gradient[[0, 2, 3]] == 0).all() and torch.isfinite(gradient).all()


@both
@kinds
@pytest.mark.parametrize("bad", [math.nan, INF])
def test_nan_stays_in_its_row(backend, kind, bad):
    x, teacher = logits_of(4, 50), logits_of(4, 50, seed=3)
    teacher[0, 9] = -INF  # beside a row whose divergence may be infinite
    y = targets_of(4, high=9)
    clean, clean_gradient = run(x, teacher, y, backend, kind)
    x[1, 20], teacher[2, 30] = bad, bad
    found, gradient = run(x, teacher, y, backend, kind)
    for row in (0, 3):
        assert torch.equal(gradient[row], clean_gradient[row])
        assert found.divergence[row] == clean.divergence[row]
    assert found.divergence[1:3].isnan().all()
    assert found.logp.isnan().tolist() == [False, True, False, False]
    assert found.entropy.isnan().tolist() == [False, True, False, False]
    assert found.teacher_logp.isnan().tolist() == [False, False, True, False]


@both
@kinds
@pytest.mark.parametrize("scale", [1e8, 1e-8])
def test_large_upstream_gradients_make_no_nan_of_excluded_columns(backend, kind, scale):
    x, teacher = logits_of(2, 40), logits_of(2, 40, seed=3)
    x[:, 3], teacher[:, 3] = -INF, -INF
    x[:, 5], teacher[:, 6] = -1e9, -1e9  # in the support, with no mass to speak of
    leaf = x.clone().requires_grad_()
    found = token_divergence(leaf, teacher, torch.tensor([0, 1]), kind=kind, temperature=0.01, backend=backend)
    total = ((found.logp + found.entropy + found.divergence) * scale).sum()
    (gradient,) = torch.autograd.grad(total, leaf)
    assert torch.isfinite(gradient).all() and (gradient[:, 3] == 0).all()
