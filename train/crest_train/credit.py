"""From a rollout to the credit of every token: builds the signals that a method asks for, and asks it.

B = sessions, T = token positions, N = B*T, K = turns that hold an action (over all sessions).
"""

from dataclasses import is_dataclass, replace
from typing import Any

import torch

from crest_ops import METHODS, Credit, Signals, Spans
from crest_train.config import MethodSection
from crest_train.rollouts import Rollout

GATHERED = frozenset({"reward_B", "turn_reward_K", "teacher_gap_N", "surprisal_N"})
"""The signals that the loop gathers."""


def make_method(section: MethodSection) -> tuple[Any, Any]:
    """The method (.assign, .needs) and its config. Raises ValueError: unknown name or option, a signal not gathered."""
    if section.name not in METHODS:
        raise ValueError(f"method.name: unknown method {section.name!r}; known: {', '.join(METHODS)}")
    method = METHODS[section.name]
    missing = sorted(set(method.needs) - GATHERED)
    if missing:
        raise ValueError(f"method.name: {section.name} needs {', '.join(missing)}, which the trainer does not gather")
    known = list(method.Config.__dataclass_fields__)
    for option in section.options:
        if option not in known:
            raise ValueError(f"method.options: {section.name} has no option {option!r}; known: {', '.join(known)}")
    try:
        config = _with(method.Config(), section.options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"method.options: {error}") from error
    if (gate := getattr(config, "gate", None)) and f"{gate}_N" not in GATHERED:
        raise ValueError(f"method.options: gate {gate!r} needs {gate}_N, which the trainer does not gather")
    return method, config


def _with(config: Any, options: dict[str, Any]) -> Any:
    """The dataclass with these fields; a table for a field that is itself one (the surrogate) changes that one's."""
    changes = {}
    for name, value in options.items():
        default = getattr(config, name, None)
        if is_dataclass(default) and isinstance(value, dict):
            value = _with(default, value)
        elif isinstance(default, bool) != isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}, want one like {default!r}")
        changes[name] = value
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


def assign_credit(
    rollout: Rollout, group: torch.Tensor, teacher_gap: torch.Tensor | None, section: MethodSection
) -> Credit:
    """The credit of every token position of the rollout, read row by row (N = B*T).

    group [B] int64: which task each session is a rollout of. teacher_gap [B,T], for methods that need a teacher.
    """
    method, config = make_method(section)
    spans = Spans.from_mask(rollout.policy, group=group, turn=rollout.turn)
    signals = Signals(
        reward_B=session_reward(rollout, section.session_reward),
        turn_reward_K=rollout.turn_reward[spans.trajectory_of_turn, spans.turn_index],
        teacher_gap_N=None if teacher_gap is None else teacher_gap.flatten(),
        surprisal_N=-rollout.old_logp.flatten(),
    )
    return method.assign(spans, signals, config)
