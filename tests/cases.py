"""Seeded logits and targets, and the gradient of token_stats, for the tests of the vocabulary ops."""

import pytest
import torch

from crest_ops import token_stats

BACKENDS = ["torch", "triton"]
both = pytest.mark.parametrize("backend", BACKENDS)


def logits_of(*shape, dtype=torch.float32, seed=0, scale=3.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def targets_of(*shape, high, seed=1):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def gradient_of(logits, targets, grad_logp, grad_entropy, **arguments):
    x = logits.detach().clone().requires_grad_()
    found = token_stats(x, targets, **arguments)
    return torch.autograd.grad((grad_logp * found.logp + grad_entropy * found.entropy).sum(), x)[0]
