"""A scored batch of TRL as spans, turn rewards and signals.

What TRL calls a completion is everything after the prompt: actions of the policy and, between them, what tools and
environment wrote. Shape letters: B rollouts of the local generation batch, T padded completion length, N = B * T token
positions read row by row, S actions, K turns.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor
from trl import GRPOConfig
from trl.trainer.utils import is_async_callable

from ..methods import METHODS
from ..signals import Credit, Signals
from ..spans import Spans

GIVEN = ("reward_B", "turn_reward_K", "action_reward_S", "surprisal_N", "entropy_N")
"""The signals that the trainer finds by itself; others are the `signals` callable's to give."""


@dataclass(frozen=True)
class TurnRewards:
    """The turn rewards of one source: per rollout a list, or None where the source has none for it.

    exact: the list has one number for every turn of the rollout; otherwise turns past its end get 0.
    """

    source: str
    weight: float
    rewards: Sequence[Sequence[float] | None]
    exact: bool


def written_tokens(batch: dict[str, Tensor]) -> Tensor:
    """[B, T] bool: the policy wrote the token and it counts, completion_mask * tool_mask."""
    written = batch["completion_mask"].bool()
    return written & batch["tool_mask"].bool() if "tool_mask" in batch else written


def action_places(written: Tensor) -> Tensor:
    """[B, T] int64: which action of its rollout, from 0, a policy token of `written` [B, T] belongs to."""
    return (written & ~F.pad(written, (1, 0))[:, :-1]).long().cumsum(1) - 1


def turns_of_actions(written: Tensor, turn_of_action: Sequence[Sequence[int]]) -> Tensor:
    """[B, T] int64: the turn of every token, from the turn of every action of every rollout.

    written [B, T] bool. turn_of_action: per rollout at least as many entries as it has actions. Raises ValueError.
    """
    place_BT = action_places(written)
    for row, (turns, last) in enumerate(zip(turn_of_action, place_BT.amax(1).tolist(), strict=True)):
        if len(turns) <= last:
            raise ValueError(f"rollout {row} has {last + 1} actions, but was seen generating {len(turns)} times")
    table = torch.nn.utils.rnn.pad_sequence([torch.tensor([*turns, 0]) for turns in turn_of_action], batch_first=True)
    return table.to(written.device).gather(1, place_BT.clamp(min=0))


def turns_of_tokens(batch: dict[str, Tensor], turn_ids: Sequence[Sequence[int]]) -> Tensor:
    """[B, T] int64 from one list per rollout with the turn of every completion token.

    Raises ValueError naming the rollout: another number of entries than completion tokens.
    """
    length_B = batch["completion_mask"].sum(1).tolist()
    turn_BT = torch.zeros(batch["completion_ids"].shape, dtype=torch.int64)
    for row, (turns, length) in enumerate(zip(turn_ids, length_B, strict=True)):
        if length and len(turns) != length:  # 0: a truncated completion that TRL masked
            raise ValueError(f"turn_ids[{row}] has {len(turns)} entries, want {length}, one per completion token")
        turn_BT[row, :length] = torch.tensor(turns[:length], dtype=torch.int64)
    return turn_BT.to(batch["completion_ids"].device)


def then(function: Callable, change: Callable[[Any], Any]) -> Callable:
    """The function, synchronous or not, with `change` applied to what it gives; under its name."""
    if is_async_callable(function):

        @functools.wraps(function)
        async def changed(*args, **kwargs):
            return change(await function(*args, **kwargs))
    else:

        @functools.wraps(function)
        def changed(*args, **kwargs):
            return change(function(*args, **kwargs))

    return changed


def turn_list(source: str, row: int, rewards: Any) -> list[float] | None:
    """The turn rewards that a reward function returned for a rollout: None where it returned one number, or none.

    A list, tuple, or tensor or array of one dimension. Raises ValueError naming source and rollout: no numbers in it.
    """
    if getattr(rewards, "ndim", None) == 1:
        rewards = rewards.tolist()
    if not isinstance(rewards, list | tuple):
        return None
    try:
        return [float(reward) for reward in rewards]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source} gives {rewards!r} for rollout {row}, want numbers, one per turn") from error


def turn_reward(spans: Spans, sources: Sequence[TurnRewards]) -> tuple[Tensor, Tensor]:
    """Reward [K] float32 of every turn, the weighted sum over the sources, and [B] bool: some source spoke of it.

    Raises ValueError naming source and rollout: a list of another length than the rollout has turns.
    """
    row_K, place_K = spans.trajectory_of_turn.tolist(), spans.turn_index.tolist()
    num_turns = dict(zip(row_K, (place + 1 for place in place_K), strict=True))
    reward_K, known_B = torch.zeros(len(row_K)), torch.zeros(spans.num_trajectories, dtype=torch.bool)
    for found in sources:
        for row, rewards in enumerate(found.rewards):
            if rewards is None:
                continue
            known_B[row] = True
            if found.exact and row in num_turns and len(rewards) != num_turns[row]:
                raise ValueError(
                    f"{found.source} gives {len(rewards)} turn rewards for rollout {row}, which has {num_turns[row]} "
                    "turns: want one number per turn"
                )
        for turn, (row, place) in enumerate(zip(row_K, place_K, strict=True)):
            rewards = found.rewards[row]
            if rewards is not None and place < len(rewards):
                reward_K[turn] += found.weight * float(rewards[place])
    return reward_K.to(spans.mask.device), known_B.to(spans.mask.device)


def action_reward(spans: Spans, reward: Tensor, turn_reward: Tensor, told: Tensor) -> Tensor:
    """[S]: turn_reward [K] at the last action of each turn; of rollouts not `told` [B] reward [B] at their last one."""
    turn_S, row_S = spans.turn_of_action, spans.trajectory_of_action
    by_turn, by_row = (torch.where(_last(of_S), of[of_S], 0) for of_S, of in ((turn_S, turn_reward), (row_S, reward)))
    return torch.where(told[row_S], by_turn, by_row)


def _last(of_action: Tensor) -> Tensor:
    return of_action.diff(append=of_action.new_full((1,), -1)) != 0


def groups(num_generations: int, known: Tensor) -> Tensor:
    """Group [B] int64 of each rollout: num_generations neighbours share one; those not `known` [B] bool stand alone."""
    row_B = torch.arange(len(known), device=known.device)
    group_B = torch.where(known, row_B // num_generations, len(known) + row_B)
    return group_B.unique(return_inverse=True)[1]


def with_given(signals: Signals, given: dict[str, Tensor]) -> Signals:
    """`signals` and what the user's callable gave. Raises ValueError: no dict, or a name that Signals does not have."""
    known = {field.name for field in fields(Signals)}
    if not isinstance(given, dict) or not given.keys() <= known:
        found = sorted(given.keys() - known) if isinstance(given, dict) else type(given).__name__
        raise ValueError(f"signals gave {found}, want a dict with some of {', '.join(sorted(known))}")
    return replace(signals, **given)


def needs_of(credit_method: str, credit_config: Any) -> tuple[str, ...]:
    """The signals that the method needs with its config."""
    return tuple(getattr(credit_config, "needs", METHODS[credit_method].needs))


def check_method(
    credit_method: str, credit_config: Any, has_signals: bool, accelerator: Accelerator, args: GRPOConfig
) -> None:
    """Raises ValueError: needs that nobody gives; on several processes split groups, a loss of several means."""
    missing = [need for need in needs_of(credit_method, credit_config) if need not in GIVEN]
    if missing and not has_signals:
        raise ValueError(
            f"credit_method {credit_method!r} needs {', '.join(missing)}, which TRL does not have: pass signals=, a "
            "callable (batch, spans, trainer) -> dict that gives them"
        )
    if accelerator.num_processes == 1:
        return
    rows = args.per_device_train_batch_size * args.steps_per_generation
    if rows % args.num_generations:
        raise ValueError(
            f"per_device_train_batch_size * steps_per_generation is {rows}, want a multiple of num_generations, "
            f"{args.num_generations}, on several processes: each must hold whole groups"
        )
    if credit_method == "factor":
        raise ValueError("credit_method 'factor' has several means in its loss: run it on one process")


def assign(
    credit_method: str, credit_config: Any, spans: Spans, signals: Signals, accelerator: Accelerator, step: int
) -> Credit:
    """The method's credit in training step `step`, with the denominators of the batch of all processes.

    Gradients are averaged over processes, hence the number of them as a factor. Given total = 1, the weights of a mean
    add up to its count; fixed_length counts rollouts. Raises ValueError: distillation over the vocabulary.
    """
    config, world = credit_config, accelerator.num_processes
    if hasattr(config, "at"):
        config = config.at(step)
    credit = METHODS[credit_method].assign(spans, signals, config, total=None if world == 1 else 1)
    if credit.distill_kind not in (None, "sampled_reverse_kl"):
        raise ValueError(
            f"credit_method {credit_method!r} distils with {credit.distill_kind!r}, which needs the teacher's hidden "
            "states: choose a credit_config without it (or with 'sampled_reverse_kl')"
        )
    if world == 1:
        return credit
    count = credit.token_weight_N.double().sum().round()
    if config.reduction == "fixed_length":
        count = count.new_tensor(spans.num_trajectories)
    scale = world / accelerator.reduce(count, reduction="sum").clamp(min=1)
    distill_N = None if credit.distill_N is None else (credit.distill_N * scale).float()
    return replace(credit, token_weight_N=(credit.token_weight_N * scale).float(), distill_N=distill_N)
