"""Log-prob, entropy and normaliser of every row of vocabulary logits, and their gradient.

Rows are the tokens of a [batch, rows, V] tensor. A target < 0 marks a row that is not wanted: it is not read, its
outputs and its gradient are 0. One program per row, a flat 1-D grid, no atomics: a row's result depends on that row
alone.
"""

import torch
import triton
import triton.language as tl

from .device import (
    GRAD_TILES,
    LN2,
    LOWEST,
    STATS_TILES,
    cap_logits,
    load_logits,
    load_tiles,
    multiply_subtract,
    row_logp,
    row_pointer,
    row_scale,
    row_sums,
    tanh,
    to_logits,
)

LENGTHS = ["num_rows", "rows_per_batch"]  # a kernel is compiled once for batches of any length


@triton.jit
def store_unwanted(row, num_rows, logp_ptr, entropy_ptr, lse_ptr, normaliser_ptr):
    tl.store(logp_ptr + row, 0.0)
    tl.store(entropy_ptr + row, 0.0)
    tl.store(lse_ptr + row, 0.0)
    tl.store(normaliser_ptr + row, 0.0)
    tl.store(normaliser_ptr + num_rows + row, 0.0)


@triton.jit
def store_stats(row, num_rows, num_columns, m, s, w, logp, logp_ptr, entropy_ptr, lse_ptr, normaliser_ptr):
    """entropy = log sum 2^t - sum 2^t t / sum 2^t, held to [0, log V]; a row without support has entropy 0 and lse
    -inf.
    """
    log2_sum = tl.log2(s)
    empty = s == 0
    entropy = (log2_sum - w / s) * LN2
    entropy = tl.where(empty | (entropy < 0), 0.0, entropy)
    bound = tl.log2(num_columns.to(tl.float32)) * LN2
    tl.store(logp_ptr + row, logp)
    tl.store(entropy_ptr + row, tl.where(entropy > bound, bound, entropy))
    tl.store(lse_ptr + row, tl.where(empty, float("-inf"), (m + log2_sum) * LN2))
    tl.store(normaliser_ptr + row, m)
    tl.store(normaliser_ptr + num_rows + row, log2_sum)


@triton.jit(do_not_specialize=LENGTHS)
def token_stats_kernel(
    logits_ptr, target_ptr, temperature_ptr, logp_ptr, entropy_ptr, lse_ptr, sum_sq_ptr, normaliser_ptr,
    num_rows, rows_per_batch, num_columns, stride_batch, stride_row, stride_temperature, logit_scale, softcap,
    SOFTCAP: tl.constexpr, SUM_SQ: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    y = tl.load(target_ptr + row)
    if y < 0:
        store_unwanted(row, num_rows, logp_ptr, entropy_ptr, lse_ptr, normaliser_ptr)
        if SUM_SQ:
            tl.store(sum_sq_ptr + row, 0.0)
        return
    row_ptr = row_pointer(logits_ptr, row, rows_per_batch, stride_batch, stride_row)
    _, scale = row_scale(temperature_ptr, row, stride_temperature, logit_scale, SOFTCAP)
    m, s, w, q = row_sums(row_ptr, num_columns, scale, logit_scale, softcap, SOFTCAP, SUM_SQ, LANES, VEC)
    logp = row_logp(row_ptr, y, num_columns, m, tl.log2(s), scale, logit_scale, softcap, SOFTCAP)
    store_stats(row, num_rows, num_columns, m, s, w, logp, logp_ptr, entropy_ptr, lse_ptr, normaliser_ptr)
    if SUM_SQ:
        tl.store(sum_sq_ptr + row, tl.where(s == 0, 0.0, q / (s * s)))


@triton.jit
def gradient_tile(
    x, scale, log2_norm, slope, const, logit_scale, softcap, ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr
):
    """2^t (slope t + const), t = scale * x - log2_norm, times the derivative of the cap."""
    derivative = 1.0
    if SOFTCAP:
        capped = cap_logits(x.to(tl.float32), logit_scale, softcap)
        derivative = tl.where(capped <= LOWEST, 0.0, 1 - (capped / softcap) * (capped / softcap)) * logit_scale
        t = multiply_subtract(capped, scale, log2_norm)
    else:
        t = multiply_subtract(x.to(tl.float32), scale, log2_norm)
    p = tl.exp2(t)
    g = p * (t * slope + const) if ENTROPY else p * const
    if SOFTCAP:
        g = g * derivative
    return g


@triton.jit(do_not_specialize=LENGTHS)
def token_stats_grad_kernel(
    logits_ptr, target_ptr, temperature_ptr, entropy_ptr, normaliser_ptr, grad_logp_ptr, grad_entropy_ptr, grad_ptr,
    num_rows, rows_per_batch, num_columns, width, stride_batch, stride_row, stride_temperature,
    stride_grad_batch, stride_grad_row, logit_scale, softcap,
    ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # d logp_y / dz_v = 1[v = y] - p_v,   d entropy / dz_v = -p_v (log p_v + entropy).
    # The one-hot term is added to the target's column alone, after the loop: inside it costs 4 instructions per logit.
    row = tl.program_id(0)
    y = tl.load(target_ptr + row)
    out_ptr = row_pointer(grad_ptr, row, rows_per_batch, stride_grad_batch, stride_grad_row)
    columns = tl.arange(0, BLOCK)
    DTYPE: tl.constexpr = grad_ptr.dtype.element_ty
    g_logp = tl.load(grad_logp_ptr + row)
    g_entropy = 0.0
    if ENTROPY:
        g_entropy = tl.load(grad_entropy_ptr + row)
    row_ptr = row_pointer(logits_ptr, row, rows_per_batch, stride_batch, stride_row)
    x_y = load_logits(row_ptr + tl.maximum(y, 0), (y >= 0) & (y < num_columns), True)
    if (y < 0) | (x_y.to(tl.float32) <= LOWEST) | ((g_logp == 0) & (g_entropy == 0)):
        for start in tl.range(0, width, BLOCK):
            tl.store(out_ptr + start + columns, tl.zeros([BLOCK], DTYPE), mask=start + columns < width)
        return
    inverse_temperature, scale = row_scale(temperature_ptr, row, stride_temperature, logit_scale, SOFTCAP)
    factor = inverse_temperature
    if not SOFTCAP:
        factor *= logit_scale
    # log2_norm = m + log2_sum is rounded at the size of the logits; what the rounding took goes into the row's
    # constants.
    m = tl.load(normaliser_ptr + row)
    log2_sum = tl.load(normaliser_ptr + num_rows + row)
    log2_norm = m + log2_sum
    lost = log2_sum - (log2_norm - m)
    correction = tl.exp2(-lost) * factor
    slope = -g_entropy * LN2 * correction
    const = -g_logp * correction
    if ENTROPY:
        const -= g_entropy * (tl.load(entropy_ptr + row) - lost * LN2) * correction
    full = (num_columns // (GRAD_TILES * BLOCK)) * (GRAD_TILES * BLOCK)
    for start in tl.range(0, full, GRAD_TILES * BLOCK):
        xs = load_tiles(row_ptr + start, columns, 0, GRAD_TILES, BLOCK, False)
        for i in tl.static_range(GRAD_TILES):
            g = gradient_tile(xs[i], scale, log2_norm, slope, const, logit_scale, softcap, ENTROPY, SOFTCAP)
            tl.store(out_ptr + start + i * BLOCK + columns, to_logits(g, DTYPE))
    if full < num_columns:
        xs = load_tiles(row_ptr + full, columns, num_columns - full, GRAD_TILES, BLOCK, True)
        for i in tl.static_range(GRAD_TILES):
            at = full + i * BLOCK + columns
            g = gradient_tile(xs[i], scale, log2_norm, slope, const, logit_scale, softcap, ENTROPY, SOFTCAP)
            tl.store(out_ptr + at, to_logits(tl.where(at < num_columns, g, 0.0), DTYPE), mask=at < width)
        full += GRAD_TILES * BLOCK
    for start in tl.range(full, width, BLOCK):  # padded columns
        tl.store(out_ptr + start + columns, tl.zeros([BLOCK], DTYPE), mask=start + columns < width)
    tl.debug_barrier()
    g = gradient_tile(x_y, scale, log2_norm, slope, const, logit_scale, softcap, ENTROPY, SOFTCAP)
    one_hot = g_logp * factor
    if SOFTCAP:
        u = tanh(x_y.to(tl.float32) * (logit_scale / softcap))
        one_hot *= (1 - u * u) * logit_scale
    tl.store(out_ptr + y, to_logits(g + one_hot, DTYPE))


def tile_options(num_columns: int, element_size: int) -> tuple[int, int, int]:
    """(lanes, vector, warps): 16 bytes a thread and tile, one lane a thread, at most 4 warps, no wider than the row
    needs.
    """
    vector = 16 // element_size
    warp = 64 if torch.version.hip else 32
    lanes = min(128, max(warp, triton.next_power_of_2(triton.cdiv(num_columns, STATS_TILES.value * vector))))
    return lanes, vector, lanes // warp


def row_strides(logits: torch.Tensor) -> tuple[int, int, int]:
    batch_stride, row_stride, _ = logits.stride()
    return logits.shape[1], batch_stride, row_stride


def token_stats(logits, targets, temperature, num_columns, logit_scale, softcap, sum_sq):
    """logits [B, T, V] (last dimension contiguous), targets [B*T] int64 (< 0: not wanted), temperature [B*T] or [1]
    float32.

    softcap 0.0 means none. Returns (logp, entropy, lse, sum_sq_probs, normaliser [2, N]), float32; sum_sq_probs is
    empty unless `sum_sq`; `normaliser` holds the row's max and log2 of its sum, for the gradient.
    """
    num_rows = targets.numel()
    logp, entropy, lse = (torch.empty(num_rows, dtype=torch.float32, device=logits.device) for _ in range(3))
    sum_sq_probs = torch.empty(num_rows if sum_sq else 0, dtype=torch.float32, device=logits.device)
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
    grad, logits, targets, temperature, entropy, normaliser, grad_logp, grad_entropy, num_columns, logit_scale, softcap
):
    """Write d/d logits of (grad_logp . logp + grad_entropy . entropy) into `grad` [B, T, V], which may be `logits`
    itself.

    grad_entropy None: no entropy term.
    """
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
