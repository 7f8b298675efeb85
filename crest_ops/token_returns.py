"""Returns and advantages of single tokens, where tool output lies between them: the conventions of other trainers.

A tool token is a position between two policy tokens of one trajectory that the policy did not write. Every function
takes `spans`, the Spans of the N positions; results are float32 (float64 for float64 inputs) and 0 outside the spans.
Rewards of positions that are no time step are not used.

Shape letters: N token positions.
"""

from typing import Literal

import torch
from torch import Tensor

from .segments import segment_difference, segment_discounted_sum
from .spans import Spans, check_whole


def generalised_advantage(
    reward: Tensor, value: Tensor, spans: Spans, *, gamma: float, lam: float, tool_tokens: Literal["carry", "step"]
) -> Tensor:
    """Exponentially weighted sum of the temporal differences that follow a token.

    A_n = delta_n + gamma * lam * A_next(n),  delta_n = r_n + gamma * V_next(n) - V_n;  A, V = 0 past the end.
    GAE, arXiv 1506.02438, eqs. 11-16. Trainers differ in next(n) where tool output follows: with tool_tokens "carry" it
    is the next policy token, so that V and A are carried over the tool output (verl); with "step" every tool token is a
    time step with its own reward and value, and discounts once (SkyRL). Which of the two is meant has no default. That
    positions before the first and after the last policy token are no time steps is this project's reading. The return
    that a critic learns is A + V.

    reward, value [N] real, looked at on time steps only; gamma, lam in [0, 1]. Returns [N], detached.
    Raises ValueError: wrong shapes, unknown tool_tokens, gamma or lam outside [0, 1].
    """
    _check_choice(tool_tokens, ("carry", "step"))
    _check_length(spans, reward=reward, value=value)
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0 <= number <= 1:
            raise ValueError(f"{name} is {number}, want 0 <= {name} <= 1")
    ids_N = spans.trajectory_of_token if tool_tokens == "carry" else _trajectory_of_step(spans)
    step_N = ids_N >= 0
    reward_N, value_N = torch.where(step_N, reward.detach(), 0), torch.where(step_N, value.detach(), 0)
    change_N = segment_difference(value_N, ids_N, spans.num_trajectories)  # V_next - V
    delta_N = reward_N + gamma * change_N - (1 - gamma) * value_N
    return torch.where(spans.mask, segment_discounted_sum(delta_N, ids_N, gamma * lam), 0)


def reinforce_return(
    reward: Tensor, spans: Spans, gamma: float, *, tool_tokens: Literal["carry", "reset"] = "carry"
) -> Tensor:
    """Discounted reward from a token on: G_n = r_n + gamma * G_next(n), next(n) the next policy token.

    REINFORCE++, arXiv 2501.03262. With tool_tokens "carry" the return of later actions reaches the tokens before the
    tool output; with "reset" it ends there, as in trainers that multiply the running return by the mask (verl, SkyRL:
    an outcome reward then trains the last action alone).

    reward [N] real, looked at inside the spans only; gamma in [0, 1]. Returns [N], detached.
    Raises ValueError: wrong shape, unknown tool_tokens, gamma outside [0, 1].
    """
    _check_choice(tool_tokens, ("carry", "reset"))
    _check_length(spans, reward=reward)
    ids_N = spans.trajectory_of_token if tool_tokens == "carry" else _run_of_token(spans)
    return segment_discounted_sum(reward.detach(), ids_N, gamma)


def _trajectory_of_step(spans: Spans) -> Tensor:
    """Trajectory of every position from its first to its last policy token, tool output included; -1 elsewhere."""
    ids_N = spans.trajectory_of_token
    before_N = ids_N.cummax(0).values  # ids never decrease: the trajectory of the last policy token so far
    after_N = torch.where(ids_N < 0, spans.num_trajectories, ids_N).flip(0).cummin(0).values.flip(0)
    return torch.where(before_N == after_N, before_N, -1)


def _run_of_token(spans: Spans) -> Tensor:
    """Number of the unbroken run of one trajectory's policy tokens that the token lies in; -1 outside the spans."""
    ids_N = spans.trajectory_of_token
    first_N = torch.ones_like(spans.mask)
    first_N[1:] = ids_N[1:] != ids_N[:-1]
    return torch.where(spans.mask, first_N.cumsum(0) - 1, -1)


def _check_choice(found: str, known: tuple[str, str]) -> None:
    if found not in known:
        raise ValueError(f"tool_tokens is {found!r}, want {known[0]!r} or {known[1]!r}")


def _check_length(spans: Spans, **values: Tensor) -> None:
    check_whole(spans)
    for name, found in values.items():
        if not isinstance(found, Tensor) or found.is_complex() or [*found.shape] != [spans.num_tokens]:
            shape = f"{[*found.shape]} {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"{name} is {shape}, want a real tensor [{spans.num_tokens}] to match the spans")
