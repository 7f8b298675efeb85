"""The numerics contract of token_stats, point 4 and the edges near it: what is out of the support, NaN, extremes."""

import math

import pytest
import reference
import torch
from cases import both, gradient_of, logits_of, targets_of

from crest_ops import token_stats

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@both
def test_minus_inf_everywhere_but_one_column(backend):
    x = torch.full((2, 100_000), -math.inf)
    x[0, 50_000] = 3.0
    x[1, [7, 99_999]] = 1.0
    y = torch.tensor([50_000, 7])
    found = token_stats(x, y, backend=backend)
    assert found.logp.tolist() == pytest.approx([0.0, -math.log(2)], abs=1e-7)
    assert found.entropy.tolist() == pytest.approx([0.0, math.log(2)], abs=1e-7)
    gradient = gradient_of(x, y, torch.ones(2), torch.ones(2), backend=backend)
    assert gradient[1, 7].item() == pytest.approx(0.5) and gradient[1, 99_999].item() == pytest.approx(-0.5)
    assert torch.count_nonzero(gradient) == 2 and torch.isfinite(gradient).all()


@both
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scattered_minus_inf(backend, dtype, softcap):
    x, y = logits_of(6, 900, dtype=dtype), targets_of(6, high=900)
    x[:, ::3] = -math.inf
    x.scatter_(1, y[:, None], 1.0)
    grads = logits_of(6, seed=3), logits_of(6, seed=4)
    found = token_stats(x, y, softcap=softcap, backend=backend)
    exact = reference.stats(x, y, softcap=softcap)
    assert (found.logp - exact[0]).abs().max() < 1e-5 and (found.entropy - exact[1]).abs().max() < 1e-5
    gradient = gradient_of(x, y, *grads, softcap=softcap, backend=backend)
    assert (gradient[x == -math.inf] == 0).all()
    exact_gradient = reference.gradient(x, y, *grads, softcap=softcap)
    assert (gradient - exact_gradient).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)


@both
def test_target_outside_the_support_and_row_without_support(backend):
    x = logits_of(3, 50)
    x[0, 4] = -math.inf
    x[1] = -math.inf
    y = torch.tensor([4, 4, 4])
    found = token_stats(x, y, backend=backend)
    assert found.logp[0] == -math.inf and found.logp[1] == -math.inf and torch.isfinite(found.logp[2])
    assert found.entropy[0].item() == pytest.approx(reference.stats(x, y)[1][0].item(), abs=1e-5)
    assert found.entropy[1] == 0 and found.lse[1] == -math.inf
    gradient = gradient_of(x, y, torch.tensor([1.0, 1.0, 1.0]), torch.tensor([0.0, 1.0, 0.0]), backend=backend)
    assert (gradient[:2] == 0).all() and gradient[2].abs().sum() > 0


@both
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_nan_row_stays_in_its_row(backend, bad, dtype):
    x, y = logits_of(3, 500, dtype=dtype), targets_of(3, high=500)
    clean = token_stats(x, y, backend=backend)
    x[1, 77] = bad
    found = token_stats(x, y, backend=backend)
    assert found.logp[1].isnan() and found.entropy[1].isnan()
    assert torch.equal(found.logp[[0, 2]], clean.logp[[0, 2]])
    gradient = gradient_of(x, y, torch.ones(3), torch.ones(3), backend=backend)
    assert gradient[1].isnan().any() and torch.isfinite(gradient[[0, 2]]).all()


@both
def test_rows_of_nothing_but_nan(backend):
    x = torch.full((2, 5), math.nan)
    x[1, 1:] = -math.inf
    found = token_stats(x, torch.tensor([0, 0]), backend=backend, outputs=("logp", "entropy", "sum_sq_probs"))
    for name in ("logp", "entropy", "lse", "sum_sq_probs"):
        assert getattr(found, name).isnan().all(), name


@both
@pytest.mark.parametrize("fill", [-1e4, -1e9, -1e10, -3.4e38])
def test_finite_mask_fills(backend, fill):
    """A fill below -1.2e9 counts as -inf; above, a row of nothing else is uniform. Nothing is NaN either way."""
    x = torch.full((2, 300), fill)
    x[1, :3] = torch.tensor([1.0, 2.0, 3.0])
    y = torch.tensor([5, 1])
    found = token_stats(x, y, backend=backend)
    gradient = gradient_of(x, y, torch.ones(2), torch.ones(2), backend=backend)
    assert torch.isfinite(gradient).all()
    exact = reference.stats(x[1, :3], y[1:].squeeze())
    assert found.logp[1].item() == pytest.approx(exact[0].item(), abs=1e-5)
    if fill > -1.2e9:
        assert found.logp[0].item() == pytest.approx(-math.log(300), abs=1e-5)
        assert found.entropy[0].item() == pytest.approx(math.log(300), abs=1e-5)
    else:
        assert found.logp[0] == -math.inf and found.entropy[0] == 0 and (gradient[0] == 0).all()


@both
@pytest.mark.parametrize("softcap", [0.5, 30.0, 1e4, 1e8])
def test_caps_of_any_size(backend, softcap):
    x, y = logits_of(3, 40), targets_of(3, high=40)
    x[0] /= 100
    found, exact = token_stats(x, y, softcap=softcap, backend=backend), reference.stats(x, y, softcap=softcap)
    assert (found.logp - exact[0]).abs().max() < 4e-6 and (found.entropy - exact[1]).abs().max() < 4e-6
    gradient = gradient_of(x, y, torch.ones(3), torch.ones(3), softcap=softcap, backend=backend)
    assert (gradient - reference.gradient(x, y, torch.ones(3), torch.ones(3), softcap=softcap)).abs().max() < 4e-6


@both
@pytest.mark.parametrize("temperature", [1e-7, 1e-3, 1e3, 1e15])
def test_extreme_temperatures(backend, temperature):
    x, y = torch.tensor([[3.0, -1.0, 2.0]]), torch.tensor([2])
    found, exact = (
        token_stats(x, y, temperature=temperature, backend=backend),
        reference.stats(x, y, temperature=temperature),
    )
    assert found.logp.item() == pytest.approx(exact[0].item(), rel=1e-5)
    assert found.entropy.item() == pytest.approx(exact[1].item(), rel=1e-5, abs=1e-7)


@both
def test_temperatures_of_no_wanted_row_or_of_stride_0(backend):
    x, y = logits_of(3, 40), targets_of(3, high=40)
    warm = torch.tensor([2.0]).expand(3)
    halved = token_stats(x / 2, y).logp
    assert (token_stats(x, y, temperature=warm, backend=backend).logp - halved).abs().max() < 2e-6
    none = torch.zeros(3, dtype=torch.bool)
    assert (token_stats(x, y, mask=none, temperature=warm, backend=backend).logp == 0).all()
