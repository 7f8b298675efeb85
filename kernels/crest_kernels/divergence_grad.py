"""The gradient of the divergences, log-probs and entropies of `divergence` by the student's logits.

One read of both rows and one write, which may go over the student's. One program per row, as in `token_stats`.
"""

import torch
import triton
import triton.language as tl

from .arguments import check_per_row, check_rows, check_tensor
from .device import (
    ELSEWHERE,
    LN2,
    LOWEST,
    cap_derivative,
    load_logits,
    load_tiles,
    row_pointer,
    row_scale,
    scaled,
    to_logits,
    write_target,
    write_zeros,
)
from .divergence import log_ratios_to_mixture, pair_options
from .token_stats import LENGTHS, PER_ROW, row_strides

TILES = tl.constexpr(2)  # loads in flight of each row


@triton.jit
def pair_gradient_tile(
    x, y, scale, m, log2_s, n, log2_z, const, slope_ratio, slope_entropy, slope_difference, jsd_weight,
    logit_scale, softcap, JSD: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """p const + p ratio slope_ratio + p log2 p slope_entropy + (p - q) slope_difference, times the derivative of the
    cap; ratio = log2 p - log2 q, or log2 p - log2 m of the mixture m. A factor p comes first: 0 * log 0 = 0 whatever
    the slope.
    """
    lp = scaled(x, scale, m, logit_scale, softcap, SOFTCAP) - log2_s
    lq = scaled(y, scale, n, logit_scale, softcap, SOFTCAP) - log2_z
    p = tl.exp2(lp)
    if JSD:
        ratio, _ = log_ratios_to_mixture(lp, lq, jsd_weight)
    else:
        ratio = lp - lq
    g = p * const + p * ratio * slope_ratio + p * lp * slope_entropy
    if not JSD:
        g += (p - tl.exp2(lq)) * slope_difference
    if SOFTCAP:
        g *= cap_derivative(x, logit_scale, softcap)
    return g


@triton.jit(do_not_specialize=LENGTHS, do_not_specialize_on_alignment=PER_ROW)
def divergence_grad_kernel(
    logits_ptr, teacher_ptr, target_ptr, temperature_ptr, entropy_ptr, student_kl_ptr, divergence_ptr, normaliser_ptr,
    grad_logp_ptr, grad_entropy_ptr, grad_student_kl_ptr, grad_divergence_ptr, grad_ptr,
    num_rows, rows_per_batch, num_columns, width, stride_batch, stride_row, stride_teacher_batch, stride_teacher_row,
    stride_temperature, stride_grad_batch, stride_grad_row, logit_scale, softcap, jsd_weight,
    JSD: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # By z_v: logp_y: 1[v = y] - p_v,  entropy: -p_v (log p_v + entropy),  KL(p || q): p_v (log p_v - log q_v - KL),
    # KL(q || p): p_v - q_v,  JSD: (1 - weight) p_v (log p_v - log m_v - KL(p || m)).
    # The one-hot term is added to the target's column alone, after the loop.
    row = tl.program_id(0)
    y = tl.load(target_ptr + row)
    out_ptr = row_pointer(grad_ptr, row, rows_per_batch, stride_grad_batch, stride_grad_row)
    columns = tl.arange(0, BLOCK)
    DTYPE: tl.constexpr = grad_ptr.dtype.element_ty
    g_logp = tl.load(grad_logp_ptr + row)
    g_entropy = tl.load(grad_entropy_ptr + row)
    g_divergence = tl.load(grad_divergence_ptr + row)
    student_kl = tl.load(student_kl_ptr + row)
    if JSD:
        g_student_kl = (1 - jsd_weight) * g_divergence
        g_divergence = 0.0
    else:  # an infinite divergence has no gradient
        g_student_kl = tl.where(student_kl == float("inf"), 0.0, tl.load(grad_student_kl_ptr + row))
        student_kl = tl.where(student_kl == float("inf"), 0.0, student_kl)
        g_divergence = tl.where(tl.load(divergence_ptr + row) == float("inf"), 0.0, g_divergence)
    row_ptr = row_pointer(logits_ptr, row, rows_per_batch, stride_batch, stride_row)
    teacher_row_ptr = row_pointer(teacher_ptr, row, rows_per_batch, stride_teacher_batch, stride_teacher_row)
    inside = (y >= 0) & (y < num_columns)
    x_y = load_logits(row_ptr + tl.maximum(y, 0), inside, True)
    teacher_y = load_logits(teacher_row_ptr + tl.maximum(y, 0), inside, True)
    tl.debug_barrier()  # every thread holds x_y before one may overwrite it
    idle = (g_logp == 0) & (g_entropy == 0) & (g_student_kl == 0) & (g_divergence == 0)
    outside = (y != ELSEWHERE) & (x_y.to(tl.float32) <= LOWEST)  # as of y = -1, not read
    if outside | idle:
        write_zeros(out_ptr, 0, width, BLOCK)
        return
    inverse_temperature, scale = row_scale(temperature_ptr, row, stride_temperature, logit_scale, SOFTCAP)
    factor = inverse_temperature
    if not SOFTCAP:
        factor *= logit_scale
    m = tl.load(normaliser_ptr + row)
    log2_s = tl.load(normaliser_ptr + num_rows + row)
    n = tl.load(normaliser_ptr + 2 * num_rows + row)
    log2_z = tl.load(normaliser_ptr + 3 * num_rows + row)
    const = -(g_logp + g_entropy * tl.load(entropy_ptr + row) + g_student_kl * student_kl) * factor
    slope_ratio = g_student_kl * factor * LN2
    slope_entropy = -g_entropy * factor * LN2
    slope_difference = g_divergence * factor
    full = (num_columns // (TILES * BLOCK)) * (TILES * BLOCK)
    for start in tl.range(0, full, TILES * BLOCK):
        xs = load_tiles(row_ptr + start, columns, 0, TILES, BLOCK, False)
        ys = load_tiles(teacher_row_ptr + start, columns, 0, TILES, BLOCK, False)
        for i in tl.static_range(TILES):
            g = pair_gradient_tile(
                xs[i], ys[i], scale, m, log2_s, n, log2_z, const, slope_ratio, slope_entropy, slope_difference,
                jsd_weight, logit_scale, softcap, JSD, SOFTCAP,
            )  # fmt: skip
            tl.store(out_ptr + start + i * BLOCK + columns, to_logits(g, DTYPE))
    if full < num_columns:
        xs = load_tiles(row_ptr + full, columns, num_columns - full, TILES, BLOCK, True)
        ys = load_tiles(teacher_row_ptr + full, columns, num_columns - full, TILES, BLOCK, True)
        for i in tl.static_range(TILES):
            at = full + i * BLOCK + columns
            g = pair_gradient_tile(
                xs[i], ys[i], scale, m, log2_s, n, log2_z, const, slope_ratio, slope_entropy, slope_difference,
                jsd_weight, logit_scale, softcap, JSD, SOFTCAP,
            )  # fmt: skip
            tl.store(out_ptr + at, to_logits(tl.where(at < num_columns, g, 0.0), DTYPE), mask=at < width)
    write_zeros(out_ptr, tl.cdiv(num_columns, TILES * BLOCK) * TILES * BLOCK, width, BLOCK)  # padded columns
    g = pair_gradient_tile(
        x_y, teacher_y, scale, m, log2_s, n, log2_z, const, slope_ratio, slope_entropy, slope_difference,
        jsd_weight, logit_scale, softcap, JSD, SOFTCAP,
    )  # fmt: skip
    write_target(out_ptr, y, x_y, g, g_logp * factor, logit_scale, softcap, SOFTCAP)


def token_divergence_grad(
    grad, logits, teacher_logits, targets, temperature, entropy, student_kl, divergence, normaliser,
    grad_logp, grad_entropy, grad_student_kl, grad_divergence, num_columns, logit_scale=1.0, softcap=0.0,
    jsd_weight=0.0,
):  # fmt: skip
    """Write d/d logits of the outputs times their gradients into `grad` [B, T, V], which may be `logits`.

    By z_v of the student: logp: 1[v = target] - p_v,  entropy: -p_v (log p_v + entropy),  KL(p || q): p_v (log p_v -
    log q_v - KL),  KL(q || p): p_v - q_v,  JSD: (1 - jsd_weight) p_v (log p_v - log m_v - KL(p || m)); an infinite one
    has none. Logits, teacher_logits, targets, temperature, num_columns, logit_scale, softcap, jsd_weight as in
    `token_divergence`.

    entropy, student_kl, divergence [N] and normaliser [4, N] as `token_divergence` gave them; grad_logp, grad_entropy,
    grad_student_kl, grad_divergence [N] float32. Where jsd_weight is not 0, grad_student_kl is not looked at. Raises
    ValueError: tensors that the kernel would misread.
    """
    check_rows(targets, temperature, num_columns, logits=logits, teacher_logits=teacher_logits, grad=grad)
    check_per_row(
        targets, entropy=entropy, student_kl=student_kl, divergence=divergence, grad_logp=grad_logp,
        grad_entropy=grad_entropy, grad_student_kl=grad_student_kl, grad_divergence=grad_divergence,
    )  # fmt: skip
    check_tensor("normaliser", normaliser, torch.float32, (4, targets.numel()), targets.device)
    num_rows = targets.numel()
    if not num_rows:
        return
    width = logits.shape[2]
    lanes, vector, num_warps = pair_options(logits, teacher_logits, width)
    rows_per_batch, stride_batch, stride_row = row_strides(logits)
    _, stride_teacher_batch, stride_teacher_row = row_strides(teacher_logits)
    _, stride_grad_batch, stride_grad_row = row_strides(grad)
    with torch.cuda.device_of(logits):
        divergence_grad_kernel[(num_rows,)](
            logits, teacher_logits, targets, temperature, entropy, student_kl, divergence, normaliser,
            grad_logp, grad_entropy, grad_student_kl, grad_divergence, grad,
            num_rows, rows_per_batch, num_columns, width, stride_batch, stride_row, stride_teacher_batch,
            stride_teacher_row, int(temperature.numel() > 1), stride_grad_batch, stride_grad_row, logit_scale, softcap,
            jsd_weight,
            JSD=jsd_weight > 0, SOFTCAP=softcap > 0, BLOCK=lanes * vector, num_warps=num_warps, enable_fp_fusion=True,
        )  # fmt: skip
