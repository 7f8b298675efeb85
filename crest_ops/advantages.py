"""How much credit: a trajectory's, a turn's or an action's outcome against the rollouts that share its task.

Every function takes `spans`, the Spans that say which rollouts share a task. unbiased: sample (True) or population
(False) standard deviation; eps is added to it.

Shape letters: S actions, K turns, B trajectories.
"""

from typing import Literal

import torch
from torch import Tensor

from .segments import segment_center, segment_zscore
from .spans import Spans, check_length


def group_advantage(
    reward: Tensor,
    spans: Spans,
    *,
    scale: Literal["std", "none"] = "std",
    unbiased: bool = True,
    eps: float = 1e-6,
    singleton: Literal["zero", "reward"] = "zero",
) -> Tensor:
    """Advantage of each trajectory inside its group.

    A_i = (R_i - mean_g R) / (std_g R + eps), with scale "none" A_i = R_i - mean_g R.
    GRPO, arXiv 2402.03300, section 4.1.2 (std); Dr.GRPO, arXiv 2503.20783 (none). The sample std and eps are verl's.
    Equal rewards give exactly 0. A group of one has nothing to compare with: 0, or with singleton "reward" A = R, which
    is verl's convention (mean 0, std 1). That zero is the default is this project's choice.

    reward [B] real. Returns [B] float32 (float64 for float64). Raises ValueError: wrong shape, unknown scale or
    singleton, eps < 0.
    """
    check_length("reward", reward, spans.num_trajectories, "[B]")
    _check_choice("scale", scale, ("std", "none"))
    _check_choice("singleton", singleton, ("zero", "reward"))
    group_B, B = spans.group_of_trajectory, spans.num_trajectories
    if scale == "std":
        advantage_B = segment_zscore(reward, group_B, B, unbiased=unbiased, eps=eps)
    else:
        advantage_B = segment_center(reward, group_B, B)
    if singleton == "zero":
        return advantage_B
    return torch.where(spans.group_size[group_B] == 1, reward.to(advantage_B.dtype), advantage_B)


def leave_one_out_advantage(reward: Tensor, spans: Spans) -> Tensor:
    """Reward of each trajectory against the mean of the other rollouts of its group.

    A_i = R_i - (1/(G-1)) * sum over j != i of R_j = G/(G-1) * (R_i - mean_g R).
    RLOO, arXiv 2402.14740; the ALFWorld baseline of FACTOR, arXiv 2608.07118. A group of one gives 0 (this project's
    choice), equal rewards exactly 0.

    reward [B] real. Returns [B] float32 (float64 for float64). Raises ValueError: wrong shape.
    """
    check_length("reward", reward, spans.num_trajectories, "[B]")
    group_B = spans.group_of_trajectory
    centered_B = segment_center(reward, group_B, spans.num_trajectories)
    size_B = spans.group_size[group_B].double()
    return centered_B * (size_B / (size_B - 1).clamp(min=1)).to(centered_B.dtype)


def turn_advantage(turn_reward: Tensor, spans: Spans, *, unbiased: bool = True, eps: float = 1e-6) -> Tensor:
    """Advantage of each turn among the turns of the same place in the sessions of its group.

    A_k^(i) = (R_k^(i) - mean_j R_k^(j)) / (std_j R_k^(j) + eps), for every (group, turn_index) apart.
    CrEST, arXiv 2608.13179, first level. Turn k must be the same request in every rollout of the group. This project's
    reading: rollouts without a turn k are left out of its mean and std, fewer than two present give 0, equal rewards
    give exactly 0; the std is the sample's by default, as in GRPO. A turn that was cut off is present, with the reward
    that the verifier gave it; a turn that was due but never reached is present only if the spans hold an (empty) action
    for it. Where the policy decides which turns are present, the present ones are a biased sample.

    turn_reward [K] real. Returns [K] float32 (float64 for float64). Raises ValueError: wrong shape.
    """
    check_length("turn_reward", turn_reward, spans.num_turns, "[K]")
    return segment_zscore(turn_reward, spans.cohort_of_turn, spans.num_turns, unbiased=unbiased, eps=eps)


def anchor_of_action(state_key: Tensor, spans: Spans) -> Tensor:
    """Anchor group of each action: id_s = id_t exactly where both task group and state_key are equal.

    GiGPO, arXiv 2505.10978, section "step relative advantages": the actions that rollouts of one task took in the same
    state. Keys are compared whole, as 64 bits; ids are 0, 1, ... in the order of (group, key) and depend on nothing
    else.

    state_key [S] int. Returns [S] int64 in [0, S). Raises ValueError: wrong shape or dtype.
    """
    check_length("state_key", state_key, spans.num_actions, "[S]")
    if state_key.is_floating_point():
        raise ValueError(f"state_key has dtype {state_key.dtype}, want int")
    group_S = spans.group_of_trajectory[spans.trajectory_of_action]
    # Two ranks below S in one int64: no two pairs meet, whatever the keys hold.
    return _dense_rank(group_S * spans.num_actions + _dense_rank(state_key.long()))


def anchor_advantage(
    returns: Tensor,
    state_key: Tensor,
    spans: Spans,
    *,
    scale: Literal["std", "none"] = "none",
    unbiased: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """Advantage of each action among the actions that its task's rollouts took in the same state.

    A_s = R_s - mean_a R, with scale "std" A_s = (R_s - mean_a R) / (std_a R + eps), a = anchor_of_action(state_key)_s.
    GiGPO, arXiv 2505.10978, step relative advantage ("none" and the sample std are its authors' code). An action alone
    in its state has nothing to compare with and gets exactly 0, as do equal returns.

    returns [S] real: what followed from the action on. state_key [S] int: equal for equal states; the caller decides
    what counts as equal. Returns [S] float32 (float64 for float64). Raises ValueError: wrong shape or dtype, unknown
    scale, eps < 0.
    """
    check_length("returns", returns, spans.num_actions, "[S]")
    _check_choice("scale", scale, ("std", "none"))
    anchor_S, S = anchor_of_action(state_key, spans), spans.num_actions
    if scale == "std":
        return segment_zscore(returns, anchor_S, S, unbiased=unbiased, eps=eps)
    return segment_center(returns, anchor_S, S)


def _dense_rank(key_S: Tensor) -> Tensor:
    """Place of each key among the distinct keys, [S] int64."""
    sorted_S, order_S = torch.sort(key_S)
    step_S = torch.zeros_like(order_S)
    step_S[1:] = sorted_S[1:] != sorted_S[:-1]
    return torch.empty_like(order_S).scatter(0, order_S, step_S.cumsum(0))


def _check_choice(name: str, found: str, known: tuple[str, ...]) -> None:
    if found not in known:
        raise ValueError(f"{name} is {found!r}, want one of {', '.join(map(repr, known))}")
