"""The policy loss in one visit: each row of logits becomes the gradient of its loss, in place.

R rows of a chunk, W logits each. Per row: the statistics, the slopes of the loss by log-prob and entropy, the gradient.
A program walks over rows, one at a time; the rows that all programs hold at once are so few that the gradient's read of
a row comes from the L2 cache.
"""

import torch
import triton
import triton.language as tl

from .arguments import check_per_row, check_rows
from .device import (
    INTERPRETED,
    LOG2E,
    row_entropy,
    row_logp,
    row_scale,
    row_sums,
    write_gradient,
    write_zeros,
)
from .token_stats import PER_ROW, tile_options

ROW_LANES = 512  # of a row that has a multiprocessor to itself
MAX_LOG_RATIO = tl.constexpr(20.0)
# Kinds of surrogate; any other is PPO's clip, a: low, b: high, c: dual, or inf.
CISPO = tl.constexpr(1)  # a: low, 1 for none, b: high
SAPO = tl.constexpr(2)  # a: tau_pos, b: tau_neg
# A kernel is compiled once, whatever the number of rows, the surrogate and the arguments that are there.
RUNTIME = (
    "num_rows", "stride_temperature", "stride_old", "stride_ref", "stride_importance", "on_policy", "kind"
)  # fmt: skip


@triton.jit
def clip(x, low, high):
    """x held to [low, high]; NaN stays NaN."""
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def expm1(d):
    series = 1.0
    for i in tl.static_range(9, 1, -1):
        series = 1 + series * d / i
    return tl.where(tl.abs(d) < 0.5, d * series, tl.exp2(d * LOG2E) - 1)


@triton.jit
def surrogate_slope(log_ratio, credit, kind, a, b, c):
    """d surrogate / d log-prob at token level: `crest_ops.surrogates` has the formulas."""
    ratio = tl.exp2(clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO) * LOG2E)
    plain = -ratio * credit
    if kind == CISPO:
        slope = -clip(ratio, 1 - a, 1 + b) * credit
    else:
        if kind == SAPO:
            reach = tl.where(credit > 0, a, b) * (ratio - 1)
            e = tl.exp2(-tl.abs(reach) * LOG2E)
            slope = 4 * e / ((1 + e) * (1 + e)) * plain  # e / (1 + e)^2 = sigmoid (1 - sigmoid)
        else:
            bounded = -clip(ratio, 1 - a, 1 + b) * credit
            held = (credit < 0) & (plain > -c * credit)
            slope = tl.where((bounded > plain) | held, 0.0, plain)
        slope = tl.where(tl.abs(log_ratio) > MAX_LOG_RATIO, 0.0, slope)
    return slope


@triton.jit
def k3_slope(logp, ref_logp):
    """d (exp(d) - d - 1) / d logp = 1 - exp(d), d = ref_logp - logp; 0 outside [-20, 20]."""
    d = ref_logp - logp
    return tl.where(tl.abs(d) <= MAX_LOG_RATIO, -expm1(clip(d, -MAX_LOG_RATIO, MAX_LOG_RATIO)), 0.0)


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_ROW)
def policy_loss_kernel(
    logits_ptr, target_ptr, temperature_ptr, credit_ptr, weight_ptr, old_logp_ptr, ref_logp_ptr, importance_ptr,
    logp_ptr, entropy_ptr, active_ptr, num_rows, num_columns, width, stride_row, stride_temperature, stride_old,
    stride_ref, stride_importance, on_policy, logit_scale, softcap, kl_coef, entropy_coef, kind, a, b, c,
    ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = LANES * VEC
    for row in tl.range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row_ptr = logits_ptr + tl.cast(row, tl.int64) * stride_row
        y = tl.load(target_ptr + row)
        if y < 0:
            write_zeros(row_ptr, 0, width, BLOCK)
            tl.store(logp_ptr + row, 0.0)
            tl.store(entropy_ptr + row, 0.0)
            tl.store(active_ptr + row, 0)
        else:
            inverse_temperature, scale = row_scale(temperature_ptr, row, stride_temperature, logit_scale, SOFTCAP)
            m, s, w, _ = row_sums(row_ptr, num_columns, scale, logit_scale, softcap, SOFTCAP, False, LANES, VEC)
            log2_sum = tl.log2(s)
            logp, x_y = row_logp(row_ptr, y, num_columns, m, log2_sum, scale, logit_scale, softcap, SOFTCAP)
            entropy = row_entropy(num_columns, s, w)
            old_logp = tl.load(old_logp_ptr + row * stride_old)
            log_ratio = logp - tl.where(on_policy != 0, logp, old_logp)
            slope = surrogate_slope(log_ratio, tl.load(credit_ptr + row), kind, a, b, c)
            slope *= tl.load(importance_ptr + row * stride_importance)
            slope += kl_coef * k3_slope(logp, tl.load(ref_logp_ptr + row * stride_ref))
            weight = tl.load(weight_ptr + row)
            g_logp = weight * slope
            g_entropy = -entropy_coef * weight
            active = (logp != float("-inf")) & ((g_logp != 0) | (g_entropy != 0))
            tl.store(logp_ptr + row, logp)
            tl.store(entropy_ptr + row, entropy)
            tl.store(active_ptr + row, active.to(tl.uint8))
            tl.debug_barrier()  # every thread has read x_y before one may overwrite it
            if active:
                write_gradient(
                    row_ptr, row_ptr, y, x_y, num_columns, width, m, log2_sum, entropy, g_logp, g_entropy,
                    inverse_temperature, scale, logit_scale, softcap, ENTROPY, SOFTCAP, BLOCK,
                )  # fmt: skip
            else:
                write_zeros(row_ptr, 0, width, BLOCK)


def launch_options(width: int, element_size: int, device: torch.device) -> tuple[int, int]:
    """(programs, most lanes of one): the rows that all programs read at once fit into half of the L2 cache.

    At least one row per multiprocessor, in ROW_LANES threads; where more fit, in fewer threads each, 128 at least.
    """
    if INTERPRETED.value:
        return 4, 128
    properties = torch.cuda.get_device_properties(device)
    multiprocessors = properties.multi_processor_count
    fitting = properties.L2_cache_size // (2 * width * element_size * multiprocessors)
    rows = min(8, triton.next_power_of_2(fitting + 1) // 2) if fitting else 1
    return rows * multiprocessors, max(128, ROW_LANES // rows)


def policy_loss(
    logits, targets, temperature, credit, weight, old_logp, ref_logp, importance_weight,
    *, num_columns, logit_scale, softcap, kl_coef, entropy_coef, surrogate,
):  # fmt: skip
    """The policy loss's gradient in place of the logits, its log-probs and entropies, in one visit.

    Overwrites each row of logits [R, W] (last dimension contiguous) with its gradient of the loss

    sum_r weight_r (importance_weight_r surrogate(logp_r - old_logp_r, credit_r) + kl_coef k3_r - entropy_coef
    entropy_r),  k3 = exp(d) - d - 1,  d = ref_logp - logp,  logp and entropy as `token_stats` has them.

    targets [R] int64, < 0: the row is not wanted and not read, its gradient and outputs are 0. temperature [R] or [1].
    credit, weight [R], old_logp, ref_logp, importance_weight [R] or None: float32, contiguous. old_logp None: that of
    the logits; importance_weight None: 1. num_columns, logit_scale, softcap as in `token_stats`, softcap 0.0 none.

    surrogate: (kind, a, b, c), of r = exp(logp - old_logp) and A = credit:
        (0, low, high, dual or inf), PPOClip: max(-r A, -clip(r, 1 - low, 1 + high) A), at most -dual A where A < 0;
        (1, low or 1, high, 0), CISPO: -clip(r, 1 - low, 1 + high) A logp, the clipped ratio a constant;
        (2, tau_pos, tau_neg, 0), SAPO: -(4 / tau) sigmoid(tau (r - 1)) A, tau = tau_pos where A > 0, else tau_neg.
    Returns (logp, entropy) float32 and active [R] bool: the row's gradient is not identically 0. Raises ValueError:
    tensors that the kernel would misread; kl_coef without ref_logp.
    """
    if kl_coef and ref_logp is None:
        raise ValueError(f"kl_coef is {kl_coef}, but ref_logp is None: pass ref_logp, or kl_coef=0.0")
    check_rows(targets, temperature, num_columns, logits=logits[None])
    check_per_row(
        targets, credit=credit, weight=weight, old_logp=old_logp, ref_logp=ref_logp, importance_weight=importance_weight
    )
    num_rows, width = logits.shape
    logp, entropy = (torch.empty(num_rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    active = torch.empty(num_rows, dtype=torch.uint8, device=logits.device)
    if not num_rows:
        return logp, entropy, active.view(torch.bool)
    one = torch.ones(1, dtype=torch.float32, device=logits.device)
    old, ref, importance = (one if given is None else given for given in (old_logp, ref_logp, importance_weight))
    programs, most_lanes = launch_options(width, logits.element_size(), logits.device)
    lanes, vector, num_warps = tile_options(width, logits.element_size(), most_lanes)
    kind, a, b, c = surrogate
    with torch.cuda.device_of(logits):
        policy_loss_kernel[(min(num_rows, programs),)](
            logits, targets, temperature, credit, weight, old, ref, importance, logp, entropy, active,
            num_rows, num_columns, width, logits.stride(0), int(temperature.numel() > 1), int(old_logp is not None),
            int(ref_logp is not None), int(importance_weight is not None), int(old_logp is None),
            logit_scale, softcap, kl_coef, entropy_coef, kind, a, b, c,
            ENTROPY=entropy_coef != 0, SOFTCAP=softcap > 0, LANES=lanes, VEC=vector,
            num_warps=num_warps, enable_fp_fusion=True,
        )  # fmt: skip
    return logp, entropy, active.view(torch.bool)
