"""Device functions that several kernels share. N tokens, V vocabulary; a row is the logits of one token."""

import os

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Stands for a logit that is out of the support. Finite, so that m - m and 0 * x stay defined; far below any real logit
# at the highest temperature, and so near that at a low one its product with the slope of a scaled loss stays finite.
OUT = tl.constexpr(-1e25)
LOWEST = tl.constexpr(-1.2e9)  # no logit of the support is lower; below, a rounded max could be 2^128 off
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
ELSEWHERE = tl.constexpr(-2)  # as a target: the row is wanted, its target is a column of another shard
STATS_TILES = tl.constexpr(4)  # loads in flight, which share one running max per lane
GRAD_TILES = tl.constexpr(8)


@triton.jit
def load_logits(ptr, mask, MASKED: tl.constexpr):
    """Logits with -inf (and masked places) replaced by OUT; NaN stays NaN. bf16 is clamped two at a time, before its
    upcast.
    """
    if MASKED:
        x = tl.load(ptr, mask=mask, other=float("-inf"))
    else:
        x = tl.load(ptr)
    if x.dtype == tl.float16 or INTERPRETED:  # fp16 cannot hold OUT; the interpreter cannot compare bf16
        x = x.to(tl.float32)
    return tl.maximum(x, tl.full([], OUT, x.dtype), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def to_logits(g, dtype: tl.constexpr):
    """Round to the dtype of the logits, to nearest even, as the hardware does (the interpreter cuts off)."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = g.to(tl.uint32, bitcast=True)
        g = tl.where(g == g, ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True), g)
    return g.to(dtype)


@triton.jit
def multiply_subtract(x, a, b):
    """a * x - b, rounded once: the hardware fuses the two, the interpreter is told to."""
    if INTERPRETED:
        return (x.to(tl.float64) * a - b).to(tl.float32)
    return x * a - b


@triton.jit
def tanh(u):
    e = tl.exp2(tl.abs(u) * (-2 * LOG2E))
    y = (1 - e) / (1 + e)
    uu = u * u
    near_0 = u * (1 + uu * (-1 / 3 + uu * (2 / 15 + uu * (-17 / 315 + uu * (62 / 2835)))))
    return tl.where(tl.abs(u) < 0.25, near_0, tl.where(u < 0, -y, y))


@triton.jit
def cap_logits(x, logit_scale, softcap):
    """softcap * tanh(logit_scale * x / softcap); what is out of the support stays out."""
    return tl.where(x <= LOWEST, OUT, softcap * tanh(x * (logit_scale / softcap)))


@triton.jit
def cap_derivative(x, logit_scale, softcap):
    """Of `cap_logits` by x; 0 out of the support."""
    capped = cap_logits(x.to(tl.float32), logit_scale, softcap)
    return tl.where(capped <= LOWEST, 0.0, 1 - (capped / softcap) * (capped / softcap)) * logit_scale


@triton.jit
def scaled(x, scale, m, logit_scale, softcap, SOFTCAP: tl.constexpr):
    """scale * cap(x) - m."""
    x = x.to(tl.float32)
    if SOFTCAP:
        x = cap_logits(x, logit_scale, softcap)
    return multiply_subtract(x, scale, m)


@triton.jit
def load_tiles(ptr, columns, num_left, TILES: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr):
    """TILES neighbouring tiles of logits, STEP apart; all loads are issued before the first is used."""
    xs = ()
    for i in tl.static_range(TILES):
        xs = xs + (load_logits(ptr + i * STEP + columns, i * STEP + columns < num_left, MASKED),)
    return xs


@triton.jit
def accumulate(xs, m, s, w, q, scale, logit_scale, softcap, SOFTCAP: tl.constexpr, SUM_SQ: tl.constexpr):
    """Take tiles into the running sums of their lanes.

    In base 2, with t = scale * x - m and e = 2^t: s = sum e, w = sum e t, q = sum e^2. Measuring t from the running max
    keeps w small where the entropy is small, whatever constant the row carries.
    """
    largest = xs[0]
    for i in tl.static_range(1, STATS_TILES):
        largest = tl.maximum(largest, xs[i])
    largest = tl.max(largest, 1).to(tl.float32)
    if SOFTCAP:
        largest = cap_logits(largest, logit_scale, softcap)
    m_new = tl.maximum(m, largest * scale)
    d = m - m_new
    a = tl.exp2(d)
    for i in tl.static_range(STATS_TILES):
        t = scaled(xs[i], scale, m_new[:, None], logit_scale, softcap, SOFTCAP)
        e = tl.exp2(t)
        if i == 0:
            sum_e, sum_et, sum_ee = e, e * t, e * e
        else:
            sum_e, sum_et, sum_ee = sum_e + e, sum_et + e * t, sum_ee + e * e
    w = a * (w + s * d) + tl.sum(sum_et, 1)
    s = a * s + tl.sum(sum_e, 1)
    if SUM_SQ:
        q = a * a * q + tl.sum(sum_ee, 1)
    return m_new, s, w, q


@triton.jit
def row_sums(
    row_ptr, num_columns, scale, logit_scale, softcap,
    SOFTCAP: tl.constexpr, SUM_SQ: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """One visit of a row: (max, sum 2^t, sum 2^t t, sum 4^t) with t = scale * x - max, all in base 2.

    A tile is [LANES, VEC] with VEC neighbouring logits (16 bytes) in one thread. The sums live per lane and meet once,
    after the loop, which so needs no barrier and no shuffle, and 1 + 1 / (STATS_TILES * VEC) exponentials per logit. A
    row without support gives a sum of 0.
    """
    TILE: tl.constexpr = LANES * VEC
    STEP: tl.constexpr = STATS_TILES * TILE
    columns = tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    m = tl.full([LANES], LOWEST, tl.float32) * scale
    s = tl.zeros([LANES], tl.float32)
    w = tl.zeros([LANES], tl.float32)
    q = tl.zeros([LANES], tl.float32)
    full = (num_columns // STEP) * STEP
    for start in tl.range(0, full, STEP):
        xs = load_tiles(row_ptr + start, columns, 0, STATS_TILES, TILE, False)
        m, s, w, q = accumulate(xs, m, s, w, q, scale, logit_scale, softcap, SOFTCAP, SUM_SQ)
    if full < num_columns:
        xs = load_tiles(row_ptr + full, columns, num_columns - full, STATS_TILES, TILE, True)
        m, s, w, q = accumulate(xs, m, s, w, q, scale, logit_scale, softcap, SOFTCAP, SUM_SQ)
    m_row = tl.max(m, 0)
    d = m - m_row
    a = tl.exp2(d)
    return m_row, tl.sum(a * s, 0), tl.sum(a * (w + s * d), 0), tl.sum(a * a * q, 0)


@triton.jit
def row_logp(row_ptr, y, num_columns, m, log2_sum, scale, logit_scale, softcap, SOFTCAP: tl.constexpr):
    """(log p_y, x_y): log p_y = (scale * x_y - max - log2 sum) ln 2 <= 0; -inf for a target outside the support."""
    x_y = load_logits(row_ptr + y, y < num_columns, True).to(tl.float32)
    logp = (scaled(x_y, scale, m, logit_scale, softcap, SOFTCAP) - log2_sum) * LN2
    logp = tl.where(logp > 0, 0.0, logp)
    return tl.where(x_y <= LOWEST, float("-inf"), logp), x_y


@triton.jit
def row_lse(m, s):
    """log-sum-exp in nats; -inf for a row without support."""
    return tl.where(s == 0, float("-inf"), (m + tl.log2(s)) * LN2)


@triton.jit
def row_entropy(num_columns, s, w):
    """log sum 2^t - sum 2^t t / sum 2^t in nats, held to [0, log V]; 0 for a row without support."""
    entropy = (tl.log2(s) - w / s) * LN2
    entropy = tl.where((s == 0) | (entropy < 0), 0.0, entropy)
    bound = tl.log2(num_columns.to(tl.float32)) * LN2
    return tl.where(entropy > bound, bound, entropy)


@triton.jit
def row_pointer(ptr, row, rows_per_batch, stride_batch, stride_row):
    """Start of row `row` of a [batch, rows_per_batch, V] tensor of any strides with a contiguous last dimension."""
    row = row.to(tl.int64)
    return ptr + row // rows_per_batch * stride_batch + row % rows_per_batch * stride_row


@triton.jit
def row_scale(temperature_ptr, row, stride_temperature, logit_scale, SOFTCAP: tl.constexpr):
    """1 / temperature of the row, and the factor from a (capped) logit to base-2 units."""
    inverse_temperature = 1.0 / tl.load(temperature_ptr + row * stride_temperature)
    scale = inverse_temperature * LOG2E
    if not SOFTCAP:
        scale *= logit_scale
    return inverse_temperature, scale


@triton.jit
def gradient_tile(
    x, scale, log2_norm, slope, const, logit_scale, softcap, ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr
):
    """2^t (slope t + const), t = scale * x - log2_norm, times the derivative of the cap."""
    t = scaled(x, scale, log2_norm, logit_scale, softcap, SOFTCAP)
    p = tl.exp2(t)
    g = p * (t * slope + const) if ENTROPY else p * const
    if SOFTCAP:
        g *= cap_derivative(x, logit_scale, softcap)
    return g


@triton.jit
def write_gradient(
    row_ptr, out_ptr, y, x_y, num_columns, width, m, log2_sum, entropy, g_logp, g_entropy,
    inverse_temperature, scale, logit_scale, softcap,
    ENTROPY: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's gradient of g_logp log p_y + g_entropy entropy, by `width` logits; out_ptr may be row_ptr.

    d log p_y / dz_v = 1[v = y] - p_v,   d entropy / dz_v = -p_v (log p_v + entropy),   0 from num_columns on. The
    one-hot term is added to the target's column alone, after the loop: inside it costs 4 instructions per logit. y < 0:
    no such term.
    """
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    factor = inverse_temperature
    if not SOFTCAP:
        factor *= logit_scale
    # log2_norm = m + log2_sum is rounded at the size of the logits; what the rounding took goes into the row's
    # constants.
    log2_norm = m + log2_sum
    lost = log2_sum - (log2_norm - m)
    correction = tl.exp2(-lost) * factor
    slope = -g_entropy * LN2 * correction
    const = -g_logp * correction
    if ENTROPY:
        const -= g_entropy * (entropy - lost * LN2) * correction
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
    write_zeros(out_ptr, tl.cdiv(num_columns, GRAD_TILES * BLOCK) * GRAD_TILES * BLOCK, width, BLOCK)  # padded columns
    g = gradient_tile(x_y, scale, log2_norm, slope, const, logit_scale, softcap, ENTROPY, SOFTCAP)
    write_target(out_ptr, y, x_y, g, g_logp * factor, logit_scale, softcap, SOFTCAP)


@triton.jit
def write_target(out_ptr, y, x_y, g, one_hot, logit_scale, softcap, SOFTCAP: tl.constexpr):
    """The target's column once more, now with its one-hot term; nothing for y < 0."""
    if SOFTCAP:
        one_hot *= cap_derivative(x_y, logit_scale, softcap)
    tl.debug_barrier()  # the row is written
    tl.store(out_ptr + y, to_logits(g + one_hot, out_ptr.dtype.element_ty), mask=y >= 0)


@triton.jit
def write_zeros(ptr, start, width, BLOCK: tl.constexpr):
    """0 in columns [start, width) of a row."""
    for at in tl.range(start, width, BLOCK):
        columns = at + tl.arange(0, BLOCK)
        tl.store(ptr + columns, tl.zeros([BLOCK], ptr.dtype.element_ty), mask=columns < width)
