"""TRACE: numbers worked by hand for three rollouts, its limits, which actions are the answer, what is refused."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from every_signal import batches
from hypothesis import given, settings
from hypothesis import strategies as st

from crest_ops.methods import grpo, trace
from crest_ops.methods.trace import TraceConfig
from crest_ops.reductions import token_mean
from crest_ops.returns import k_step_credit, log_ratio_td
from crest_ops.signals import AdditiveCredit, Signals
from crest_ops.spans import Spans

EACH = settings(deadline=None, max_examples=40)
LOG2 = math.log(2)

# One group. Rollout 0: two tool calls of 2 and 1 tokens, an answer of 2. Rollout 1: an answer of 1. Rollout 2: none.
SPANS = Spans.from_lengths(
    torch.tensor([2, 1, 1, 2, 1, 3]),
    action=torch.tensor([True, False, True, True, True, False]),
    turn=torch.tensor([0, 0, 0, 1, 0, 0]),
    trajectory=torch.tensor([0, 0, 0, 0, 1, 2]),
    group=torch.tensor([0, 0, 0]),
)
SIGNALS = Signals(
    reward_B=torch.tensor([3.0, 0.0, 0.0], dtype=torch.float64),  # mean 1, population std sqrt 2
    # d = 4, 2, 1, 1/2 | 1, 8 | 2 with eps = .5: delta = log 2 each, then -3 log 2
    gold_logp=torch.tensor([-3.5, -1.5, -0.5, 0, -0.5, -7.5, -1.5], dtype=torch.float64),
    action_mask_S=torch.tensor([True, False, True, False]),
)
HAND = TraceConfig(eps=0.5, steps=2, gamma=0.5, alpha_turn=0.5, std_eps=0.0)
OUT = 2**0.5  # of rollout 0; the others have -1 / sqrt 2


def tokens(first, second, third, fourth):
    return torch.tensor([first, first, 0, second, third, third, fourth, 0, 0, 0], dtype=torch.float64)


def close(found, wanted, atol=1e-12):
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_by_hand(dtype):
    signals = Signals(reward_B=SIGNALS.reward_B.to(dtype), gold_logp=SIGNALS.gold_logp.to(dtype))
    credit = trace.assign(SPANS, signals, HAND)
    # Two calls: both differences are log 2, so is every mean; the end is 2 and 1 steps away: 2 * (1/4, 1/2) * OUT.
    calls = [OUT + 0.5 * (LOG2 + 0.5 * OUT), OUT + 0.5 * (LOG2 + OUT)]
    assert type(credit) is AdditiveCredit and credit.credit_N.dtype == credit.advantage_N.dtype == dtype
    close(credit.credit_N, tokens(*calls, OUT, -OUT / 2), atol=1e-6 if dtype == torch.float32 else 1e-12)
    close(credit.advantage_N, tokens(OUT, OUT, OUT, -OUT / 2), atol=1e-6)
    assert torch.equal(credit.token_weight_N, token_mean(SPANS))
    assert (credit.surrogate.low, credit.surrogate.high) == (0.2, 0.2) and credit.distill_N is None


def test_which_actions_are_the_answer():
    every = trace.assign(SPANS, SIGNALS, replace(HAND, answer="none")).credit_N
    calls = [OUT + 0.5 * LOG2, OUT + 0.5 * (LOG2 + 0.5 * OUT), OUT + 0.5 * (LOG2 + OUT)]
    close(every, tokens(*calls, -OUT / 2 + 0.5 * (-3 * LOG2 - OUT / 2)))
    # The second action of rollout 0 and rollout 1's are the answers; 1 and 3 are the calls.
    masked = trace.assign(SPANS, SIGNALS, replace(HAND, answer="action_mask")).credit_N
    close(masked, tokens(OUT + 0.5 * (LOG2 + 0.5 * OUT), OUT, OUT + 0.5 * (LOG2 + OUT), -OUT / 2))


@EACH
@given(batches(), st.sampled_from(["last", "none", "action_mask"]))
def test_the_turns_credit_is_added_to_the_outcomes(case, answer):
    spans, signals = case
    config = TraceConfig(answer=answer)
    credit = trace.assign(spans, signals, config)
    population = grpo.assign(spans, signals, grpo.GRPOConfig(unbiased=False)).credit_N
    assert torch.equal(credit.advantage_N, population)
    assert torch.equal(trace.assign(spans, signals, replace(config, alpha_turn=0.0)).credit_N, population)
    twice = trace.assign(spans, signals, replace(config, alpha_turn=0.4)).credit_N
    torch.testing.assert_close(twice - population, 2 * (credit.credit_N - population), rtol=0, atol=1e-12)
    last_S = torch.ones(spans.num_actions, dtype=torch.bool)
    last_S[:-1] = spans.trajectory_of_action[1:] != spans.trajectory_of_action[:-1]
    answer_S = {"last": last_S, "none": last_S & False, "action_mask": ~signals.action_mask_S}[answer]
    answer_N = spans.mask & answer_S[spans.action_of_token.clamp(min=0).long()] if spans.num_actions else spans.mask
    assert torch.equal(credit.credit_N[answer_N], population[answer_N])


@EACH
@given(batches())
def test_one_step_without_an_outcome_is_the_change_of_the_value(case):
    """Equal rewards: no outcome, so only the differences are left; they are not normalised over the group."""
    spans, signals = case
    signals = replace(signals, reward_B=torch.ones(spans.num_trajectories, dtype=torch.float64))
    credit = trace.assign(spans, signals, TraceConfig(steps=1, alpha_turn=1.0, answer="none"))
    delta_S = log_ratio_td(signals.gold_logp, spans, 0.1)
    places = torch.nonzero(spans.mask).flatten()
    assert torch.equal(credit.credit_N[places], delta_S[spans.action_of_token[places].long()])
    assert not credit.advantage_N.any()


def test_the_defaults_are_the_papers():
    config = TraceConfig()
    assert (config.alpha_out, config.alpha_turn, config.eps) == (1.0, 0.2, 0.1)
    assert (config.steps, config.gamma, config.answer) == (3, 0.8, "last")
    spans = Spans.from_mask(torch.tensor([[1, 0] * 5, [1, 0] * 5]).bool(), group=torch.tensor([0, 0]))
    signals = Signals(reward_B=torch.tensor([1.0, 0]).double(), gold_logp=-torch.arange(12.0, 0, -1).double())
    found = trace.assign(spans, signals).credit_N[::2]
    # Four calls of the first rollout: c_0 ends before the last call, c_1 .. c_3 get the fill .8^3, .8^2, .8 of A = 1.
    d = [12.1, 11.1, 10.1, 9.1, 8.1]
    delta = [math.log(a / b) for a, b in itertools.pairwise(d)]
    mean = [
        (delta[0] + 0.8 * delta[1] + 0.64 * delta[2]) / 2.44,
        (delta[1] + 0.8 * delta[2] + 0.64 * delta[3]) / 2.44 + 2 * 0.512,
        (delta[2] + 0.8 * delta[3]) / 1.8 + 2 * 0.64,
        delta[3] + 2 * 0.8,
    ]
    wanted = torch.tensor([1 + 0.2 * c for c in mean] + [1.0], dtype=torch.float64)
    torch.testing.assert_close(found[:5], wanted, rtol=0, atol=1e-5)  # std_eps


def test_a_turn_can_turn_the_sign_of_the_outcome_round():
    """A failed rollout whose call found the answer: its call is rewarded, its answer is not."""
    gold = torch.tensor([-9.9, 0, 0, -0.9, -0.9, -0.9], dtype=torch.float64)
    spans = Spans.from_mask(torch.tensor([[1, 0, 1], [1, 0, 1]]).bool(), group=torch.tensor([0, 0]))
    signals = Signals(reward_B=torch.tensor([0.0, 1.0]).double(), gold_logp=gold)
    credit = trace.assign(spans, signals, TraceConfig(alpha_turn=1.0))
    # log(10 / .1) = 4.605; the fill takes 2 * .8, the outcome 1.
    assert credit.credit_N[0].item() == pytest.approx(math.log(100) - 1.6 - 1, abs=1e-5)
    assert credit.credit_N[2].item() == pytest.approx(-1, abs=1e-5) and credit.advantage_N[0] < 0


def test_the_answer_ends_the_steps():
    """What the answer itself does to the gold answer's log-prob is not looked at."""
    changed = SIGNALS.gold_logp.clone()
    changed[[3, 5]] = -0.25
    found = trace.assign(SPANS, replace(SIGNALS, gold_logp=changed), HAND).credit_N
    assert torch.equal(found, trace.assign(SPANS, SIGNALS, HAND).credit_N)
    mask = torch.tensor([True, True, False, False])
    turn = k_step_credit(log_ratio_td(changed, SPANS, 0.5), SPANS, 2, 0.5, mask=mask)
    close(turn, torch.tensor([LOG2, LOG2, 0, 0], dtype=torch.float64))


def test_bad_settings_and_signals_are_named():
    for changes, message in (
        ({"eps": 0.0}, "eps is 0.0"),
        ({"eps": -0.1}, "eps is -0.1"),
        ({"alpha_out": -1.0}, "alpha_out is -1.0"),
        ({"alpha_turn": math.inf}, "alpha_turn is inf"),
        ({"gamma": 1.1}, "gamma is 1.1"),
        ({"steps": 0}, "steps is 0"),
        ({"steps": 2.5}, "steps is 2.5"),
        ({"answer": "first"}, "answer is 'first', want one of 'last', 'none', 'action_mask'"),
        ({"std_eps": -1.0}, "std_eps is -1.0"),
        ({"reduction": "mean"}, "reduction is 'mean'"),
    ):
        with pytest.raises(ValueError, match=message):
            TraceConfig(**changes)
    gold = SIGNALS.gold_logp
    for changes, message in (
        ({"gold_logp": None}, "signal gold_logp is missing"),
        ({"gold_logp": gold[:6]}, r"signal gold_logp has shape \[6\], want \[7\]"),
        ({"gold_logp": gold + 0.1}, r"signal gold_logp\[3\] is 0.1, want a value in \[-inf, 0\]"),
        ({"gold_logp": gold.log()}, r"signal gold_logp\[0\] is nan"),
        ({"reward_B": torch.zeros(2)}, r"signal reward_B has shape \[2\], want \[3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            trace.assign(SPANS, replace(SIGNALS, **changes))
    with pytest.raises(ValueError, match="signal action_mask_S is missing"):
        trace.assign(SPANS, replace(SIGNALS, action_mask_S=None), TraceConfig(answer="action_mask"))


def test_the_method_is_one_dynamic_graph():
    def credit(spans, signals):
        return trace.assign(spans, signals, HAND).credit_N

    found = torch.compile(credit, fullgraph=True, dynamic=True, backend="aot_eager")(SPANS, SIGNALS)
    torch.testing.assert_close(found, trace.assign(SPANS, SIGNALS, HAND).credit_N, rtol=0, atol=1e-12)
