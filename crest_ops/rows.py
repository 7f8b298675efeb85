"""The plain-torch definition of a visit: statistics of rows of vocabulary logits, and their gradient.

Rows are handled a few at a time, so that what a visit works on stays in cache, in two buffers that are made once
(`scratch`). Shape letters: R rows of a call, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

LOWEST = -1.2e9  # no logit of the support is lower
SMALLEST = -1e10  # stands for the scaled logit, from the row's max, of what is out of the support: its power is 0
UNWANTED = -1  # the target of a row that is not wanted
ELSEWHERE = -2  # the target of a wanted row that lies in another shard of the vocabulary
BLOCK_ELEMENTS = 1 << 18  # of one buffer and CPU thread: 1 MB in float32
GPU_BLOCK_ELEMENTS = 1 << 27


class Power(NamedTuple):
    """of(t) = exp(unit * t)."""

    of: Callable[..., Tensor]
    unit: float


NATURAL = Power(torch.exp, 1.0)  # a row's result depends on the row alone
BINARY = Power(torch.exp2, math.log(2))  # three times as fast; in torch an element's place decides how it is rounded


def block_rows(num_columns: int, device: torch.device) -> int:
    """Rows of a block; never a single one, whose sums torch would add in another order."""
    elements = BLOCK_ELEMENTS * torch.get_num_threads() if device.type == "cpu" else GPU_BLOCK_ELEMENTS
    return max(2, elements // num_columns)


def scratch_of(dtype: torch.dtype, num_rows: int, num_columns: int, device: torch.device) -> Tensor:
    """Two buffers [2, R, V] for blocks of num_rows rows. One block may hold a row more; a lone row stands twice."""
    size = max(2, min(num_rows, block_rows(num_columns, device) + 1))
    return torch.empty(2, size, num_columns, dtype=dtype, device=device)


def blocks(x_RV: Tensor) -> list[slice]:
    """Slices that cover the rows; the last takes a lone row along."""
    num_rows, num_columns = x_RV.shape
    starts = [*range(0, max(1, num_rows - 1), block_rows(num_columns, x_RV.device)), num_rows]
    return [slice(start, end) for start, end in zip(starts, starts[1:], strict=False)]


def cut(values: Tensor, block: slice) -> Tensor:
    """Values [R, 1] of a block; a single one stands for all rows."""
    return values if len(values) == 1 else values[block]


def shift_rows(x_RV: Tensor, max_R1: Tensor | None, scale: Tensor, softcap: float, logit_scale: float, t_RV: Tensor):
    """t := (cap(x) - max) * scale of rows x, down to -inf out of the support. Returns (max, d cap / dx).

    cap(x) = softcap * tanh(logit_scale * x / softcap); without a softcap (0.0) cap(x) = x, and the derivative is None.
    scale [1] or [R, 1]. max None: of the row. t may be x.
    """
    derivative_RV = None
    if softcap:
        out_RV = x_RV <= LOWEST
        t_RV.copy_(x_RV).mul_(logit_scale / softcap).tanh_()
        derivative_RV = (1 - t_RV * t_RV).mul_(logit_scale)
        x_RV = t_RV.mul_(softcap).masked_fill_(out_RV, -math.inf)
    elif x_RV.dtype != t_RV.dtype:
        x_RV = t_RV.copy_(x_RV)
    if max_R1 is None:
        max_R1 = x_RV.amax(1, keepdim=True).clamp_(min=2 * LOWEST)
    torch.sub(x_RV, max_R1, out=t_RV)
    if scale.numel() != 1 or scale.device.type != "cpu":
        t_RV.mul_(scale)
    elif float(scale) != 1:
        t_RV.mul_(float(scale))
    return max_R1, derivative_RV


def scale_of(temperature: Tensor, softcap: float, logit_scale: float) -> Tensor:
    """d z / d cap(x), [1, 1] or [R, 1]."""
    return (1.0 if softcap else logit_scale) / temperature[:, None]


def stats_rows(
    x_RV: Tensor, target_R: Tensor, temperature: Tensor, softcap: float, logit_scale: float, entropy: bool,
    sum_sq: bool, power: Power, scratch: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(logp, entropy, lse, sum_sq_probs, max, log_sum) of wanted rows, [R] each. temperature [1] or [R].

    max is that of the (capped) logits before temperature; log_sum = log sum exp((cap - max) * scale).
    """
    num_rows, num_columns = x_RV.shape
    scale = scale_of(temperature, softcap, logit_scale)
    max_R, sum_R, weighted_R, squares_R = scratch.new_zeros(4, num_rows)
    for block in blocks(x_RV):
        t_RV, e_RV = scratch[:, : block.stop - block.start]
        max_R1, _ = shift_rows(x_RV[block], None, cut(scale / power.unit, block), softcap, logit_scale, t_RV)
        max_R[block] = max_R1[:, 0]
        torch.sum(power.of(t_RV, out=e_RV), 1, out=sum_R[block])
        if sum_sq:
            squares_R[block] = (e_RV * e_RV).sum(1)
        if entropy:
            torch.sum(e_RV.mul_(t_RV), 1, out=weighted_R[block])
            if weighted_R[block].isnan().any():  # 0 * -inf: out of the support
                power.of(t_RV.clamp_(min=SMALLEST), out=e_RV)
                torch.sum(e_RV.mul_(t_RV), 1, out=weighted_R[block])
    x_R1 = x_RV.gather(1, target_R.clamp(min=0)[:, None])
    t_R1 = scratch.new_empty(num_rows, 1)
    shift_rows(x_R1, max_R[:, None], scale, softcap, logit_scale, t_R1)
    log_sum_R, empty_R, zero = sum_R.log(), max_R <= LOWEST, sum_R.new_zeros(())
    entropy_R = sum_sq_R = zero.expand_as(sum_R)
    if sum_sq:
        sum_sq_R = torch.where(empty_R, zero, squares_R / (sum_R * sum_R))
    if entropy:
        entropy_R = torch.where(
            empty_R, zero, (log_sum_R - power.unit * weighted_R / sum_R).clamp(0, math.log(num_columns))
        )
    logp_R = torch.where(x_R1[:, 0] <= LOWEST, -math.inf, (t_R1[:, 0] - log_sum_R).clamp(max=0))
    logp_R = torch.where(target_R == ELSEWHERE, zero, logp_R)
    lse_R = torch.where(empty_R, -math.inf, max_R * scale[:, 0] + log_sum_R)
    return logp_R, entropy_R, lse_R, sum_sq_R, max_R, log_sum_R


def grad_rows(
    grad_RV: Tensor, x_RV: Tensor, target_R: Tensor, temperature: Tensor, softcap: float, logit_scale: float,
    entropy_R, max_R, log_sum_R, grad_logp_R, grad_entropy_R: Tensor | None, power: Power,
    scratch: Tensor,
) -> None:  # fmt: skip
    """Write d (grad_logp . logp + grad_entropy . entropy) / dx of wanted rows into grad, which may be x.

    d logp_y / dz_v = 1[v = y] - p_v,  d entropy / dz_v = -p_v (log p_v + entropy),  p = exp(z - log_sum). The target's
    column is found again by itself, with its 1, and written last.
    """
    scale = scale_of(temperature, softcap, logit_scale)
    share_R = (-log_sum_R).exp() * scale[:, 0]
    slope_R1 = const_R1 = (-grad_logp_R * share_R)[:, None]
    if grad_entropy_R is not None:
        slope_R1 = (-grad_entropy_R * share_R)[:, None]
        const_R1 = const_R1 + slope_R1 * (entropy_R - log_sum_R)[:, None]
        slope_R1 = slope_R1 * power.unit

    def gradient(x_RV, block: slice, t_RV: Tensor, e_RV: Tensor) -> tuple[Tensor, Tensor | None]:
        factor = cut(scale / power.unit, block)
        _, derivative_RV = shift_rows(x_RV, max_R[block, None], factor, softcap, logit_scale, t_RV)
        if grad_entropy_R is None:
            power.of(t_RV, out=t_RV).mul_(const_R1[block])
        else:
            power.of(t_RV.clamp_(min=SMALLEST), out=e_RV)
            t_RV.mul_(slope_R1[block]).add_(const_R1[block]).mul_(e_RV)
        return t_RV if derivative_RV is None else t_RV.mul_(derivative_RV), derivative_RV

    here_R1, at_R1 = target_R[:, None] >= 0, target_R.clamp(min=0)[:, None]
    x_R1 = x_RV.gather(1, at_R1)
    at_target_R1, derivative_R1 = gradient(x_R1, slice(None), *scratch.new_empty(2, len(x_RV), 1))
    at_target_R1 += here_R1 * grad_logp_R[:, None] * scale * (1 if derivative_R1 is None else derivative_R1)
    for block in blocks(x_RV):
        buffers = scratch[:, : block.stop - block.start]
        alike = grad_RV.dtype == scratch.dtype
        found_RV, _ = gradient(x_RV[block], block, grad_RV[block] if alike else buffers[0], buffers[1])
        if not alike:
            grad_RV[block] = found_RV
    rows = torch.arange(len(x_RV), device=x_RV.device)
    grad_RV[rows, at_R1[:, 0]] = at_target_R1[:, 0].to(grad_RV.dtype)
    dead_R = grad_logp_R == 0 if grad_entropy_R is None else (grad_logp_R == 0) & (grad_entropy_R == 0)
    dead_R = dead_R | (here_R1 & (x_R1 <= LOWEST))[:, 0]
    if dead_R.any():
        grad_RV[dead_R] = 0
