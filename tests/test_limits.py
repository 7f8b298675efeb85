"""Every method is GRPO, or the baseline that it builds on, where its own knob is 0."""

from dataclasses import replace

import pytest
import torch
from every_signal import batches
from hypothesis import given, settings

from crest_ops.methods import METHODS
from crest_ops.returns import discounted_return
from crest_ops.segments import segment_expand, segment_zscore

POPULATION = {"unbiased": False}


def neutral(signals):
    zeros = torch.zeros_like
    return replace(signals, feedback_S=zeros(signals.feedback_S), teacher_gap_N=zeros(signals.teacher_gap_N))


# method, its settings, the limit, its settings, whether the signals are made neutral
LIMITS = [
    ("crest", {"lam": 0.0}, "turn_grpo", {}, False),
    ("crest", {}, "turn_grpo", {}, True),
    ("rlsd", {"lam": 0.0}, "grpo", {}, False),
    ("rlsd", {}, "grpo", {}, True),
    ("serl", {"alpha": 0.0}, "grpo", {}, False),
    ("serl", {}, "grpo", {}, True),
    ("triage", {"lam": 0.0}, "grpo", {}, False),
    ("triage", {"table": (0.0, 0.0, 0.0, 0.0)}, "grpo", {}, False),
    ("gigpo", {"omega": 0.0, "mode": "mean_std_norm"}, "grpo", {}, False),
    ("gigpo", {"omega": 0.0}, "dr_grpo", {}, False),
    ("efca", {"omega": 0.0, "mode": "mean_std_norm"}, "grpo", {}, False),
    ("efca", {"beta_feedback": 0.0, "beta_history": 0.0}, "gigpo", {}, False),
    ("efca", {"eta": 0.0}, "gigpo", {}, True),
    ("trace", {"alpha_turn": 0.0, "std_eps": 1e-6}, "grpo", POPULATION, False),
    ("toolopd", {"beta": 0.0}, "grpo", {}, False),
    ("responsibility", {"kappa": 1.0}, "turn_grpo", {}, False),
    ("responsibility", {"kappa": 1.0, "base": "group"}, "grpo", {}, False),
    ("dapo", {}, "grpo", {}, False),
    ("gspo", {}, "grpo", {}, False),
    ("cispo", {}, "grpo", {}, False),
]


@pytest.mark.parametrize(("name", "options", "limit", "limit_options", "made_neutral"), LIMITS)
@settings(deadline=None, max_examples=15)
@given(case=batches())
def test_the_limit_is_bitwise(name, options, limit, limit_options, made_neutral, case):
    spans, signals = case
    signals = neutral(signals) if made_neutral else signals
    found = METHODS[name].assign(spans, signals, METHODS[name].Config(**options))
    wanted = METHODS[limit].assign(spans, signals, METHODS[limit].Config(**limit_options))
    assert torch.equal(found.credit_N, wanted.credit_N)
    assert found.distill_N is None or not found.distill_N.any()


@settings(deadline=None, max_examples=15)
@given(case=batches())
def test_mt_grpo_without_turn_rewards_is_grpo(case):
    spans, signals = case
    signals = replace(signals, turn_reward_K=torch.zeros_like(signals.turn_reward_K))
    mt_grpo, grpo = METHODS["mt_grpo"], METHODS["grpo"]
    found = mt_grpo.assign(spans, signals, mt_grpo.Config()).credit_N
    wanted = grpo.assign(spans, signals, grpo.Config(std_eps=1e-4)).credit_N
    several_N = segment_expand(
        torch.bincount(spans.trajectory_of_turn, minlength=spans.num_trajectories) > 1,
        spans.trajectory_of_token,
        fill=False,
    )
    assert torch.equal(found[several_N], wanted[several_N])


@settings(deadline=None, max_examples=15)
@given(case=batches(empty=False))
def test_factor_without_potential_and_teacher_shares_its_advantage_out(case):
    """An advantage of one action is its own; of T actions, T times the action's credit."""
    spans, signals = case
    factor = METHODS["factor"]
    config = factor.Config(eta=0.0, potential="uniform", advantage="zscore")
    found = factor.assign(spans, replace(signals, action_mask_S=None), config).credit_N
    outcome_B = torch.zeros(spans.num_trajectories, dtype=torch.float64)
    outcome_B.index_add_(0, spans.trajectory_of_action, signals.action_reward_S)
    deviation_B = segment_zscore(outcome_B, spans.group_of_trajectory, spans.num_trajectories, unbiased=False, eps=1e-8)
    steps_B = torch.bincount(spans.trajectory_of_action, minlength=spans.num_trajectories)
    wanted = segment_expand(deviation_B / steps_B.clamp(min=1), spans.trajectory_of_token)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=15)
@given(case=batches(empty=False))
def test_abc_with_gamma_1_is_the_sum_of_the_scores_to_go(case):
    spans, signals = case
    abc = METHODS["abc"]
    group_S = spans.group_of_trajectory[spans.trajectory_of_action]
    score_S = segment_zscore(signals.clue_score_S, group_S, spans.num_groups, unbiased=True, eps=1e-6)
    found = abc.assign(spans, signals, abc.Config(gamma=1.0)).credit_N
    wanted = segment_expand(discounted_return(score_S, spans, 1.0), spans.action_of_token)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", METHODS)
@settings(deadline=None, max_examples=15)
@given(case=batches())
def test_equal_rewards_teach_nothing_where_the_verifier_alone_gives_the_direction(name, case):
    spans, signals = case
    same = {field: torch.full_like(getattr(signals, field), 0.5) for field in ("reward_B", "turn_reward_K")}
    method = METHODS[name]
    if set(method.needs) <= {"reward_B", "turn_reward_K", "teacher_gap_N", "skill_gap_N", "surprisal_N"}:
        assert not method.assign(spans, replace(signals, **same)).credit_N.any()
