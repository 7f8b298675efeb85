"""How much credit: literal numbers, groups of one, absent turns, zero variance, cut-off turns, anchor states."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crest_ops.advantages import (
    anchor_advantage,
    anchor_of_action,
    group_advantage,
    leave_one_out_advantage,
    turn_advantage,
)
from crest_ops.spans import Spans

HALF = 0.5**0.5


def spans_of(groups, turns):
    """Trajectories without tokens: turns[i] lists the turn indices that trajectory i holds."""
    index = [k for ks in turns for k in ks]
    trajectory = [i for i, ks in enumerate(turns) for _ in ks]
    return Spans(
        torch.empty(0, dtype=torch.int32),
        torch.arange(len(index)),
        torch.tensor(trajectory, dtype=torch.int64),
        torch.tensor(groups),
        torch.tensor(index, dtype=torch.int64),
    )


def close(found, wanted):
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=found.dtype), rtol=1e-6, atol=1e-6)


# Group 0 holds trajectories 0, 2, 4; group 1 holds 1; group 2 holds 3 and 5.
GROUPS = [0, 1, 0, 2, 0, 2]
REWARD = torch.tensor([1.0, 0.7, 4.0, 0.5, 4.0, 0.5])


def test_group_advantage_literal():
    spans = spans_of(GROUPS, [[0]] * 6)
    std = 3**0.5  # mean 3, deviations -2, 1, 1
    close(group_advantage(REWARD, spans, eps=0.0), [-2 / std, 0, 1 / std, 0, 1 / std, 0])
    close(group_advantage(REWARD, spans, eps=1.0), [-2 / (std + 1), 0, 1 / (std + 1), 0, 1 / (std + 1), 0])
    close(group_advantage(REWARD, spans, unbiased=False, eps=0.0), [-(2**0.5), 0, HALF, 0, HALF, 0])
    close(group_advantage(REWARD, spans, scale="none"), [-2, 0, 1, 0, 1, 0])


def test_leave_one_out_literal():
    spans = spans_of(GROUPS, [[0]] * 6)
    close(leave_one_out_advantage(REWARD, spans), [1 - 4, 0, 4 - 2.5, 0, 4 - 2.5, 0])


def test_leave_one_out_of_float64_has_its_digits():
    """4/3 of the distance to the mean, which float32 does not hold."""
    four = spans_of([0, 0, 0, 0], [[0]] * 4)
    found = leave_one_out_advantage(torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64), four)
    torch.testing.assert_close(
        found, torch.tensor([1.0, -1 / 3, -1 / 3, -1 / 3], dtype=torch.float64), rtol=0, atol=1e-15
    )


def test_a_group_of_one_is_zero_or_by_choice_its_reward():
    spans = spans_of(GROUPS, [[0]] * 6)
    assert group_advantage(REWARD, spans)[1] == 0
    for scale in ("std", "none"):
        advantage = group_advantage(REWARD, spans, scale=scale, singleton="reward")
        assert advantage[1] == REWARD[1]
        assert torch.equal(advantage[[0, 2, 3, 4, 5]], group_advantage(REWARD, spans, scale=scale)[[0, 2, 3, 4, 5]])


def test_turn_advantage_compares_each_turn_with_the_same_turn_of_the_group():
    # Turn 1 is present in two of group 0's rollouts, turn 2 in one; group 1 holds turns 0 and 1.
    spans = spans_of([0, 0, 1, 0, 1], [[0, 1], [0, 1, 2], [0, 1], [0], [0, 1]])
    reward = torch.tensor([1.0, 0, 0, 1, 1, 0, 1, 0, 1, 1])
    third = (1 / 3) ** 0.5  # turn 0 of group 0: rewards 1, 0, 0, sample variance 1/3
    close(
        turn_advantage(reward, spans, eps=0.0),
        [2 / 3 / third, -HALF, -1 / 3 / third, HALF, 0, -HALF, 0, -1 / 3 / third, HALF, 0],
    )
    close(turn_advantage(reward, spans, unbiased=False, eps=0.0)[1:4], [-1, -HALF, 1])


def test_a_failed_turn_is_negative_whatever_the_other_turns_did():
    spans = spans_of([0, 0, 0], [[0, 1, 2]] * 3)
    for others in ([1.0, 1.0], [0.0, 0.0], [1.0, 0.0]):
        reward = torch.tensor([others[0], 0.0, others[1], 1, 1, 1, 0, 1, 0])
        assert turn_advantage(reward, spans)[1] < 0


def test_a_cut_off_turn_counts_when_it_was_reached_and_not_when_it_was_not():
    present = spans_of([0, 0, 0], [[0, 1], [0, 1], [0, 1]])  # trajectory 2 was cut off in turn 1, judged 0
    absent = spans_of([0, 0, 0], [[0, 1], [0, 1], [0]])  # trajectory 2 never reached turn 1
    third = (1 / 3) ** 0.5
    found = turn_advantage(torch.tensor([1.0, 1, 1, 0, 1, 0]), present, eps=0.0)
    close(found[[1, 3, 5]], [2 / 3 / third, -1 / 3 / third, -1 / 3 / third])
    close(turn_advantage(torch.tensor([1.0, 1, 1, 0, 1]), absent, eps=0.0)[[1, 3]], [HALF, -HALF])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exact_zeros(dtype):
    spans = spans_of([0, 0, 0], [[0, 1]] * 3)
    tenth = torch.full((6,), 0.1, dtype=dtype)
    for advantage in (
        group_advantage(tenth[:3], spans, eps=0.0),
        group_advantage(tenth[:3], spans, scale="none"),
        leave_one_out_advantage(tenth[:3], spans),
        turn_advantage(tenth, spans, eps=0.0),
    ):
        assert advantage.dtype == dtype
        assert torch.equal(advantage, torch.zeros_like(advantage))


def test_float64_and_whole_number_rewards():
    spans = spans_of([0, 0, 0], [[0]] * 3)
    reward = torch.tensor([0.2, 0.5, 1.7], dtype=torch.float64)
    wanted = (reward - reward.mean()) / (reward.std() + 1e-6)
    torch.testing.assert_close(group_advantage(reward, spans), wanted, rtol=1e-14, atol=0)
    torch.testing.assert_close(turn_advantage(reward, spans), wanted, rtol=1e-14, atol=0)
    for solved in (torch.tensor([True, False, False]), torch.tensor([1, 0, 0])):
        assert torch.equal(turn_advantage(solved, spans), turn_advantage(solved.float(), spans))


def test_rewards_of_other_groups_change_nothing():
    spans = spans_of(GROUPS, [[0]] * 6)
    other = REWARD.clone()
    other[[1, 3, 5]] = torch.tensor([5.0, -3.0, 8.0])
    for advantage in (group_advantage, leave_one_out_advantage, turn_advantage):
        assert torch.equal(advantage(REWARD, spans)[[0, 2, 4]], advantage(other, spans)[[0, 2, 4]])


def test_trajectories_without_a_turn_have_a_reward_but_no_turn_advantage():
    spans = spans_of([0, 0], [[0], []])
    close(group_advantage(torch.tensor([1.0, 0.0]), spans, eps=0.0), [HALF, -HALF])
    assert turn_advantage(torch.tensor([1.0]), spans).tolist() == [0]


def test_bad_arguments_are_named():
    spans = spans_of([0, 0], [[0, 1], [0]])
    with pytest.raises(ValueError, match=r"reward has shape \[3\], want \[B\] = \[2\]"):
        group_advantage(torch.zeros(3), spans)
    with pytest.raises(ValueError, match=r"reward has shape \[2, 1\]"):
        leave_one_out_advantage(torch.zeros(2, 1), spans)
    with pytest.raises(ValueError, match=r"turn_reward has shape \[2\], want \[K\] = \[3\]"):
        turn_advantage(torch.zeros(2), spans)
    with pytest.raises(ValueError, match="scale is 'max', want one of 'std', 'none'"):
        group_advantage(torch.zeros(2), spans, scale="max")
    with pytest.raises(ValueError, match="singleton is 'one'"):
        group_advantage(torch.zeros(2), spans, singleton="one")


# Trajectories 0 and 2 of group 0, trajectory 1 of group 1; an action per turn.
ANCHORED = spans_of([0, 1, 0], [[0, 1, 2], [0, 1], [0, 1]])
STATE = torch.tensor([7, -9, 7, 7, 7, -9, 5])  # group 0: state 7 twice, -9 twice, 5 once; group 1: state 7 twice
RETURN = torch.tensor([1.0, 2, 4, 8, 2, 0, 3])


def test_anchor_advantage_literal():
    found = anchor_advantage(RETURN, STATE, ANCHORED)
    assert found.tolist() == [-1.5, 1, 1.5, 3, -3, -1, 0]  # means 2.5, 1, 5
    close(anchor_advantage(RETURN, STATE, ANCHORED, scale="std", eps=0.0), [-HALF, HALF, HALF, HALF, -HALF, -HALF, 0])
    close(anchor_advantage(RETURN, STATE, ANCHORED, scale="std", unbiased=False, eps=0.0), [-1, 1, 1, 1, -1, -1, 0])
    close(anchor_advantage(RETURN, STATE, ANCHORED, scale="std", unbiased=False, eps=0.5)[:2], [-1.5 / 2, 1 / 1.5])


def test_anchor_ids_literal():
    """In the order of (group, key): (0, -9), (0, 5), (0, 7), (1, 7)."""
    assert anchor_of_action(STATE, ANCHORED).tolist() == [2, 0, 2, 3, 3, 0, 1]
    assert anchor_of_action(STATE.int(), ANCHORED).tolist() == [2, 0, 2, 3, 3, 0, 1]


keys = st.one_of(st.integers(-2, 2), st.sampled_from([-(2**63), 2**63 - 1, 2**62, -(2**62), 2**32, -(2**32)]))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.lists(keys, max_size=4), st.integers(0, 2)), min_size=1, max_size=6))
def test_anchor_ids_number_the_pairs_of_group_and_key(rollouts):
    groups = [group for _, group in rollouts]
    known = sorted(set(groups))
    groups = [known.index(group) for group in groups]
    spans = spans_of(groups, [list(range(len(states))) for states, _ in rollouts])
    state_key = torch.tensor([key for states, _ in rollouts for key in states], dtype=torch.int64)
    pairs = [(group, key) for (states, _), group in zip(rollouts, groups, strict=True) for key in states]
    wanted = sorted(set(pairs))
    assert anchor_of_action(state_key, spans).tolist() == [wanted.index(pair) for pair in pairs]
    returns = torch.arange(len(pairs), dtype=torch.float64)
    for scale in ("none", "std"):
        found = anchor_advantage(returns, state_key, spans, scale=scale, eps=0.0)
        for pair in wanted:
            mine = torch.tensor([other == pair for other in pairs])
            assert found[mine].sum().abs() < 1e-9
            assert (mine.sum() == 1) == (not found[mine].any())


@pytest.mark.parametrize("scale", ["none", "std"])
def test_an_action_alone_in_its_state_and_equal_returns_give_exact_zeros(scale):
    tenth, own = torch.full((7,), 0.1), torch.arange(7)
    for eps in (0.0, 1e-6):
        assert torch.equal(anchor_advantage(tenth, STATE, ANCHORED, scale=scale, eps=eps), torch.zeros(7))
        assert torch.equal(anchor_advantage(RETURN, own, ANCHORED, scale=scale, eps=eps), torch.zeros(7))


def test_the_returns_of_another_group_change_nothing_in_the_same_state():
    other = RETURN.clone()
    other[[3, 4]] = torch.tensor([-50.0, 20])
    found = [anchor_advantage(values, STATE, ANCHORED)[[0, 1, 2, 5, 6]] for values in (RETURN, other)]
    assert torch.equal(*found)


def test_anchor_arguments_are_named():
    with pytest.raises(ValueError, match=r"returns has shape \[2\], want \[S\] = \[7\]"):
        anchor_advantage(torch.zeros(2), STATE, ANCHORED)
    with pytest.raises(ValueError, match=r"state_key has shape \[2\], want \[S\] = \[7\]"):
        anchor_advantage(RETURN, STATE[:2], ANCHORED)
    with pytest.raises(ValueError, match="state_key has dtype torch.float32, want int"):
        anchor_of_action(RETURN, ANCHORED)
    with pytest.raises(ValueError, match="scale is 'max', want one of 'std', 'none'"):
        anchor_advantage(RETURN, STATE, ANCHORED, scale="max")
    with pytest.raises(ValueError, match="eps is -1"):
        anchor_advantage(RETURN, STATE, ANCHORED, scale="std", eps=-1)
