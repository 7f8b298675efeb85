"""The linear ops in float16: nothing leaves its range before the scale of the gradient is known."""

import pytest
import torch

from crest_ops import linear_policy_loss, linear_token_divergence, linear_token_stats

N, H, V = 64, 16, 50


def inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, generator=generator)
    weight = torch.randn(V, H, generator=generator) * 0.5
    return hidden, weight, torch.randint(0, V, (N,), generator=generator)


def plain_loss(hidden, weight, targets, credit, token_weight, old_logp):
    logp = torch.log_softmax(hidden @ weight.t(), -1).gather(1, targets[:, None])[:, 0]
    ratio = (logp - old_logp).exp()
    return -(token_weight * torch.minimum(ratio * credit, ratio.clamp(0.8, 1.28) * credit)).sum()


@pytest.mark.parametrize("cast", ["autocast", "all float16"])
def test_a_huge_unclipped_ratio_stays_in_the_range_of_float16(cast):
    hidden, weight, targets = inputs()
    dtype = torch.float16 if cast == "all float16" else torch.float32
    hidden, weight = (tensor.to(dtype).requires_grad_() for tensor in (hidden, weight))
    exact = [tensor.detach().to(torch.float16).double().requires_grad_() for tensor in (hidden, weight)]
    old_logp = linear_token_stats(hidden.float(), weight.float(), targets).logp.detach()
    old_logp[3] -= 12  # r = e^12 and credit < 0: PPO does not clip it
    credit, token_weight = -torch.ones(N), torch.full((N,), 1 / N / 64)
    with torch.autocast("cpu", torch.float16, enabled=cast == "autocast"):
        loss = linear_policy_loss(hidden, weight, targets, credit, token_weight=token_weight, old_logp=old_logp).loss
    loss.backward()
    plain_loss(*exact, targets, credit.double(), token_weight.double(), old_logp.double()).backward()
    for ours, theirs in zip((hidden, weight), exact, strict=True):
        assert (ours.grad.double() - theirs.grad).abs().max() < 2e-2 * theirs.grad.abs().max()


@pytest.mark.parametrize("op", ["policy loss", "stats", "divergence"])
def test_float16_sums_of_many_rows_and_tiny_coefficients(op):
    rows = 2000
    hidden = torch.randn(rows, H, generator=torch.Generator().manual_seed(1))
    hidden[:, 0] = 100  # a sum over the rows is beyond 65504
    hidden, targets = hidden.half(), torch.zeros(rows, dtype=torch.long)
    weight = (torch.randn(V, H, generator=torch.Generator().manual_seed(2)) * 0.01).half().requires_grad_()
    teacher = torch.randn(V, H, generator=torch.Generator().manual_seed(3)).half() * 0.01
    coefficient = torch.full((rows,), 1 / rows)
    exact = weight.detach().double().requires_grad_()
    log_p = torch.log_softmax(hidden.double() @ exact.t(), -1)
    if op == "divergence":
        log_q = torch.log_softmax(hidden.double() @ teacher.double().t(), -1)
        found = (linear_token_divergence(hidden, weight, hidden, teacher, targets).divergence * coefficient).sum()
        ((log_p.exp() * (log_p - log_q)).sum(1) * coefficient).sum().backward()
    else:
        (-log_p[:, 0] * coefficient).sum().backward()
        if op == "stats":
            found = -(linear_token_stats(hidden, weight, targets).logp * coefficient).sum()
        else:
            found = linear_policy_loss(hidden, weight, targets, torch.ones(rows), token_weight=coefficient).loss
    found.backward()
    assert (weight.grad.double() - exact.grad).abs().max() < 4e-3 * exact.grad.abs().max()
