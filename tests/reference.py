"""Independent float64 references through autograd, and the three-way accuracy rule."""

import math

import torch


def scaled(logits, temperature=1.0, softcap=None, logit_scale=1.0, vocab_size=None):
    """float64 logits after scale, cap and temperature, cut to the valid columns; -inf stays out of the support."""
    x = logits.double()[..., :vocab_size]
    z = x * logit_scale
    if softcap is not None:
        z = torch.where(x == -math.inf, -math.inf, softcap * torch.tanh(z / softcap))
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.double()[..., None]
    return z / temperature


def stats(logits, targets, **transform):
    """(logp, entropy, lse, sum of squared probabilities), for rows whose support is not empty."""
    z = scaled(logits, **transform)
    lse = torch.logsumexp(z, -1)
    finite = z > -math.inf
    log_p = torch.where(finite, z, 0) - lse[..., None]
    p = torch.where(finite, log_p.exp(), 0)
    logp = z.gather(-1, targets.clamp(min=0)[..., None])[..., 0] - lse
    return logp, -(p * torch.where(finite, log_p, 0)).sum(-1), lse, (p * p).sum(-1)


def gradient(logits, targets, grad_logp, grad_entropy, **transform):
    """d (grad_logp . logp + grad_entropy . entropy) / d logits in float64; masked rows are those with both 0."""
    x = logits.detach().double().requires_grad_()
    logp, entropy, _, _ = stats(x, targets, **transform)
    total = (torch.where(grad_logp == 0, 0, grad_logp.double() * logp) + grad_entropy.double() * entropy).sum()
    return torch.autograd.grad(total, x)[0]


def assert_no_worse_than(ours, plain, exact, tolerance):
    """|ours - exact| <= |plain - exact| + tolerance, element by element; the message shows the worst element."""
    error = (ours.double() - exact).abs()
    allowed = (plain.double() - exact).abs() + tolerance
    excess = torch.nan_to_num(error - allowed, nan=math.inf)
    at = int(excess.argmax())
    assert excess.max() <= 0, (
        f"element {at}: ours {ours.flatten()[at]}, plain {plain.flatten()[at]}, exact {exact.flatten()[at]}"
    )
