"""The drop-in for prime-rl against hand-worked values, with its dataclasses as recorded (2026-08-21, 559b44772)."""

import math
from dataclasses import dataclass, field

import pytest
import torch
from stand_ins import install, near
from torch import Tensor

from crest_ops.integrations.prime_rl import policy_loss


@dataclass
class LossInputs:
    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = field(default=None)
    topk_logprobs: Tensor | None = field(default=None)  # stands for fields that later versions add


@dataclass
class LossOutputs:
    loss: Tensor
    metrics: dict[str, Tensor]


@pytest.fixture(autouse=True)
def prime_rl(monkeypatch):
    install(monkeypatch, "prime_rl.trainer.rl.loss", LossInputs=LossInputs, LossOutputs=LossOutputs)


RATIOS = [1.5, 0.5, math.nan, 4.0]
MASK = torch.tensor([True, True, False, True])


def inputs(**changes):
    old = torch.tensor([-1.0, -1.0, math.nan, -2.0])
    fields = dict(
        trainer_logprobs=(old + torch.tensor(RATIOS).log()).requires_grad_(), inference_logprobs=old,
        ref_logprobs=None, advantages=torch.tensor([1.0, 1.0, math.nan, -1.0]), loss_mask=MASK,
    )  # fmt: skip
    return LossInputs(**(fields | changes))


def test_ppo_is_a_sum():
    sequence = inputs()
    found = policy_loss(sequence, low=0.2, high=0.2)
    assert isinstance(found, LossOutputs)
    found.loss.backward()
    assert found.loss.item() == near(-1.2 - 0.5 + 4.0)
    assert sequence.trainer_logprobs.grad.tolist() == near([0.0, -0.5, 0.0, 4.0])
    assert float(found.metrics["clip_ratio"]) == near(1 / 3)
    assert all(metric.dim() == 0 for metric in found.metrics.values())


def test_settings_are_the_surrogates_fields():
    first = math.sqrt(1.5 * 0.5)
    found = policy_loss(inputs(), surrogate="gspo", level="action", low=0.2, high=0.2)
    assert found.loss.item() == near(-first - first + 4.0)
    found = policy_loss(inputs(), surrogate="ppo", low=0.2, high=0.2, dual=3.0)
    assert found.loss.item() == near(-1.2 - 0.5 + 3.0)


def test_weights_scale_tokens_and_masked_ones_are_not_read():
    weights = torch.tensor([2.0, 0.5, math.nan, 1.0])
    found = policy_loss(inputs(loss_weights=weights), low=0.2, high=0.2)
    assert found.loss.item() == near(-2.4 - 0.25 + 4.0)


def test_penalty_of_the_reference():
    reference = inputs().trainer_logprobs.detach() + torch.tensor([0.3, 0.0, math.nan, -0.3])
    found = policy_loss(inputs(ref_logprobs=reference), kl_coef=0.1, low=0.2, high=0.2)
    penalty = (math.exp(0.3) - 0.3 - 1) + (math.exp(-0.3) + 0.3 - 1)
    assert found.loss.item() == near(2.3 + 0.1 * penalty)
    unread = policy_loss(inputs(ref_logprobs=reference), low=0.2, high=0.2)
    assert unread.loss.item() == near(2.3)


def test_a_sequence_without_a_trained_token():
    sequence = inputs(loss_mask=torch.zeros(4).bool())
    found = policy_loss(sequence)
    found.loss.backward()
    assert found.loss == 0 and (sequence.trainer_logprobs.grad == 0).all()


@pytest.mark.parametrize(
    "changes, settings, match",
    [
        ({"topk_logprobs": torch.zeros(4, 2)}, {}, "topk_logprobs"),
        ({"loss_mask": MASK[:3]}, {}, "loss_mask"),
        ({"advantages": None}, {}, "advantages"),
        ({"trainer_logprobs": torch.zeros(1, 4), "loss_mask": MASK[None]}, {}, r"trainer_logprobs is \[1, 4\]"),
        ({"trainer_logprobs": None}, {}, "trainer_logprobs is NoneType"),
        ({"inference_logprobs": torch.full((4,), math.nan)}, {}, "old_logp"),
        ({"loss_weights": torch.ones(1)}, {}, "loss_weights"),
        ({}, {"surrogate": "dppo"}, "surrogate.*dppo"),
        ({}, {"eps": 0.2}, "eps"),
        ({}, {"kl_coef": 0.1}, "kl_coef"),
        ({}, {"low": 2.0}, "low"),
    ],
)
def test_refusals_name_the_argument(changes, settings, match):
    with pytest.raises(ValueError, match=match):
        policy_loss(inputs(**changes), **settings)
