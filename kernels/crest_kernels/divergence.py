"""How far the student's distribution of every row is from the teacher's, from the logits of both.

p is the student's row, q the teacher's; all logarithms are to base 2 inside. One program per row, as in `token_stats`.
"""

import math

import torch
import triton
import triton.language as tl

from .arguments import check_rows
from .device import (
    ELSEWHERE,
    LN2,
    LOWEST,
    cap_logits,
    load_logits,
    load_tiles,
    row_logp,
    row_pointer,
    row_scale,
    row_sums,
    scaled,
)
from .token_stats import LENGTHS, PER_ROW, row_strides, store_stats, store_unwanted, tile_options

PAIR_TILES = tl.constexpr(5)  # loads in flight of each row: as many as leave 4 rows on a multiprocessor
VISIT_TILES = tl.constexpr(2)  # the same, where both rows are normalised already
# A row's sum of |difference of logits| is larger only where one of the two excludes a column that the other does not.
ONE_SIDED = tl.constexpr(1e20)


@triton.jit
def lane_max(xs, m, scale, logit_scale, softcap, SOFTCAP: tl.constexpr):
    """The running max of each lane, after PAIR_TILES more tiles."""
    largest = xs[0]
    for i in tl.static_range(1, PAIR_TILES):
        largest = tl.maximum(largest, xs[i])
    largest = tl.max(largest, 1).to(tl.float32)
    if SOFTCAP:
        largest = cap_logits(largest, logit_scale, softcap)
    return tl.maximum(m, largest * scale)


@triton.jit
def accumulate_pair(xs, ys, m, s, w, n, z, r, f, far, scale, logit_scale, softcap, SOFTCAP: tl.constexpr):
    """Take tiles of both rows into the running sums of their lanes.

    With t = scale * x - m of the student and u = scale * y - n of the teacher, in base 2: s = sum 2^t, w = sum 2^t t,
    z = sum 2^u, r = sum 2^t (t - u), f = sum 2^u (t - u), far = sum |t - u|, which only a column that one of the two
    excludes can make huge.
    """
    m_new = lane_max(xs, m, scale, logit_scale, softcap, SOFTCAP)
    n_new = lane_max(ys, n, scale, logit_scale, softcap, SOFTCAP)
    for i in tl.static_range(PAIR_TILES):
        t = scaled(xs[i], scale, m_new[:, None], logit_scale, softcap, SOFTCAP)
        u = scaled(ys[i], scale, n_new[:, None], logit_scale, softcap, SOFTCAP)
        e = tl.exp2(t)
        h = tl.exp2(u)
        d = t - u
        if i == 0:
            sum_e, sum_et, sum_h, sum_ed, sum_hd, sum_d = e, e * t, h, e * d, h * d, tl.abs(d)
        else:
            sum_e, sum_et, sum_h = sum_e + e, sum_et + e * t, sum_h + h
            sum_ed, sum_hd, sum_d = sum_ed + e * d, sum_hd + h * d, sum_d + tl.abs(d)
    shift_m = m - m_new
    shift_n = n - n_new
    a = tl.exp2(shift_m)
    b = tl.exp2(shift_n)
    shift = shift_m - shift_n
    r = a * (r + s * shift) + tl.sum(sum_ed, 1)
    f = b * (f + z * shift) + tl.sum(sum_hd, 1)
    w = a * (w + s * shift_m) + tl.sum(sum_et, 1)
    s = a * s + tl.sum(sum_e, 1)
    z = b * z + tl.sum(sum_h, 1)
    return m_new, s, w, n_new, z, r, f, far + tl.sum(sum_d, 1)


@triton.jit
def one_sided(row_ptr, teacher_row_ptr, num_columns, LANES: tl.constexpr, VEC: tl.constexpr):
    """(whether the student, whether the teacher) has a column in its support that the other excludes."""
    columns = tl.arange(0, LANES * VEC)
    student = tl.zeros([LANES * VEC], tl.int1)
    teacher = tl.zeros([LANES * VEC], tl.int1)
    for start in tl.range(0, num_columns, LANES * VEC):
        mask = start + columns < num_columns
        x = load_logits(row_ptr + start + columns, mask, True).to(tl.float32) > LOWEST
        y = load_logits(teacher_row_ptr + start + columns, mask, True).to(tl.float32) > LOWEST
        student = student | (x & (y == 0))
        teacher = teacher | (y & (x == 0))
    return tl.max(student.to(tl.int32), 0) > 0, tl.max(teacher.to(tl.int32), 0) > 0


@triton.jit
def store_unwanted_pair(
    row, num_rows, logp_ptr, entropy_ptr, teacher_logp_ptr, student_kl_ptr, divergence_ptr, normaliser_ptr
):
    store_unwanted(row, num_rows, logp_ptr, entropy_ptr, normaliser_ptr)
    tl.store(teacher_logp_ptr + row, 0.0)
    tl.store(student_kl_ptr + row, 0.0)
    tl.store(divergence_ptr + row, 0.0)
    tl.store(normaliser_ptr + 2 * num_rows + row, 0.0)
    tl.store(normaliser_ptr + 3 * num_rows + row, 0.0)


@triton.jit
def log2_or_0(s):
    """log2 of a sum; 0 for that of a row without support, so that its terms 2^t stay 0 when divided by it."""
    return tl.where(s == 0, 0.0, tl.log2(s))


@triton.jit(do_not_specialize=LENGTHS, do_not_specialize_on_alignment=PER_ROW)
def kl_kernel(
    logits_ptr, teacher_ptr, target_ptr, temperature_ptr, logp_ptr, entropy_ptr, teacher_logp_ptr,
    student_kl_ptr, divergence_ptr, normaliser_ptr, num_rows, rows_per_batch, num_columns, stride_batch, stride_row,
    stride_teacher_batch, stride_teacher_row, stride_temperature, logit_scale, softcap,
    SOFTCAP: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    # student_kl = KL(p || q) = r / s + log2(z / s),  divergence = KL(q || p) = -f / z + log2(s / z).
    row = tl.program_id(0)
    y = tl.load(target_ptr + row)
    if (y < 0) & (y != ELSEWHERE):
        store_unwanted_pair(
            row, num_rows, logp_ptr, entropy_ptr, teacher_logp_ptr, student_kl_ptr, divergence_ptr,
            normaliser_ptr,
        )  # fmt: skip
        return
    _, scale = row_scale(temperature_ptr, row, stride_temperature, logit_scale, SOFTCAP)
    row_ptr = row_pointer(logits_ptr, row, rows_per_batch, stride_batch, stride_row)
    teacher_row_ptr = row_pointer(teacher_ptr, row, rows_per_batch, stride_teacher_batch, stride_teacher_row)
    TILE: tl.constexpr = LANES * VEC
    STEP: tl.constexpr = PAIR_TILES * TILE
    columns = tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    m = tl.full([LANES], LOWEST, tl.float32) * scale
    n = m
    s = tl.zeros([LANES], tl.float32)
    w, z, r, f, far = s, s, s, s, s
    full = (num_columns // STEP) * STEP
    for start in tl.range(0, full, STEP):
        xs = load_tiles(row_ptr + start, columns, 0, PAIR_TILES, TILE, False)
        ys = load_tiles(teacher_row_ptr + start, columns, 0, PAIR_TILES, TILE, False)
        m, s, w, n, z, r, f, far = accumulate_pair(
            xs, ys, m, s, w, n, z, r, f, far, scale, logit_scale, softcap, SOFTCAP
        )
    if full < num_columns:
        xs = load_tiles(row_ptr + full, columns, num_columns - full, PAIR_TILES, TILE, True)
        ys = load_tiles(teacher_row_ptr + full, columns, num_columns - full, PAIR_TILES, TILE, True)
        m, s, w, n, z, r, f, far = accumulate_pair(
            xs, ys, m, s, w, n, z, r, f, far, scale, logit_scale, softcap, SOFTCAP
        )
    m_row = tl.max(m, 0)
    n_row = tl.max(n, 0)
    shift_m = m - m_row
    shift_n = n - n_row
    a = tl.exp2(shift_m)
    b = tl.exp2(shift_n)
    r = tl.sum(a * (r + s * (shift_m - shift_n)), 0)
    f = tl.sum(b * (f + z * (shift_m - shift_n)), 0)
    w = tl.sum(a * (w + s * shift_m), 0)
    s = tl.sum(a * s, 0)
    z = tl.sum(b * z, 0)
    student_kl = tl.where(s == 0, 0.0, (r / s + tl.log2(z / s)) * LN2)
    teacher_kl = tl.where(z == 0, 0.0, (tl.log2(s / z) - f / z) * LN2)
    student_kl = tl.where(student_kl < 0, 0.0, student_kl)
    teacher_kl = tl.where(teacher_kl < 0, 0.0, teacher_kl)
    if tl.sum(far, 0) > ONE_SIDED * scale:
        student, teacher = one_sided(row_ptr, teacher_row_ptr, num_columns, LANES, VEC)
        student_kl = tl.where(student, float("inf"), student_kl)
        teacher_kl = tl.where(teacher, float("inf"), teacher_kl)
    at = tl.maximum(y, 0)
    logp, _ = row_logp(row_ptr, at, num_columns, m_row, tl.log2(s), scale, logit_scale, softcap, SOFTCAP)
    logp = tl.where(y == ELSEWHERE, 0.0, logp)
    store_stats(row, num_rows, num_columns, m_row, s, w, logp, logp_ptr, entropy_ptr, normaliser_ptr)
    logp, _ = row_logp(teacher_row_ptr, at, num_columns, n_row, tl.log2(z), scale, logit_scale, softcap, SOFTCAP)
    tl.store(teacher_logp_ptr + row, tl.where(y == ELSEWHERE, 0.0, logp))
    tl.store(student_kl_ptr + row, student_kl)
    tl.store(divergence_ptr + row, teacher_kl)
    tl.store(normaliser_ptr + 2 * num_rows + row, n_row)
    tl.store(normaliser_ptr + 3 * num_rows + row, log2_or_0(z))


@triton.jit
def log_ratios_to_mixture(lp, lq, weight):
    """(log2 p - log2 m, log2 q - log2 m) of m = (1 - weight) p + weight q, by log-sum-exp: finite, and 0 for p = q."""
    delta = lq - lp
    higher = tl.where(delta > 0, weight, 1 - weight)
    lower = tl.where(delta > 0, 1 - weight, weight)
    excess = tl.log2(higher + lower * tl.exp2(-tl.abs(delta)))  # of log2 m over the higher of the two
    return tl.minimum(-delta, 0.0) - excess, tl.minimum(delta, 0.0) - excess


@triton.jit
def accumulate_mixture(
    xs, ys, k_p, k_q, scale, m, log2_s, n, log2_z, weight, logit_scale, softcap, SOFTCAP: tl.constexpr
):
    """k_p += p (log2 p - log2 m), k_q += q (log2 q - log2 m)."""
    for i in tl.static_range(VISIT_TILES):
        lp = scaled(xs[i], scale, m, logit_scale, softcap, SOFTCAP) - log2_s
        lq = scaled(ys[i], scale, n, logit_scale, softcap, SOFTCAP) - log2_z
        rp, rq = log_ratios_to_mixture(lp, lq, weight)
        k_p += tl.exp2(lp) * rp
        k_q += tl.exp2(lq) * rq
    return k_p, k_q


@triton.jit(do_not_specialize=LENGTHS, do_not_specialize_on_alignment=PER_ROW)
def jsd_kernel(
    logits_ptr, teacher_ptr, target_ptr, temperature_ptr, logp_ptr, entropy_ptr, teacher_logp_ptr,
    student_kl_ptr, divergence_ptr, normaliser_ptr, num_rows, rows_per_batch, num_columns, stride_batch, stride_row,
    stride_teacher_batch, stride_teacher_row, stride_temperature, logit_scale, softcap, jsd_weight, bound,
    SOFTCAP: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    # student_kl = KL(p || m),  divergence = (1 - weight) KL(p || m) + weight KL(q || m) <= bound.
    row = tl.program_id(0)
    y = tl.load(target_ptr + row)
    if y < 0:
        store_unwanted_pair(
            row, num_rows, logp_ptr, entropy_ptr, teacher_logp_ptr, student_kl_ptr, divergence_ptr,
            normaliser_ptr,
        )  # fmt: skip
        return
    _, scale = row_scale(temperature_ptr, row, stride_temperature, logit_scale, SOFTCAP)
    row_ptr = row_pointer(logits_ptr, row, rows_per_batch, stride_batch, stride_row)
    teacher_row_ptr = row_pointer(teacher_ptr, row, rows_per_batch, stride_teacher_batch, stride_teacher_row)
    m, s, w, _ = row_sums(row_ptr, num_columns, scale, logit_scale, softcap, SOFTCAP, False, LANES, VEC)
    logp, _ = row_logp(row_ptr, y, num_columns, m, tl.log2(s), scale, logit_scale, softcap, SOFTCAP)
    store_stats(row, num_rows, num_columns, m, s, w, logp, logp_ptr, entropy_ptr, normaliser_ptr)
    n, z, _, _ = row_sums(teacher_row_ptr, num_columns, scale, logit_scale, softcap, SOFTCAP, False, LANES, VEC)
    logp, _ = row_logp(teacher_row_ptr, y, num_columns, n, tl.log2(z), scale, logit_scale, softcap, SOFTCAP)
    tl.store(teacher_logp_ptr + row, logp)
    log2_s = log2_or_0(s)
    log2_z = log2_or_0(z)
    tl.store(normaliser_ptr + 2 * num_rows + row, n)
    tl.store(normaliser_ptr + 3 * num_rows + row, log2_z)
    TILE: tl.constexpr = LANES * VEC
    STEP: tl.constexpr = VISIT_TILES * TILE
    columns = tl.arange(0, TILE)
    k_p = tl.zeros([TILE], tl.float32)
    k_q = tl.zeros([TILE], tl.float32)
    full = (num_columns // STEP) * STEP
    for start in tl.range(0, full, STEP):
        xs = load_tiles(row_ptr + start, columns, 0, VISIT_TILES, TILE, False)
        ys = load_tiles(teacher_row_ptr + start, columns, 0, VISIT_TILES, TILE, False)
        k_p, k_q = accumulate_mixture(
            xs, ys, k_p, k_q, scale, m, log2_s, n, log2_z, jsd_weight, logit_scale, softcap, SOFTCAP
        )
    if full < num_columns:
        xs = load_tiles(row_ptr + full, columns, num_columns - full, VISIT_TILES, TILE, True)
        ys = load_tiles(teacher_row_ptr + full, columns, num_columns - full, VISIT_TILES, TILE, True)
        k_p, k_q = accumulate_mixture(
            xs, ys, k_p, k_q, scale, m, log2_s, n, log2_z, jsd_weight, logit_scale, softcap, SOFTCAP
        )
    student_kl = tl.sum(k_p, 0)
    other = 1 - jsd_weight
    divergence = (other * student_kl + jsd_weight * tl.sum(k_q, 0)) * LN2
    divergence = tl.where(divergence < 0, 0.0, divergence)
    tl.store(student_kl_ptr + row, student_kl * LN2)
    tl.store(divergence_ptr + row, tl.where(divergence > bound, bound, divergence))


def pair_options(logits, teacher_logits, num_columns: int) -> tuple[int, int, int]:
    """`tile_options` of the narrower dtype, for both rows: their sums are then added in one order."""
    return tile_options(num_columns, min(logits.element_size(), teacher_logits.element_size()))


def token_divergence(
    logits, teacher_logits, targets, temperature, num_columns, logit_scale=1.0, softcap=0.0, jsd_weight=0.0
):
    """Divergence of student p and teacher q over the vocabulary, log-probs and entropy of every row.

    logits [B, T, V] and teacher_logits [B, T, V'] (last dimensions contiguous), targets [B*T] int64 (-1: not
    wanted; -2, of the KLs: ELSEWHERE), temperature [B*T] or [1] float32.

    p, q, logp and entropy over the first num_columns columns, with logit_scale and softcap, as in `token_stats`;
    softcap 0.0 means none. Returns (logp, entropy, teacher_logp, student_kl, divergence, normaliser [4, N]), float32.
    jsd_weight 0.0: student_kl = KL(p || q), divergence = KL(q || p). Otherwise, m = (1 - jsd_weight) p + jsd_weight q:
    student_kl = KL(p || m), divergence = (1 - jsd_weight) KL(p || m) + jsd_weight KL(q || m).
    Raises ValueError: tensors that the kernels would misread.
    """
    check_rows(targets, temperature, num_columns, logits=logits, teacher_logits=teacher_logits)
    num_rows = targets.numel()
    logp, entropy, teacher_logp, student_kl, divergence = (
        torch.empty(num_rows, dtype=torch.float32, device=logits.device) for _ in range(5)
    )
    normaliser = torch.empty(4, num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        lanes, vector, num_warps = pair_options(logits, teacher_logits, num_columns)
        rows_per_batch, stride_batch, stride_row = row_strides(logits)
        _, stride_teacher_batch, stride_teacher_row = row_strides(teacher_logits)
        arguments = (
            logits, teacher_logits, targets, temperature, logp, entropy, teacher_logp, student_kl, divergence,
            normaliser, num_rows, rows_per_batch, num_columns, stride_batch, stride_row, stride_teacher_batch,
            stride_teacher_row, int(temperature.numel() > 1), logit_scale, softcap,
        )  # fmt: skip
        options = dict(SOFTCAP=softcap > 0, LANES=lanes, VEC=vector, num_warps=num_warps, enable_fp_fusion=True)
        with torch.cuda.device_of(logits):
            if jsd_weight:
                bound = -jsd_weight * math.log(jsd_weight) - (1 - jsd_weight) * math.log1p(-jsd_weight)
                jsd_kernel[(num_rows,)](*arguments, jsd_weight, bound, **options)
            else:
                kl_kernel[(num_rows,)](*arguments, **options)
    return logp, entropy, teacher_logp, student_kl, divergence, normaliser
