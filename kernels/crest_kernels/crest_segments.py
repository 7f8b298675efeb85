"""CrEST's segment pass in one launch: gap -> z-score inside spans -> credit -> clipped surrogate -> value and slope per
token.

One program per span of the uncertainty's statistics (a trajectory, a turn, or the whole batch): it reads the span
twice, once for mean and variance and once to apply them. Spans lie one after the other; what lies between their tokens
is stepped over.
"""

import torch
import triton
import triton.language as tl

from .arguments import check_tensor, check_values
from .device import LOG2E

MAX_EXPONENT = tl.constexpr(20.0)


@triton.jit
def load_live(values_ptr, at, live):
    return tl.load(values_ptr + at, mask=live, other=0.0).to(tl.float32)


@triton.jit
def crest_segments_kernel(
    logp_ptr, teacher_logp_ptr, old_logp_ptr, uncertainty_ptr, live_ptr, turn_ptr, advantage_ptr, weight_ptr, end_ptr,
    value_ptr, slope_ptr, ratio_ptr, clipped_ptr, phi_ptr,
    lam, eps, inverse_tau, rho, std_eps, low, high, dual,
    BLOCK: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0)
    begin = tl.load(end_ptr + span - 1, mask=span > 0, other=0)
    end = tl.load(end_ptr + span)
    lanes = tl.arange(0, BLOCK)

    total = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.float32)
    # The largest value is taken off before summing: equal values then have exactly no spread.
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in tl.range(begin, end, BLOCK):
        at = start + lanes
        live = tl.load(live_ptr + at, mask=at < end, other=0) != 0
        u = tl.load(uncertainty_ptr + at, mask=live, other=float("-inf"))
        largest = tl.maximum(largest, u)
    pivot = tl.max(largest, 0)
    for start in tl.range(begin, end, BLOCK):
        at = start + lanes
        live = tl.load(live_ptr + at, mask=at < end, other=0) != 0
        total += tl.where(live, load_live(uncertainty_ptr, at, live) - pivot, 0.0)
        count += tl.where(live, 1.0, 0.0)
    n = tl.maximum(tl.sum(count, 0), 1.0)
    mean = tl.sum(total, 0) / n
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(begin, end, BLOCK):
        at = start + lanes
        live = tl.load(live_ptr + at, mask=at < end, other=0) != 0
        d = tl.where(live, load_live(uncertainty_ptr, at, live) - pivot - mean, 0.0)
        squares += d * d
    spread = tl.sqrt(tl.sum(squares, 0) / n) + std_eps
    spread = tl.where(spread == 0, 1.0, spread)

    for start in tl.range(begin, end, BLOCK):
        at = start + lanes
        inside = at < end
        live = tl.load(live_ptr + at, mask=inside, other=0) != 0
        turn = tl.load(turn_ptr + at, mask=live, other=0)
        advantage = tl.load(advantage_ptr + turn, mask=live, other=0.0)
        logp = load_live(logp_ptr, at, live)
        old_logp = load_live(old_logp_ptr, at, live)

        sign = tl.where(advantage > 0, 1.0, tl.where(advantage < 0, -1.0, 0.0))
        gap = tl.where(old_logp > float("-inf"), load_live(teacher_logp_ptr, at, live) - old_logp, 0.0)
        exponent = tl.minimum(
            tl.maximum(tl.where(sign == 0, 0.0, sign * gap * inverse_tau), -MAX_EXPONENT), MAX_EXPONENT
        )
        excess = tl.minimum(tl.exp2(exponent * LOG2E), 1 + eps) - 1
        z = (load_live(uncertainty_ptr, at, live) - pivot - mean) / spread
        gate = 1 / (1 + tl.exp2(-z * LOG2E))
        strength = tl.minimum(tl.maximum(lam * (1 + rho * (2 * gate - 1)), 0.0), lam)
        strength = tl.where(gate == gate, strength, gate)  # min and max drop NaN
        phi = tl.where(exponent > 0, 1 + strength * excess, 1.0)
        credit = advantage * phi

        log_ratio = tl.where(logp == old_logp, 0.0, logp - old_logp)
        held = tl.abs(log_ratio) > MAX_EXPONENT
        ratio = tl.exp2(tl.minimum(tl.maximum(log_ratio, -MAX_EXPONENT), MAX_EXPONENT) * LOG2E)
        ratio = tl.where(log_ratio == log_ratio, ratio, log_ratio)
        plain = -ratio * credit
        bounded = -tl.minimum(tl.maximum(ratio, 1 - low), 1 + high) * credit
        clipped = bounded > plain
        value = tl.where(clipped, bounded, plain)
        dual_clipped = (credit < 0) & (value > -dual * credit)
        value = tl.where(dual_clipped, -dual * credit, value)
        clipped = (clipped | dual_clipped) & live
        weight = load_live(weight_ptr, at, live)
        slope = tl.where(held | clipped | (logp == float("-inf")), 0.0, plain)
        tl.store(value_ptr + at, tl.where(live, weight * value, 0.0), mask=inside)
        tl.store(slope_ptr + at, tl.where(live, weight * slope, 0.0), mask=inside)
        tl.store(ratio_ptr + at, tl.where(live, ratio, 0.0), mask=inside)
        tl.store(clipped_ptr + at, clipped, mask=inside)
        tl.store(phi_ptr + at, tl.where(live, phi, 0.0), mask=inside)


def crest_segments(
    logp, teacher_logp, old_logp, uncertainty, live, turn_of_token, turn_advantage, weight, ends,
    *, lam, eps, tau, rho, std_eps, low, high, dual,
):  # fmt: skip
    """CrEST's credit, clipped surrogate and its slope of every token, in one launch (CrEST, arXiv 2608.13179).

    Per live token, A = turn_advantage[turn_of_token], mean and std of u = uncertainty over the live tokens of its span:
    gap = teacher_logp - old_logp (0 where old_logp is -inf),  w = exp(clip(sgn(A) gap / tau, -20, 20)),
    gate = sigmoid((u - mean) / (std + std_eps)),  strength = clip(lam (1 + rho (2 gate - 1)), 0, lam),
    phi = 1 + strength (min(w, 1 + eps) - 1) where w > 1, else 1,  r = exp(clip(logp - old_logp, -20, 20)),
    value = max(-r A phi, -clip(r, 1 - low, 1 + high) A phi), at most -dual A phi where A < 0,
    slope = d value / d logp = -r A phi, 0 where clipped, beyond the clip at 20, and where logp is -inf.

    logp, teacher_logp, old_logp, uncertainty, weight [N] float32; live [N] bool; turn_of_token [N] int32, in [0, K)
    where live; turn_advantage [K] float32; ends [S] int64, never falling: span s covers the positions from ends[s - 1]
    (0 for the first) to before ends[s], and the last end is N. All contiguous. lam: largest strength; eps: clip of the
    teacher's weight w; tau > 0: temperature of the gap; rho: how far the gate moves the strength; std_eps >= 0: added
    to the std, divided by the number of tokens; low, high: clip of the ratio r; dual: of the dual clip, None for none.

    Returns (weight * value, weight * slope, ratio r, clipped bool, phi) [N], 0 where not live. Raises ValueError:
    tensors that the kernel would misread; tau <= 0; ends or turn_of_token out of range, on a GPU a device-side assert.
    """
    if not tau > 0:
        raise ValueError(f"tau is {tau}, want > 0")
    num_tokens, num_turns, device = logp.numel(), turn_advantage.numel(), logp.device
    floats = dict(logp=logp, teacher_logp=teacher_logp, old_logp=old_logp, uncertainty=uncertainty, weight=weight)
    for name, value in floats.items():
        check_tensor(name, value, torch.float32, (num_tokens,), device)
    check_tensor("live", live, torch.bool, (num_tokens,), device)
    check_tensor("turn_of_token", turn_of_token, torch.int32, (num_tokens,), device)
    check_tensor("turn_advantage", turn_advantage, torch.float32, (num_turns,), device)
    check_tensor("ends", ends, torch.int64, (max(ends.numel(), 1),), device)
    elsewhere = live & ((turn_of_token < 0) | (turn_of_token >= num_turns))
    check_values("turn_of_token", turn_of_token, elsewhere, f"0 <= turn < {num_turns} where live")
    falling = ends.diff(prepend=ends.new_zeros(1)) < 0
    falling[-1] |= ends[-1] != num_tokens
    check_values("ends", ends, falling, f"no end below the one before it, and {num_tokens} (tokens) last")
    value, slope, ratio, phi = (torch.empty_like(logp) for _ in range(4))
    clipped = torch.empty_like(live)
    if not logp.numel():
        return value, slope, ratio, clipped, phi
    with torch.cuda.device_of(logp):
        crest_segments_kernel[(ends.numel(),)](
            logp, teacher_logp, old_logp, uncertainty, live, turn_of_token, turn_advantage, weight, ends,
            value, slope, ratio, clipped, phi,
            lam, eps, 1 / tau, rho, std_eps, low, high, float("inf") if dual is None else dual,
            BLOCK=1024, num_warps=8,
        )  # fmt: skip
    return value, slope, ratio, clipped, phi
