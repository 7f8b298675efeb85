"""Dr.GRPO, DAPO, GSPO, CISPO and MT-GRPO: one batch by hand, and where each is GRPO.

Shape letters: N token positions, B trajectories.
"""

from dataclasses import replace

import pytest
import torch
from every_signal import batches
from hypothesis import given, settings
from hypothesis import strategies as st

from crest_ops.methods import cispo, dapo, dr_grpo, grpo, gspo, mt_grpo
from crest_ops.methods.cispo import CISPOConfig
from crest_ops.methods.dapo import DAPOConfig, dynamic_sampling, soft_overlong_penalty
from crest_ops.methods.dr_grpo import DrGRPOConfig
from crest_ops.methods.grpo import GRPOConfig
from crest_ops.methods.gspo import GSPOConfig
from crest_ops.methods.mt_grpo import MTGRPOConfig
from crest_ops.reductions import REDUCTIONS, sequence_mean, token_mean
from crest_ops.signals import AdditiveCredit, Credit, Signals
from crest_ops.spans import Spans

# Group 0: rollouts 0 and 1 of two turns (tokens 2 + 1 and 1 + 2), rollout 2 of one turn (4 tokens).
# Group 1: rollouts 3 and 4 with equal rewards (1 and 2 tokens). Group 2: rollout 5 alone (1 + 1 tokens).
SPANS = Spans.from_mask(
    torch.tensor(
        [[0, 1, 1, 0, 1], [0, 1, 0, 1, 1], [0, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0]]
    ).bool(),
    group=torch.tensor([0, 0, 0, 1, 1, 2]),
    turn=torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 1, 1], [0] * 5, [0] * 5, [0] * 5, [0, 1, 1, 1, 1]]),
)
SIGNALS = Signals(
    reward_B=torch.tensor(
        [1.0, 0, 5, 0.5, 0.5, 1], dtype=torch.float64
    ),  # group 0: -1, -2, 3 from the mean, std sqrt(7)
    turn_reward_K=torch.tensor([0.0, 9, 2, 9, 4, 1, 0, 1, 9], dtype=torch.float64),
)
ROOT7 = 7**0.5
LENGTHS = [3, 3, 4, 1, 2, 2]


def per_trajectory(*values):
    """The same value on every token of a trajectory, 0 outside the spans."""
    out = torch.zeros(SPANS.num_tokens, dtype=torch.float64)
    out[SPANS.mask] = torch.tensor(values, dtype=torch.float64).repeat_interleave(torch.tensor(LENGTHS))
    return out


def close(found, wanted):
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-7)


def test_dr_grpo_by_hand():
    credit = dr_grpo.assign(SPANS, SIGNALS, DrGRPOConfig(length=10))
    assert type(credit) is Credit and (credit.surrogate.low, credit.surrogate.high) == (0.2, 0.2)
    close(credit.credit_N, per_trajectory(-1, -2, 3, 0, 0, 0))
    close(credit.token_weight_N, per_trajectory(*[1 / 60] * 6))
    close(
        dr_grpo.assign(SPANS, SIGNALS, DrGRPOConfig(length=10), total=12).token_weight_N, per_trajectory(*[1 / 120] * 6)
    )
    assert dr_grpo.assign(SPANS, SIGNALS, DrGRPOConfig(singleton="reward")).credit_N[25] == 1
    by_tokens = dr_grpo.assign(SPANS, SIGNALS, DrGRPOConfig(reduction="token_mean"))
    assert torch.equal(by_tokens.token_weight_N, token_mean(SPANS))


@settings(deadline=None, max_examples=40)
@given(batches(), st.sampled_from(["zero", "reward"]))
def test_dr_grpo_is_grpo_without_std_and_its_denominator_knows_no_length(case, singleton):
    spans, signals = case
    credit = dr_grpo.assign(spans, signals, DrGRPOConfig(length=7, singleton=singleton))
    wanted = grpo.assign(spans, signals, GRPOConfig(scale="none", singleton=singleton)).credit_N
    assert torch.equal(credit.credit_N, wanted)
    close(credit.token_weight_N, spans.mask.double() / (7 * spans.num_trajectories))
    doubled = dr_grpo.assign(spans, replace(signals, reward_B=2 * signals.reward_B), DrGRPOConfig(singleton=singleton))
    assert torch.equal(doubled.credit_N, 2 * credit.credit_N)  # no std to take the scale away


def test_gspo_and_cispo_are_grpo_under_their_surrogates():
    for method, config, high, reduction in (
        (gspo, GSPOConfig(std_eps=0.0), 4e-4, sequence_mean),
        (cispo, CISPOConfig(std_eps=0.0), 0.28, token_mean),
    ):
        credit = method.assign(SPANS, SIGNALS, config)
        assert type(credit) is Credit and credit.surrogate.high == high
        close(credit.credit_N, per_trajectory(-1 / ROOT7, -2 / ROOT7, 3 / ROOT7, 0, 0, 0))
        assert torch.equal(credit.token_weight_N, reduction(SPANS))
        assert torch.equal(method.assign(SPANS, SIGNALS, config, total=99).token_weight_N, reduction(SPANS, total=99))


def test_gspo_clips_a_trajectory_as_a_whole():
    """Rollout 2: log-ratios .0005, .0005, .0005, 0 have the mean .000375, inside; with .0003 at the end .00045, out."""
    credit = gspo.assign(SPANS, SIGNALS)
    for last, clipped in ((0.0, False), (0.0003, True)):
        log_ratio = torch.zeros(30, dtype=torch.float64)
        log_ratio[11:15] = torch.tensor([0.0005, 0.0005, 0.0005, last], dtype=torch.float64)
        found = credit.surrogate.evaluate(log_ratio, credit.credit_N, SPANS)
        assert found.clipped[11:15].tolist() == [clipped] * 4
        assert (found.slope[11:15] == 0).tolist() == [clipped] * 4
        assert not found.clipped[:11].any()


def test_cispo_keeps_the_gradient_of_a_clipped_token_and_ppo_does_not():
    log_ratio = torch.zeros(30, dtype=torch.float64)
    log_ratio[11] = 0.7
    for method, slope in ((cispo, -1.28 * 3 / ROOT7), (dapo, 0.0)):
        credit = method.assign(SPANS, SIGNALS, method.Config(std_eps=0.0))
        found = credit.surrogate.evaluate(log_ratio, credit.credit_N, SPANS)
        assert found.clipped[11] and found.slope[11].item() == pytest.approx(slope)


def test_dapo_by_hand():
    """Groups 1 and 2 are constant: 10 of 15 tokens stay."""
    assert dynamic_sampling(SIGNALS.reward_B, SPANS).tolist() == [True] * 3 + [False] * 3
    credit = dapo.assign(SPANS, SIGNALS, DAPOConfig(std_eps=0.0))
    assert type(credit) is Credit and (credit.surrogate.low, credit.surrogate.high) == (0.2, 0.28)
    close(credit.credit_N, per_trajectory(-1 / ROOT7, -2 / ROOT7, 3 / ROOT7, 0, 0, 0))
    close(credit.token_weight_N, per_trajectory(0.1, 0.1, 0.1, 0, 0, 0))
    close(dapo.assign(SPANS, SIGNALS, DAPOConfig(dynamic=False)).token_weight_N, per_trajectory(*[1 / 15] * 6))
    by_rollout = dapo.assign(SPANS, SIGNALS, DAPOConfig(reduction="sequence_mean")).token_weight_N
    close(by_rollout, per_trajectory(1 / 9, 1 / 9, 1 / 12, 0, 0, 0))
    close(dapo.assign(SPANS, SIGNALS, total=40).token_weight_N, per_trajectory(*[1 / 40] * 3, 0, 0, 0))


def test_dapo_gives_a_group_of_one_nothing_even_where_grpo_gives_its_reward():
    credit = dapo.assign(SPANS, SIGNALS, DAPOConfig(singleton="reward"))
    assert not credit.credit_N[25:].any() and not credit.token_weight_N[25:].any()
    assert dapo.assign(SPANS, SIGNALS, DAPOConfig(singleton="reward", dynamic=False)).credit_N[25] == 1


def test_dapo_of_a_batch_with_nothing_to_learn():
    equal = replace(SIGNALS, reward_B=torch.full((6,), 0.1))
    credit = dapo.assign(SPANS, equal)
    assert torch.equal(credit.credit_N, torch.zeros(30)) and torch.equal(credit.token_weight_N, torch.zeros(30))


@settings(deadline=None, max_examples=40)
@given(batches(), st.sampled_from(sorted(REDUCTIONS)))
def test_dapo_is_grpo_and_its_filter_only_renormalises(case, reduction):
    spans, signals = case
    plain = grpo.assign(spans, signals, GRPOConfig(reduction=reduction))
    credit = dapo.assign(spans, signals, DAPOConfig(reduction=reduction))
    assert torch.equal(credit.credit_N, plain.credit_N)
    whole = dapo.assign(spans, signals, DAPOConfig(reduction=reduction, dynamic=False))
    assert torch.equal(whole.credit_N, plain.credit_N) and torch.equal(whole.token_weight_N, plain.token_weight_N)

    keep_B = dynamic_sampling(signals.reward_B, spans)
    for i in range(spans.num_trajectories):
        mates = signals.reward_B[spans.group_of_trajectory == spans.group_of_trajectory[i]]
        assert keep_B[i] == (mates.min() != mates.max())
    keep_N = spans.mask & keep_B[spans.trajectory_of_token.clamp(min=0).long()]
    assert not credit.token_weight_N[~keep_N].any()
    assert (credit.token_weight_N[keep_N] > 0).all()
    assert credit.token_weight_N.sum().item() == pytest.approx(float(keep_N.any()), abs=1e-6)
    if keep_N.any():
        kept = plain.token_weight_N[keep_N].double()
        found = credit.token_weight_N[keep_N].double()
        torch.testing.assert_close(found, kept / kept.sum(), rtol=3 * 2**-24, atol=0)  # three roundings to float32


def test_soft_overlong_penalty_by_hand():
    """Limit 10, buffer 4: free up to 6 of the policy's own tokens, -1/4 for each more, -1 from 10 on."""
    spans = Spans.from_lengths(
        torch.tensor([3, 50, 3, 7, 8, 10, 12, 0]),
        action=torch.tensor([1, 0, 1, 1, 1, 1, 1, 1], dtype=torch.bool),
        turn=torch.zeros(8, dtype=torch.int64),
        trajectory=torch.tensor([0, 0, 0, 1, 2, 3, 4, 5]),
        group=torch.zeros(6, dtype=torch.int64),
    )
    wanted = [0, -0.25, -0.5, -1, -1, 0]
    assert soft_overlong_penalty(spans, 10, buffer=4).tolist() == wanted
    assert soft_overlong_penalty(spans, 10, buffer=4, factor=2.0).tolist() == [2 * value for value in wanted]
    for arguments, named in (
        ({"max_length": 10, "buffer": 0}, "buffer is 0"),
        ({"max_length": 10, "buffer": 11}, "buffer is 11 and max_length 10"),
        ({"max_length": 10, "buffer": 4, "factor": -1}, "factor is -1"),
    ):
        with pytest.raises(ValueError, match=named):
            soft_overlong_penalty(spans, **arguments)
    with pytest.raises(ValueError, match=r"reward has shape \[2\], want \[B\] = \[6\]"):
        dynamic_sampling(torch.zeros(2), spans)


def mt_credit(turn_rewards=None, **changes):
    signals = SIGNALS if turn_rewards is None else replace(SIGNALS, turn_reward_K=torch.tensor(turn_rewards).double())
    return mt_grpo.assign(SPANS, signals, MTGRPOConfig(**{"std_eps": 0.0, "lam": 0.5, **changes}))


def test_mt_grpo_by_hand():
    """Group 0: outcome -1, -2, 3 over sqrt(7); first turns 0, 2, 4: z -1, 0, 1; sums 1, 2, 9: -3, -2, 5 over sqrt(19).

    Rollout 2 has one turn, so the sum's. Group 1, one turn each: sums 1.5, .5, z +-sqrt(1/2). Rollout 5 is alone.
    """
    credit = mt_credit()
    assert type(credit) is AdditiveCredit and (credit.surrogate.low, credit.surrogate.high) == (0.2, 0.2)
    wanted = torch.zeros(30, dtype=torch.float64)
    wanted[[1, 2]], wanted[4] = -1 / ROOT7 - 0.5, -1 / ROOT7
    wanted[[6, 8, 9]] = -2 / ROOT7
    wanted[11:15] = 5 / 19**0.5
    wanted[15], wanted[[20, 21]] = 0.5**0.5, -(0.5**0.5)
    close(credit.credit_N, wanted)
    close(credit.advantage_N, per_trajectory(-1 / ROOT7, -2 / ROOT7, 3 / ROOT7, 0, 0, 0))
    assert torch.equal(credit.token_weight_N, token_mean(SPANS))
    population = mt_credit(unbiased=False)
    close(population.credit_N[4:5], torch.tensor([-1 / (14 / 3) ** 0.5], dtype=torch.float64))


def test_mt_grpo_adds_its_eps_to_each_std():
    found = mt_credit(std_eps=1.0).credit_N
    wanted = [-1 / (ROOT7 + 1) - 0.5 * 2 / (2 + 1), -1 / (ROOT7 + 1), 5 / (19**0.5 + 1)]
    close(found[[1, 4, 11]], torch.tensor(wanted, dtype=torch.float64))
    assert MTGRPOConfig().std_eps == 1e-4 and MTGRPOConfig().lam == 1


def test_mt_grpo_never_reads_later_turns():
    assert torch.equal(mt_credit([0.0, -3, 2, 7, 4, 1, 0, 1, 5]).credit_N, mt_credit().credit_N)


def test_mt_grpo_can_turn_the_verifiers_sign_round():
    """Rollouts 0 and 1 fail; the better first turn of rollout 1, 4 against 0 and 2, outweighs it at lam = 2."""
    credit = mt_credit([0.0, 9, 4, 9, 2, 1, 0, 1, 9], lam=2.0)
    assert credit.credit_N[6] > 0 > credit.advantage_N[6]
    assert credit.credit_N[8] < 0


@settings(deadline=None, max_examples=40)
@given(batches(), st.booleans())
def test_mt_grpo_without_a_first_turns_word_is_grpo_bitwise(case, unbiased):
    """lam = 0: wherever there are several turns; equal turn rewards: there, and everywhere else up to rounding."""
    spans, signals = case
    base = grpo.assign(spans, signals, GRPOConfig(std_eps=1e-4, unbiased=unbiased)).credit_N
    turns_B = torch.bincount(spans.trajectory_of_turn, minlength=spans.num_trajectories)
    several_N = spans.mask & (turns_B > 1)[spans.trajectory_of_token.clamp(min=0).long()]
    quiet = mt_grpo.assign(spans, signals, MTGRPOConfig(lam=0.0, unbiased=unbiased))
    assert torch.equal(quiet.credit_N[several_N], base[several_N])
    assert torch.equal(quiet.advantage_N, base)
    silent = replace(signals, turn_reward_K=torch.zeros_like(signals.turn_reward_K))
    equal = mt_grpo.assign(spans, silent, MTGRPOConfig(unbiased=unbiased)).credit_N
    assert torch.equal(equal[several_N], base[several_N])
    if (turns_B > 0).all():
        assert torch.equal(equal, base)


@settings(deadline=None, max_examples=40)
@given(batches(), st.sampled_from([0.5, 1.0, 3.0]))
def test_mt_grpo_moves_the_first_turn_only(case, lam):
    spans, signals = case
    credit = mt_grpo.assign(spans, signals, MTGRPOConfig(lam=lam))
    first_K = torch.ones(spans.num_turns, dtype=torch.bool)
    first_K[1:] = spans.trajectory_of_turn[1:] != spans.trajectory_of_turn[:-1]
    later_N = spans.mask & ~first_K[spans.turn_of_token.clamp(min=0).long()] if spans.num_turns else spans.mask
    assert torch.equal(credit.credit_N[later_N], credit.advantage_N[later_N])


@pytest.mark.parametrize("method", [dr_grpo, dapo, gspo, cispo, mt_grpo], ids=lambda method: method.__name__)
def test_bad_settings_are_named(method):
    with pytest.raises(ValueError, match="reduction is 'median'"):
        method.Config(reduction="median")
    with pytest.raises(ValueError, match="surrogate is 'ppo'"):
        method.Config(surrogate="ppo")
    with pytest.raises(ValueError, match=f"config is NoneType, want {method.Config.__name__}"):
        method.assign(SPANS, SIGNALS, None)
    for missing in method.needs:
        with pytest.raises(ValueError, match=f"signal {missing} is missing"):
            method.assign(SPANS, replace(SIGNALS, **{missing: None}))


def test_bad_numbers_are_named():
    for length in (0, -1, float("inf"), "long"):
        with pytest.raises(ValueError, match=f"length is {length!r}, want a number"):
            DrGRPOConfig(length=length)
    with pytest.raises(ValueError, match="lam is -1, want"):
        MTGRPOConfig(lam=-1)
    with pytest.raises(ValueError, match="std_eps is -1"):
        MTGRPOConfig(std_eps=-1)
    with pytest.raises(ValueError, match="config is GRPOConfig, want DAPOConfig"):
        dapo.assign(SPANS, SIGNALS, GRPOConfig())
