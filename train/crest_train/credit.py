"""From a rollout to the credit of every token: its spans, its rewards, and the method that is asked.

B = sessions, T = token positions, N = B*T, S = actions of all sessions, K = turns that hold an action.
"""

from dataclasses import is_dataclass, replace
from typing import Any

import torch

from crest_ops import METHODS, Credit, Signals, Spans, methods
from crest_train.config import MethodSection
from crest_train.sessions import Rollout


def make_method(section: MethodSection, step: int | None = None) -> tuple[Any, Any]:
    """The method (.assign, .Config, .needs) and its config, that of training step `step` (from 1) where one is named.

    Raises ValueError: unknown name or option, a value that the method refuses.
    """
    if section.name not in METHODS:
        raise ValueError(f"method.name: unknown method {section.name!r}; known: {', '.join(METHODS)}")
    method = METHODS[section.name]
    known = list(method.Config.__dataclass_fields__)
    for option in section.options:
        if option not in known:
            raise ValueError(f"method.options: {section.name} has no option {option!r}; known: {', '.join(known)}")
    try:
        config = _with(method.Config(), section.options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"method.options: {error}") from error
    return method, config.at(step) if step is not None and hasattr(config, "at") else config


def needs_of(section: MethodSection, step: int | None = None) -> tuple[str, ...]:
    """The signals that the method needs with its options: in training step `step`, or (None) before any schedule."""
    return methods.needs_of(section.name, make_method(section, step)[1])


def _with(config: Any, options: dict[str, Any]) -> Any:
    """The dataclass with these fields; a table for a field that is itself one (the surrogate) changes that one's.

    Lists, as files have them, are tuples.
    """
    changes = {}
    for name, value in options.items():
        default = getattr(config, name, None)
        if is_dataclass(default) and isinstance(value, dict):
            value = _with(default, value)
        elif isinstance(default, bool) != isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}, want one like {default!r}")
        changes[name] = tuple(value) if isinstance(value, list) else value
    return replace(config, **changes)


def session_reward(rollout: Rollout, kind: str) -> torch.Tensor:
    """Reward [B] of each session: "all" = its worst turn (1 when every turn succeeded), "mean" = mean over its turns.

    Turns that were not reached count as failed.
    """
    exists_BK = torch.arange(rollout.turn_reward.shape[1]) < rollout.num_turns[:, None]
    if kind == "all":
        return rollout.turn_reward.where(exists_BK, torch.tensor(1.0)).amin(1)
    return rollout.turn_reward.sum(1) / rollout.num_turns


def rows_with_signal(rollout: Rollout, group: torch.Tensor) -> list[int]:
    """Rows whose group differs in the reward of some turn: the others have nothing to learn from."""
    outcome_BK = torch.where(rollout.reached, rollout.turn_reward, -1.0)
    return [
        row
        for g in group.unique()
        for row in (group == g).nonzero().flatten().tolist()
        if (outcome_BK[group == g] != outcome_BK[row]).any()
    ]


def action_reward(rollout: Rollout, kind: str) -> torch.Tensor:
    """Reward [S] of each action: a session's actions sum to its `session_reward`, earned where it was verified.

    "all": the session's reward at its last action. "mean": a turn's reward / number of turns, at its last action.
    """
    reward_B = session_reward(rollout, kind).tolist()
    rewards = []
    for session, reward in zip(rollout.sessions, reward_B, strict=True):
        turns = [action.turn for action in session.actions]
        last = [turn != after for turn, after in zip(turns, [*turns[1:], None], strict=False)]
        if kind == "mean":
            earned = [value / session.num_turns for value in session.turn_reward]
            rewards += [earned[turn] if ends else 0.0 for turn, ends in zip(turns, last, strict=True)]
        elif turns:
            rewards += [0.0] * (len(turns) - 1) + [reward]
    return torch.tensor(rewards)


def spans_of(rollout: Rollout, group: torch.Tensor) -> Spans:
    """Which token positions form which action, turn and session, the rollout read row by row (N = B*T).

    Actions are the ones recorded, also where no token lies between two of them. group [B] int64, from 0: which task
    each session is a rollout of.
    """
    segments, length = [], rollout.ids.shape[1]
    for row, session in enumerate(rollout.sessions):
        end = 0
        for action in session.actions:
            size = len(action.tokens)
            segments += [(action.start - end, False, action.turn, row), (size, True, action.turn, row)]
            end = action.start + size
        segments.append((length - end, False, 0, row))
    lengths, written, turn, row = (torch.tensor(column) for column in zip(*segments, strict=True))
    return Spans.from_lengths(lengths, action=written, turn=turn, trajectory=row, group=group)


def assign_credit(spans: Spans, signals: Signals, section: MethodSection, step: int) -> Credit:
    """The credit of every token position of a rollout in training step `step` (from 1), read row by row (N = B*T).

    spans: spans_of the rollout. signals: what the method needs in that step (needs_of), on the rollout's device.
    """
    method, config = make_method(section, step)
    return method.assign(spans, signals, config)
