"""Rollouts in a file, one session a line, so that a probe can be repeated elsewhere or fed with sessions from outside.

A line is a JSON object with the fields of `RecordedSession`; those with a default can be left out. The least that can
be said of a session, here with two turns of one action each:

    {"batch": 0, "group": 0, "num_turns": 2, "turn_reward": [1.0, 0.0], "ids": [5, 8, 9, 4, 6, 9],
     "actions": [{"turn": 0, "start": 1, "tokens": [8, 9]}, {"turn": 1, "start": 4, "tokens": [6, 9]}]}

Sessions of equal batch and group are rollouts of the same task; every batch was drawn apart from every other, by the
policy that is probed. Methods that need more than rewards need more fields: a teacher's gap needs what the self-teacher
is shown (system, requests, gold, and text and observation of every action), signals by rule need `info`.

B = sessions, T = token positions.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from crest_train.sessions import Action, Rollout, Session, as_tensors

MEASURED = ("logp", "entropy", "sampler_logp")
"""What is known of every token of an action when the session was played."""

CREDITED = ("credit", "token_weight", "distill", "teacher_gap", "ratio")
"""What is known of them when the step was made, in the records of a run."""


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class RecordedAction(_Line):
    """One action: what the policy wrote at ids[start : start + len(tokens)] of its session, and what came of it.

    turn: its place in the session, from 0. tokens: the written ids, the one that ended the action included.
    logp, entropy: per token, at the sampling temperature, in nats; left out: the probed policy's own are taken.
    sampler_logp: with which it was drawn, where that was from another distribution.
    state_key: equal where actions of a group met the same state. text: the action without its end token.
    observation: the environment's reply. info: what the environment says of the action (see environments.protocol).
    cut: it was stopped by a limit.
    In the records of a run (see records.py), per token: credit; token_weight, of its loss; distill, the weight of the
    teacher's divergence; teacher_gap, its log-prob given the hint minus without (nats); ratio, the probability that the
    step's update left it over the one before. Empty where the method has none.
    """

    turn: int = Field(ge=0)
    start: int = Field(ge=0)
    tokens: list[int] = Field(min_length=1)
    logp: list[float] = []
    entropy: list[float] = []
    sampler_logp: list[float] = []
    state_key: int = 0
    text: str = ""
    observation: str | None = None
    info: dict[str, Any] = {}
    cut: bool = False
    credit: list[float] = []
    token_weight: list[float] = []
    distill: list[float] = []
    teacher_gap: list[float] = []
    ratio: list[float] = []


class RecordedSession(_Line):
    """One session of a batch.

    batch, group: whole numbers; sessions equal in both share their task. num_turns: turns that the session would have.
    turn_reward: verified reward of every turn reached, at most num_turns. prompt: ids before the session's own, shared
    by all sessions of a system text; ids: all ids behind it, policy and environment; actions: in order, at least one id
    before the first. seed, system, requests (one per turn begun), gold (the ground-truth calls of every turn begun):
    see sessions.Session. cut: it met the model's limit. texts, in the records of a run: of every id; joined they are
    the session's text (a character of several ids stands at the last of them).
    """

    batch: int = Field(ge=0)
    group: int = Field(ge=0)
    num_turns: int = Field(ge=1)
    turn_reward: list[float]
    ids: list[int] = Field(min_length=1)
    actions: list[RecordedAction]
    prompt: list[int] = []
    seed: int = 0
    system: str = ""
    requests: list[str] = []
    gold: list[str] = []
    cut: bool = False
    texts: list[str] = []

    @model_validator(mode="after")
    def _fits_together(self) -> "RecordedSession":
        _check(len(self.texts) in (0, len(self.ids)), f"{len(self.texts)} texts for {len(self.ids)} ids")
        _check(len(self.turn_reward) <= self.num_turns, f"{len(self.turn_reward)} turn_reward for num_turns turns")
        free, turn = 1, 0  # the policy never writes the first id
        for i, action in enumerate(self.actions):
            end = action.start + len(action.tokens)
            name = f"actions[{i}]"
            _check(turn <= action.turn < self.num_turns, f"{name}.turn is {action.turn}, want {turn}..num_turns - 1")
            _check(action.start >= free, f"{name}.start is {action.start}, want {free} or more")
            _check(self.ids[action.start : end] == action.tokens, f"{name}.tokens are not ids[{action.start}:{end}]")
            for values in (*MEASURED, *CREDITED):
                found = len(getattr(action, values))
                _check(found in (0, len(action.tokens)), f"{name}.{values} has {found} numbers, want one per token")
            free, turn = end, action.turn
        return self


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def record(file: TextIO, number: int, rollout: Rollout, group: torch.Tensor) -> None:
    """Append the sessions of batch `number` to an open text file. group [B] int: as the credit has it.

    Raises ValueError when an environment's info cannot be written as JSON.
    """
    for session, place in zip(rollout.sessions, group.tolist(), strict=True):
        file.write(line_of({"batch": number, "group": place, **asdict(session)}))


def line_of(session: dict[str, Any]) -> str:
    """The line of a session. Raises ValueError when an environment's info cannot be written as JSON."""
    try:
        return json.dumps(session, ensure_ascii=False) + "\n"
    except TypeError as error:
        raise ValueError(f"environment: the info of session {session['seed']} is no JSON ({error})") from error


def read_rollouts(path: Path, vocab_size: int) -> Iterator[tuple[Rollout, torch.Tensor]]:
    """The batches of a file in the order of their numbers: sessions, and their group [B] int64 counted from 0.

    The lines of a batch may lie anywhere in the file. Log-probs and entropies that were not recorded are NaN.
    Raises ValueError naming the line, before the first batch: no JSON, a field that is unknown, missing or wrong, an id
    outside [0, vocab_size).
    """
    batches: dict[int, list[RecordedSession]] = {}
    for where, session in read_sessions(path, "--rollouts"):
        _check_ids(session, where, vocab_size)
        batches.setdefault(session.batch, []).append(session)
    for _, sessions in sorted(batches.items()):
        places = {group: place for place, group in enumerate(dict.fromkeys(session.group for session in sessions))}
        group_B = torch.tensor([places[session.group] for session in sessions])
        yield as_tensors([_played(session) for session in sessions], 0.0), group_B


def read_sessions(path: Path, argument: str) -> Iterator[tuple[str, RecordedSession]]:
    """The sessions of a file, each with the words that name its line and the argument that led there.

    Raises ValueError with these words: no UTF-8, no JSON, a field that is unknown, missing or wrong.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{argument}: {path} could not be read ({error})") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{argument}: {path}, line {number}"
            yield where, _parsed(line, where)


def _parsed(line: str, where: str) -> RecordedSession:
    try:
        return RecordedSession.model_validate_json(line)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        words = problem["msg"].removeprefix("Value error, ")
        raise ValueError(f"{where}: {f'{key}: ' if key else ''}{words}") from error


def _check_ids(session: RecordedSession, where: str, vocab_size: int) -> None:
    for name in ("prompt", "ids"):
        for place, token in enumerate(getattr(session, name)):
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"{where}: {name}[{place}] is {token}, the policy's vocabulary is 0..{vocab_size - 1}: "
                    "were these sessions written with another tokenizer?"
                )


def _played(recorded: RecordedSession) -> Session:
    actions = []
    for action in recorded.actions:
        unknown = [math.nan] * len(action.tokens)
        played = {name: value for name, value in action if name not in CREDITED}
        fields = {**played, "logp": action.logp or unknown, "entropy": action.entropy or unknown}
        actions.append(Action(**fields))
    fields = {name: value for name, value in recorded if name not in ("batch", "group", "texts")}
    return Session(**{**fields, "actions": actions})
