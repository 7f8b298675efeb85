"""GiGPO: two rollouts by hand, its limits, and what anchor groups must not mix.

Shape letters: N token positions, S actions, B trajectories.
"""

from dataclasses import replace

import pytest
import torch
from every_signal import batches
from hypothesis import given, settings
from hypothesis import strategies as st

from crest_ops.methods import gigpo, grpo
from crest_ops.methods.gigpo import GiGPOConfig
from crest_ops.methods.grpo import GRPOConfig
from crest_ops.segments import segment_sum
from crest_ops.signals import AdditiveCredit, Signals
from crest_ops.spans import Spans

# Group 0: rollout 0 with actions of 2, 1 and 0 tokens, rollout 1 of 1 and 2; group 1: rollout 2 with one of 1 token.
SPANS = Spans.from_lengths(
    torch.tensor([3, 2, 1, 1, 1, 0, 1, 1, 2, 2, 1, 1]),
    action=torch.tensor([0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1], dtype=torch.bool),
    turn=torch.tensor([0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0]),
    trajectory=torch.tensor([0] * 6 + [1] * 4 + [2] * 2),
    group=torch.tensor([0, 0, 1]),
)
# With gamma 1/2 the returns are 1, 2, 4 | 2, 0 | 8. In group 0, state 7: 1, 4, 2, mean 7/3; state 9: 2, 0, mean 1.
SIGNALS = Signals(
    reward_B=torch.tensor([4.0, 2, 8], dtype=torch.float64),
    action_reward_S=torch.tensor([0.0, 0, 4, 2, 0, 8], dtype=torch.float64),
    state_key_S=torch.tensor([7, 9, 7, 7, 9, 7]),
)
EXACT = GiGPOConfig(gamma=0.5, std_eps=0.0)


def on_tokens(values):
    out = torch.zeros(SPANS.num_tokens, dtype=torch.float64)
    out[SPANS.mask] = torch.tensor(values, dtype=torch.float64)
    return out


def close(config, wanted):
    found = gigpo.assign(SPANS, SIGNALS, config).credit_N
    torch.testing.assert_close(found, on_tokens(wanted), rtol=0, atol=1e-12)


def test_by_hand():
    """A^E = 1, -1, 0; A^S = -4/3, 1, (5/3) | -1/3, -1 | 0. The first action turns the verifier's sign round."""
    close(EXACT, [-1 / 3, -1 / 3, 2, -4 / 3, -2, -2, 0])
    close(replace(EXACT, omega=0.5), [1 / 3, 1 / 3, 1.5, -7 / 6, -1.5, -1.5, 0])
    credit = gigpo.assign(SPANS, SIGNALS, EXACT)
    assert type(credit) is AdditiveCredit
    torch.testing.assert_close(credit.advantage_N, on_tokens([1, 1, 1, -1, -1, -1, 0]))
    torch.testing.assert_close(credit.token_weight_N.double(), on_tokens([1 / 7] * 7))
    assert (credit.surrogate.low, credit.surrogate.high) == (0.2, 0.2)


def test_with_the_std_by_hand():
    """Sample std: episodes sqrt(2), state 7 sqrt(((16 + 25 + 1) / 9) / 2) = sqrt(7/3), state 9 sqrt(2)."""
    half, seven = 0.5**0.5, (7 / 3) ** 0.5
    first, third = half - 4 / 3 / seven, -half - 1 / 3 / seven
    close(replace(EXACT, mode="mean_std_norm"), [first, first, 2 * half, third, -2 * half, -2 * half, 0])


def test_episode_statistics_over_actions_by_hand():
    """Rows 4, 4, 4, 2, 2: mean 3.2, variance (3 * .64 + 2 * 1.44) / 4 = 1.2; the action without a token counts."""
    rows = replace(EXACT, omega=0.0, episode_over="actions")
    close(rows, [0.8, 0.8, 0.8, -1.2, -1.2, -1.2, 0])
    std = 1.2**0.5
    close(replace(rows, mode="mean_std_norm"), [0.8 / std] * 3 + [-1.2 / std] * 3 + [0])


@pytest.mark.parametrize("episode_over", ["trajectories", "actions"])
def test_a_group_of_one_is_zero_or_by_choice_its_reward_and_its_actions_have_no_anchor(episode_over):
    config = replace(EXACT, episode_over=episode_over)
    assert gigpo.assign(SPANS, SIGNALS, config).credit_N[-1] == 0
    assert gigpo.assign(SPANS, SIGNALS, replace(config, singleton="reward")).credit_N[-1] == 8


configs = st.builds(
    GiGPOConfig,
    omega=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    gamma=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    mode=st.sampled_from(["mean_norm", "mean_std_norm"]),
    episode_over=st.sampled_from(["trajectories", "actions"]),
    singleton=st.sampled_from(["zero", "reward"]),
    unbiased=st.booleans(),
)


@settings(deadline=None, max_examples=40)
@given(batches(), configs)
def test_without_the_actions_word_it_is_grpo_bitwise(case, config):
    spans, signals = case
    config = replace(config, episode_over="trajectories")
    base = GRPOConfig(scale=config.scale, unbiased=config.unbiased, singleton=config.singleton)
    wanted = grpo.assign(spans, signals, base).credit_N
    alone = replace(signals, state_key_S=torch.arange(spans.num_actions))
    equal = replace(signals, action_reward_S=torch.zeros(spans.num_actions, dtype=torch.float64))
    for given_signals, given_config in ((signals, replace(config, omega=0.0)), (alone, config), (equal, config)):
        credit = gigpo.assign(spans, given_signals, given_config)
        assert torch.equal(credit.credit_N, wanted) and torch.equal(credit.advantage_N, wanted)


@settings(deadline=None, max_examples=40)
@given(batches(), configs)
def test_the_actions_word_sums_to_nothing_in_every_anchor_group(case, config):
    spans, signals = case
    credit = gigpo.assign(spans, signals, config)
    shift_S = torch.zeros(spans.num_actions, dtype=torch.float64)
    shift_S[spans.action_of_token[spans.mask].long()] = (credit.credit_N - credit.advantage_N)[spans.mask]
    group_S = spans.group_of_trajectory[spans.trajectory_of_action]
    pairs = [*zip(group_S.tolist(), signals.state_key_S.tolist(), strict=True)]
    known = sorted(set(pairs))
    anchor_S = torch.tensor([known.index(pair) for pair in pairs], dtype=torch.int64)
    written = torch.ones(len(known), dtype=torch.bool)
    written[anchor_S[spans.action_length == 0]] = False  # an action without a token is a member that shows nowhere
    torch.testing.assert_close(
        segment_sum(shift_S, anchor_S, len(known))[written], torch.zeros(int(written.sum()), dtype=torch.float64)
    )


@settings(deadline=None, max_examples=40)
@given(batches(), configs)
def test_only_the_equality_of_state_keys_counts(case, config):
    spans, signals = case
    names = torch.tensor([2**63 - 1, -(2**63), 0, -1, 2**62, 1 - 2**63])  # of the keys -3..2
    renamed = replace(signals, state_key_S=names[signals.state_key_S + 3])
    assert torch.equal(gigpo.assign(spans, renamed, config).credit_N, gigpo.assign(spans, signals, config).credit_N)


def test_gamma_decides_how_far_a_reward_reaches():
    for gamma, returns in ((0.0, [0, 0, 4, 2, 0]), (1.0, [4, 4, 4, 2, 0])):
        found = gigpo.assign(SPANS, SIGNALS, replace(EXACT, gamma=gamma))
        mean7, mean9 = (returns[0] + returns[2] + returns[3]) / 3, (returns[1] + returns[4]) / 2
        wanted = [returns[0] - mean7] * 2 + [returns[1] - mean9, returns[3] - mean7] + [returns[4] - mean9] * 2 + [0]
        torch.testing.assert_close(found.credit_N - found.advantage_N, on_tokens(wanted))


def test_a_shorter_way_from_a_shared_state_is_worth_more():
    """Both solve the task; from the state that both meet first, one needs one action and the other three."""
    spans = Spans.from_mask(torch.tensor([[1, 0, 0, 0, 0], [1, 0, 1, 0, 1]]).bool(), group=torch.tensor([0, 0]))
    given_signals = Signals(
        reward_B=torch.ones(2),
        action_reward_S=torch.tensor([1.0, 0, 0, 1]),
        state_key_S=torch.tensor([5, 5, 6, 7]),
    )
    credit = gigpo.assign(spans, given_signals)
    assert credit.credit_N[0] > 0 > credit.credit_N[5] and not credit.advantage_N.any()
    assert credit.credit_N[[7, 9]].tolist() == [0, 0]


def test_bad_settings_are_named():
    for name, value in (("mode", "std"), ("episode_over", "steps"), ("singleton", "one"), ("omega", -1), ("gamma", 2)):
        with pytest.raises(ValueError, match=f"{name} is {value!r}"):
            GiGPOConfig(**{name: value})
    with pytest.raises(ValueError, match="state_key_S has dtype torch.float32, want int"):
        gigpo.assign(SPANS, replace(SIGNALS, state_key_S=torch.zeros(6)))
