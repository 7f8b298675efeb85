"""A scored batch of TRL as spans, turn rewards and signals.

What TRL calls a completion is everything after the prompt: actions of the policy and, between them, what tools and
environment wrote. Shape letters: B rollouts of the local generation batch, T padded completion length, N = B * T token
positions read row by row, S actions, K turns.
"""

import functools
import math
import operator
import reprlib
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from trl import GRPOConfig
from trl.trainer.utils import is_async_callable

from ..methods import METHODS, needs_of
from ..signals import Credit, Signals
from ..spans import Spans
from .rollouts import action_places

TRAINER_SIGNALS = ("reward_B", "turn_reward_K", "action_reward_S", "surprisal_N", "entropy_N")
"""The signals that the trainer finds by itself; others are the `signals` callable's to give."""


@dataclass(frozen=True)
class TurnRewards:
    """The turn rewards of one source: per rollout a list, or None where the source has none for it.

    exact: the list has one number for every turn up to the rollout's last; otherwise turns past its end get 0.
    """

    source: str
    weight: float
    rewards: Sequence[Sequence[float] | None]
    exact: bool


def written_tokens(batch: dict[str, Tensor]) -> Tensor:
    """[B, T] bool: the policy wrote the token and it counts, completion_mask * tool_mask."""
    written = batch["completion_mask"].bool()
    return written & batch["tool_mask"].bool() if "tool_mask" in batch else written


def with_prompts(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, int]:
    """Ids and attention mask [B, P + T] of prompt (padded length P) and completion, and T."""
    ids_BL, mask_BL = (
        torch.cat([batch[f"prompt_{kind}"], batch[f"completion_{kind}"]], dim=1) for kind in ("ids", "mask")
    )
    return ids_BL, mask_BL, batch["completion_ids"].shape[1]


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


def turn_ids_of(fields: dict[str, Any], num_rollouts: int) -> list[list[int]] | None:
    """The turn_ids among what a rollout_func returned, None without: per rollout the turn of every completion token.

    Raises ValueError: not one list (tuple, tensor or array of one dimension) per rollout, anything but whole numbers.
    """
    turn_ids = fields.get("turn_ids")
    if turn_ids is None:
        return None
    if not isinstance(turn_ids, Sized) or len(turn_ids) != num_rollouts:
        raise ValueError(f"turn_ids is {reprlib.repr(turn_ids)}, want {num_rollouts} lists, one per rollout")
    return [_listed("turn_ids", row, turns, operator.index, "an int") for row, turns in enumerate(turn_ids)]


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


def followed_by(function: Callable, change: Callable[[Any], Any]) -> Callable:
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

    A list, tuple, or tensor or array of one dimension. Raises ValueError naming source and rollout: anything in it that
    is not a finite number.
    """
    if isinstance(rewards, list | tuple) or getattr(rewards, "ndim", 0):
        return _listed(source, row, rewards, _finite, "a finite number")
    return None


def environment_rewards(environments: Sequence[Any] | None) -> list[list[float] | None]:
    """The turn rewards so far of the environment of every rollout, None where it has no such attribute.

    Raises ValueError naming the rollout: no list, tuple, or tensor or array of one dimension, of finite numbers.
    """
    rewards = [getattr(environment, "turn_rewards", None) for environment in environments or []]
    return [
        None if found is None else _listed("environment.turn_rewards", row, found, _finite, "a finite number")
        for row, found in enumerate(rewards)
    ]


def _listed(source: str, row: int, values: Any, number: Callable[[Any], Any], kind: str) -> list:
    """`number` of every value of a list, tuple, tensor or array; ValueError where it does not take one."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise ValueError(f"{source} gives {values!r} for rollout {row}, want a list, each entry {kind}")
    found = []
    for place, value in enumerate(values):
        try:
            found.append(number(value))
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(f"{source} gives {value!r} at place {place} of rollout {row}, want {kind}") from error
    return found


def _finite(number: Any) -> float:
    if not math.isfinite(number):
        raise ValueError("not finite")
    return float(number)


def turn_reward(spans: Spans, sources: Sequence[TurnRewards]) -> tuple[Tensor, Tensor]:
    """Reward [K] float32 of every turn, the weighted sum over the sources, and [B] bool: some source spoke of it.

    Raises ValueError naming source and rollout: a list of another length than the rollout has turns, a reward other
    than 0 of a turn in which no action was written. Rollouts without a policy token have no turns, and may have any.
    """
    row_K, place_K = spans.trajectory_of_turn.tolist(), spans.turn_index.tolist()
    num_turns = dict(zip(row_K, (place + 1 for place in place_K), strict=True))
    turn_at = {at: turn for turn, at in enumerate(zip(row_K, place_K, strict=True))}
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
            for place, reward in enumerate(rewards):
                if (row, place) in turn_at:
                    reward_K[turn_at[row, place]] += found.weight * reward
                elif reward != 0 and row in num_turns:
                    raise ValueError(
                        f"{found.source} gives {reward} for turn {place} of rollout {row}, in which no action was "
                        "written: want 0 there, and the reward at a turn with an action"
                    )
    return reward_K.to(spans.mask.device), known_B.to(spans.mask.device)


def action_reward(spans: Spans, reward: Tensor, turn_reward: Tensor, told: Tensor) -> Tensor:
    """[S]: turn_reward [K] at the last action of each turn; of rollouts not `told` [B] reward [B] at their last one."""
    turn_S, row_S = spans.turn_of_action, spans.trajectory_of_action
    by_turn, by_row = (torch.where(_last(of_S), of[of_S], 0) for of_S, of in ((turn_S, turn_reward), (row_S, reward)))
    return torch.where(told[row_S], by_turn, by_row)


def check_told(credit_method: str, credit_config: Any, known: Tensor, told: Tensor) -> None:
    """Raises ValueError: the method needs turn rewards, and a rollout is scored (known [B]), but not by turn (told)."""
    untold = (known & ~told).nonzero().flatten().tolist()
    if "turn_reward_K" in needs_of(credit_method, credit_config) and untold:
        raise ValueError(
            f"credit_method {credit_method!r} needs turn_reward_K, but rollout {untold[0]} has none: return a list of "
            "numbers, one per turn, from a reward function, or give the environment the attribute turn_rewards"
        )


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


def check_method(
    credit_method: str, credit_config: Any, has_signals: bool, accelerator: Accelerator, args: GRPOConfig
) -> None:
    """Raises ValueError: needs that nobody gives; on several processes split groups, a loss of several means."""
    missing = [need for need in needs_of(credit_method, credit_config) if need not in TRAINER_SIGNALS]
    if missing and not has_signals:
        raise ValueError(
            f"credit_method {credit_method!r} needs {', '.join(missing)}, which TRL does not have: pass signals=, a "
            "callable (batch, spans, trainer) -> dict that gives them"
        )
    rows = args.per_device_train_batch_size * args.steps_per_generation
    _check_groups(
        accelerator,
        ("per_device_train_batch_size * steps_per_generation", rows),
        ("num_generations", args.num_generations),
    )
    if args.eval_strategy != "no":
        check_evaluation(accelerator, args)
    if credit_method == "factor" and accelerator.num_processes > 1:
        raise ValueError("credit_method 'factor' has several means in its loss: run it on one process")


def check_evaluation(accelerator: Accelerator, args: GRPOConfig) -> None:
    """Raises ValueError: evaluation on several processes would split groups."""
    _check_groups(
        accelerator,
        ("per_device_eval_batch_size", args.per_device_eval_batch_size),
        ("num_generations_eval", args.num_generations_eval or args.num_generations),
    )


def _check_groups(accelerator: Accelerator, rows: tuple[str, int], size: tuple[str, int]) -> None:
    if accelerator.num_processes > 1 and rows[1] % size[1]:
        raise ValueError(
            f"{rows[0]} is {rows[1]}, want a multiple of {size[0]}, {size[1]}, on several processes: each must hold "
            "whole groups"
        )


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
