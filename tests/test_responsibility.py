"""Responsibility: numbers by hand; blame is conserved, stays in its trajectory and ends at the root."""

from dataclasses import replace
from typing import get_type_hints

import pytest
import torch
from every_signal import batches
from hypothesis import given, settings
from hypothesis import strategies as st

from crest_ops.methods import grpo, responsibility, turn_grpo
from crest_ops.methods.responsibility import ResponsibilityConfig, cause_root, redistribute
from crest_ops.segments import segment_sum
from crest_ops.signals import AdditiveCredit, Signals
from crest_ops.spans import Spans

# One group of two rollouts, two turns each, every turn one action of 2 tokens and one of 1, tool output between.
SPANS = Spans.from_lengths(
    torch.tensor([1, 2, 1, 1] * 4),
    action=torch.tensor([False, True] * 8),
    turn=torch.tensor([0, 0, 0, 0, 1, 1, 1, 1] * 2),
    trajectory=torch.tensor([0] * 8 + [1] * 8),
    group=torch.tensor([0, 0]),
)
# Turn rewards: population z-scores +1, -1 | -1, +1.
SIGNALS = Signals(
    turn_reward_K=torch.tensor([1.0, 0, 0, 1], dtype=torch.float64),
    reward_B=torch.tensor([1.0, 0], dtype=torch.float64),
    error_S=torch.tensor([0, 1, 1, 1, 0, 1, 1, 0], dtype=torch.bool),
    cause_S=torch.tensor([-1, -1, 1, 2, -1, 4, 5, 4]),
)
EXACT = ResponsibilityConfig(unbiased=False, std_eps=0.0)


def actions(lengths):
    """Rollouts with so many actions, one token each, in one group."""
    S = sum(lengths)
    return Spans.from_lengths(
        torch.ones(S, dtype=torch.int64),
        action=torch.ones(S, dtype=torch.bool),
        turn=torch.cat([torch.arange(n) for n in lengths]),
        trajectory=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        group=torch.zeros(len(lengths), dtype=torch.int64),
    )


def close(found, wanted):
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=found.dtype), rtol=0, atol=1e-9)


def test_redistribution_by_hand():
    """1 is an error, 2 its echo, 3 an echo of the echo; 4 was no error, 5 an echo with positive credit: they stay."""
    credit = torch.tensor([1, -1, -2, -0.5, -1, 0.5], dtype=torch.float64)
    error = torch.tensor([False, True, True, True, False, True])
    cause = torch.tensor([-1, -1, 1, 2, 1, 0])
    found = redistribute(credit, error, cause, actions([6]), 0.3)
    close(found, [1, -1 - 0.7 * 2 - 0.7 * 0.5, -0.6, -0.15, -1, 0.5])
    close(redistribute(credit, error, cause, actions([6]), 0.0), [1, -3.5, 0, 0, -1, 0.5])
    assert cause_root(error, cause).tolist() == [0, 1, 1, 1, 4, 0]


def test_turns_by_hand():
    """Rollout 0: 2 and 3 (turn 1, each -1) echo 1 (turn 0, +1): 1 - 2 * .7. Rollout 1: 5 (-1) echoes 4 (-1), 6 (+1) is
    an echo without blame, 7 no error."""
    found = responsibility.assign(SPANS, SIGNALS, EXACT)
    wanted = [0, 1, 1, 0, -0.4, 0, -0.3, -0.3, 0, -0.3, 0, -1.7, -1.7, 0, -0.3, 0, 1, 1, 0, 1]
    close(found.credit_N, wanted)
    close(found.advantage_N[SPANS.mask], [1.0] * 3 + [-1] * 6 + [1] * 3)
    assert get_type_hints(responsibility.assign)["return"] is type(found) is AdditiveCredit
    assert (EXACT.kappa, EXACT.base, EXACT.reduction) == (0.3, "turn", "action_mean")
    torch.testing.assert_close(found.token_weight_N, torch.tensor([0, 1 / 16, 1 / 16, 0, 1 / 8] * 4))


def test_it_can_turn_the_sign_of_a_root():
    found = responsibility.assign(SPANS, SIGNALS, EXACT)
    assert found.advantage_N[4] > 0 > found.credit_N[4]


def test_the_base_may_be_the_trajectory_by_hand():
    """Rollout 1 failed: 5 and 6 (each -1) echo 4; rollout 0 succeeded and keeps everything."""
    config = replace(EXACT, base="group")
    assert config.needs == ("reward_B", "error_S", "cause_S")
    assert responsibility.needs == ResponsibilityConfig().needs == ("turn_reward_K", "error_S", "cause_S")
    found = responsibility.assign(SPANS, replace(SIGNALS, turn_reward_K=None), config)
    close(found.credit_N[SPANS.mask], [1.0] * 6 + [-2.4, -2.4, -0.3, -0.3, -0.3, -1])
    with pytest.raises(ValueError, match="signal reward_B is missing"):
        responsibility.assign(SPANS, replace(SIGNALS, reward_B=None), config)


@st.composite
def forests(draw):
    """Random batch, signed credit, errors, and for each action any earlier one of its trajectory as cause, or none."""
    spans, signals = draw(batches())
    trajectory = spans.trajectory_of_action.tolist()
    earlier = [[u for u in range(t) if trajectory[u] == trajectory[t]] for t in range(len(trajectory))]
    cause = [draw(st.sampled_from([-1, *before, *before])) for before in earlier]
    error = draw(st.lists(st.booleans(), min_size=len(cause), max_size=len(cause)))
    kappa = draw(st.sampled_from([0.0, 0.3, 0.5, 1.0]))
    cause_S = torch.tensor(cause, dtype=torch.int64)
    return spans, signals.value_S, torch.tensor(error, dtype=torch.bool), cause_S, kappa


@settings(deadline=None, max_examples=50)
@given(forests())
def test_it_is_the_definition(case):
    """Roots by following causes one by one, blame moved one action at a time."""
    spans, credit, error, cause, kappa = case
    wanted, roots = credit.tolist(), []
    for t in range(len(wanted)):
        root = t
        while error[root] and cause[root] >= 0:
            root = int(cause[root])
        roots.append(root)
    for t, root in enumerate(roots):
        if root != t and credit[t] < 0:
            wanted[t] -= (1 - kappa) * float(credit[t])
            wanted[root] += (1 - kappa) * float(credit[t])
    assert cause_root(error, cause).tolist() == roots
    found = redistribute(credit, error, cause, spans, kappa)
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=50)
@given(forests())
def test_blame_is_conserved_in_every_trajectory_and_no_echo_gets_more(case):
    spans, credit, error, cause, kappa = case
    found = redistribute(credit, error, cause, spans, kappa)
    before, after = (
        segment_sum(values, spans.trajectory_of_action, spans.num_trajectories) for values in (credit, found)
    )
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)
    echo = error & (cause >= 0)
    assert (found[echo] >= credit[echo]).all()
    assert (found[~echo] <= credit[~echo]).all()
    blamed = echo & (credit < 0)
    assert torch.equal(found[blamed], kappa * credit[blamed])
    single = redistribute(credit.float(), error, cause, spans, kappa)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), found, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=40)
@given(forests())
def test_without_echoes_or_with_kappa_one_nothing_changes_bitwise(case):
    spans, credit, error, cause, kappa = case
    nobody = torch.full_like(cause, -1)
    assert torch.equal(redistribute(credit, error, nobody, spans, kappa), credit)
    assert torch.equal(redistribute(credit, torch.zeros_like(error), cause, spans, kappa), credit)
    assert torch.equal(redistribute(credit, error, cause, spans, 1.0), credit)


@settings(deadline=None, max_examples=40)
@given(batches())
def test_with_kappa_one_it_is_its_base_bitwise(case):
    spans, signals = case
    for base, plain in (
        ("turn", turn_grpo.assign(spans, signals, turn_grpo.TurnGRPOConfig(reduction="action_mean"))),
        ("group", grpo.assign(spans, signals, grpo.GRPOConfig(reduction="action_mean"))),
    ):
        found = responsibility.assign(spans, signals, ResponsibilityConfig(base=base, kappa=1.0))
        assert torch.equal(found.credit_N, plain.credit_N) and torch.equal(found.advantage_N, plain.credit_N)
        assert torch.equal(found.token_weight_N, plain.token_weight_N)


@pytest.mark.parametrize("S", [1, 2, 3, 4, 5, 8, 9, 1000])
def test_a_chain_of_any_length_lands_on_one_root(S):
    """Action 0 is the error, each later one the echo of the one before."""
    cause = torch.arange(S) - 1
    error = torch.ones(S, dtype=torch.bool)
    found = redistribute(torch.full((S,), -1.0, dtype=torch.float64), error, cause, actions([S]), 0.25)
    close(found, [-1 - 0.75 * (S - 1), *[-0.25] * (S - 1)])


def test_bad_causes_are_named():
    spans = actions([2, 2])
    credit, error = torch.full((4,), -1.0), torch.ones(4, dtype=torch.bool)
    for cause, message in (
        ([-1, 1, -1, 2], r"signal cause_S\[1\] is 1, want -1 or the index of an earlier action"),
        ([1, 0, -1, 2], r"signal cause_S\[0\] is 1, want -1 or the index of an earlier action"),  # a cycle
        ([-1, 0, 1, 2], r"signal cause_S\[2\] is 1, want -1 or an earlier action of the same trajectory"),
        ([-1, 0, -1], r"signal cause_S has shape \[3\], want \[4\]"),
    ):
        with pytest.raises(ValueError, match=message):
            redistribute(credit, error, torch.tensor(cause), spans, 0.3)
    cause = torch.tensor([-1, 0, -1, 2])
    with pytest.raises(ValueError, match="signal error_S has dtype torch.int64, want bool"):
        redistribute(credit, error.long(), cause, spans, 0.3)
    with pytest.raises(ValueError, match=r"action_credit is \[3\], want \[4\] to match the spans"):
        redistribute(credit[:3], error, cause, spans, 0.3)
    with pytest.raises(ValueError, match="action_credit is list"):
        redistribute([1.0], error, cause, spans, 0.3)
    with pytest.raises(ValueError, match="infinite or NaN somewhere"):
        redistribute(torch.tensor([0, 0, float("nan"), 0]), error, cause, spans, 0.3)
    with pytest.raises(ValueError, match="kappa is 1.5, want 0 <= kappa <= 1"):
        redistribute(credit, error, cause, spans, 1.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kappa": -0.1}, "kappa is -0.1, want a number with 0 <= kappa <= 1"),
        ({"base": "action"}, "base is 'action', want one of 'turn', 'group'"),
        ({"std_eps": -1.0}, "std_eps is -1.0"),
        ({"reduction": "median"}, "reduction is 'median'"),
    ],
)
def test_bad_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        ResponsibilityConfig(**changes)
