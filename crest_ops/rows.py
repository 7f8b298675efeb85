"""The plain-torch definition of a visit: statistics of rows of vocabulary logits, and their gradient.

Rows are handled a few at a time, so that what a visit works on stays in cache, in two buffers that are made once
(`scratch`). Shape letters: R rows of a block, V vocabulary.
"""

import math

import torch
from torch import Tensor

LOWEST = -1.2e9  # no logit of the support is lower
SMALLEST = -1e10  # stands for the scaled logit, from the row's max, of what is out of the support: exp gives 0
UNWANTED = -1  # the target of a row that is not wanted
ELSEWHERE = -2  # the target of a wanted row that lies in another shard of the vocabulary
BLOCK_ELEMENTS = 1 << 18  # of one buffer and thread: 1 MB in float32


def block_rows(num_columns: int) -> int:
    """Rows of a block; never a single one, whose sums torch would add in another order."""
    return max(2, BLOCK_ELEMENTS * torch.get_num_threads() // num_columns)


def scratch_of(dtype: torch.dtype, num_rows: int, num_columns: int, device: torch.device) -> Tensor:
    """Two buffers [2, R, V] for blocks of num_rows rows. One block may hold a row more; a lone row stands twice."""
    size = max(2, min(num_rows, block_rows(num_columns) + 1))
    return torch.empty(2, size, num_columns, dtype=dtype, device=device)


def shift_rows(x_RV: Tensor, temperature, softcap: float, logit_scale: float, max_R1: Tensor | None, z_RV: Tensor):
    """z := (cap(x) - max) * scale of rows x, down to -inf out of the support. Returns (max, scale, d cap / dx).

    cap(x) = softcap * tanh(logit_scale * x / softcap), scale = 1 / temperature; without a softcap (0.0) cap(x) = x,
    scale = logit_scale / temperature and the derivative is None. temperature: [1] or [R, 1]. max None: of the row.
    z may be x.
    """
    scale = (1.0 if softcap else logit_scale) / temperature
    derivative_RV = None
    if softcap:
        out_RV = x_RV <= LOWEST
        z_RV.copy_(x_RV).mul_(logit_scale / softcap).tanh_()
        derivative_RV = (1 - z_RV * z_RV).mul_(logit_scale)
        z_RV.mul_(softcap).masked_fill_(out_RV, -math.inf)
    elif x_RV.dtype != z_RV.dtype:
        z_RV.copy_(x_RV)
    source_RV = x_RV if x_RV.dtype == z_RV.dtype and not softcap else z_RV
    if max_R1 is None:
        max_R1 = source_RV.amax(1, keepdim=True).clamp_(min=2 * LOWEST)
    torch.sub(source_RV, max_R1, out=z_RV)
    if scale.numel() > 1:
        z_RV.mul_(scale)
    elif float(scale) != 1:
        z_RV.mul_(float(scale))
    return max_R1, scale, derivative_RV


def stats_rows(
    x_RV: Tensor, target_R: Tensor, temperature: Tensor, softcap: float, logit_scale: float, entropy: bool,
    sum_sq: bool, scratch: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(logp, entropy, lse, sum_sq_probs, max, log_sum) of a block of wanted rows, [R] each.

    max is that of the (capped) logits before temperature; log_sum = log sum exp((cap - max) * scale).
    """
    t_RV, e_RV = scratch[:, : len(x_RV)]
    max_R1, scale, _ = shift_rows(x_RV, temperature, softcap, logit_scale, None, t_RV)
    at_R1 = target_R.clamp(min=0)[:, None]
    t_target_R = t_RV.gather(1, at_R1)[:, 0]
    out_R = x_RV.gather(1, at_R1)[:, 0] <= LOWEST
    sum_R = torch.exp(t_RV, out=e_RV).sum(1)
    log_sum_R = sum_R.log()
    empty_R = (max_R1 <= LOWEST)[:, 0]
    zero = sum_R.new_zeros(())
    entropy_R = sum_sq_R = zero.expand_as(sum_R)
    if sum_sq:
        sum_sq_R = torch.where(empty_R, zero, (e_RV * e_RV).sum(1) / (sum_R * sum_R))
    if entropy:
        weighted_R = e_RV.mul_(t_RV).sum(1)
        if weighted_R.isnan().any():  # 0 * -inf: out of the support
            torch.exp(t_RV.clamp_(min=SMALLEST), out=e_RV)
            weighted_R = e_RV.mul_(t_RV).sum(1)
        entropy_R = log_sum_R - weighted_R / sum_R
        entropy_R = torch.where(empty_R, zero, entropy_R.clamp(0, math.log(x_RV.shape[1])))
    logp_R = torch.where(out_R, -math.inf, (t_target_R - log_sum_R).clamp(max=0))
    logp_R = torch.where(target_R == ELSEWHERE, zero, logp_R)
    lse_R = torch.where(empty_R, -math.inf, (max_R1 * scale)[:, 0] + log_sum_R)
    return logp_R, entropy_R, lse_R, sum_sq_R, max_R1[:, 0], log_sum_R


def grad_rows(
    grad_RV: Tensor, x_RV: Tensor, target_R: Tensor, temperature: Tensor, softcap: float, logit_scale: float,
    entropy_R, max_R, log_sum_R, grad_logp_R, grad_entropy_R: Tensor | None, scratch: Tensor,
) -> None:  # fmt: skip
    """Write d (grad_logp . logp + grad_entropy . entropy) / dx of a block of wanted rows into grad, which may be x.

    d logp_y / dz_v = 1[v = y] - p_v,  d entropy / dz_v = -p_v (log p_v + entropy),  p = exp(z - log_sum).
    """
    rows = torch.arange(len(x_RV), device=x_RV.device)
    here_R = target_R >= 0
    at_R = target_R.clamp(min=0)
    flat_R = grad_logp_R == 0 if grad_entropy_R is None else (grad_logp_R == 0) & (grad_entropy_R == 0)
    dead_R = flat_R | (here_R & (x_RV[rows, at_R] <= LOWEST))
    t_RV = grad_RV if grad_RV.dtype == scratch.dtype else scratch[0, : len(x_RV)]
    _, scale, derivative_RV = shift_rows(x_RV, temperature, softcap, logit_scale, max_R[:, None], t_RV)
    factor_R = scale.reshape(-1).expand(len(x_RV))
    share_R = (-log_sum_R).exp() * factor_R
    if grad_entropy_R is None:
        t_RV.exp_().mul_((-grad_logp_R * share_R)[:, None])
    else:
        e_RV = torch.exp(t_RV.clamp_(min=SMALLEST), out=scratch[1, : len(x_RV)])
        const_R = grad_logp_R + grad_entropy_R * (entropy_R - log_sum_R)
        t_RV.mul_((-grad_entropy_R * share_R)[:, None]).sub_((const_R * share_R)[:, None]).mul_(e_RV)
    t_RV[rows, at_R] += torch.where(here_R, grad_logp_R * factor_R, 0)
    if derivative_RV is not None:
        t_RV.mul_(derivative_RV)
    if dead_R.any():
        t_RV[dead_R] = 0
    if t_RV is not grad_RV:
        grad_RV.copy_(t_RV)
