"""What the linear ops refuse that is no wrong shape or value, and what they must not look at."""

import pytest
import torch

from crest_ops import Spans, linear_policy_loss, linear_token_divergence, linear_token_stats, token_divergence

N, H, V = 64, 16, 50


def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(N, H, generator=generator), torch.randn(V, H, generator=generator)
    return hidden, weight, torch.randint(0, V, (N,), generator=generator)


@pytest.mark.parametrize(
    "use",
    [
        lambda loss, gradient, hidden, weight: (loss + gradient.pow(2).sum()).backward(),
        lambda loss, gradient, hidden, weight: torch.autograd.grad(loss + gradient.pow(2).sum(), hidden),
        lambda loss, gradient, hidden, weight: torch.autograd.grad(gradient.pow(2).sum(), weight, allow_unused=True),
    ],
)
def test_a_second_derivative_raises(use):
    hidden, weight, targets = inputs()
    hidden.requires_grad_(), weight.requires_grad_()
    loss = linear_policy_loss(hidden, weight, targets, torch.ones(N), token_weight=torch.ones(N)).loss
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        use(loss, gradient, hidden, weight)


def test_targets_and_temperatures_outside_the_spans_are_not_looked_at():
    hidden, weight, targets = inputs()
    outside = torch.arange(N) >= N // 2
    spans = Spans.from_mask(~outside[None], group=torch.tensor([0]))
    arguments = dict(token_weight=torch.ones(N), spans=spans)
    clean = linear_policy_loss(hidden, weight, targets, torch.ones(N), temperature=torch.ones(N), **arguments)
    targets[outside] = -1
    garbage = torch.where(outside, 0.0, 1.0)
    found = linear_policy_loss(hidden, weight, targets, torch.ones(N), temperature=garbage, **arguments)
    assert torch.equal(found.loss, clean.loss) and (found.logp[outside] == 0).all()


def test_a_teacher_of_inference_mode_is_refused_by_name():
    hidden, weight, targets = inputs()
    weight.requires_grad_()
    with torch.inference_mode():
        teacher = hidden + 1
    with pytest.raises(ValueError, match="teacher_hidden.*no_grad"):
        linear_token_divergence(hidden, weight, teacher, weight.detach(), targets)
    with torch.inference_mode():
        teacher_logits = hidden @ weight.t()
    with pytest.raises(ValueError, match="teacher_logits.*no_grad"):
        token_divergence(hidden @ weight.t(), teacher_logits, targets)


def test_sparse_hidden_is_refused_by_name():
    hidden, weight, targets = inputs()
    with pytest.raises(ValueError, match="hidden"):
        linear_token_stats(hidden.to_sparse(), weight, targets)
