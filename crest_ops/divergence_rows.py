"""The plain-torch definition of a divergence: of a few rows of student and teacher logits, and their gradient.

p is the student's distribution, q the teacher's, m = (1 - a) p + a q their mixture. What is as wide as the vocabulary
lies in buffers that are made once (`buffers`).
Shape letters: R rows of a block, V vocabulary. x_RV are the student's logits, y_RV the teacher's; all rows are wanted.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .rows import ELSEWHERE, LOWEST, SMALLEST, scale_of, scratch_of, shift_rows

FAR = 1e6  # in size, log p - log q of a column that one of the two excludes is larger


def buffers(dtype: torch.dtype, num_rows: int, num_columns: int, device: torch.device) -> list[Tensor]:
    """Six buffers [R, V] for the blocks of num_rows rows."""
    return [buffer for _ in range(3) for buffer in scratch_of(dtype, num_rows, num_columns, device)]


class _Side(NamedTuple):
    """One side: t = z - max and exp(t) [R, V]; max of the (capped) logits, sum of exp(t), log of the sum (0 of an empty
    row) and the target's log-prob [R].
    """

    t_RV: Tensor
    exp_RV: Tensor
    max_R: Tensor
    sum_R: Tensor
    log_sum_R: Tensor
    logp_R: Tensor


def _side(x_RV, target_R, temperature, softcap: float, logit_scale: float, t_RV: Tensor, exp_RV: Tensor) -> _Side:
    scale = scale_of(temperature, softcap, logit_scale)
    max_R1, _ = shift_rows(x_RV, None, scale, softcap, logit_scale, t_RV)
    sum_R = torch.exp(t_RV.clamp_(min=SMALLEST), out=exp_RV).sum(1)
    log_sum_R = torch.where(sum_R == 0, 0, sum_R.log())
    at_R1 = target_R.clamp(min=0)[:, None]
    t_target_R, x_target_R = (a_RV.gather(1, at_R1)[:, 0] for a_RV in (t_RV, x_RV))
    logp_R = torch.where(x_target_R <= LOWEST, -math.inf, (t_target_R - log_sum_R).clamp(max=0))
    logp_R = torch.where(target_R == ELSEWHERE, 0, logp_R)
    return _Side(t_RV, exp_RV, max_R1[:, 0], sum_R, log_sum_R, logp_R)


def divergence_rows(
    x_RV: Tensor, y_RV: Tensor, target_R: Tensor, temperature: Tensor, softcap: float, logit_scale: float,
    jsd_weight: float, scratch: Sequence[Tensor],
) -> tuple[Tensor, ...]:  # fmt: skip
    """(logp, entropy, teacher_logp, student_kl, divergence, max, log_sum, teacher_max, teacher_log_sum), [R] each.

    jsd_weight 0.0: student_kl = KL(p || q), divergence = KL(q || p); otherwise KL(p || m) and the JSD.
    """
    t_RV, e_RV, u_RV, h_RV, d_RV, product_RV = (buffer[: len(x_RV)] for buffer in scratch)
    student = _side(x_RV, target_R, temperature, softcap, logit_scale, t_RV, e_RV)
    teacher = _side(y_RV, target_R, temperature, softcap, logit_scale, u_RV, h_RV)
    entropy_R = student.log_sum_R - torch.mul(t_RV, e_RV, out=product_RV).sum(1) / student.sum_R
    entropy_R = torch.where(student.sum_R == 0, 0, entropy_R.clamp(0, math.log(x_RV.shape[1])))
    if jsd_weight:
        found = _jsd(student, teacher, jsd_weight, d_RV, product_RV)
    else:
        found = _kls(student, teacher, x_RV, y_RV, d_RV, product_RV)
    normalisers = student.max_R, student.log_sum_R, teacher.max_R, teacher.log_sum_R
    return student.logp_R, entropy_R, teacher.logp_R, *found, *normalisers


def _kls(student: _Side, teacher: _Side, x_RV, y_RV, d_RV: Tensor, product_RV: Tensor) -> tuple[Tensor, Tensor]:
    """(KL(p || q), KL(q || p)), summed over differences of log-probs, which stay small for near-equal rows."""
    torch.sub(student.t_RV, teacher.t_RV, out=d_RV)
    s_R, z_R = student.sum_R, teacher.sum_R
    reverse_R = torch.mul(student.exp_RV, d_RV, out=product_RV).sum(1) / s_R + (z_R / s_R).log()
    forward_R = (s_R / z_R).log() - torch.mul(teacher.exp_RV, d_RV, out=product_RV).sum(1) / z_R
    reverse_R = torch.where(s_R == 0, 0, reverse_R.clamp(min=0))
    forward_R = torch.where(z_R == 0, 0, forward_R.clamp(min=0))
    far_R = d_RV.abs_().amax(1) > FAR  # never of a row with NaN
    if far_R.any():
        x_out_RV, y_out_RV = x_RV <= LOWEST, y_RV <= LOWEST
        reverse_R = reverse_R.masked_fill(far_R & (y_out_RV & ~x_out_RV).any(1), math.inf)
        forward_R = forward_R.masked_fill(far_R & (x_out_RV & ~y_out_RV).any(1), math.inf)
    return reverse_R, forward_R


def _jsd(student: _Side, teacher: _Side, weight: float, delta_RV: Tensor, excess_RV: Tensor) -> tuple[Tensor, Tensor]:
    """(KL(p || m), JSD)."""
    student.t_RV.sub_(student.log_sum_R[:, None])
    torch.sub(teacher.t_RV.sub_(teacher.log_sum_R[:, None]), student.t_RV, out=delta_RV)
    to_p_RV, to_q_RV = _log_ratios_to_mixture(delta_RV, weight, student.t_RV, excess_RV)
    s_R, z_R = student.sum_R, teacher.sum_R
    student_kl_R = torch.where(s_R == 0, 0, to_p_RV.mul_(student.exp_RV).sum(1) / s_R)
    teacher_kl_R = torch.where(z_R == 0, 0, to_q_RV.mul_(teacher.exp_RV).sum(1) / z_R)
    return student_kl_R, combine_kls(student_kl_R, teacher_kl_R, weight)


def _log_ratios_to_mixture(
    delta_RV: Tensor, weight: float, to_p_RV: Tensor, excess_RV: Tensor
) -> tuple[Tensor, Tensor]:
    """(log p - log m, log q - log m) of delta = log q - log p, by log-sum-exp: finite, and exactly 0 for p = q.

    The second goes over delta.
    """
    lower_RV = torch.sign(delta_RV, out=to_p_RV).add_(1).mul_(0.5)  # 1 where p is the lower of the two
    torch.mul(lower_RV, 1 - weight, out=excess_RV)
    lower_RV.neg_().add_(1).mul_(weight).add_(excess_RV)  # the weight of the lower
    torch.abs(delta_RV, out=excess_RV).neg_().expm1_().mul_(lower_RV).log1p_()  # of log m over the higher
    torch.clamp(delta_RV, min=0, out=to_p_RV).neg_().sub_(excess_RV)
    return to_p_RV, delta_RV.clamp_(max=0).sub_(excess_RV)


def _log_probs(
    x_RV, y_RV, scale: Tensor, softcap: float, logit_scale: float, normaliser: Tensor, log_p_RV, log_q_RV
) -> Tensor | None:
    """Write log p and log q, with the normalisers [4, R] of `divergence_rows`; the derivative of the student's cap."""
    max_R1, log_sum_R1, teacher_max_R1, teacher_log_sum_R1 = normaliser[:, :, None]
    _, derivative_RV = shift_rows(x_RV, max_R1, scale, softcap, logit_scale, log_p_RV)
    shift_rows(y_RV, teacher_max_R1, scale, softcap, logit_scale, log_q_RV)
    log_p_RV.clamp_(min=SMALLEST).sub_(log_sum_R1)
    log_q_RV.clamp_(min=SMALLEST).sub_(teacher_log_sum_R1)
    return derivative_RV


def mixture_rows(
    x_RV: Tensor, y_RV: Tensor, temperature: Tensor, softcap: float, logit_scale: float, weight: float,
    normaliser: Tensor, scratch: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    """[2, R]: what these columns add to KL(p || m) and KL(q || m), with the normalisers [4, R] of all columns."""
    log_p_RV, log_q_RV, delta_RV, to_p_RV, excess_RV, _ = (buffer[: len(x_RV)] for buffer in scratch)
    scale = scale_of(temperature, softcap, logit_scale)
    _log_probs(x_RV, y_RV, scale, softcap, logit_scale, normaliser, log_p_RV, log_q_RV)
    torch.sub(log_q_RV, log_p_RV, out=delta_RV)
    to_p_RV, to_q_RV = _log_ratios_to_mixture(delta_RV, weight, to_p_RV, excess_RV)
    return torch.stack([to_p_RV.mul_(log_p_RV.exp_()).sum(1), to_q_RV.mul_(log_q_RV.exp_()).sum(1)])


def combine_kls(student_kl: Tensor, teacher_kl: Tensor, weight: float) -> Tensor:
    """JSD = (1 - a) KL(p || m) + a KL(q || m), held to [0, entropy of the weights]."""
    bound = -weight * math.log(weight) - (1 - weight) * math.log1p(-weight)
    return ((1 - weight) * student_kl + weight * teacher_kl).clamp(0, bound)


def gradient_rows(
    x_RV: Tensor, y_RV: Tensor, target_R: Tensor, temperature: Tensor, softcap: float, logit_scale: float,
    jsd_weight: float, saved: Tensor, grads: Tensor, scratch: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    """d/dx of the outputs times their gradients, in one of the buffers [R, V].

    saved [7, R]: entropy, student_kl, divergence and the four normalisers of `divergence_rows`; grads [4, R]: of logp,
    entropy, student_kl and divergence.
    By z_v: logp_y: 1[v = y] - p_v,  entropy: -p_v (log p_v + entropy),  KL(p || q): p_v (log p_v - log q_v - KL),
    KL(q || p): p_v - q_v,  JSD: (1 - a) p_v (log p_v - log m_v - KL(p || m)).
    """
    entropy_R, student_kl_R, divergence_R = saved[:3]
    grad_logp_R, grad_entropy_R, grad_student_R, grad_divergence_R = grads
    log_p_RV, log_q_RV, grad_RV, delta_RV, excess_RV, _ = (buffer[: len(x_RV)] for buffer in scratch)
    scale = scale_of(temperature, softcap, logit_scale)
    derivative_RV = _log_probs(x_RV, y_RV, scale, softcap, logit_scale, saved[3:], log_p_RV, log_q_RV)
    if jsd_weight:
        grad_student_R, grad_divergence_R = (1 - jsd_weight) * grad_divergence_R, torch.zeros_like(grad_divergence_R)
        torch.sub(log_q_RV, log_p_RV, out=delta_RV)
        _log_ratios_to_mixture(delta_RV, jsd_weight, grad_RV, excess_RV)
    else:  # an infinite divergence has no gradient
        grad_student_R = grad_student_R.masked_fill(student_kl_R == math.inf, 0)
        student_kl_R = student_kl_R.masked_fill(student_kl_R == math.inf, 0)
        grad_divergence_R = grad_divergence_R.masked_fill(divergence_R == math.inf, 0)
        torch.sub(log_p_RV, log_q_RV, out=grad_RV)
    const_R = grad_logp_R + grad_entropy_R * entropy_R + grad_student_R * student_kl_R
    grad_RV.mul_(grad_student_R[:, None]).sub_(const_R[:, None])
    if grad_entropy_R.any():
        grad_RV.addcmul_(log_p_RV, grad_entropy_R[:, None], value=-1)
    p_RV = log_p_RV.exp_()
    grad_RV.mul_(p_RV)
    if grad_divergence_R.any():
        grad_RV.addcmul_(p_RV.sub_(log_q_RV.exp_()), grad_divergence_R[:, None])
    rows, here_R, at_R = torch.arange(len(target_R), device=x_RV.device), target_R >= 0, target_R.clamp(min=0)
    grad_RV[rows, at_R] += torch.where(here_R, grad_logp_R, 0)
    grad_RV.mul_(scale)
    if derivative_RV is not None:
        grad_RV.mul_(derivative_RV)
    idle_R = (grad_logp_R == 0) & (grad_entropy_R == 0) & (grad_student_R == 0) & (grad_divergence_R == 0)
    dead_R = idle_R | (here_R & (x_RV[rows, at_R] <= LOWEST))
    if dead_R.any():
        grad_RV[dead_R] = 0
    return grad_RV
