"""Plays sessions with the policy, many in lockstep over one key-value cache that is kept across the turns of a session.

Every row feeds exactly as many tokens as every other, forced or sampled (one at a time unless all have more queued):
all rows share one cache index, no mask is needed, and a session costs one visit per token.

B = sessions, T = token positions, K = turns of a session, R = rows that sample, H = hidden size, V = vocabulary.
"""

import hashlib
import json
import time
from collections import deque
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel

from crest_ops.heads import logit_options
from crest_train.cache import GrowingCache
from crest_train.chat import Chat
from crest_train.environments.protocol import Environment
from crest_train.environments.protocol_checks import checked_gold, checked_opening, checked_step
from crest_train.model import context_length, head_logits, hidden_states, shaped_logits


@dataclass
class Action:
    """One action of the policy: its tokens, where they begin in the session (and in the teacher's), what came of it.

    entropy: of the policy's distribution at each token (nats, at the sampling temperature).
    state_key: names the state that the action met; equal for equal states: info["state_key"] where the environment
        tells it, else a digest of the turn's place and of all texts shown in the turn so far.
    cut: stopped by `max_action_tokens` (the environment saw its text) or by the model's context (it did not).
    """

    turn: int
    start: int
    teacher_start: int
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    state_key: int = 0
    text: str = ""
    observation: str | None = None
    info: dict[str, Any] = field(default_factory=dict)
    cut: bool = False


@dataclass
class Session:
    """One played session: its tokens behind the prompt, its actions, and the verified reward of every turn reached.

    gold: ground truth of every turn begun, where it was asked for (`Sampling.gold`); else empty.
    cut: the session reached the model's context; the turn it was in has reward 0 and later turns do not exist.
    """

    seed: int
    system: str
    prompt: list[int]
    num_turns: int
    requests: list[str]
    gold: list[str]
    ids: list[int]
    teacher_ids: list[int]
    actions: list[Action]
    turn_reward: list[float]
    cut: bool


@dataclass
class Rollout:
    """What `rollout` gives: the sessions as tensors (the shared prompts left out) and as records.

    ids [B,T] int64: 0 behind a session's end. policy [B,T] bool: True where the policy wrote the token.
    turn [B,T] int64: place of the token's turn in its session, -1 where the policy did not write.
    old_logp, entropy [B,T] float32: log-prob and entropy at the sampling temperature, 0 where the policy did not write.
    turn_reward [B,K] float32: 0 for turns not reached. reached [B,K] bool. num_turns [B] int64.
    teacher_ids [B,T'], teacher_position [B,T] int64: the hinted sessions, and where each policy token stands in them (0
        elsewhere); None when no teacher stream was asked for.
    seconds: wall time.
    """

    sessions: list[Session]
    ids: torch.Tensor
    policy: torch.Tensor
    turn: torch.Tensor
    old_logp: torch.Tensor
    entropy: torch.Tensor
    turn_reward: torch.Tensor
    reached: torch.Tensor
    num_turns: torch.Tensor
    teacher_ids: torch.Tensor | None
    teacher_position: torch.Tensor | None
    seconds: float

    @cached_property
    def lengths(self) -> torch.Tensor:
        """Number of tokens [B] int64 of each session, its prompt left out."""
        return torch.tensor([len(session.ids) for session in self.sessions])

    def by_prompt(self, rows: list[int]) -> list[tuple[list[int], list[int]]]:
        """The rows, as (prompt, the rows that share it); the shortest come first, so that parts need little padding."""
        shared: dict[tuple[int, ...], list[int]] = {}
        for row in sorted(rows, key=self.lengths.tolist().__getitem__):
            shared.setdefault(tuple(self.sessions[row].prompt), []).append(row)
        return [(list(prompt), members) for prompt, members in shared.items()]

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy wrote."""
        return sum(len(action.tokens) for session in self.sessions for action in session.actions)

    @property
    def fed_tokens(self) -> int:
        """Number of tokens of all sessions, prompts left out."""
        return sum(len(session.ids) for session in self.sessions)

    @property
    def cut_sessions(self) -> int:
        """Number of sessions that reached the model's context."""
        return sum(session.cut for session in self.sessions)


@dataclass(frozen=True)
class Sampling:
    """How the policy writes: temperature > 0, at most max_action_tokens per action, `rows` sessions in one lockstep.

    gold: record the ground truth of every turn begun.
    teacher_template: how a turn's ground truth enters the self-teacher's request, with {request} and {gold}; None for
        no teacher stream.
    """

    temperature: float = 1.0
    max_action_tokens: int = 8
    rows: int = 128
    gold: bool = False
    teacher_template: str | None = None


def rollout(
    model: PreTrainedModel,
    chat: Chat,
    environments: list[Environment],
    seeds: list[int],
    *,
    generator: torch.Generator,
    sampling: Sampling,
) -> Rollout:
    """Play one session per environment, started with its seed, and return them all in the order given.

    Sessions that share a system prompt are played together. generator: on the model's device.
    Raises ValueError when no session has room for an action in the model's context, or an environment breaks the
    protocol (naming its class, the turn and what it gave).
    """
    began = time.perf_counter()
    rows = _begin(model, chat, environments, seeds, sampling)
    by_prompt: dict[tuple[int, ...], list[_Row]] = {}
    for row in rows:
        if not row.over:
            by_prompt.setdefault(tuple(row.session.prompt), []).append(row)
    for prompt, alike in by_prompt.items():
        for start in range(0, len(alike), sampling.rows):
            _play(model, list(prompt), alike[start : start + sampling.rows], generator, sampling.temperature)
    return _as_tensors([row.session for row in rows], sampling, time.perf_counter() - began)


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
    return _as_tensors([row.session for row in rows], sampling, time.perf_counter() - began)


def _begin(
    model: PreTrainedModel, chat: Chat, environments: list[Environment], seeds: list[int], sampling: Sampling
) -> list["_Row"]:
    context = context_length(model)
    rows = [_Row(chat, *pair, sampling, context) for pair in zip(environments, seeds, strict=True)]
    if all(row.over for row in rows):
        needed = min(len(row.session.prompt) + row.taken for row in rows) + 1
        raise ValueError(f"policy.model: no action fits into its context of {context} tokens; wanted {needed} or more")
    return rows


class _Row:
    """A session being played: what is queued to be fed, and the action being written."""

    def __init__(self, chat: Chat, environment: Environment, seed: int, sampling: Sampling, context: int):
        self.chat, self.environment, self.sampling = chat, environment, sampling
        request = checked_opening(environment, seed)
        prompt, opening = chat.open(environment.system, request)
        self.room = context - len(prompt)
        self.session = Session(
            seed, environment.system, prompt, environment.num_turns, [], [], [], [], [], [], cut=False
        )
        self.pending: deque[int] = deque()
        self.over = False
        self._force(opening, chat.open(environment.system, self._hinted(request))[1])
        self._begin_action()

    def take(self, width: int) -> list[int]:
        """The next tokens to feed; a session that is over feeds nothing of meaning."""
        return [0] * width if self.over else [self.pending.popleft() for _ in range(width)]

    def write(self, token: int, logp: float, entropy: float) -> None:
        """Take a sampled token; play the action when it ends."""
        action = self.action
        action.tokens.append(token)
        action.logp.append(logp)
        action.entropy.append(entropy)
        ended = token == self.chat.end_token
        if ended or len(action.tokens) == self.sampling.max_action_tokens:
            self._play_action(action, ended)
        elif self.taken + len(action.tokens) >= self.room:
            action.cut = True
            self._cut()
        else:
            self.pending.append(token)

    def write_all(self, tokens: list[int]) -> None:
        """Take an action that is known in advance, as far as the context reaches."""
        for token in tokens:
            if not self.over:
                self.write(token, 0.0, 0.0)

    def gold(self) -> str:
        """The ground truth of the turn under way."""
        return checked_gold(self.environment, len(self.session.turn_reward))

    def _begin_action(self) -> None:
        session = self.session
        self.action = Action(len(session.turn_reward), len(session.ids), len(session.teacher_ids))
        self.action.state_key = self._digest_of_texts()
        self.taken = max(len(session.ids), len(session.teacher_ids))
        if self.taken >= self.room:
            self._cut()
        else:
            session.actions.append(self.action)

    def _play_action(self, action: Action, ended: bool) -> None:
        session, end = self.session, self.chat.end_token
        action.text = self.chat.decode(action.tokens[:-1] if ended else action.tokens)
        action.cut = not ended
        step = checked_step(self.environment, action.text, action.turn, session.num_turns)
        action.observation, action.info = step.observation, step.info
        action.state_key = step.info.get("state_key", action.state_key)
        session.ids += action.tokens
        session.teacher_ids += action.tokens
        if step.turn_reward is not None:
            session.turn_reward.append(float(step.turn_reward))
        if step.done:
            self.over = True
            return
        self.pending.append(action.tokens[-1])
        closing = [] if ended else [end]
        reply = closing + self.chat.reply(step.observation, step.request)
        hinted = reply
        if step.request is not None:
            hinted = closing + self.chat.reply(step.observation, self._hinted(step.request))
        self._force(reply, hinted)
        self._begin_action()

    def _digest_of_texts(self) -> int:
        turn = self.action.turn
        shown = [action.observation for action in self.session.actions if action.turn == turn]
        texts = json.dumps([turn, self.session.requests[turn], *shown])
        return int.from_bytes(hashlib.blake2b(texts.encode(), digest_size=8).digest(), "little") >> 1

    def _force(self, ids: list[int], teacher_ids: list[int]) -> None:
        self.pending.extend(ids)
        self.session.ids += ids
        self.session.teacher_ids += teacher_ids

    def _hinted(self, request: str) -> str:
        self.session.requests.append(request)
        if self.sampling.gold:
            self.session.gold.append(self.gold())
        template = self.sampling.teacher_template
        return request if template is None else template.format(request=request, gold=self.gold())

    def _cut(self) -> None:
        """The context is full: the turn under way fails, finished turns stay, nothing stays behind the last action."""
        session = self.session
        self.over = session.cut = True
        last = session.actions[-1] if session.actions else Action(0, 0, 0)
        session.ids[last.start :] = session.teacher_ids[last.teacher_start :] = last.tokens
        if any(action.turn == len(session.turn_reward) for action in session.actions):
            session.turn_reward.append(0.0)


@torch.no_grad()
def _play(
    model: PreTrainedModel, prompt: list[int], rows: list[_Row], generator: torch.Generator, temperature: float
) -> None:
    """Play the rows, which share a prompt, until all are over."""
    options = logit_options(model)
    cache = GrowingCache()
    if prompt and rows:
        hidden_states(model, torch.tensor([prompt], device=model.device), cache)
        cache.select([0] * len(rows))
    while playing := [slot for slot, row in enumerate(rows) if not row.over]:
        if 4 * len(playing) <= 3 * len(rows):
            cache.select(playing)
            rows = [rows[slot] for slot in playing]
            playing = range(len(rows))
        width = min(len(rows[slot].pending) for slot in playing)
        fed = torch.tensor([row.take(width) for row in rows], device=model.device)
        hidden_BH = hidden_states(model, fed, cache)[:, -1]
        ready = [slot for slot in playing if not rows[slot].pending]
        if not ready:
            continue
        logits_RV = shaped_logits(head_logits(model, hidden_BH[ready]), **options)
        for slot, token, logp, entropy in zip(ready, *_sample(logits_RV, temperature, generator), strict=True):
            rows[slot].write(token, logp, entropy)


def _sample(
    logits_RV: torch.Tensor, temperature: float, generator: torch.Generator
) -> tuple[list[int], list[float], list[float]]:
    """One token per row, its log-prob and the entropy: where a uniform number falls among the summed probabilities."""
    logp_RV = (logits_RV / temperature).log_softmax(-1)
    sum_RV = logp_RV.exp().cumsum(-1, dtype=torch.float64)
    entropy_R = torch.special.entr(logp_RV.exp()).sum(-1)
    uniform_R1 = torch.rand(len(logp_RV), 1, dtype=torch.float64, device=logp_RV.device, generator=generator)
    chosen_R1 = torch.searchsorted(sum_RV, uniform_R1 * sum_RV[:, -1:], right=True)
    return chosen_R1.squeeze(1).tolist(), logp_RV.gather(1, chosen_R1).squeeze(1).tolist(), entropy_R.tolist()


def _as_tensors(sessions: list[Session], sampling: Sampling, seconds: float) -> Rollout:
    with_teacher = sampling.teacher_template is not None
    length = max(len(session.ids) for session in sessions)
    turns = max(session.num_turns for session in sessions)
    turn, old_logp, entropy, position = [], [], [], []
    for session in sessions:
        turn_T, logp_T, entropy_T, position_T = [-1] * length, [0.0] * length, [0.0] * length, [0] * length
        for action in session.actions:
            size = len(action.tokens)
            written = slice(action.start, action.start + size)
            turn_T[written] = [action.turn] * size
            logp_T[written] = action.logp
            entropy_T[written] = action.entropy
            position_T[written] = range(action.teacher_start, action.teacher_start + size)
        turn.append(turn_T)
        old_logp.append(logp_T)
        entropy.append(entropy_T)
        position.append(position_T)
    turn_BT = torch.tensor(turn, dtype=torch.int64)
    rewards = [session.turn_reward for session in sessions]
    return Rollout(
        sessions=sessions,
        ids=_padded([session.ids for session in sessions], length),
        policy=turn_BT >= 0,
        turn=turn_BT,
        old_logp=torch.tensor(old_logp, dtype=torch.float32),
        entropy=torch.tensor(entropy, dtype=torch.float32),
        turn_reward=torch.tensor([reward + [0.0] * (turns - len(reward)) for reward in rewards]),
        reached=torch.tensor([[k < len(reward) for k in range(turns)] for reward in rewards]),
        num_turns=torch.tensor([session.num_turns for session in sessions]),
        teacher_ids=_padded([s.teacher_ids for s in sessions], max(len(s.teacher_ids) for s in sessions))
        if with_teacher
        else None,
        teacher_position=torch.tensor(position, dtype=torch.int64) if with_teacher else None,
        seconds=seconds,
    )


def _padded(rows: list[list[int]], length: int) -> torch.Tensor:
    return torch.tensor([row + [0] * (length - len(row)) for row in rows], dtype=torch.int64)
