"""Divergences in float64 by autograd, and the gradient of ours, for the tests of token_divergence."""

import math

import pytest
import reference
import torch
from cases import logits_of

from crest_ops import token_divergence

KINDS = ["reverse_kl", "forward_kl", "jsd"]
kinds = pytest.mark.parametrize("kind", KINDS)
OUTPUTS = ("logp", "entropy", "teacher_logp", "gap", "divergence")


def exact_of(x, teacher, y, kind, jsd_weight=0.5, **transform):
    """(logp, entropy, teacher_logp, gap, divergence) in float64, by torch.distributions where it has them."""
    width = transform.pop("vocab_size", None) or x.shape[-1]
    p, q = (
        torch.distributions.Categorical(logits=reference.scaled(z, vocab_size=width, **transform)) for z in (x, teacher)
    )
    log_p, log_q = p.logits, q.logits
    if kind == "jsd":
        log_m = torch.logaddexp(log_p + math.log(1 - jsd_weight), log_q + math.log(jsd_weight))
        to_p, to_q = ((r.exp() * (r - log_m)).sum(-1) for r in (log_p, log_q))
        divergence = (1 - jsd_weight) * to_p + jsd_weight * to_q
    else:
        divergence = torch.distributions.kl_divergence(*((p, q) if kind == "reverse_kl" else (q, p)))
    logp, teacher_logp = p.log_prob(y.clamp(min=0)), q.log_prob(y.clamp(min=0)).detach()
    return logp, p.entropy(), teacher_logp, teacher_logp - logp, divergence


def gradient_of(x, teacher, y, weights, **arguments):
    """Gradient of weights . (logp, entropy, gap, divergence) by the student's logits."""
    leaf = x.detach().clone().requires_grad_()
    found = token_divergence(leaf, teacher, y, **arguments)
    outputs = found.logp, found.entropy, found.gap, found.divergence
    return torch.autograd.grad(sum((w * o).sum() for w, o in zip(weights, outputs, strict=True)), leaf)[0]


def exact_gradient_of(x, teacher, y, weights, kind, **arguments):
    leaf = x.detach().double().requires_grad_()
    logp, entropy, _, gap, divergence = exact_of(leaf, teacher, y, kind, **arguments)
    outputs = logp, entropy, gap, divergence
    return torch.autograd.grad(sum((w * o).sum() for w, o in zip(weights, outputs, strict=True)), leaf)[0]


def weights_of(*shape):
    return [logits_of(*shape, seed=20 + i, scale=1.0) for i in range(4)]


def pair_of(*shape, dtype=torch.float32, teacher_dtype=None, wider=0):
    return logits_of(*shape, dtype=dtype), logits_of(
        *shape[:-1], shape[-1] + wider, dtype=teacher_dtype or dtype, seed=3
    )
