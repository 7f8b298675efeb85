"""Every op over a vocabulary called alike: logits [..., V] in, log-prob, entropy, a loss and its gradient out.

The ops over a head get the logits as hidden states, with the identity as the head and a bias that may be -inf.
"""

import math

import torch

from crest_ops import (
    Spans,
    crest_policy_loss,
    linear_policy_loss,
    linear_token_stats,
    policy_loss,
    token_divergence,
    token_stats,
)

OPS = [
    "token_stats", "policy_loss", "crest_policy_loss", "token_divergence", "linear_token_stats", "linear_policy_loss",
]  # fmt: skip


class Found:
    """logp and entropy per token, the loss, and (a function of a factor) the gradient of factor * loss."""

    def __init__(self, logp, entropy, loss, leaf):
        self.logp, self.entropy, self.loss, self.leaf = logp.detach(), entropy.detach(), loss, leaf

    def gradient(self, factor=1.0):
        return torch.autograd.grad(factor * self.loss, self.leaf, retain_graph=True)[0]


def coefficients(shape):
    """(credit or factor of log-prob, token weight or factor of entropy), all positive."""
    size = math.prod(shape)
    return torch.linspace(0.5, 2, size).view(shape), torch.linspace(1, 0.2, size).view(shape)


def loss_of(op, x, targets, bias=None, teacher=None, credit=None, weight=None, **arguments):
    """(what the op gives, a loss made of all that it gives with a gradient)."""
    if credit is None:
        credit, weight = coefficients(targets.shape)
    if op.startswith("linear"):
        arguments |= dict(head_weight=torch.eye(x.shape[-1], dtype=x.dtype), head_bias=bias)
    elif bias is not None:
        x = x + bias
    if teacher is None:
        teacher = (x.detach() * 0.5).to(x.dtype)
    if op == "token_stats":
        found = token_stats(x, targets, **arguments)
    elif op == "linear_token_stats":
        found = linear_token_stats(x, targets=targets, **arguments)
    elif op == "token_divergence":
        found = token_divergence(x, teacher, targets, **arguments)
    elif op == "policy_loss":
        found = policy_loss(x, targets, credit, token_weight=weight, entropy_coef=0.1, **arguments)
    elif op == "linear_policy_loss":
        found = linear_policy_loss(
            x, targets=targets, credit=credit, token_weight=weight, entropy_coef=0.1, **arguments
        )
    else:
        spans = Spans.from_mask(torch.ones(1, targets.numel()).bool(), group=torch.tensor([0]))
        found = crest_policy_loss(
            x, teacher, targets, spans, torch.ones(1), token_weight=weight, **arguments
        )  # fmt: skip
    if "policy_loss" in op:
        return found, found.loss
    total = (credit * found.logp).sum() + (weight * found.entropy).sum()
    return found, total + found.divergence.sum() if op == "token_divergence" else total


def run(op, logits, targets, *others, **arguments):
    leaf = logits.detach().requires_grad_()
    found, loss = loss_of(op, leaf, targets, *others, **arguments)
    return Found(found.logp, found.entropy, loss, leaf)
