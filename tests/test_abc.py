"""ABC: rubric, fine-tuning weight and step advantages by hand; what crosses no trajectory and no group."""

import math
from dataclasses import replace
from typing import get_type_hints

import pytest
import torch
from every_signal import batches
from hypothesis import given, settings
from hypothesis import strategies as st

from crest_ops.methods import abc, grpo
from crest_ops.methods.abc import ABCConfig, clue_score, sft_weight, step_advantage
from crest_ops.reductions import token_mean
from crest_ops.segments import segment_expand
from crest_ops.signals import Credit, Signals
from crest_ops.spans import Spans

# One group of two rollouts; each two actions, of 2 and 1 tokens, tool output before each.
SPANS = Spans.from_lengths(
    torch.tensor([1, 2, 1, 1, 1, 2, 1, 1]),
    action=torch.tensor([0, 1, 0, 1, 0, 1, 0, 1], dtype=torch.bool),
    turn=torch.zeros(8, dtype=torch.int64),
    trajectory=torch.tensor([0] * 4 + [1] * 4),
    group=torch.tensor([0, 0]),
)
EXACT = ABCConfig(unbiased=False, std_eps=0.0)
ROOT2, ROOT5 = 2**0.5, 5**0.5


def scores(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def rollouts(lengths, groups):
    """Packed spans of rollouts with so many actions, one token each."""
    S = sum(lengths)
    return Spans.from_lengths(
        torch.ones(S, dtype=torch.int64),
        action=torch.ones(S, dtype=torch.bool),
        turn=torch.cat([torch.arange(n) for n in lengths]),
        trajectory=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        group=torch.tensor(groups),
    )


def credit(values, spans=SPANS, config=EXACT):
    return abc.assign(spans, Signals(clue_score_S=values), config).credit_N


def close(found, wanted):
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=found.dtype), rtol=0, atol=1e-9)


def test_rubric_by_hand():
    found = torch.tensor([False, True, False, False, True, True, False])
    excluded = torch.tensor([0, 0, 1, 0, 1, 0, 3])
    discarded = torch.tensor([0.0, 0, 0, 1, 0, 1, 0])
    # 1, 1.8, 1.4, .2, 2.2 clipped, 1, 2.2 clipped
    score = clue_score(found, excluded, discarded)
    torch.testing.assert_close(score, torch.tensor([1, 1.8, 1.4, 0.2, 2, 1, 2]))
    two = torch.full((1,), 2, dtype=torch.float64)
    assert clue_score(0 * two, 0 * two, two).tolist() == [0] and clue_score(two, two, 0 * two).dtype == torch.float64
    other = clue_score(found, excluded, discarded, rubric=(0.5, 1.0, 0.25, -0.5))
    torch.testing.assert_close(other, torch.tensor([0.5, 1.5, 0.75, 0, 1.75, 1, 1.25]))
    with pytest.raises(ValueError, match=r"excluded is \[1\] torch.int64, want a real tensor"):
        clue_score(found, torch.tensor([1]), discarded)
    with pytest.raises(ValueError, match="found is list"):
        clue_score([1], excluded, discarded)
    with pytest.raises(ValueError, match="rubric is"):
        clue_score(found, excluded, discarded, rubric=(1.0, 0.8, 0.4))


def test_fine_tuning_weight_literal():
    weight = sft_weight(scores(0, 1, 2))
    assert weight.tolist() == pytest.approx([0.2384, 1, 1.7616], abs=5e-5)
    assert weight[1] == 1
    assert sft_weight(scores(0.5), alpha=1.0, beta=0.5).item() == 1
    assert sft_weight(scores(2.0), alpha=1.0, beta=1.0).item() == pytest.approx(2 / (1 + math.exp(-1)))
    with pytest.raises(ValueError, match="alpha is 0, want alpha > 0"):
        sft_weight(scores(1), alpha=0)
    with pytest.raises(ValueError, match="score is list"):
        sft_weight([1.0])


@given(st.floats(0, 2), st.floats(0, 2))
def test_fine_tuning_weight_is_monotone_bounded_and_symmetric(one, other):
    low, high = sft_weight(scores(*sorted((one, other))))
    assert 0 < low <= high < 2
    assert low < high or abs(one - other) < 1e-12
    assert sft_weight(scores(one, 2 - one)).sum().item() == pytest.approx(2)


@settings(deadline=None, max_examples=20)
@given(batches())
def test_scores_of_one_are_plain_fine_tuning(case):
    spans, signals = case
    weight_S = sft_weight(torch.ones(spans.num_actions))
    weight_N = segment_expand(weight_S, spans.action_of_token) * token_mean(spans)
    assert torch.equal(weight_N, token_mean(spans))


def test_step_credit_by_hand():
    """Scores 2, 1 | 1, 0: mean 1, population variance 1/2; a quarter of the next step's credit is added."""
    found = abc.assign(SPANS, Signals(clue_score_S=scores(2, 1, 1, 0)), EXACT)
    close(found.credit_N, [0, ROOT2, ROOT2, 0, 0, 0, -ROOT2 / 4, -ROOT2 / 4, 0, -ROOT2])
    sample = 1.5**0.5  # sample variance 2/3
    close(credit(scores(2, 1, 1, 0), config=replace(EXACT, unbiased=True))[[1, 9]], [sample, -sample])
    assert ABCConfig().gamma == 0.25
    assert get_type_hints(abc.assign)["return"] is type(found) is Credit
    torch.testing.assert_close(found.token_weight_N[[1, 4, 6, 9]], torch.full((4,), 1 / 6))


def test_what_the_statistics_are_taken_over_by_hand():
    """Rollouts of 1 and 3 steps, scores 2 | 1, 1, 0. Steps: mean 1, variance 1/2. Rollouts: means 2 and 2/3, together
    4/3; variance ((2/3)^2 + (1/9 + 1/9 + 16/9)/3) / 2 = 5/9."""
    spans, values = rollouts([1, 3], [0, 0]), scores(2, 1, 1, 0)
    close(step_advantage(values, spans, EXACT), [ROOT2, 0, 0, -ROOT2])
    each = replace(EXACT, statistics="trajectory")
    close(step_advantage(values, spans, each), [2 / ROOT5, -1 / ROOT5, -1 / ROOT5, -4 / ROOT5])
    with_an_idle_rollout = rollouts([1, 0, 3], [0, 0, 0])
    for config in (EXACT, each):
        assert torch.equal(step_advantage(values, with_an_idle_rollout, config), step_advantage(values, spans, config))
    sample = (20 / 27) ** 0.5  # 5/9 * 4/3
    close(step_advantage(values, spans, replace(each, unbiased=True))[:1], [2 / 3 / sample])


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4), st.integers(1, 4), st.booleans(), st.integers(0, 1000))
def test_rollouts_of_one_length_have_one_statistic(B, T, unbiased, seed):
    spans = rollouts([T] * B, [0] * B)
    values = 2 * torch.rand(B * T, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    config = ABCConfig(unbiased=unbiased)
    each = replace(config, statistics="trajectory")
    torch.testing.assert_close(step_advantage(values, spans, each), step_advantage(values, spans, config))


@settings(deadline=None, max_examples=40)
@given(batches(), st.sampled_from([0.0, 0.25, 0.9, 1.0]), st.sampled_from(["step", "trajectory"]))
def test_credit_is_the_discounted_sum_to_the_end_of_the_trajectory(case, gamma, statistics):
    """Gamma 0: the step alone; 1: reward to go. Nothing is added across the end of a trajectory."""
    spans, signals = case
    config = ABCConfig(gamma=gamma, statistics=statistics)
    score_S = step_advantage(signals.clue_score_S, spans, config).tolist()
    trajectory_S = spans.trajectory_of_action.tolist()
    wanted, after = [0.0] * len(score_S), {}
    for t in reversed(range(len(score_S))):
        after[trajectory_S[t]] = wanted[t] = score_S[t] + gamma * after.get(trajectory_S[t], 0.0)
    wanted_N = segment_expand(torch.tensor(wanted, dtype=torch.float64), spans.action_of_token)
    found = abc.assign(spans, signals, config).credit_N
    torch.testing.assert_close(found, wanted_N, rtol=1e-9, atol=1e-9)
    if gamma == 0:
        assert torch.equal(found, wanted_N)


@settings(deadline=None, max_examples=40)
@given(batches(), st.floats(0, 2), st.sampled_from(["step", "trajectory"]))
def test_equal_scores_give_exact_zeros(case, value, statistics):
    spans, _ = case
    same = torch.full((spans.num_actions,), value, dtype=torch.float64)
    for eps in (0.0, 1e-6):
        found = credit(same, spans, ABCConfig(std_eps=eps, statistics=statistics))
        assert torch.equal(found, torch.zeros_like(found))


@settings(deadline=None, max_examples=20)
@given(st.lists(st.sampled_from([0.0, 0.2, 1.0, 1.4, 1.8]), min_size=1, max_size=8), st.integers(0, 1))
def test_with_one_step_a_rollout_it_is_grpo_of_the_scores(values, second):
    B = len(values)
    spans = rollouts([1] * B, sorted([0] + [second] * (B - 1)))
    given_ = Signals(reward_B=scores(*values), clue_score_S=scores(*values))
    base, found = grpo.assign(spans, given_), abc.assign(spans, given_)
    assert torch.equal(found.credit_N, base.credit_N) and torch.equal(found.token_weight_N, base.token_weight_N)


def test_a_useful_step_of_a_failed_rollout_is_credited():
    """Rollout 1 found a clue first and then went wrong: its first step stays positive, its second is negative."""
    found = credit(scores(1.8, 1.8, 1.8, 0.2), config=replace(EXACT, gamma=0.25))
    assert (found[[6, 7]] > 0).all() and found[9] < 0
    assert (found[[6, 7]] < found[4]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gamma": 1.1}, "gamma is 1.1, want a number with 0 <= gamma <= 1"),
        ({"statistics": "turn"}, "statistics is 'turn', want one of 'step', 'trajectory'"),
        ({"std_eps": -1.0}, "std_eps is -1.0"),
        ({"reduction": "median"}, "reduction is 'median'"),
    ],
)
def test_bad_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        ABCConfig(**changes)


def test_bad_scores_are_named():
    with pytest.raises(ValueError, match=r"signal clue_score_S\[1\] is 2.5, want a value in \[0, 2\]"):
        credit(scores(1, 2.5, 1, 1))
    with pytest.raises(ValueError, match=r"signal clue_score_S has shape \[3\], want \[4\]"):
        credit(scores(1, 1, 1))
