"""Log-prob, entropy and normaliser of every row of vocabulary logits, and their gradient.

Rows are the tokens of a [batch, rows, V] tensor. A target of -1 marks a row that is not wanted: it is not read, its
outputs and its gradient are 0. A target of -2 (ELSEWHERE) is a column of another shard of the vocabulary: the row's
logp is 0 and its gradient has no one-hot term. One program per row, a flat 1-D grid, no atomics: a row's result depends
on that row alone.
"""

import torch
import triton
import triton.language as tl

from .arguments import check_per_row, check_rows, check_tensor
from .device import (
    ELSEWHERE,
    LOWEST,
    STATS_TILES,
    load_logits,
    row_entropy,
    row_logp,
    row_lse,
    row_pointer,
    row_scale,
    row_sums,
    write_gradient,
    write_zeros,
)

# A kernel is compiled once for batches of any length, wherever its per-row tensors (which may be slices) start.
LENGTHS = ["num_rows", "rows_per_batch"]
PER_ROW = [
    "target_ptr", "temperature_ptr", "entropy_ptr", "normaliser_ptr", "student_kl_ptr", "divergence_ptr",
    "grad_logp_ptr", "grad_entropy_ptr", "grad_student_kl_ptr", "grad_divergence_ptr", "credit_ptr", "weight_ptr",
    "old_logp_ptr", "ref_logp_ptr", "importance_ptr",
]  # fmt: skip


@triton.jit
def store_unwanted(row, num_rows, logp_ptr, entropy_ptr, normaliser_ptr):
    tl.store(logp_ptr + row, 0.0)
    tl.store(entropy_ptr + row, 0.0)
    tl.store(normaliser_ptr + row, 0.0)
    tl.store(normaliser_ptr + num_rows + row, 0.0)


@triton.jit
def store_stats(row, num_rows, num_columns, m, s, w, logp, logp_ptr, entropy_ptr, normaliser_ptr):
    tl.store(logp_ptr + row, logp)
    tl.store(entropy_ptr + row, row_entropy(num_columns, s, w))
    tl.store(normaliser_ptr + row, m)
    tl.store(normaliser_ptr + num_rows + row, tl.log2(s))


@triton.jit(do_not_specialize=LENGTHS, do_not_specialize_on_alignment=PER_ROW)
def token_stats_kernel(
    logits_ptr, target_ptr, temperature_ptr, logp_ptr, entropy_ptr, lse_ptr, sum_sq_ptr, normaliser_ptr,
    num_rows, rows_per_batch, num_columns, stride_batch, stride_row, stride_temperature, logit_scale, softcap,
    SOFTCAP: tl.constexpr, SUM_SQ: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    y = tl.load(target_ptr + row)
    if (y < 0) & (y != ELSEWHERE):
        store_unwanted(row, num_rows, logp_ptr, entropy_ptr, normaliser_ptr)
        tl.store(lse_ptr + row, 0.0)
        tl.store(sum_sq_ptr + row, 0.0)
        return
    row_ptr = row_pointer(logits_ptr, row, rows_per_batch, stride_batch, stride_row)
    _, scale = row_scale(temperature_ptr, row, stride_temperature, logit_scale, SOFTCAP)
    m, s, w, q = row_sums(row_ptr, num_columns, scale, logit_scale, softcap, SOFTCAP, SUM_SQ, LANES, VEC)
    logp, _ = row_logp(row_ptr, tl.maximum(y, 0), num_columns, m, tl.log2(s), scale, logit_scale, softcap, SOFTCAP)
    logp = tl.where(y == ELSEWHERE, 0.0, logp)
    store_stats(row, num_rows, num_columns, m, s, w, logp, logp_ptr, entropy_ptr, normaliser_ptr)
    tl.store(lse_ptr + row, row_lse(m, s))
    sum_sq = 0.0
    if SUM_SQ:
        sum_sq = tl.where(s == 0, 0.0, q / (s * s))
    tl.store(sum_sq_ptr + row, sum_sq)


@triton.jit(do_not_specialize=LENGTHS, do_not_specialize_on_alignment=PER_ROW)
def token_stats_grad_kernel(
    logits_ptr, target_ptr, temperature_ptr, entropy_ptr, normaliser_ptr, grad_logp_ptr, grad_entropy_ptr, grad_ptr,
    num_rows, rows_per_batch, num_columns, width, stride_batch, stride_row, stride_temperature,
    stride_grad_batch, stride_grad_row, logit_scale, softcap,
    ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    y = tl.load(target_ptr + row)
    out_ptr = row_pointer(grad_ptr, row, rows_per_batch, stride_grad_batch, stride_grad_row)
    g_logp = tl.load(grad_logp_ptr + row)
    g_entropy = 0.0
    if ENTROPY:
        g_entropy = tl.load(grad_entropy_ptr + row)
    row_ptr = row_pointer(logits_ptr, row, rows_per_batch, stride_batch, stride_row)
    x_y = load_logits(row_ptr + tl.maximum(y, 0), (y >= 0) & (y < num_columns), True)
    tl.debug_barrier()  # every thread holds x_y before one may overwrite it
    outside = (y != ELSEWHERE) & (x_y.to(tl.float32) <= LOWEST)
    if outside | ((g_logp == 0) & (g_entropy == 0)):
        write_zeros(out_ptr, 0, width, BLOCK)
        return
    inverse_temperature, scale = row_scale(temperature_ptr, row, stride_temperature, logit_scale, SOFTCAP)
    entropy = 0.0
    if ENTROPY:
        entropy = tl.load(entropy_ptr + row)
    write_gradient(
        row_ptr, out_ptr, y, x_y, num_columns, width, tl.load(normaliser_ptr + row),
        tl.load(normaliser_ptr + num_rows + row), entropy, g_logp, g_entropy, inverse_temperature, scale,
        logit_scale, softcap, ENTROPY, SOFTCAP, BLOCK,
    )  # fmt: skip


def tile_options(num_columns: int, element_size: int, most_lanes: int = 128) -> tuple[int, int, int]:
    """(lanes, vector, warps): 16 bytes a thread and tile, one lane a thread, no more of them than the row needs."""
    vector = 16 // element_size
    warp = 64 if torch.version.hip else 32
    lanes = min(most_lanes, max(warp, triton.next_power_of_2(triton.cdiv(num_columns, STATS_TILES.value * vector))))
    return lanes, vector, lanes // warp


def row_strides(logits: torch.Tensor) -> tuple[int, int, int]:
    """(rows of a batch entry, strides of batch entries and rows); a lone entry's stride, N * V and never used, is 0: a
    kernel is compiled for its divisibility and for 32 or 64 bits.
    """
    batch_stride, row_stride, _ = logits.stride()
    return logits.shape[1], batch_stride if len(logits) > 1 else 0, row_stride


def token_stats(logits, targets, temperature, num_columns, logit_scale=1.0, softcap=0.0, sum_sq=False):
    """Log-prob of the target, entropy and log-sum-exp of every row of logits [B, T, V], in one read.

    logp = z_target - lse, lse = log sum_v exp z_v, entropy = -sum_v p_v log p_v, p = exp(z - lse), over the first
    num_columns columns of z = cap(logit_scale * logits) / temperature, cap(x) = softcap * tanh(x / softcap); softcap
    0.0 means none. targets [B*T] int64 (-1: not wanted; -2: ELSEWHERE), temperature [B*T] or [1] float32.

    Returns (logp, entropy, lse, sum_sq_probs, normaliser [2, N]), float32; sum_sq_probs = sum_v p_v^2 is 0 unless
    `sum_sq`; `normaliser` holds the row's max and log2 of its sum, for the gradient. Raises ValueError: tensors that
    the kernel would misread.
    """
    check_rows(targets, temperature, num_columns, logits=logits)
    num_rows = targets.numel()
    logp, entropy, lse, sum_sq_probs = (
        torch.empty(num_rows, dtype=torch.float32, device=logits.device) for _ in range(4)
    )
    normaliser = torch.empty(2, num_rows, dtype=torch.float32, device=logits.device)
    if not num_rows:
        return logp, entropy, lse, sum_sq_probs, normaliser
    lanes, vector, num_warps = tile_options(num_columns, logits.element_size())
    rows_per_batch, stride_batch, stride_row = row_strides(logits)
    with torch.cuda.device_of(logits):
        token_stats_kernel[(num_rows,)](
            logits, targets, temperature, logp, entropy, lse, sum_sq_probs, normaliser,
            num_rows, rows_per_batch, num_columns, stride_batch, stride_row, int(temperature.numel() > 1),
            logit_scale, softcap,
            SOFTCAP=softcap > 0, SUM_SQ=sum_sq, LANES=lanes, VEC=vector, num_warps=num_warps, enable_fp_fusion=True,
        )  # fmt: skip
    return logp, entropy, lse, sum_sq_probs, normaliser


def token_stats_grad(
    grad, logits, targets, temperature, entropy, normaliser, grad_logp, grad_entropy, num_columns, logit_scale=1.0,
    softcap=0.0,
):  # fmt: skip
    """Write d/d logits of (grad_logp . logp + grad_entropy . entropy) into `grad` [B, T, V], which may be `logits`.

    d logp / dz_v = 1[v = target] - p_v,  d entropy / dz_v = -p_v (log p_v + entropy); z, p, targets, temperature,
    num_columns, logit_scale, softcap as in `token_stats`. Columns >= num_columns, rows that are not wanted and those
    whose target is excluded (logp = -inf) get 0. entropy [N] and normaliser [2, N] as `token_stats` gave them;
    grad_logp, grad_entropy [N] float32; grad_entropy None: no entropy term. Raises ValueError: tensors that the kernel
    would misread.
    """
    check_rows(targets, temperature, num_columns, logits=logits, grad=grad)
    check_per_row(targets, entropy=entropy, grad_logp=grad_logp, grad_entropy=grad_entropy)
    check_tensor("normaliser", normaliser, torch.float32, (2, targets.numel()), targets.device)
    num_rows = targets.numel()
    if not num_rows:
        return
    width = logits.shape[2]
    lanes, vector, num_warps = tile_options(width, logits.element_size())
    rows_per_batch, stride_batch, stride_row = row_strides(logits)
    _, stride_grad_batch, stride_grad_row = row_strides(grad)
    with torch.cuda.device_of(logits):
        token_stats_grad_kernel[(num_rows,)](
            logits, targets, temperature, entropy, normaliser,
            grad_logp, grad_logp if grad_entropy is None else grad_entropy, grad,
            num_rows, rows_per_batch, num_columns, width, stride_batch, stride_row, int(temperature.numel() > 1),
            stride_grad_batch, stride_grad_row, logit_scale, softcap,
            ENTROPY=grad_entropy is not None, SOFTCAP=softcap > 0, BLOCK=lanes * vector,
            num_warps=num_warps, enable_fp_fusion=True,
        )  # fmt: skip
