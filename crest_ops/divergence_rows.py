"""The plain-torch definition of a divergence: of a few rows of student and teacher logits, and their gradient.

p is the student's distribution, q the teacher's, m = (1 - a) p + a q their mixture.
Shape letters: R rows of a block, V vocabulary. x_RV are the student's logits, y_RV the teacher's; all rows are wanted.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .rows import LOWEST, shift_rows

FAR = 1e6  # in size, log p - log q of a column that one of the two excludes is larger


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


def _side(x_RV: Tensor, target_R: Tensor, temperature: Tensor, softcap: float, logit_scale: float) -> _Side:
    t_RV = torch.empty(x_RV.shape, dtype=temperature.dtype, device=x_RV.device)
    max_R1, *_ = shift_rows(x_RV, temperature, softcap, logit_scale, None, t_RV)
    exp_RV = t_RV.exp()
    sum_R = exp_RV.sum(1)
    log_sum_R = torch.where(sum_R == 0, 0, sum_R.log())
    t_target_R, x_target_R = (a_RV.gather(1, target_R[:, None])[:, 0] for a_RV in (t_RV, x_RV))
    logp_R = torch.where(x_target_R <= LOWEST, -math.inf, (t_target_R - log_sum_R).clamp(max=0))
    return _Side(t_RV, exp_RV, max_R1[:, 0], sum_R, log_sum_R, logp_R)


def divergence_rows(
    x_RV: Tensor, y_RV: Tensor, target_R: Tensor, temperature: Tensor, softcap: float, logit_scale: float,
    jsd_weight: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(logp, entropy, teacher_logp, student_kl, divergence, max, log_sum, teacher_max, teacher_log_sum), [R] each.

    jsd_weight 0.0: student_kl = KL(p || q), divergence = KL(q || p); otherwise KL(p || m) and the JSD.
    """
    student = _side(x_RV, target_R, temperature, softcap, logit_scale)
    teacher = _side(y_RV, target_R, temperature, softcap, logit_scale)
    entropy_R = student.log_sum_R - (student.t_RV * student.exp_RV).sum(1) / student.sum_R
    entropy_R = torch.where(student.sum_R == 0, 0, entropy_R.clamp(0, math.log(x_RV.shape[1])))
    if jsd_weight:
        found = _jsd(student, teacher, jsd_weight)
    else:
        found = _kls(student, teacher, x_RV, y_RV)
    normalisers = student.max_R, student.log_sum_R, teacher.max_R, teacher.log_sum_R
    return student.logp_R, entropy_R, teacher.logp_R, *found, *normalisers


def _kls(student: _Side, teacher: _Side, x_RV: Tensor, y_RV: Tensor) -> tuple[Tensor, Tensor]:
    """(KL(p || q), KL(q || p)), summed over differences of log-probs, which stay small for near-equal rows."""
    d_RV = student.t_RV - teacher.t_RV
    s_R, z_R = student.sum_R, teacher.sum_R
    reverse_R = (student.exp_RV * d_RV).sum(1) / s_R + (z_R / s_R).log()
    forward_R = (s_R / z_R).log() - (teacher.exp_RV * d_RV).sum(1) / z_R
    reverse_R = torch.where(s_R == 0, 0, reverse_R.clamp(min=0))
    forward_R = torch.where(z_R == 0, 0, forward_R.clamp(min=0))
    far_R = d_RV.abs_().amax(1) > FAR  # never of a row with NaN
    if far_R.any():
        x_out_RV, y_out_RV = x_RV <= LOWEST, y_RV <= LOWEST
        reverse_R = reverse_R.masked_fill(far_R & (y_out_RV & ~x_out_RV).any(1), math.inf)
        forward_R = forward_R.masked_fill(far_R & (x_out_RV & ~y_out_RV).any(1), math.inf)
    return reverse_R, forward_R


def _jsd(student: _Side, teacher: _Side, weight: float) -> tuple[Tensor, Tensor]:
    """(KL(p || m), (1 - a) KL(p || m) + a KL(q || m)), held to [0, entropy of the weights]."""
    log_p_RV = student.t_RV - student.log_sum_R[:, None]
    log_q_RV = teacher.t_RV - teacher.log_sum_R[:, None]
    to_p_RV, to_q_RV = _log_ratios_to_mixture(log_p_RV, log_q_RV, weight)
    student_kl_R = to_p_RV.mul_(log_p_RV.exp_()).sum(1)
    teacher_kl_R = to_q_RV.mul_(log_q_RV.exp_()).sum(1)
    bound = -weight * math.log(weight) - (1 - weight) * math.log1p(-weight)
    return student_kl_R, ((1 - weight) * student_kl_R + weight * teacher_kl_R).clamp(0, bound)


def _log_ratios_to_mixture(log_p_RV: Tensor, log_q_RV: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """(log p - log m, log q - log m), by log-sum-exp: finite, and exactly 0 for p = q."""
    delta_RV = log_q_RV - log_p_RV
    lower_RV = torch.where(delta_RV > 0, 1 - weight, weight).to(delta_RV.dtype)
    excess_RV = delta_RV.abs().neg_().expm1_().mul_(lower_RV).log1p_()  # of log m over the higher of the two
    return -delta_RV.clamp(min=0) - excess_RV, delta_RV.clamp_(max=0) - excess_RV


def gradient_rows(
    x_RV: Tensor, y_RV: Tensor, target_R: Tensor, temperature: Tensor, softcap: float, logit_scale: float,
    jsd_weight: float, saved: Tensor, grads_4R: Tensor,
) -> Tensor:  # fmt: skip
    """d/dx of the outputs times their gradients (of logp, entropy, student_kl, divergence), [R, V].

    saved [7, R]: entropy, student_kl, divergence and the four normalisers of `divergence_rows`.
    By z_v: logp_y: 1[v = y] - p_v,  entropy: -p_v (log p_v + entropy),  KL(p || q): p_v (log p_v - log q_v - KL),
    KL(q || p): p_v - q_v,  JSD: (1 - a) p_v (log p_v - log m_v - KL(p || m)).
    """
    entropy_R, student_kl_R, divergence_R, max_R, log_sum_R, teacher_max_R, teacher_log_sum_R = saved
    grad_logp_R, grad_entropy_R, grad_student_R, grad_divergence_R = grads_4R
    log_p_RV, log_q_RV = torch.empty(2, *x_RV.shape, dtype=saved.dtype, device=x_RV.device)
    _, scale, derivative_RV, _ = shift_rows(x_RV, temperature, softcap, logit_scale, max_R[:, None], log_p_RV)
    shift_rows(y_RV, temperature, softcap, logit_scale, teacher_max_R[:, None], log_q_RV)
    log_p_RV.sub_(log_sum_R[:, None])
    log_q_RV.sub_(teacher_log_sum_R[:, None])
    if jsd_weight:
        grad_student_R, grad_divergence_R = (1 - jsd_weight) * grad_divergence_R, torch.zeros_like(grad_divergence_R)
        ratio_RV, _ = _log_ratios_to_mixture(log_p_RV, log_q_RV, jsd_weight)
    else:  # an infinite divergence has no gradient
        grad_student_R = grad_student_R.masked_fill(student_kl_R == math.inf, 0)
        student_kl_R = student_kl_R.masked_fill(student_kl_R == math.inf, 0)
        grad_divergence_R = grad_divergence_R.masked_fill(divergence_R == math.inf, 0)
        ratio_RV = log_p_RV - log_q_RV
    const_R = grad_logp_R + grad_entropy_R * entropy_R + grad_student_R * student_kl_R
    grad_RV = ratio_RV.mul_(grad_student_R[:, None]).sub_(const_R[:, None])
    if grad_entropy_R.any():
        grad_RV.addcmul_(log_p_RV, grad_entropy_R[:, None], value=-1)
    p_RV = log_p_RV.exp_()
    grad_RV.mul_(p_RV)
    if not jsd_weight and grad_divergence_R.any():
        grad_RV.addcmul_(p_RV.sub_(log_q_RV.exp_()), grad_divergence_R[:, None])
    rows = torch.arange(len(target_R), device=x_RV.device)
    grad_RV[rows, target_R] += grad_logp_R
    grad_RV.mul_(scale)
    if derivative_RV is not None:
        grad_RV.mul_(derivative_RV)
    idle_R = (grad_logp_R == 0) & (grad_entropy_R == 0) & (grad_student_R == 0) & (grad_divergence_R == 0)
    return grad_RV.masked_fill_((idle_R | (x_RV[rows, target_R] <= LOWEST))[:, None], 0)
