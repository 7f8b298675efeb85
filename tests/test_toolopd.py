"""ToolOPD: numbers by hand, which actions are distilled and how strongly, GRPO beside it untouched."""

import math
from dataclasses import replace
from typing import get_type_hints

import pytest
import torch
from every_signal import batches
from hypothesis import given, settings
from hypothesis import strategies as st

from crest_ops.methods import grpo, toolopd
from crest_ops.methods.toolopd import ToolOPDConfig, skill_credit
from crest_ops.reductions import action_mean
from crest_ops.segments import segment_mean
from crest_ops.signals import Credit, Signals
from crest_ops.spans import Spans

NAN = float("nan")

# One group of two rollouts with advantages +1 and -1; each two actions, of 2 and 1 tokens, tool output before each.
SPANS = Spans.from_lengths(
    torch.tensor([1, 2, 1, 1, 1, 2, 1, 1]),
    action=torch.tensor([0, 1, 0, 1, 0, 1, 0, 1], dtype=torch.bool),
    turn=torch.zeros(8, dtype=torch.int64),
    trajectory=torch.tensor([0] * 4 + [1] * 4),
    group=torch.tensor([0, 0]),
)
SKILL = torch.tensor([NAN, 0.5, 0.3, NAN, 5, NAN, -0.2, -0.4, NAN, 1], dtype=torch.float64)
GAP = torch.tensor([NAN, 2, -1, NAN, 1, NAN, 1, -1, NAN, 4], dtype=torch.float64)
SIGNALS = Signals(
    reward_B=torch.tensor([1.0, 0], dtype=torch.float64),
    skill_gap_N=SKILL,
    teacher_gap_N=GAP,
)
ADVANTAGE = torch.tensor([1.0, -1], dtype=torch.float64)
# Evidence: .4 | 3 (clipped) and, in the failure, .3 | -1; less kappa = .1: .3 | 2.9 (mean 1.6) and .2 | 0 (mean .1).
RAW = [0, 0.3, 0.3, 0, 2.9, 0, 0.2, 0.2, 0, 0]
NORMALISED = [0, 0.1875, 0.1875, 0, 1.8125, 0, 2, 2, 0, 0]


def close(found, wanted):
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=found.dtype), rtol=0, atol=1e-9)


def test_action_credit_by_hand():
    close(skill_credit(ADVANTAGE, SKILL, SPANS, ToolOPDConfig()), NORMALISED)
    close(skill_credit(ADVANTAGE, SKILL, SPANS, ToolOPDConfig(normalise=False)), RAW)
    bounded = skill_credit(ADVANTAGE, SKILL, SPANS, ToolOPDConfig(normalise=False, bounded=True))
    close(bounded, [math.tanh(c) for c in RAW])
    close(skill_credit(0 * ADVANTAGE, SKILL, SPANS, ToolOPDConfig()), [0.0] * 10)


def test_token_credit_by_hand():
    """[e - .1]_+ : .4, .2 | 2.9 (means .3, 2.9: together 1.6) and .1, .3 | 0 (means .2, 0: together .1)."""
    config = ToolOPDConfig(level="token")
    raw = skill_credit(ADVANTAGE, SKILL, SPANS, replace(config, normalise=False))
    close(raw, [0, 0.4, 0.2, 0, 2.9, 0, 0.1, 0.3, 0, 0])
    close(skill_credit(ADVANTAGE, SKILL, SPANS, config), [0, 0.25, 0.125, 0, 1.8125, 0, 1, 3, 0, 0])


def test_distillation_by_hand():
    """beta = .1, four actions: .1 / 8 for each of two tokens, .1 / 4 for one; sampled: times old minus teacher."""
    credit = toolopd.assign(SPANS, SIGNALS)
    full = [0, 0.00234375, 0.00234375, 0, 0.0453125, 0, 0.025, 0.025, 0, 0]
    sampled = [0, -0.0046875, 0.00234375, 0, -0.0453125, 0, -0.025, 0.025, 0, 0]
    assert credit.distill_kind == "sampled_reverse_kl"
    close(credit.distill_N, sampled)
    gated = toolopd.assign(SPANS, SIGNALS, ToolOPDConfig(gate=True))
    close(gated.distill_N, [0, -0.0046875, 0, 0, -0.0453125, 0, 0, 0.025, 0, 0])
    without = replace(SIGNALS, teacher_gap_N=None)
    other = toolopd.assign(SPANS, without, ToolOPDConfig(kind="reverse_kl"))
    assert other.distill_kind == "reverse_kl"
    close(other.distill_N, full)
    assert get_type_hints(toolopd.assign)["return"] is type(credit) is Credit


def test_needs_follow_the_kind():
    assert toolopd.needs == ("reward_B", "skill_gap_N", "teacher_gap_N")
    assert ToolOPDConfig(kind="reverse_kl").needs == ("reward_B", "skill_gap_N")
    with pytest.raises(ValueError, match="signal teacher_gap_N is missing"):
        toolopd.assign(SPANS, replace(SIGNALS, teacher_gap_N=None))


configs = st.builds(
    ToolOPDConfig,
    kappa=st.sampled_from([0.0, 0.1, 0.5]),
    clip=st.sampled_from([0.5, 3.0]),
    level=st.sampled_from(["action", "token"]),
    bounded=st.booleans(),
    normalise=st.booleans(),
)


@settings(deadline=None, max_examples=40)
@given(batches(), configs)
def test_credit_is_never_negative_and_has_mean_one_over_actions(case, config):
    spans, signals = case
    advantage_B = signals.reward_B - 0.5
    credit_N = skill_credit(advantage_B, signals.skill_gap_N, spans, config)
    assert (credit_N >= 0).all() and not credit_N[~spans.mask].any() and torch.isfinite(credit_N).all()
    assert config.normalise or (credit_N <= (1 if config.bounded else config.clip)).all()
    if config.normalise:
        mean_S = segment_mean(credit_N, spans.action_of_token, spans.num_actions)
        written = spans.action_length > 0
        for i in range(spans.num_trajectories):
            mean = mean_S[written & (spans.trajectory_of_action == i)]
            assert not mean.any() or mean.mean().item() == pytest.approx(1)


@settings(deadline=None, max_examples=40)
@given(batches(), configs, st.floats(0, 10))
def test_the_rl_part_is_grpos_bitwise_and_a_silent_skill_leaves_it_alone(case, config, beta):
    spans, signals = case
    config = replace(config, beta=beta)
    base = grpo.assign(spans, signals, grpo.GRPOConfig(reduction="action_mean"))
    credit = toolopd.assign(spans, signals, config)
    silent = replace(signals, skill_gap_N=torch.zeros(spans.num_tokens, dtype=torch.float64))
    pure = toolopd.assign(spans, silent, config)
    for found in (credit, pure, toolopd.assign(spans, signals, replace(config, beta=0.0))):
        assert torch.equal(found.credit_N, base.credit_N) and torch.equal(found.token_weight_N, base.token_weight_N)
        assert found.surrogate == base.surrogate
    assert not pure.distill_N.any()
    assert not toolopd.assign(spans, signals, replace(config, beta=0.0)).distill_N.any()


@settings(deadline=None, max_examples=40)
@given(batches(), configs)
def test_the_other_outcome_distils_other_actions(case, config):
    """A fixed trajectory and skill with the outcome flipped: what was kept is dropped."""
    spans, signals = case
    advantage_B = signals.reward_B - 0.5
    one = skill_credit(advantage_B, signals.skill_gap_N, spans, config)
    other = skill_credit(-advantage_B, signals.skill_gap_N, spans, config)
    assert not (one * other).any()


def test_the_other_outcome_changes_several_actions():
    gap = torch.tensor([0.5, -0.5, 0.4, -2.0, 0.05], dtype=torch.float64)
    spans = Spans.from_mask(
        torch.ones(1, 5, dtype=torch.bool), group=torch.tensor([0]), turn=torch.arange(5).unsqueeze(0)
    )
    config = ToolOPDConfig(normalise=False)
    one = torch.ones(1, dtype=torch.float64)
    close(skill_credit(one, gap, spans, config), [0.4, 0, 0.3, 0, 0])
    close(skill_credit(-one, gap, spans, config), [0, 0.4, 0, 1.9, 0])


def test_copies_of_an_irrelevant_action_leave_the_others_credit():
    """Not so with the mean of one, which spreads a trajectory's credit over all its actions."""

    def credit(copies, config):
        gap = torch.tensor([0.5, 0.3, *[0.05] * copies], dtype=torch.float64)
        spans = Spans.from_mask(
            torch.ones(1, 2 + copies, dtype=torch.bool),
            group=torch.tensor([0]),
            turn=torch.arange(2 + copies).unsqueeze(0),
        )
        return skill_credit(torch.ones(1, dtype=torch.float64), gap, spans, config)

    few, many = credit(1, ToolOPDConfig(normalise=False)), credit(4, ToolOPDConfig(normalise=False))
    assert torch.equal(few[:2], many[:2]) and not few[2:].any() and not many[2:].any()
    close(credit(1, ToolOPDConfig()), [2, 1, 0])
    close(credit(4, ToolOPDConfig()), [4, 2, 0, 0, 0, 0])


@settings(deadline=None, max_examples=40)
@given(batches(), st.sampled_from(["action", "token"]))
def test_uniform_credit_is_on_policy_distillation_with_the_action_mean(case, level):
    spans, signals = case
    z_N = grpo.assign(spans, signals).credit_N.sign()
    signals = replace(signals, skill_gap_N=torch.where(spans.mask, 0.7 * z_N, NAN))
    found = toolopd.assign(spans, signals, ToolOPDConfig(level=level)).distill_N
    plain = 0.1 * action_mean(spans).double() * -signals.teacher_gap_N
    torch.testing.assert_close(found, torch.where(z_N != 0, plain, 0.0).double(), rtol=1e-6, atol=1e-12)


@settings(deadline=None, max_examples=40)
@given(batches(), configs)
def test_the_sampled_term_pulls_towards_the_teacher_and_gated_with_the_outcome(case, config):
    spans, signals = case
    gap_N = torch.where(spans.mask, signals.teacher_gap_N, 0)
    distill_N = toolopd.assign(spans, signals, config).distill_N
    assert (distill_N * gap_N <= 0).all()  # loss += distill * logp: down where the teacher is above
    gated = toolopd.assign(spans, signals, replace(config, gate=True))
    kept = gated.credit_N.sign() * gap_N > 0
    assert torch.equal(gated.distill_N, torch.where(kept, distill_N, 0))
    assert (gated.distill_N * gated.credit_N <= 0).all()


def test_pieces_of_a_batch_share_the_count():
    whole, piece = toolopd.assign(SPANS, SIGNALS), toolopd.assign(SPANS, SIGNALS, total=8)
    torch.testing.assert_close(2 * piece.distill_N, whole.distill_N)
    torch.testing.assert_close(2 * piece.token_weight_N, whole.token_weight_N)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beta": -1.0}, "beta is -1.0, want a number"),
        ({"kappa": -0.1}, "kappa is -0.1"),
        ({"clip": 0}, "clip is 0"),
        ({"level": "turn"}, "level is 'turn', want one of 'action', 'token'"),
        ({"kind": "forward_kl"}, "kind is 'forward_kl', want one of 'sampled_reverse_kl', 'reverse_kl'"),
        ({"kind": "reverse_kl", "gate": True}, "gate is True and kind is 'reverse_kl'"),
        ({"bounded": 2}, "bounded is 2"),
        ({"normalise": None}, "normalise is None"),
        ({"reduction": "median"}, "reduction is 'median'"),
    ],
)
def test_bad_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        ToolOPDConfig(**changes)
