"""What rules say of the actions of a text game: one turn a session, a score, a room to look at and an inventory."""

import hashlib
from dataclasses import dataclass, field

from crest_train.environments.protocol import Role, Step

MAX_CHARACTERS = 500
"""A longer action is refused before an engine sees it."""


@dataclass(frozen=True)
class Outcome:
    """What an engine answers to an action.

    score: so far, at most 1; below 0 when the task was failed. over: the task ended. refused: it was no action.
    state: all that can be seen of the state then, free of charge.
    """

    observation: str
    score: float
    over: bool
    refused: bool
    state: str


@dataclass
class TextGame:
    """The books of a session, and the verdict over each of its actions.

    The turn ends when the task does, or with `max_actions` actions; its reward is the score then, in [0, 1].

    Step.info: `error` (it was no action), `feedback` (-1 an error, +1 the visible state changed, 0 else), `redundant`
    (the same action was played in the same state before), `state_key` (of score, room and inventory: what cannot be
    seen is not told apart), `role`: progress when the score rose, regression when it fell or the turn ends below a
    score of 1, exploration when it led to a state or a reply that is new in the session, no progress otherwise. There
    is no `cause`: no rule tells which earlier action is to blame.
    """

    max_actions: int
    state: str
    score: float = 0.0
    num_actions: int = 0
    tried: set[tuple[str, str]] = field(default_factory=set)
    met: set[str] = field(default_factory=set)
    over: bool = False

    def judge(self, action: str, outcome: Outcome) -> Step:
        """The answer to an action. Raises ValueError when the session is over."""
        if self.over:
            raise ValueError("the session is over; call reset to start another")
        self.num_actions += 1
        self.over = over = outcome.over or self.num_actions >= self.max_actions
        redundant = (self.state, action) in self.tried
        new = not {outcome.state, outcome.observation} <= self.met | {self.state}
        if outcome.score > self.score:
            role = Role.PROGRESS
        elif outcome.score < self.score or (over and outcome.score < 1):
            role = Role.REGRESSION
        elif new and not outcome.refused:
            role = Role.EXPLORATION
        else:
            role = Role.NO_PROGRESS
        info = {
            "error": outcome.refused,
            "feedback": -1 if outcome.refused else int(outcome.state != self.state),
            "redundant": redundant,
            "state_key": key(f"{self.score} {self.state}"),
            "role": role,
        }
        self.tried.add((self.state, action))
        self.met |= {self.state, outcome.state, outcome.observation}
        self.state, self.score = outcome.state, outcome.score
        return Step(outcome.observation, min(max(outcome.score, 0.0), 1.0) if over else None, info=info)


def key(text: str) -> int:
    """A number in [0, 2^63) that names the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def plain(action: str) -> str | None:
    """The action on one line, in characters that every engine takes; None when it is empty or too long."""
    words = "".join(letter if letter.isprintable() else " " for letter in action).split()
    text = " ".join(words).encode(errors="replace").decode()
    return text if 0 < len(text) <= MAX_CHARACTERS else None
