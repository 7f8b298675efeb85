"""RLSD and SERL: numbers by hand, the bounds of the teacher's weight, GRPO as their limit."""

import math
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
import torch
from crest_train.config import TeacherSection
from crest_train.contexts import CONTEXTS
from every_signal import batches
from hypothesis import given, settings
from hypothesis import strategies as st

from crest_ops.methods import grpo, rlsd, serl
from crest_ops.methods.rlsd import RLSDConfig
from crest_ops.methods.serl import FEEDBACK_SOURCES, GRANULARITIES, SERLConfig
from crest_ops.segments import segment_mean
from crest_ops.signals import MultiplicativeCredit, Signals
from crest_ops.spans import Spans

NAN = float("nan")
BOTH = pytest.mark.parametrize("method", [rlsd, serl], ids=["rlsd", "serl"])
SHARE = {rlsd: "lam", serl: "alpha"}

# One group of two rollouts with advantages +1 and -1; each two actions, of 2 and 1 tokens, tool output before each.
SPANS = Spans.from_lengths(
    torch.tensor([1, 2, 1, 1, 1, 2, 1, 1]),
    action=torch.tensor([0, 1, 0, 1, 0, 1, 0, 1], dtype=torch.bool),
    turn=torch.zeros(8, dtype=torch.int64),
    trajectory=torch.tensor([0] * 4 + [1] * 4),
    group=torch.tensor([0, 0]),
)
GAP = [NAN, 0.1, -0.1, NAN, 5, NAN, 0.1, -5, NAN, 0]
SIGNALS = Signals(reward_B=torch.tensor([1.0, 0], dtype=torch.float64), teacher_gap_N=torch.tensor(GAP).double())
EXACT = {"unbiased": False, "std_eps": 0.0}
# e^.1 = 1.1051709181 and e^-.1 = .9048374180; half of what w is above 1; past the clip w - 1 = +-.2.
FIRST, SECOND = [0, 1.0525854590, 0.9524187090, 0], [0, -0.9524187090, -1.1, 0]


@BOTH
def test_by_hand(method):
    credit = method.assign(SPANS, SIGNALS, method.Config(**EXACT))
    wanted = torch.tensor([*FIRST, 1.1, *SECOND, -1], dtype=torch.float64)
    torch.testing.assert_close(credit.credit_N, wanted, rtol=0, atol=1e-9)
    torch.testing.assert_close(credit.token_weight_N, torch.where(SPANS.mask, 1 / 6, 0.0))
    assert get_type_hints(method.assign)["return"] is type(credit) is MultiplicativeCredit
    assert credit.advantage_N.tolist() == [0, 1, 1, 0, 1, 0, -1, -1, 0, -1]


def test_serl_leaves_tokens_outside_environment_facing_actions_to_grpo_by_hand():
    facing = replace(SIGNALS, action_mask_S=torch.tensor([False, True, True, False]))
    found = serl.assign(SPANS, facing, SERLConfig(**EXACT)).credit_N
    wanted = torch.tensor([0, 1, 1, 0, 1.1, *SECOND, -1], dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)
    assert not torch.equal(rlsd.assign(SPANS, facing, RLSDConfig(**EXACT)).credit_N, found)


@BOTH
def test_the_share_decays_to_nothing_over_fifty_steps(method):
    config = method.Config()
    share = SHARE[method]
    assert (getattr(config, share), config.steps, config.eps_w) == (0.5, 50, 0.2)
    found = [getattr(config.at(step), share) for step in (0, 10, 25, 49, 50, 51, 1000)]
    assert found == pytest.approx([0.5, 0.4, 0.25, 0.01, 0, 0, 0]) and found[4:] == [0, 0, 0]
    assert replace(config.at(10), **{share: 0.5}) == config
    assert getattr(method.Config(steps=10).at(5), share) == 0.25
    with pytest.raises(ValueError, match="step is -1"):
        config.at(-1)


@BOTH
@settings(deadline=None, max_examples=40)
@given(case=batches(), share=st.floats(0, 1), eps=st.floats(0, 1), scale=st.sampled_from([0.1, 1.0, 1e3]))
def test_sign_kept_and_factor_bounded(method, case, share, eps, scale):
    spans, signals = case
    signals = replace(signals, teacher_gap_N=scale * signals.teacher_gap_N)
    config = method.Config(eps_w=eps, **{SHARE[method]: share})
    plain, credit = grpo.assign(spans, signals).credit_N, method.assign(spans, signals, config).credit_N
    assert (credit * plain >= 0).all() and not credit[plain == 0].any()
    if share * eps < 1:
        assert torch.equal(credit.sign(), plain.sign())
    factor = credit[plain != 0] / plain[plain != 0]
    assert ((factor >= 1 - share * eps - 1e-12) & (factor <= 1 + share * eps + 1e-12)).all()


@BOTH
@settings(deadline=None, max_examples=40)
@given(case=batches(), share=st.floats(0, 1))
def test_without_a_teachers_word_it_is_grpo_bitwise(method, case, share):
    spans, signals = case
    base = grpo.assign(spans, signals, grpo.GRPOConfig(reduction="token_mean"))
    silent = replace(signals, teacher_gap_N=torch.zeros(spans.num_tokens, dtype=torch.float64))
    for given_, config in (
        (signals, method.Config(**{SHARE[method]: 0.0})),
        (signals, method.Config(**{SHARE[method]: share}).at(50)),
        (silent, method.Config(**{SHARE[method]: share})),
    ):
        credit = method.assign(spans, given_, config)
        assert torch.equal(credit.credit_N, base.credit_N)
        assert torch.equal(credit.token_weight_N, base.token_weight_N)
        assert credit.surrogate == base.surrogate


@BOTH
def test_the_size_rises_with_the_gap_in_successes_and_falls_in_failures(method):
    sizes = []
    for gap in torch.linspace(-0.5, 0.5, 21, dtype=torch.float64):
        given_ = replace(SIGNALS, teacher_gap_N=torch.where(SPANS.mask, gap, NAN))
        sizes.append(method.assign(SPANS, given_, method.Config(**EXACT)).credit_N[[1, 6]].abs())
    up, down = torch.stack(sizes).T
    assert (up.diff() >= 0).all() and (down.diff() <= 0).all()
    assert up[0].item() == pytest.approx(0.9) and up[-1].item() == pytest.approx(1.1)
    assert down[0].item() == pytest.approx(1.1) and down[-1].item() == pytest.approx(0.9)


@settings(deadline=None, max_examples=40)
@given(batches())
def test_serl_touches_no_other_token_and_equals_rlsd_on_actions(case):
    spans, signals = case
    facing_N = torch.cat([signals.action_mask_S, torch.tensor([False])])[spans.action_of_token.long()]
    plain = grpo.assign(spans, signals).credit_N
    found = serl.assign(spans, signals, SERLConfig()).credit_N
    teacher = rlsd.assign(spans, signals, RLSDConfig()).credit_N
    assert torch.equal(found, torch.where(facing_N, teacher, plain))
    everywhere = replace(signals, action_mask_S=None)
    assert torch.equal(serl.assign(spans, everywhere, SERLConfig()).credit_N, teacher)


def test_serl_does_not_conserve_an_actions_mean():
    credit = serl.assign(SPANS, SIGNALS, SERLConfig(**EXACT))
    mean_S = segment_mean(credit.credit_N, SPANS.action_of_token, 4)
    mean = (1.0525854590 + 0.9524187090) / 2
    torch.testing.assert_close(mean_S[0].item(), mean, rtol=0, atol=1e-9)
    assert abs(mean_S[0].item() - 1) > 1e-3


def test_serls_forward_kl_is_a_flag():
    assert serl.assign(SPANS, SIGNALS).distill_N is None and serl.assign(SPANS, SIGNALS).distill_kind is None
    config = SERLConfig(kl=True)
    facing = replace(SIGNALS, action_mask_S=torch.tensor([False, True, True, False]))
    credit = serl.assign(SPANS, facing, config)
    assert credit.distill_kind == "forward_kl"
    torch.testing.assert_close(credit.distill_N, torch.tensor([0, 0, 0, 0, 1, 0, 1, 1, 0, 0]) * (0.5 / 6))
    assert torch.equal(credit.credit_N, serl.assign(SPANS, facing).credit_N)
    assert not serl.assign(SPANS, facing, config.at(50)).distill_N.any()
    doubled = serl.assign(SPANS, facing, config, total=12)
    torch.testing.assert_close(2 * doubled.distill_N, credit.distill_N)


def test_five_sources_and_two_granularities():
    assert FEEDBACK_SOURCES == (
        "feedback",
        "next_observation",
        "future_trajectory",
        "successful_sibling",
        "hindsight_skill",
    )
    assert GRANULARITIES == ("step", "anchor")
    assert set(FEEDBACK_SOURCES) <= set(CONTEXTS)
    assert set(GRANULARITIES) <= set(get_args(TeacherSection.model_fields["insert"].annotation))


@BOTH
def test_the_exponent_never_overflows(method):
    """Gaps are clamped before exp: with eps 1 the weight is e^-20 at least and 2 at most, in float32 too."""
    for dtype in (torch.float32, torch.float64):
        given_ = Signals(
            reward_B=torch.tensor([1.0, 0], dtype=dtype),
            teacher_gap_N=torch.full((10,), 1e30, dtype=dtype),
        )
        config = method.Config(eps_w=1.0, **EXACT, **{SHARE[method]: 1.0})
        credit = method.assign(SPANS, given_, config).credit_N
        assert credit.dtype == dtype
        torch.testing.assert_close(credit[1].item(), 2.0)
        assert credit[6].item() == pytest.approx(-math.exp(-20), abs=1e-7)


@BOTH
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eps_w": 1.5}, "eps_w is 1.5, want a number with 0 <= eps_w <= 1"),
        ({"steps": 0}, "steps is 0, want a number"),
        ({"std_eps": -1.0}, "std_eps is -1.0"),
        ({"reduction": "median"}, "reduction is 'median', want one of 'token_mean'"),
        ({"surrogate": "ppo"}, "surrogate is 'ppo'"),
    ],
)
def test_bad_settings_are_named(method, changes, message):
    with pytest.raises(ValueError, match=message):
        method.Config(**changes)
    with pytest.raises(ValueError, match=f"{SHARE[method]} is -0.1, want a number with 0 <= {SHARE[method]} <= 1"):
        method.Config(**{SHARE[method]: -0.1})


def test_bad_signals_are_named():
    with pytest.raises(ValueError, match="signal action_mask_S has dtype torch.int64, want bool"):
        serl.assign(SPANS, replace(SIGNALS, action_mask_S=torch.ones(4, dtype=torch.int64)))
    with pytest.raises(ValueError, match=r"signal action_mask_S has shape \[3\], want \[4\]"):
        serl.assign(SPANS, replace(SIGNALS, action_mask_S=torch.ones(3, dtype=torch.bool)))
    with pytest.raises(ValueError, match="kl is 'yes'"):
        SERLConfig(kl="yes")
    gap = torch.tensor(GAP)
    gap[4] = math.inf
    with pytest.raises(ValueError, match=r"signal teacher_gap_N\[4\] is inf, want finite"):
        rlsd.assign(SPANS, replace(SIGNALS, teacher_gap_N=gap))
