"""What a rollout leaves: sessions and their actions as records, and the same as tensors.

B = sessions, T = token positions, K = turns of a session.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch


@dataclass
class Action:
    """One action of the policy: its tokens, where they begin in the session, what came of it.

    logp, entropy: of the policy's distribution at each token (nats, at the sampling temperature).
    sampler_logp: of the distribution that the token was drawn from, where another engine or a cut made it differ.
    state_key: names the state that the action met; equal for equal states: info["state_key"] where the environment
        tells it, else a digest of the turn's place and of all texts shown in the turn so far.
    cut: stopped by `max_action_tokens` (the environment saw its text) or by the model's context (it did not).
    """

    turn: int
    start: int
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    state_key: int = 0
    text: str = ""
    observation: str | None = None
    info: dict[str, Any] = field(default_factory=dict)
    cut: bool = False
    sampler_logp: list[float] = field(default_factory=list)


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
    actions: list[Action]
    turn_reward: list[float]
    cut: bool


@dataclass
class Rollout:
    """What `rollout` gives: the sessions as tensors (the shared prompts left out) and as records.

    ids [B,T] int64: 0 behind a session's end. policy [B,T] bool: True where the policy wrote the token.
    turn [B,T] int64: place of the token's turn in its session, -1 where the policy did not write.
    old_logp, entropy [B,T] float32: the policy's log-prob and entropy at the sampling temperature, 0 where it did not
    write. sampler_logp [B,T] float32: the log-prob with which the token was drawn.
    turn_reward [B,K] float32: 0 for turns not reached. reached [B,K] bool. num_turns [B] int64.
    seconds: wall time.
    """

    sessions: list[Session]
    ids: torch.Tensor
    policy: torch.Tensor
    turn: torch.Tensor
    old_logp: torch.Tensor
    sampler_logp: torch.Tensor
    entropy: torch.Tensor
    turn_reward: torch.Tensor
    reached: torch.Tensor
    num_turns: torch.Tensor
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

    @property
    def lost_sessions(self) -> int:
        """Number of sessions whose process died or hung (environments/supervised.py)."""
        return sum(bool(s.actions) and s.actions[-1].info.get("lost", False) for s in self.sessions)


def as_tensors(sessions: list[Session], seconds: float) -> Rollout:
    """The rollout of sessions that were played in so many seconds."""
    ids = padded([session.ids for session in sessions])
    length = ids.shape[1]
    turns = max(session.num_turns for session in sessions)
    turn, old_logp, sampler_logp, entropy = [], [], [], []
    for session in sessions:
        turn_T, logp_T, sampler_T, entropy_T = [-1] * length, *([0.0] * length for _ in range(3))
        for action in session.actions:
            size = len(action.tokens)
            written = slice(action.start, action.start + size)
            turn_T[written] = [action.turn] * size
            logp_T[written] = action.logp
            sampler_T[written] = action.sampler_logp or action.logp
            entropy_T[written] = action.entropy
        turn.append(turn_T)
        old_logp.append(logp_T)
        sampler_logp.append(sampler_T)
        entropy.append(entropy_T)
    turn_BT = torch.tensor(turn, dtype=torch.int64)
    rewards = [session.turn_reward for session in sessions]
    return Rollout(
        sessions=sessions,
        ids=ids,
        policy=turn_BT >= 0,
        turn=turn_BT,
        old_logp=torch.tensor(old_logp, dtype=torch.float32),
        sampler_logp=torch.tensor(sampler_logp, dtype=torch.float32),
        entropy=torch.tensor(entropy, dtype=torch.float32),
        turn_reward=torch.tensor([reward + [0.0] * (turns - len(reward)) for reward in rewards]),
        reached=torch.tensor([[k < len(reward) for k in range(turns)] for reward in rewards]),
        num_turns=torch.tensor([session.num_turns for session in sessions]),
        seconds=seconds,
    )


def padded(rows: list[list[int]]) -> torch.Tensor:
    """Token ids [B,T] int64 of rows of any lengths, 0 behind their ends."""
    length = max(map(len, rows))
    return torch.tensor([row + [0] * (length - len(row)) for row in rows], dtype=torch.int64)
