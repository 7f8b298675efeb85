"""Surrogates: literal values, slopes against autograd of formulas written out here, spans, masks, extremes."""

import math

import pytest
import torch

from crest_ops.spans import Spans
from crest_ops.surrogates import CISPO, GSPO, SAPO, PPOClip

LN2 = math.log(2)
NAN, INF = float("nan"), float("inf")

# Two trajectories. 0: turn 0 holds actions of 2 and 1 tokens, turn 1 one of 2 tokens; 1: one action of 3 tokens.
SPANS = Spans.from_lengths(
    torch.tensor([1, 2, 1, 1, 1, 2, 1, 3]),
    action=torch.tensor([0, 1, 0, 1, 0, 1, 0, 1], dtype=torch.bool),
    turn=torch.tensor([0, 0, 0, 0, 0, 1, 0, 0]),
    trajectory=torch.tensor([0, 0, 0, 0, 0, 0, 1, 1]),
    group=torch.tensor([0, 0]),
)
MEMBERS = {
    "token": [[1], [2], [4], [6], [7], [9], [10], [11]],
    "action": [[1, 2], [4], [6, 7], [9, 10, 11]],
    "turn": [[1, 2, 4], [6, 7], [9, 10, 11]],
    "trajectory": [[1, 2, 4, 6, 7], [9, 10, 11]],
}
N = SPANS.num_tokens


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def close(found, wanted):
    torch.testing.assert_close(found, wanted.to(found.dtype), rtol=1e-6, atol=1e-7)


# Ratios 1, 2, 2, 1/2, 1/2 with both signs of credit.
LOG_RATIO = tensor(0, LN2, LN2, -LN2, -LN2)
CREDIT = tensor(3, 1, -1, 1, -1)


def test_ppo_literal():
    found = PPOClip(0.2, 0.28).evaluate(LOG_RATIO, CREDIT)
    close(found.ratio, tensor(1, 2, 2, 0.5, 0.5))
    close(found.value, tensor(-3, -1.28, 2, -0.5, 0.8))
    close(found.slope, tensor(-3, 0, 2, -0.5, 0))
    assert found.clipped.tolist() == [False, True, False, False, True]


def test_dual_clip_literal():
    found = PPOClip(0.2, 0.28, dual=1.5).evaluate(LOG_RATIO, CREDIT)
    close(found.value, tensor(-3, -1.28, 1.5, -0.5, 0.8))
    close(found.slope, tensor(-3, 0, 0, -0.5, 0))
    assert found.clipped.tolist() == [False, True, True, False, True]


def test_cispo_literal():
    logp = tensor(-1, -2, -3, -4, -5)
    found = CISPO(high=0.28).evaluate(LOG_RATIO, CREDIT, logp=logp)
    close(found.slope, tensor(-3, -1.28, 1.28, -0.5, 0.5))
    close(found.value, tensor(3, 2.56, -3.84, 2, -2.5))
    assert found.clipped.tolist() == [False, True, True, False, False]
    both = CISPO(high=0.28, low=0.2).evaluate(LOG_RATIO, CREDIT)
    close(both.slope, tensor(-3, -1.28, 1.28, -0.8, 0.8))
    close(both.value, both.slope * LOG_RATIO)
    assert both.clipped.tolist() == [False, True, True, True, True]


def test_sapo_literal():
    found = SAPO(tau_pos=1.0, tau_neg=2.0).evaluate(LOG_RATIO, CREDIT)
    up, down = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-2))  # ratio 2: tau (r - 1) is 1 or 2
    low_up, low_down = 1 / (1 + math.exp(0.5)), 1 / (1 + math.exp(1))  # ratio 1/2: -0.5 or -1
    close(found.value, tensor(-6, -4 * up, 2 * down, -4 * low_up, 2 * low_down))
    wanted = [-3, -8 * up * (1 - up), 8 * down * (1 - down), -2 * low_up * (1 - low_up), 2 * low_down * (1 - low_down)]
    close(found.slope, tensor(*wanted))
    assert not found.clipped.any()


def test_gspo_is_the_geometric_mean_of_the_ratios_with_its_own_bounds():
    log_ratio = torch.zeros(N, dtype=torch.float64)
    log_ratio[[1, 2, 4, 6, 7]] = tensor(1e-4, 4e-4, -2e-4, 3e-4, 4e-4)  # mean 2e-4: inside
    log_ratio[[9, 10, 11]] = 5e-4  # outside: exp(5e-4) > 1 + 4e-4
    found = GSPO().evaluate(log_ratio, torch.ones(N), SPANS)
    close(found.ratio[SPANS.mask], torch.exp(tensor(*[2e-4] * 5, *[5e-4] * 3)))
    assert found.clipped[SPANS.mask].tolist() == [False] * 5 + [True] * 3
    close(found.value[SPANS.mask], tensor(*[-math.exp(2e-4)] * 5, *[-1.0004] * 3))
    close(found.slope[SPANS.mask], tensor(*[-math.exp(2e-4)] * 5, *[0] * 3))


def test_mean_and_sum_of_log_ratios_are_different_objects():
    spans = Spans.from_mask(torch.ones(1, 100, dtype=torch.bool), group=torch.tensor([0]))
    log_ratio, credit = torch.full((100,), 0.01), torch.ones(100)
    mean = PPOClip(level="trajectory").evaluate(log_ratio, credit, spans).ratio
    total = PPOClip(level="trajectory", ratio="sum").evaluate(log_ratio, credit, spans).ratio
    torch.testing.assert_close(mean, torch.full((100,), math.exp(0.01)))
    torch.testing.assert_close(total, torch.full((100,), math.exp(1.0)))


def token_form(log_ratio, level, ratio):
    """r_n = sg[r_span] exp(logp_n - sg[logp_n]), written with loops; log_ratio is a leaf."""
    out = torch.zeros_like(log_ratio)
    for members in MEMBERS[level]:
        inside = log_ratio[members]
        span = (inside.mean() if ratio == "mean" else inside.sum()).detach()
        out = out.index_put((torch.tensor(members),), torch.exp(span + inside - inside.detach()))
    return out


def formula(surrogate, r, credit, log_ratio):
    if isinstance(surrogate, PPOClip):
        value = torch.minimum(r * credit, r.clamp(1 - surrogate.low, 1 + surrogate.high) * credit)
        if surrogate.dual is not None:
            value = torch.where(credit < 0, torch.maximum(value, surrogate.dual * credit), value)
        return -value
    if isinstance(surrogate, CISPO):
        low = 0.0 if surrogate.low is None else 1 - surrogate.low
        return -r.detach().clamp(low, 1 + surrogate.high) * credit * log_ratio
    tau = torch.tensor([surrogate.tau_pos if a > 0 else surrogate.tau_neg for a in credit], dtype=torch.float64)
    return -torch.sigmoid(tau * (r - 1)) * 4 / tau * credit


SURROGATES = [
    (PPOClip, {}),
    (PPOClip, {"dual": 3.0}),
    (GSPO, {}),
    (CISPO, {}),
    (CISPO, {"high": 0.1, "low": 0.1}),
    (SAPO, {}),
]


@pytest.mark.parametrize("ratio", ["mean", "sum"])
@pytest.mark.parametrize("level", MEMBERS)
@pytest.mark.parametrize(("kind", "options"), SURROGATES)
def test_slope_is_the_gradient_of_the_token_form(kind, options, level, ratio):
    surrogate = kind(**options, level=level, ratio=ratio)
    generator = torch.Generator().manual_seed(3)
    for scale in (1e-3, 0.2, 1.0):
        log_ratio = (scale * torch.randn(N, generator=generator, dtype=torch.float64)).requires_grad_()
        credit = torch.randn(N, generator=generator, dtype=torch.float64)
        value = formula(surrogate, token_form(log_ratio, level, ratio), credit, log_ratio) * SPANS.mask
        (slope,) = torch.autograd.grad(value.sum(), log_ratio)
        found = surrogate.evaluate(log_ratio, credit, SPANS)
        assert not found.value.requires_grad and not found.slope.requires_grad
        torch.testing.assert_close(found.value, value.detach(), rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(found.slope, slope, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("level", ["action", "turn", "trajectory"])
def test_with_equal_credit_in_a_span_the_slopes_are_the_gradient_through_the_mean(level):
    generator = torch.Generator().manual_seed(4)
    log_ratio = (0.1 * torch.randn(N, generator=generator, dtype=torch.float64)).requires_grad_()
    credit, objective = torch.zeros(N, dtype=torch.float64), 0.0
    for number, members in enumerate(MEMBERS[level]):
        a = (-1.0) ** number * (number + 1)
        credit[members] = a
        r = log_ratio[members].mean().exp()
        objective = objective - len(members) * torch.minimum(r * a, r.clamp(0.8, 1.28) * a)
    (gradient,) = torch.autograd.grad(objective, log_ratio)
    found = PPOClip(level=level).evaluate(log_ratio, credit, SPANS)
    torch.testing.assert_close(found.slope, gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("level", MEMBERS)
@pytest.mark.parametrize(("kind", "options"), SURROGATES)
@pytest.mark.parametrize("poison", [NAN, INF, -INF, -1e4])
def test_masked_tokens_are_exact_zeros_and_reach_nobody(kind, options, level, poison):
    surrogate = kind(**options, level=level)
    generator = torch.Generator().manual_seed(5)
    log_ratio, credit = 0.1 * torch.randn(N, generator=generator), torch.randn(N, generator=generator)
    mask = torch.ones(N, dtype=torch.bool)
    mask[[2, 9]] = False
    left_out = ~(SPANS.mask & mask)
    clean = surrogate.evaluate(log_ratio, credit, SPANS, mask=mask, logp=log_ratio - 1)
    bad = torch.where(left_out, poison, log_ratio)
    dirty = surrogate.evaluate(bad, torch.where(left_out, poison, credit), SPANS, mask=mask, logp=bad - 1)
    for first, second in zip(clean, dirty, strict=True):
        assert torch.equal(first, second)
        assert not second[left_out].any()
    if level == "token":
        alone = surrogate.evaluate(bad, credit, mask=SPANS.mask & mask, logp=bad - 1)
        assert torch.equal(alone.value, clean.value) and torch.equal(alone.slope, clean.slope)


def test_a_masked_token_is_not_in_the_mean_of_its_span():
    mask = torch.ones(N, dtype=torch.bool)
    mask[2] = False
    log_ratio = torch.zeros(N)
    log_ratio[[1, 2]] = torch.tensor([0.2, 0.6])
    surrogate = PPOClip(level="action")
    assert surrogate.evaluate(log_ratio, torch.ones(N), SPANS, mask=mask).ratio[1].item() == pytest.approx(
        math.exp(0.2)
    )
    assert surrogate.evaluate(log_ratio, torch.ones(N), SPANS).ratio[1].item() == pytest.approx(math.exp(0.4))


@pytest.mark.parametrize(("kind", "options"), SURROGATES)
def test_extreme_log_ratios_stay_finite_with_slope_zero_past_the_clip(kind, options):
    log_ratio = torch.tensor([1e4, -1e4, INF, -INF, 21.0, -21.0, 19.9])
    surrogate = kind(**{**options, "level": "token"})
    for sign in (1.0, -1.0, 0.0):
        found = surrogate.evaluate(log_ratio, torch.full((7,), sign))
        for tensor_N in found:
            assert torch.isfinite(tensor_N).all()
        if kind is not CISPO:
            assert not found.slope[:6].any()
        if sign == 0:
            assert not found.value.any() and not found.slope.any()
    torch.testing.assert_close(
        surrogate.evaluate(log_ratio, torch.ones(7)).ratio[0].item(), math.exp(20), rtol=1e-6, atol=0
    )


def test_dtypes():
    log_ratio = torch.tensor([0.1, -0.1])
    for dtype, wanted in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        found = PPOClip().evaluate(log_ratio.to(dtype), torch.ones(2))
        assert found.value.dtype == found.slope.dtype == found.ratio.dtype == wanted
        assert found.clipped.dtype == torch.bool


def test_one_dynamic_graph_without_breaks():
    def every(log_ratio, credit):
        return [kind(**{**options, "level": "token"}).evaluate(log_ratio, credit).slope for kind, options in SURROGATES]

    compiled = torch.compile(every, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (5, 9):
        log_ratio, credit = torch.randn(n), torch.randn(n)
        for found, wanted in zip(compiled(log_ratio, credit), every(log_ratio, credit), strict=True):
            torch.testing.assert_close(found, wanted)


def test_bad_arguments_are_named():
    five = torch.zeros(5)
    with pytest.raises(ValueError, match="GSPO at level 'trajectory' needs spans"):
        GSPO().evaluate(five, five)
    with pytest.raises(ValueError, match="spans hold 12 tokens, log_ratio has 5"):
        PPOClip().evaluate(five, five, SPANS)
    with pytest.raises(ValueError, match=r"credit has shape \[4\], want \[5\]"):
        PPOClip().evaluate(five, torch.zeros(4))
    with pytest.raises(ValueError, match=r"log_ratio has shape \[1, 5\]"):
        PPOClip().evaluate(five[None], five[None])
    for wrong, message in (
        (lambda: PPOClip(low=-0.1), "low is -0.1"),
        (lambda: PPOClip(high=NAN), "high is nan"),
        (lambda: PPOClip(dual=1.0), "dual is 1.0"),
        (lambda: PPOClip(level="word"), "level is 'word', want one of 'token', 'action', 'turn', 'trajectory'"),
        (lambda: CISPO(ratio="max"), "ratio is 'max'"),
        (lambda: SAPO(tau_neg=0), "tau_neg 0"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
