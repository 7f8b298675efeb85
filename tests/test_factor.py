"""FACTOR: numbers worked by hand for two rollouts, the properties P1-P8 end to end, presets, schedule, other tokens."""

import math
from dataclasses import replace

import pytest
import torch
from every_signal import batches
from hypothesis import given, settings
from hypothesis import strategies as st

from crest_ops.methods import factor
from crest_ops.methods.factor import FactorConfig, FactorTotal, shaped_reward
from crest_ops.reductions import action_mean, sequence_mean, token_mean
from crest_ops.segments import segment_mean
from crest_ops.signals import MultiplicativeCredit, Signals
from crest_ops.spans import Spans

EACH = settings(deadline=None, max_examples=40)
NAN = float("nan")
PRESETS = ("leave_one_out", "zscore", "raw")


def packed(lengths, trajectory, group):
    """Actions of these token counts, one position of tool output before each."""
    M = len(lengths)
    return Spans.from_lengths(
        torch.tensor([[1, length] for length in lengths], dtype=torch.int64).flatten(),
        action=torch.tensor([False, True] * M),
        turn=torch.zeros(2 * M, dtype=torch.int64),
        trajectory=torch.tensor(trajectory, dtype=torch.int64).repeat_interleave(2),
        group=torch.tensor(group),
    )


# Rollout 0: actions of 2, 1 and 3 tokens; rollout 1: of 0 and 2 tokens.
SPANS = packed([2, 1, 3, 0, 2], [0, 0, 0, 1, 1], [0, 0])
LOG2 = math.log(2)
SIGNALS = Signals(
    action_reward_S=torch.tensor([0.0, 0.5, 1.5, 0.25, 0.75], dtype=torch.float64),
    value_S=torch.tensor([50.0, 1.25, 3.0, -9.0, 0.5], dtype=torch.float64),
    teacher_gap_N=torch.tensor([NAN, 0, LOG2, NAN, 5, NAN, 0, 0, -LOG2, NAN, NAN, 0, 99], dtype=torch.float64),
)
# G = 2 and 1; leave-one-out b = 1 and 2, A = 1 and -1.
# A* = 0 + 1.25 - 1 = .25; .5 + 3 - 1.25 = 2.25; 1.5 + 0 - 3 = -1.5; none; .25 + .75 + 0 - 2 = -1.
ACTION_CREDIT = [0.25, 2.25, -1.5, 0.0, -1.0]
# omega: .3 + .7 * (2/3, 4/3); 1; against the sign: .3 + .7 * (3/4, 3/4, 3/2); the last gap is clipped to 3.
LAST = 2 / (1 + math.exp(3))
OMEGA = [
    [0.3 + 0.7 * 2 / 3, 0.3 + 0.7 * 4 / 3],
    [1],
    [0.825, 0.825, 1.35],
    [],
    [1 + 0.7 * (1 - LAST), 0.3 + 0.7 * LAST],
]


def on_tokens(per_action, outside=0.0):
    """Packed like SPANS from one list per action."""
    out = []
    for values in per_action:
        out += [outside, *values]
    return torch.tensor(out, dtype=torch.float64)


def total_of(values_S, spans):
    return torch.zeros(spans.num_trajectories, dtype=torch.float64).index_add(
        0, spans.trajectory_of_action, values_S.double()
    )


def mean_of_actions(values_N, spans):
    return segment_mean(values_N, spans.action_of_token, spans.num_actions)


def without_mask(signals):
    return replace(signals, action_mask_S=None)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_by_hand(dtype, atol):
    signals = Signals(
        action_reward_S=SIGNALS.action_reward_S.to(dtype),
        value_S=SIGNALS.value_S.to(dtype),
        teacher_gap_N=SIGNALS.teacher_gap_N.to(dtype),
    )
    credit = factor.assign(SPANS, signals)
    wanted = on_tokens([[a * w for w in omega] for a, omega in zip(ACTION_CREDIT, OMEGA, strict=True)])
    assert type(credit) is MultiplicativeCredit and credit.credit_N.dtype == credit.advantage_N.dtype == dtype
    torch.testing.assert_close(credit.credit_N.double(), wanted, rtol=0, atol=atol)
    plain = on_tokens([[a] * len(omega) for a, omega in zip(ACTION_CREDIT, OMEGA, strict=True)])
    torch.testing.assert_close(credit.advantage_N.double(), plain, rtol=0, atol=atol)
    weight = on_tokens([[1 / 8] * 2, [1 / 4], [1 / 12] * 3, [], [1 / 8] * 2])  # four actions hold a token
    torch.testing.assert_close(credit.token_weight_N.double(), weight, rtol=0, atol=1e-7)
    assert credit.distill_N is None and (credit.surrogate.low, credit.surrogate.high) == (0.2, 0.2)


def test_uniform_potential_by_hand():
    config = FactorConfig(eta=0.0, potential="uniform")
    credit = factor.assign(SPANS, Signals(action_reward_S=SIGNALS.action_reward_S), config)
    wanted = on_tokens([[1 / 3] * 2, [1 / 3], [1 / 3] * 3, [], [-1] * 2])
    torch.testing.assert_close(credit.credit_N, wanted, rtol=0, atol=1e-12)


def test_presets_by_hand():
    spans = packed([1, 1, 1, 1, 0, 2], [0, 0, 1, 2, 2, 3], [0, 0, 0, 1])
    reward = torch.tensor([1.0, 2, 6, 3, 0, 7], dtype=torch.float64)  # G = 3, 6, 3 | 7: mean 4, population std sqrt 2
    scale = 1 / (2**0.5 + 1e-8)
    for preset, rewards, baseline, advantage in (
        ("raw", reward.tolist(), [0, 0, 0, 0], [3, 6, 3, 7]),
        ("leave_one_out", reward.tolist(), [4.5, 3, 4.5, 7], [-1.5, 3, -1.5, 0]),
        ("zscore", [scale, -2 * scale, 2 * scale, 3 * scale, -4 * scale, 0], [0] * 4, [-scale, 2 * scale, -scale, 0]),
    ):
        found, b = shaped_reward(reward, spans, preset)
        for values, wanted in ((found, rewards), (b, baseline), (total_of(found, spans) - b, advantage)):
            torch.testing.assert_close(values, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("preset", "reward"),
    [
        ("leave_one_out", [0.1, 0.1, 0.1]),
        ("zscore", [0.1, 0.1, 0.1]),
        ("zscore", [0.3, 0.3, 0.3 + 4e-7]),  # a spread below 1e-6 is none
    ],
)
def test_equal_returns_give_exactly_no_advantage(preset, reward):
    spans = packed([1, 2, 1], [0, 1, 2], [0, 0, 0])
    config = FactorConfig(eta=0.0, potential="uniform", advantage=preset)
    signals = Signals(action_reward_S=torch.tensor(reward, dtype=torch.float64))
    assert not factor.assign(spans, signals, config).credit_N.any()


@st.composite
def cases(draw, **options):
    spans, signals = draw(batches(**options))
    config = FactorConfig(
        eta=draw(st.sampled_from([0.0, 0.7, 1.0])),
        tau=draw(st.sampled_from([0.5, 1.0])),
        potential=draw(st.sampled_from(["value", "uniform"])),
        advantage=draw(st.sampled_from(PRESETS)),
    )
    return spans, without_mask(signals), config


@EACH
@given(cases(), st.integers(0, 2**31), st.sampled_from([1.0, 100.0]))
def test_credit_is_conserved_down_to_the_tokens(case, seed, scale):
    """P1, P2: token means sum to the advantage of the trajectory, for any value function, teacher, eta and tau."""
    spans, signals, config = case
    reward_S, baseline_B = shaped_reward(signals.action_reward_S, spans, config.advantage)
    wanted = torch.where(spans.trajectory_length > 0, total_of(reward_S, spans) - baseline_B, 0)
    g = torch.Generator().manual_seed(seed)
    for value in (signals.value_S, scale * torch.randn(spans.num_actions, generator=g, dtype=torch.float64)):
        credit = factor.assign(spans, replace(signals, value_S=value), config)
        mean_S = mean_of_actions(credit.credit_N, spans)
        torch.testing.assert_close(mean_S, mean_of_actions(credit.advantage_N, spans), rtol=0, atol=1e-12 * scale)
        torch.testing.assert_close(total_of(mean_S, spans), wanted, rtol=0, atol=1e-12 * scale)


@EACH
@given(cases(dtype=torch.float32))
def test_credit_is_conserved_in_float32(case):
    spans, signals, config = case
    credit = factor.assign(spans, signals, config)
    assert credit.credit_N.dtype == torch.float32
    reward_S, baseline_B = shaped_reward(signals.action_reward_S, spans, config.advantage)
    wanted = torch.where(spans.trajectory_length > 0, total_of(reward_S, spans) - baseline_B, 0)
    mean_S = mean_of_actions(credit.credit_N.double(), spans)
    torch.testing.assert_close(total_of(mean_S, spans), wanted, rtol=0, atol=1e-5)


@EACH
@given(cases())
def test_the_teacher_never_turns_the_sign_and_never_goes_below_its_floor(case):
    """P3."""
    spans, signals, config = case
    credit = factor.assign(spans, signals, config)
    assert torch.equal(credit.credit_N.sign(), credit.advantage_N.sign())
    assert (credit.credit_N.abs() >= (1 - config.eta) * credit.advantage_N.abs() * (1 - 1e-12)).all()


@EACH
@given(cases())
def test_the_surrogate_on_policy_is_the_mean_action_credit(case):
    """P4: in value; the gradient is another matter, sum_j C_j grad logp_j / L, and does depend on the teacher."""
    spans, signals, config = case
    credit = factor.assign(spans, signals, config)
    surrogate = credit.surrogate.evaluate(torch.zeros(spans.num_tokens, dtype=torch.float64), credit.credit_N, spans)
    assert not surrogate.clipped.any()
    inner_S = -mean_of_actions(surrogate.value, spans)
    torch.testing.assert_close(inner_S, mean_of_actions(credit.advantage_N, spans), rtol=0, atol=1e-12)
    loss = (credit.token_weight_N.double() * surrogate.value).sum()
    count = int((spans.action_length > 0).sum())
    torch.testing.assert_close(loss, -inner_S.sum() / max(count, 1), rtol=0, atol=1e-5)


def test_an_actions_weight_does_not_depend_on_its_length():
    """P5: under the action mean; under the token mean it does."""

    def weights(first, reduction):
        spans = packed([first, 2], [0, 0], [0])
        reward = torch.tensor([1.0, 1.0])
        config = FactorConfig(eta=0.0, potential="uniform", advantage="raw", reduction=reduction)
        credit = factor.assign(spans, Signals(action_reward_S=reward), config)
        share = credit.token_weight_N * credit.credit_N
        return [share[spans.action_of_token == i].sum().item() for i in range(2)]

    assert weights(3, "action_mean") == pytest.approx([0.5, 0.5]) == weights(6, "action_mean")
    short, long = weights(3, "token_mean"), weights(6, "token_mean")
    assert long[0] / long[1] == pytest.approx(2 * short[0] / short[1]) == pytest.approx(3)


@EACH
@given(cases())
def test_without_a_teachers_word_every_token_has_its_actions_credit(case):
    """P7: bitwise for eta = 0, to rounding where the gap is constant."""
    spans, signals, config = case
    plain = factor.assign(spans, replace(signals, teacher_gap_N=None), replace(config, eta=0.0))
    assert torch.equal(plain.credit_N, plain.advantage_N)
    constant = factor.assign(spans, replace(signals, teacher_gap_N=torch.full((spans.num_tokens,), 1.7)), config)
    torch.testing.assert_close(constant.credit_N, plain.credit_N, rtol=1e-6, atol=0)


@EACH
@given(cases(), st.floats(0.1, 3), st.integers(0, 1000))
def test_credit_moves_with_the_gap_in_the_direction_of_the_action(case, raised, at):
    """P6: C itself never falls where the gap rises, whatever the sign of the action."""
    spans, signals, config = case
    places = torch.nonzero(spans.mask).flatten()
    if len(places) == 0:
        return
    n = places[at % len(places)]
    louder = signals.teacher_gap_N.clone()
    louder[n] += raised
    before, after = (
        factor.assign(spans, given, config).credit_N[n] for given in (signals, replace(signals, teacher_gap_N=louder))
    )
    assert after >= before - 1e-12


def test_gaps_past_the_clip_are_all_the_same():
    """P8: a shift inside an action says nothing until the clip binds."""
    gap = SIGNALS.teacher_gap_N.clone()
    found = factor.assign(SPANS, replace(SIGNALS, teacher_gap_N=gap.clamp(-3, 3))).credit_N
    assert torch.equal(found, factor.assign(SPANS, SIGNALS).credit_N)
    gap[1:3] += 2  # 0, log 2 become 2, 2.69: no clip
    torch.testing.assert_close(factor.assign(SPANS, replace(SIGNALS, teacher_gap_N=gap)).credit_N, found)
    gap[1:3] += 2  # both clipped to 3
    clipped = factor.assign(SPANS, replace(SIGNALS, teacher_gap_N=gap)).credit_N
    assert clipped[1:3].tolist() == pytest.approx([0.25, 0.25]) and clipped[1] > found[1]


def test_other_tokens_carry_the_trajectorys_advantage_under_their_own_mean():
    """Rollout 0's second action is thought: no step, its reward goes to the first."""
    mask = torch.tensor([True, False, True, True, True])
    credit = factor.assign(SPANS, replace(SIGNALS, action_mask_S=mask))
    # A* = 0 + .5 + 3 - 1 = 2.5; -1.5, as before; A = 1 on the thought.
    actions = [2.5, 1.0, -1.5, 0.0, -1.0]
    wanted = on_tokens([[a * w for w in omega] for a, omega in zip(actions, OMEGA, strict=True)])
    torch.testing.assert_close(credit.credit_N, wanted, rtol=0, atol=1e-12)
    weight = on_tokens([[1 / 6] * 2, [1], [1 / 9] * 3, [], [1 / 6] * 2])  # three actions that act; one other token
    torch.testing.assert_close(credit.token_weight_N.double(), weight, rtol=0, atol=1e-7)
    one_mean = factor.assign(SPANS, replace(SIGNALS, action_mask_S=mask), FactorConfig(reduction="token_mean"))
    assert torch.equal(one_mean.token_weight_N, token_mean(SPANS))
    everything = factor.assign(SPANS, replace(SIGNALS, action_mask_S=torch.ones(5, dtype=torch.bool)))
    assert torch.equal(everything.credit_N, factor.assign(SPANS, SIGNALS).credit_N)
    assert torch.equal(everything.token_weight_N, action_mean(SPANS))
    nothing = factor.assign(SPANS, replace(SIGNALS, action_mask_S=torch.zeros(5, dtype=torch.bool)))
    assert torch.equal(nothing.token_weight_N, token_mean(SPANS))
    assert torch.equal(nothing.credit_N, on_tokens([[1.0] * 2, [1.0], [1.0] * 3, [], [-1.0] * 2]))


@EACH
@given(batches(), st.sampled_from(PRESETS))
def test_the_steps_keep_the_total_whatever_is_left_out(case, preset):
    spans, signals = case
    credit = factor.assign(spans, signals, FactorConfig(advantage=preset))
    reward_S, baseline_B = shaped_reward(signals.action_reward_S, spans, preset)
    advantage_B = total_of(reward_S, spans) - baseline_B
    acts_S = signals.action_mask_S & (spans.action_length > 0)
    acts_B = total_of(acts_S, spans) > 0
    found = total_of(torch.where(acts_S, mean_of_actions(credit.credit_N, spans), 0), spans)
    torch.testing.assert_close(found, torch.where(acts_B, advantage_B, 0), rtol=0, atol=1e-12)
    other_N = spans.mask & ~signals.action_mask_S[spans.action_of_token.clamp(min=0).long()]
    torch.testing.assert_close(credit.credit_N[other_N], advantage_B[spans.trajectory_of_token[other_N].long()])


def test_the_forward_kl_weighs_action_tokens_alone():
    signals = replace(SIGNALS, action_mask_S=torch.tensor([True, False, True, True, True]))
    credit = factor.assign(SPANS, signals, FactorConfig(lam_kl=0.5))
    assert credit.distill_kind == "forward_kl"
    weight = on_tokens([[0.5 / 7] * 2, [0], [0.5 / 7] * 3, [], [0.5 / 7] * 2])
    torch.testing.assert_close(credit.distill_N.double(), weight, rtol=0, atol=1e-7)
    assert torch.equal(credit.credit_N, factor.assign(SPANS, signals).credit_N)


def test_pieces_of_a_batch_add_up_to_the_whole():
    mask = torch.tensor([True, False, True, True, True])
    config = FactorConfig(lam_kl=0.5, advantage="raw")
    whole = factor.assign(SPANS, replace(SIGNALS, action_mask_S=mask), config)
    total = FactorTotal(reduction=3, action_tokens=7, other_tokens=1)
    found = []
    for i, actions, tokens in ((0, slice(0, 3), slice(0, 9)), (1, slice(3, 5), slice(9, 13))):
        spans = packed([[2, 1, 3], [0, 2]][i], [0] * [3, 2][i], [0])
        signals = Signals(
            action_reward_S=SIGNALS.action_reward_S[actions],
            value_S=SIGNALS.value_S[actions],
            teacher_gap_N=SIGNALS.teacher_gap_N[tokens],
            action_mask_S=mask[actions],
        )
        found.append(factor.assign(spans, signals, config, total=total))
    for name in ("credit_N", "token_weight_N", "distill_N"):
        torch.testing.assert_close(torch.cat([getattr(piece, name) for piece in found]), getattr(whole, name))
    plain = factor.assign(SPANS, SIGNALS, FactorConfig(reduction="sequence_mean"), total=8)
    assert torch.equal(plain.token_weight_N, sequence_mean(SPANS, total=8))
    for signals, options in ((replace(SIGNALS, action_mask_S=mask), {}), (SIGNALS, {"lam_kl": 1.0})):
        with pytest.raises(ValueError, match="total is 8, want a FactorTotal"):
            factor.assign(SPANS, signals, FactorConfig(**options), total=8)


def test_schedule_of_the_paper():
    config = FactorConfig(lam_kl=1.0)
    for step, eta, potential, lam_kl in (
        (1, 0.0, "uniform", 0.98),
        (10, 0.0, "uniform", 0.8),
        (11, 0.7 * 0.78, "value", 0.78),
        (25, 0.35, "value", 0.5),
        (49, 0.7 * 0.02, "value", 0.02),
        (50, 0.0, "value", 0.0),
        (400, 0.0, "value", 0.0),
    ):
        now = config.at(step)
        assert (now.eta, now.lam_kl) == (pytest.approx(eta, abs=1e-12), pytest.approx(lam_kl, abs=1e-12))
        assert now.potential == potential
    assert config.at(50).eta == 0 and config.at(50).lam_kl == 0
    with pytest.raises(ValueError, match="step is -1"):
        config.at(-1)


def test_needs_follow_the_settings():
    assert factor.needs == ("action_reward_S", "value_S", "teacher_gap_N")
    assert FactorConfig(potential="uniform").needs == ("action_reward_S", "teacher_gap_N")
    assert FactorConfig().at(1).needs == ("action_reward_S",)
    assert FactorConfig().at(60).needs == ("action_reward_S", "value_S")
    assert FactorConfig(lam_kl=1.0).at(1).needs == ("action_reward_S", "teacher_gap_N")


def test_bad_settings_and_signals_are_named():
    for changes, message in (
        ({"eta": 1.5}, "eta is 1.5"),
        ({"tau": 0.0}, "tau is 0.0"),
        ({"clip": -3.0}, "clip is -3.0"),
        ({"lam_kl": -1.0}, "lam_kl is -1.0"),
        ({"warmup": -1}, "warmup is -1"),
        ({"decay_steps": 0}, "decay_steps is 0"),
        ({"potential": "critic"}, "potential is 'critic', want one of 'value', 'uniform'"),
        ({"advantage": "mean"}, "advantage is 'mean', want one of 'leave_one_out', 'zscore', 'raw'"),
        ({"reduction": "mean"}, "reduction is 'mean'"),
    ):
        with pytest.raises(ValueError, match=message):
            FactorConfig(**changes)
    for changes, message in (
        ({"value_S": None}, "signal value_S is missing"),
        ({"value_S": torch.zeros(4)}, r"signal value_S has shape \[4\], want \[5\]"),
        ({"teacher_gap_N": None}, "signal teacher_gap_N is missing"),
        ({"action_mask_S": torch.ones(4, dtype=torch.bool)}, r"signal action_mask_S has shape \[4\]"),
        ({"action_reward_S": torch.tensor([0, 1, NAN, 0, 0])}, r"signal action_reward_S\[2\] is nan"),
    ):
        with pytest.raises(ValueError, match=message):
            factor.assign(SPANS, replace(SIGNALS, **changes))
