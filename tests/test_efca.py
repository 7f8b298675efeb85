"""EFCA: its two signals and its weight by hand, its properties, GiGPO as the limit.

Shape letters: N token positions, S actions.
"""

from dataclasses import replace

import pytest
import torch
from every_signal import batches
from hypothesis import given, settings
from hypothesis import strategies as st

from crest_ops.methods import efca, gigpo
from crest_ops.methods.efca import EFCAConfig, history_signal, reweighted_return
from crest_ops.methods.gigpo import GiGPOConfig
from crest_ops.signals import AdditiveCredit, Signals
from crest_ops.spans import Spans

WEIGHT = {"beta_feedback": 0.2, "beta_history": 0.2, "low": 0.5, "high": 1.5}


def one_token_actions(*lengths):
    """Trajectories of one group, the i-th with lengths[i] actions of one token, a tool token after each."""
    S = sum(lengths)
    return Spans.from_lengths(
        torch.ones(2 * S, dtype=torch.int64),
        action=torch.tensor([True, False] * S),
        turn=torch.zeros(2 * S, dtype=torch.int64),
        trajectory=torch.arange(len(lengths)).repeat_interleave(2 * torch.tensor(lengths)),
        group=torch.zeros(len(lengths), dtype=torch.int64),
    )


def test_history_by_hand():
    """Window 3. The second trajectory is too short for a window and borrows nothing from the first."""
    feedback = torch.tensor([-1, -1, -1, 0, -1, 1, -1, 0, 0, -1, -1])
    found = history_signal(feedback, one_token_actions(9, 2), window=3, eta=0.3)
    assert found.tolist() == [0, 0, -1, -0.3, -0.3, 0, 0, 0, -0.3, 0, 0]
    assert history_signal(feedback, one_token_actions(9, 2)).tolist() == [0, 0, 0, 0, -0.3, 0, 0, 0, 0, 0, 0]
    assert history_signal(feedback, one_token_actions(9, 2), window=1, eta=0.3).tolist() == pytest.approx(
        [-1, -1, -1, -0.3, -1, 0, -1, -0.3, -0.3, -1, -1]
    )


@settings(deadline=None, max_examples=40)
@given(batches(), st.integers(1, 6), st.sampled_from([0.0, 0.3, 1.0]), st.data())
def test_history_against_a_loop_and_without_the_future(case, window, eta, data):
    spans, signals = case
    feedback, trajectory = signals.feedback_S, spans.trajectory_of_action.tolist()
    wanted = []
    for t in range(spans.num_actions):
        seen = [int(feedback[s]) for s in range(t + 1) if trajectory[s] == trajectory[t]][-window:]
        stuck, idle = all(c == -1 for c in seen), all(c != 1 for c in seen)
        wanted.append(0.0 if len(seen) < window else -1.0 if stuck else -eta if idle else 0.0)
    found = history_signal(feedback, spans, window=window, eta=eta)
    assert found.tolist() == wanted
    if spans.num_actions:
        t = data.draw(st.integers(0, spans.num_actions - 1))
        later = feedback.clone()
        later[t + 1 :] = -later[t + 1 :]
        assert torch.equal(history_signal(later, spans, window=window, eta=eta)[: t + 1], found[: t + 1])


@pytest.mark.parametrize(
    ("feedback", "history", "wanted"),
    [
        (1, 0.0, [2.4, -1.6, 0]),  # w = 1.2
        (-1, 0.0, [1.6, -2.4, 0]),  # w = .8
        (-1, -1.0, [1.2, -2.8, 0]),  # w = .6
        (0, -0.3, [1.88, -2.12, 0]),  # w = .94
        (1, -1.0, [2, -2, 0]),  # w = 1
    ],
)
def test_reweighting_by_hand(feedback, history, wanted):
    returns = torch.tensor([2.0, -2, 0], dtype=torch.float64)
    found = reweighted_return(
        returns, torch.full((3,), feedback), torch.full((3,), history, dtype=torch.float64), **WEIGHT
    )
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-12)


def test_the_weight_is_bounded():
    returns = torch.tensor([2.0, -2], dtype=torch.float64)
    strong = {**WEIGHT, "beta_feedback": 4.0}
    for feedback, wanted in ((1, [3.0, -1.0]), (-1, [1.0, -3.0])):  # w = 1.5 and .5
        found = reweighted_return(returns, torch.full((2,), feedback), torch.zeros(2), **strong)
        assert found.tolist() == wanted


finite = st.floats(-100, 100)


@settings(deadline=None, max_examples=50)
@given(finite, st.floats(0, 5), st.floats(0, 5), st.floats(0, 1), st.floats(1, 2))
def test_sign_zero_and_monotony_of_the_reweighting(value, beta_feedback, beta_history, low, high):
    """Over all nine pairs of signals: no sign changes, 0 stays 0, a better reply never makes the return worse."""
    feedback = torch.tensor([-1, 0, 1]).repeat_interleave(3)
    history = torch.tensor([-1.0, -0.3, 0.0]).repeat(3)
    returns = torch.full((9,), value, dtype=torch.float64)
    found = reweighted_return(
        returns, feedback, history, beta_feedback=beta_feedback, beta_history=beta_history, low=low, high=high
    )
    slack = 1e-12 * abs(value)
    assert (found * value >= -slack).all()
    if value == 0:
        assert not found.any()
    elif low > 1e-6 and high < 2 - 1e-6:
        assert (found.sign() == returns.sign()).all()
    square = found.view(3, 3)
    assert (square.diff(dim=0) >= -slack).all() and (square.diff(dim=1) >= -slack).all()
    assert square[1, 2] == value  # both signals neutral: bitwise


# One group. Rollout 0: two actions, rollout 1: one. All in one state, gamma 1/2: returns 1, 2 | -2.
SPANS = one_token_actions(2, 1)
SIGNALS = Signals(
    reward_B=torch.tensor([1.0, 0], dtype=torch.float64),
    action_reward_S=torch.tensor([0.0, 2, -2], dtype=torch.float64),
    feedback_S=torch.tensor([-1, 1, -1]),
    state_key_S=torch.tensor([3, 3, 3]),
)


def test_by_hand():
    """Weights .8, 1.2, .8: returns .8, 2.4, -2.4, mean 4/15; A^E = 1/2, -1/2."""
    credit = efca.assign(SPANS, SIGNALS, EFCAConfig(gamma=0.5))
    assert type(credit) is AdditiveCredit
    wanted = torch.tensor([0.5 + 8 / 15, 0, 0.5 + 32 / 15, 0, -0.5 - 40 / 15, 0], dtype=torch.float64)
    torch.testing.assert_close(credit.credit_N, wanted, rtol=0, atol=1e-12)
    assert credit.advantage_N.tolist() == [0.5, 0, 0.5, 0, -0.5, 0]


def test_history_by_hand_in_the_credit():
    """Window 2, eta 1/2: the second action of rollout 0 saw -1, -1: w = 1 - .2 - .2 = .6, first .8, rollout 1 .8."""
    given_signals = replace(SIGNALS, feedback_S=torch.tensor([-1, -1, -1]))
    credit = efca.assign(SPANS, given_signals, EFCAConfig(gamma=0.5, window=2))
    returns = [0.8, 1.2, -2.4]
    mean = sum(returns) / 3
    wanted = torch.tensor([0.5 + 0.8 - mean, 0, 0.5 + 1.2 - mean, 0, -0.5 - 2.4 - mean, 0], dtype=torch.float64)
    torch.testing.assert_close(credit.credit_N, wanted, rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=40)
@given(batches(), st.sampled_from(["mean_norm", "mean_std_norm"]), st.sampled_from([torch.float32, torch.float64]))
def test_neutral_signals_are_gigpo_bitwise(case, mode, dtype):
    spans, signals = case
    signals = replace(signals, reward_B=signals.reward_B.to(dtype), action_reward_S=signals.action_reward_S.to(dtype))
    wanted = gigpo.assign(spans, signals, GiGPOConfig(mode=mode))
    silent = replace(signals, feedback_S=torch.zeros_like(signals.feedback_S))
    for given_signals, config in (
        (signals, EFCAConfig(mode=mode, beta_feedback=0.0, beta_history=0.0)),
        (signals, EFCAConfig(mode=mode, low=1, high=1)),
        (silent, EFCAConfig(mode=mode, window=50)),  # no trajectory is that long
        (silent, EFCAConfig(mode=mode, eta=0.0)),
    ):
        found = efca.assign(spans, given_signals, config)
        assert torch.equal(found.credit_N, wanted.credit_N)
        assert torch.equal(found.advantage_N, wanted.advantage_N)


def test_a_group_of_failures_without_a_reward_learns_nothing():
    nothing = replace(SIGNALS, reward_B=torch.zeros(2), action_reward_S=torch.zeros(3))
    assert not efca.assign(SPANS, nothing).credit_N.any()


def test_a_better_reply_gives_more_credit_for_either_sign_of_the_return():
    for action in (0, 2):
        credit = []
        for feedback in (-1, 0, 1):
            replies = SIGNALS.feedback_S.clone()
            replies[action] = feedback
            found = efca.assign(SPANS, replace(SIGNALS, feedback_S=replies), EFCAConfig(gamma=0.5))
            credit.append(found.credit_N[2 * action].item())
        assert credit[0] < credit[1] < credit[2]


def test_bad_settings_and_signals_are_named():
    for name, value in (("window", 0), ("window", 2.5), ("eta", 2), ("low", -1), ("high", 3), ("beta_history", -1)):
        with pytest.raises(ValueError, match=f"{name} is {value!r}"):
            EFCAConfig(**{name: value})
    for name in ("mode", "episode_over"):
        with pytest.raises(ValueError, match=f"{name} is 'x'"):
            EFCAConfig(**{name: "x"})
    with pytest.raises(ValueError, match=r"feedback has shape \[2\], want \[S\] = \[3\]"):
        history_signal(torch.zeros(2), SPANS)
    with pytest.raises(ValueError, match=r"signal feedback_S\[1\] is 2"):
        efca.assign(SPANS, replace(SIGNALS, feedback_S=torch.tensor([0, 2, 0])))
    with pytest.raises(ValueError, match="config is GiGPOConfig, want EFCAConfig"):
        efca.assign(SPANS, SIGNALS, GiGPOConfig())


@pytest.mark.parametrize(
    ("change", "said"),
    [({"low": 1.5}, "low is 1.5"), ({"high": 3}, "high is 3"), ({"beta_history": -1}, "beta_history")],
)
def test_numbers_of_the_weight_out_of_range_are_refused(change, said):
    settings = {"beta_feedback": 0.2, "beta_history": 0.2, "low": 0.5, "high": 1.5} | change
    with pytest.raises(ValueError, match=said):
        reweighted_return(torch.ones(2), torch.ones(2), torch.zeros(2), **settings)
