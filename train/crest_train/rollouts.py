"""Plays sessions with the policy: an engine writes, the environments answer, and every row is a session under way.

B = sessions.
"""

import time
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from crest_train.chat import Chat
from crest_train.engines.lockstep import LockstepEngine
from crest_train.engines.protocol import Engine
from crest_train.environments.protocol import Environment
from crest_train.model import context_length
from crest_train.ranks import gathered, share
from crest_train.rows import Row
from crest_train.sampling import Sampling
from crest_train.sessions import Rollout, Session, as_tensors


def rollout(
    model: PreTrainedModel,
    chat: Chat,
    environments: list[Environment],
    seeds: list[int],
    *,
    generator: torch.Generator,
    sampling: Sampling,
    begun: list[list[list[int]]] | None = None,
    engine: Engine | None = None,
) -> Rollout:
    """Play one session per environment, started with its seed, and return them all in the order given.

    engine: writes with the model's weights as they were last pushed; None: the model itself, on whose device the
    generator then is. begun: tokens of the actions with which each session begins, played as they are (log-prob 0); the
    policy goes on.
    Raises ValueError when no session has room for an action in the model's context, or an environment breaks the
    protocol (naming its class, the turn and what it gave).
    """
    began = time.perf_counter()
    engine = engine or LockstepEngine(model)
    rows = _begin(model, chat, environments, seeds, sampling)
    for row, actions in zip(rows, begun or [[]] * len(rows), strict=True):
        for tokens in actions:
            row.write_all(tokens)
    sessions = [row.session for row in rows]
    played: dict[int, Session] = {}
    for together in _played_together(rows, engine.lockstep, sampling.rows):
        mine = share(together)
        _play(engine, [rows[place] for place in mine], chat.end_token, sampling, generator)
        played |= {place: sessions[place] for place in mine}
    for part in gathered(played):
        for place, session in part.items():
            sessions[place] = session
    return as_tensors(sessions, time.perf_counter() - began)


def demonstrate(
    model: PreTrainedModel, chat: Chat, environments: list[Environment], seeds: list[int], *, sampling: Sampling
) -> Rollout:
    """The same sessions with the ground truth written in the policy's place; old_logp is 0.

    A line of it, or what stands before an end-of-action token, is one action; nothing limits an action's length.
    Raises ValueError as `rollout` does, and when an environment's gold() is empty.
    """
    began = time.perf_counter()
    end = chat.tokenizer.convert_ids_to_tokens(chat.end_token)
    rows = _begin(model, chat, environments, seeds, replace(sampling, max_action_tokens=0))
    for row in rows:
        while not row.over:
            turn = row.action.turn
            lines = [line.strip() for line in row.gold().replace(end, "\n").splitlines()]
            if not any(lines):
                raise ValueError(f"environment: gold() is empty in turn {turn} of session {row.session.seed}")
            for line in filter(None, lines):
                if not row.over and row.action.turn == turn:
                    row.write_all([*chat.encode(line), chat.end_token])
    return as_tensors([row.session for row in rows], time.perf_counter() - began)


def _begin(
    model: PreTrainedModel, chat: Chat, environments: list[Environment], seeds: list[int], sampling: Sampling
) -> list[Row]:
    context = context_length(model)
    rows = [Row(chat, *pair, sampling, context) for pair in zip(environments, seeds, strict=True)]
    if all(row.over for row in rows):
        needed = min(len(row.session.prompt) + row.taken for row in rows) + 1
        raise ValueError(f"policy.model: no action fits into its context of {context} tokens; wanted {needed} or more")
    return rows


def _played_together(rows: list[Row], one_prompt: bool, most: int) -> list[list[int]]:
    """The places of the rows that are not over, at most so many together, and where asked for of one prompt."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for place, row in enumerate(rows):
        if not row.over:
            alike.setdefault(tuple(row.session.prompt) if one_prompt else (), []).append(place)
    return [places[start : start + most] for places in alike.values() for start in range(0, len(places), most)]


def _play(engine: Engine, rows: list[Row], end_token: int, sampling: Sampling, generator: torch.Generator) -> None:
    """Play the rows until all are over, here and in the other processes."""
    writer = engine.open([row.session.prompt for row in rows], sampling, end_token, generator)
    for slot, row in enumerate(rows):
        writer.ask(slot, row.take(), row.limit)
    while answers := writer.answers():
        for slot, answer in answers:
            rows[slot].hear(answer)
            if not rows[slot].over:
                writer.ask(slot, rows[slot].take(), rows[slot].limit)
