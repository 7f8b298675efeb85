"""What an environment is to the trainer: text in, text out, a verified reward for every user turn."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol


class Role(IntEnum):
    """What an action did for its turn, in the four roles of TRIAGE (arXiv 2606.32017)."""

    PROGRESS = 0
    EXPLORATION = 1
    NO_PROGRESS = 2
    REGRESSION = 3


@dataclass(frozen=True)
class Step:
    """What an environment answers to one action.

    observation: the tool's reply, appended as tokens that are never trained on; None when nothing is replied.
    turn_reward: the verified reward of the turn, in [0, 1], when this action ended it; None while the turn goes on.
    request: the next user request, when the turn ended and another follows; None otherwise.
    info: what rules can say of the action, for the credit methods that ask for it (what is missing is asked for only by
        a method that needs it): `role` (Role), `feedback` (int: -1, 0, +1 read from the reply), `error` (bool: the
        action failed), `cause` (int: number, from 0 and counted over the session, of the earlier action whose error
        made this one fail, else -1), `state_key` (int below 2^63: equal for actions that found the same state),
        `redundant` (bool), `lost` (bool: the process that played the session was lost, which ended it).
    """

    observation: str | None = None
    turn_reward: float | None = None
    request: str | None = None
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """True when the session is over: the last turn ended."""
        return self.turn_reward is not None and self.request is None


class Environment(Protocol):
    """One session at a time; an instance shares no mutable state with any other.

    A bad action (not parseable, no such tool, wrong arguments) is answered with an observation, never an exception.
    `crest-train eval` also reads `category` (str, of the session; a column of its table each) and `session_ids` (all
    sessions, through which the seeds run, so that none is counted twice) where there are such attributes.
    """

    system: str
    """The system prompt of the session (tool docs), valid after reset; empty when there is none."""

    num_turns: int
    """Number of user turns of the session, valid after reset."""

    def reset(self, seed: int) -> str:
        """Start the session that `seed` names, the same one in every process, and return the first user request."""

    def step(self, action: str) -> Step:
        """Play one action of the policy, given as its text without the end-of-action token."""

    def gold(self) -> str:
        """The ground-truth actions of the turn now being played, as the policy would have to write them.

        May be missing where there is none: what reads it (a warm start, some methods and teachers) is then refused.
        """

    def save(self) -> Any:
        """The exact state of the session, independent of later steps; may be missing, as the trainer replays."""

    def restore(self, state: Any) -> None:
        """Continue from a state that `save` gave."""
