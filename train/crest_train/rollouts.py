"""Plays sessions with the policy, many in lockstep over one key-value cache that is kept across the turns of a session.

Every row feeds exactly as many tokens as every other, forced or sampled (one at a time unless all have more queued):
all rows share one cache index, no mask is needed, and a session costs one visit per token. Several processes (see
ranks.py) play their shares of the rows in one lockstep too: whoever's turn it is to sample takes the random number that
would be its own if a single process played them all.

B = sessions, R = rows that sample, H = hidden size, V = vocabulary.
"""

import hashlib
import json
import time
from collections import deque
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from crest_ops.heads import logit_options
from crest_train.cache import GrowingCache
from crest_train.chat import Chat
from crest_train.environments.protocol import Environment
from crest_train.environments.protocol_checks import checked_gold, checked_opening, checked_step
from crest_train.model import context_length, head_logits, hidden_states, shaped_logits
from crest_train.ranks import gathered, rank, share, size, total
from crest_train.sessions import Action, Rollout, Session, as_tensors


@dataclass(frozen=True)
class Sampling:
    """How the policy writes: temperature > 0, at most max_action_tokens per action, `rows` sessions in one lockstep.

    rows: of all processes together. gold: record the ground truth of every turn begun.
    """

    temperature: float = 1.0
    max_action_tokens: int = 8
    rows: int = 128
    gold: bool = False


def rollout(
    model: PreTrainedModel,
    chat: Chat,
    environments: list[Environment],
    seeds: list[int],
    *,
    generator: torch.Generator,
    sampling: Sampling,
    begun: list[list[list[int]]] | None = None,
) -> Rollout:
    """Play one session per environment, started with its seed, and return them all in the order given.

    Sessions that share a system prompt are played together. generator: on the model's device.
    begun: tokens of the actions with which each session begins, played as they are (log-prob 0); the policy goes on.
    Raises ValueError when no session has room for an action in the model's context, or an environment breaks the
    protocol (naming its class, the turn and what it gave).
    """
    began = time.perf_counter()
    rows = _begin(model, chat, environments, seeds, sampling)
    for row, actions in zip(rows, begun or [[]] * len(rows), strict=True):
        for tokens in actions:
            row.write_all(tokens)
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for place, row in enumerate(rows):
        if not row.over:
            by_prompt.setdefault(tuple(row.session.prompt), []).append(place)
    sessions = [row.session for row in rows]
    played: dict[int, Session] = {}
    for prompt, alike in by_prompt.items():
        for start in range(0, len(alike), sampling.rows):
            mine = share(alike[start : start + sampling.rows])
            _play(model, list(prompt), [rows[place] for place in mine], generator, sampling.temperature)
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
        self.session = Session(seed, environment.system, prompt, environment.num_turns, [], [], [], [], [], cut=False)
        self.pending: deque[int] = deque()
        self.over = False
        self._ask(request)
        self._force(opening)
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
        self.action = Action(len(session.turn_reward), len(session.ids))
        self.action.state_key = self._digest_of_texts()
        self.taken = len(session.ids)
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
        if step.turn_reward is not None:
            session.turn_reward.append(float(step.turn_reward))
        if step.done:
            self.over = True
            return
        self.pending.append(action.tokens[-1])
        closing = [] if ended else [end]
        if step.request is not None:
            self._ask(step.request)
        self._force(closing + self.chat.reply(step.observation, step.request))
        self._begin_action()

    def _digest_of_texts(self) -> int:
        turn = self.action.turn
        shown = [action.observation for action in self.session.actions if action.turn == turn]
        texts = json.dumps([turn, self.session.requests[turn], *shown])
        return int.from_bytes(hashlib.blake2b(texts.encode(), digest_size=8).digest(), "little") >> 1

    def _force(self, ids: list[int]) -> None:
        self.pending.extend(ids)
        self.session.ids += ids

    def _ask(self, request: str) -> None:
        self.session.requests.append(request)
        if self.sampling.gold:
            self.session.gold.append(self.gold())

    def _cut(self) -> None:
        """The context is full: the turn under way fails, finished turns stay, nothing stays behind the last action."""
        session = self.session
        self.over = session.cut = True
        last = session.actions[-1] if session.actions else Action(0, 0)
        session.ids[last.start :] = last.tokens
        if any(action.turn == len(session.turn_reward) for action in session.actions):
            session.turn_reward.append(0.0)


@torch.no_grad()
def _play(
    model: PreTrainedModel, prompt: list[int], rows: list[_Row], generator: torch.Generator, temperature: float
) -> None:
    """Play the rows, which share a prompt, until all are over, here and in the other processes."""
    options = logit_options(model)
    cache = GrowingCache()
    if prompt and rows:
        hidden_states(model, torch.tensor([prompt], device=model.device), cache)
        cache.select([0] * len(rows))
    while True:
        width, num_ready = _next([len(row.pending) for row in rows if not row.over])
        if not width:
            return
        drawn_R1 = torch.rand(sum(num_ready), 1, dtype=torch.float64, device=model.device, generator=generator)
        uniform_R1 = drawn_R1.split(num_ready)[rank()]
        playing = [slot for slot, row in enumerate(rows) if not row.over]
        if not playing:
            continue
        if 4 * len(playing) <= 3 * len(rows):
            cache.select(playing)
            rows = [rows[slot] for slot in playing]
            playing = range(len(rows))
        fed = torch.tensor([row.take(width) for row in rows], device=model.device)
        hidden_BH = hidden_states(model, fed, cache)[:, -1]
        ready = [slot for slot in playing if not rows[slot].pending]
        if not ready:
            continue
        logits_RV = shaped_logits(head_logits(model, hidden_BH[ready]), **options)
        for slot, token, logp, entropy in zip(ready, *_sample(logits_RV, temperature, uniform_R1), strict=True):
            rows[slot].write(token, logp, entropy)


def _next(queued: list[int]) -> tuple[int, list[int]]:
    """How many tokens every row feeds next, 0 when all are over, and how many rows of each process then sample.

    queued: of each row that plays here, how many tokens wait to be fed.
    """
    shortest = min(queued, default=0)
    told_P2 = torch.zeros(size(), 2, dtype=torch.int64)
    told_P2[rank()] = torch.tensor([shortest, queued.count(shortest)])
    told = total(told_P2).tolist()
    width = min((length for length, _ in told if length), default=0)
    return width, [count if length == width else 0 for length, count in told]


def _sample(
    logits_RV: torch.Tensor, temperature: float, uniform_R1: torch.Tensor
) -> tuple[list[int], list[float], list[float]]:
    """One token per row, its log-prob and the entropy: where a uniform number falls among the summed probabilities."""
    logp_RV = (logits_RV / temperature).log_softmax(-1)
    sum_RV = logp_RV.exp().cumsum(-1, dtype=torch.float64)
    entropy_R = torch.special.entr(logp_RV.exp()).sum(-1)
    chosen_R1 = torch.searchsorted(sum_RV, uniform_R1 * sum_RV[:, -1:], right=True)
    return chosen_R1.squeeze(1).tolist(), logp_RV.gather(1, chosen_R1).squeeze(1).tolist(), entropy_R.tolist()
