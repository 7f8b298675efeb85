"""Signals refuse what a method could not mean, naming the signal, the index, what was found and what was wanted."""

import re
from dataclasses import replace

import pytest
import torch
from every_signal import random_signals

from crest_ops.methods import METHODS
from crest_ops.signals import Signals
from crest_ops.spans import Spans

# Two trajectories of 3 and 2 actions, one token each.
SPANS = Spans.from_lengths(
    torch.ones(5, dtype=torch.int64),
    action=torch.ones(5, dtype=torch.bool),
    turn=torch.tensor([0, 0, 1, 0, 1]),
    trajectory=torch.tensor([0, 0, 0, 1, 1]),
    group=torch.tensor([0, 0]),
)
GIVEN = random_signals(SPANS, 0)


def refused(name, values, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(GIVEN, **{name: values}).require(SPANS, name)


@pytest.mark.parametrize("name", [name for name in Signals.__dataclass_fields__])
def test_what_is_meant_is_given_back_detached(name):
    signal = getattr(GIVEN, name)
    if signal.is_floating_point():
        signal = signal.clone().requires_grad_()
    (found,) = replace(GIVEN, **{name: signal}).require(SPANS, name)
    assert torch.equal(found, signal) and not found.requires_grad


@pytest.mark.parametrize("name", [name for name in Signals.__dataclass_fields__])
def test_missing_and_of_the_wrong_length(name):
    with pytest.raises(ValueError, match=f"signal {name} is missing: pass Signals\\({name}="):
        Signals().require(SPANS, name)
    signal = getattr(GIVEN, name)
    refused(name, torch.cat([signal, signal[:1]]), f"signal {name} has shape [{len(signal) + 1}], want [{len(signal)}]")


@pytest.mark.parametrize(
    ("name", "at", "value", "message"),
    [
        ("role_S", 3, 4, "signal role_S[3] is 4, want a value in [0, 3]"),
        ("role_S", 0, -1, "signal role_S[0] is -1, want a value in [0, 3]"),
        ("feedback_S", 2, 2, "signal feedback_S[2] is 2, want a value in [-1, 1]"),
        ("clue_score_S", 1, 2.5, "signal clue_score_S[1] is 2.5, want a value in [0, 2]"),
        ("gold_logp", 6, 0.25, "signal gold_logp[6] is 0.25, want a value in [-inf, 0]"),
        ("gold_logp", 6, float("-inf"), "signal gold_logp[6] is -inf, want finite"),
        ("value_S", 4, float("nan"), "signal value_S[4] is nan, want finite"),
        ("reward_B", 1, float("inf"), "signal reward_B[1] is inf, want finite"),
        ("cause_S", 1, 1, "signal cause_S[1] is 1, want -1 or the index of an earlier action"),
        ("cause_S", 1, 4, "signal cause_S[1] is 4, want -1 or the index of an earlier action"),
        ("cause_S", 2, -2, "signal cause_S[2] is -2, want -1 or the index of an earlier action"),
        ("cause_S", 3, 2, "signal cause_S[3] is 2, want -1 or an earlier action of the same trajectory"),
    ],
)
def test_values_out_of_range_are_named(name, at, value, message):
    signal = getattr(GIVEN, name).clone()
    signal[at] = value
    refused(name, signal, message)


def test_ids_are_whole_and_flags_are_bool():
    for name in ("role_S", "feedback_S", "cause_S", "state_key_S"):
        refused(name, getattr(GIVEN, name).double(), f"signal {name} has dtype torch.float64, want int")
        refused(name, getattr(GIVEN, name) > 0, f"signal {name} has dtype torch.bool, want int")
    for name in ("error_S", "action_mask_S"):
        refused(name, getattr(GIVEN, name).long(), f"signal {name} has dtype torch.int64, want bool")


def test_any_int64_is_a_state_key():
    keys = torch.tensor([-(2**63), 2**63 - 1, 0, 1, -1])
    (found,) = Signals(state_key_S=keys).require(SPANS, "state_key_S")
    assert torch.equal(found, keys)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int64, torch.bfloat16])
def test_rewards_of_any_kind_are_numbers(dtype):
    """Kinds whose own sum may saturate or wrap: MT-GRPO adds outcome and turn reward in trajectories of a turn."""
    spans = Spans.from_mask(torch.ones(3, 1, dtype=torch.bool), group=torch.zeros(3, dtype=torch.int64))
    reward = torch.tensor([[0, 1, 127], [0, 0, 127]]).to(dtype)
    plain, typed = (
        METHODS["mt_grpo"].assign(spans, Signals(reward_B=reward[0].to(kind), turn_reward_K=reward[1].to(kind)))
        for kind in (torch.float32, dtype)
    )
    assert torch.equal(typed.credit_N, plain.credit_N) and typed.credit_N.dtype == torch.float32
