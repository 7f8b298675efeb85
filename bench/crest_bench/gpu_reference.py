"""Float64 references for the checks on a device: torch.log_softmax and autograd, nothing of the code under test.

Shape letters: N tokens, V vocabulary.
"""

import math

import torch
from torch import Tensor


def log_probs(logits: Tensor, temperature=1.0, softcap=None, logit_scale=1.0, vocab_size=None) -> Tensor:
    """log_softmax in float64 of cap(logit_scale * logits) / temperature over the valid columns; -inf stays -inf."""
    x = logits.double()[..., :vocab_size]
    z = x * logit_scale
    if softcap:
        z = torch.where(x == -math.inf, -math.inf, softcap * torch.tanh(z / softcap))
    if isinstance(temperature, Tensor):
        temperature = temperature.double()[..., None]
    return torch.log_softmax(z / temperature, -1)


def at_targets(log_p: Tensor, targets: Tensor) -> Tensor:
    return log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0]


def expectation(log_p: Tensor, values: Tensor) -> Tensor:
    """sum_v p_v values_v with 0 * (anything) = 0."""
    inside = log_p > -math.inf
    return (log_p.exp() * torch.where(inside, values, 0)).sum(-1)


def entropy(log_p: Tensor) -> Tensor:
    return -expectation(log_p, log_p)


def divergence(log_p: Tensor, log_q: Tensor, kind: str, jsd_weight: float) -> Tensor:
    """Of the student p and the teacher q. forward_kl: KL(q || p); reverse_kl: KL(p || q); jsd: a KL(q || m) +
    (1 - a) KL(p || m) with m = a q + (1 - a) p, a = jsd_weight.
    """
    if kind == "forward_kl":
        return expectation(log_q, log_q - log_p)
    if kind == "reverse_kl":
        return expectation(log_p, log_p - log_q)
    # Held up, so that columns which both exclude have a derivative.
    parts = log_q.clamp(min=-1e4) + math.log(jsd_weight), log_p.clamp(min=-1e4) + math.log1p(-jsd_weight)
    log_m = torch.logaddexp(*parts)
    student, teacher = expectation(log_p, log_p - log_m), expectation(log_q, log_q - log_m)
    return (1 - jsd_weight) * student + jsd_weight * teacher


def surrogate_value(kind: str, logp: Tensor, old_logp: Tensor, credit: Tensor) -> Tensor:
    """Per token, by the papers' formulas with the settings of `gpu_checks.SURROGATES`; autograd gives the slope."""
    ratio = (logp - old_logp).exp()
    if kind == "SAPO":
        tau = torch.where(credit > 0, 1.0, 1.05)
        return -4 / tau * (tau * (ratio - 1)).sigmoid() * credit
    if kind == "CISPO":
        return -ratio.detach().clamp(max=1.28) * credit * logp
    value = -torch.minimum(ratio * credit, ratio.clamp(0.8, 1.28) * credit)
    if kind == "PPOClip dual":
        value = torch.where(credit < 0, torch.minimum(value, -3.0 * credit), value)
    return value


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    return (ref_logp - logp).exp() - (ref_logp - logp) - 1


def crest_value(logp: Tensor, teacher_logp: Tensor, old_logp: Tensor, advantage: Tensor, trajectories: Tensor):
    """CrEST, arXiv 2608.13179, with its defaults and PPOClip(0.2, 0.28), per token of [N]; trajectories [N] ids."""
    sign, gap = advantage.sign(), teacher_logp - old_logp
    weight = (sign * gap / 2.0).exp().clamp(1 - 0.28, 1 + 0.28)
    gate = torch.zeros_like(logp)
    for trajectory in trajectories.unique():
        u = -old_logp[trajectories == trajectory]
        spread = (u - u.mean()).square().mean().sqrt() + 1e-6
        gate[trajectories == trajectory] = ((u - u.mean()) / spread).sigmoid()
    strength = (0.3 * (1 + 0.5 * (2 * gate - 1))).clamp(0, 0.3)
    phi = torch.where(sign * gap > 0, 1 + strength * (weight - 1), 1.0)
    return surrogate_value("PPOClip", logp, old_logp, advantage * phi)
