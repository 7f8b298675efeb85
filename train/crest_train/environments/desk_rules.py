"""What can be said of an action of `desk` by rule, without a judge model.

Role, feedback, error, cause, redundancy, and a key of the state that it was taken in.
"""

import hashlib
from dataclasses import dataclass, field, replace

from crest_train.environments.desk_sessions import Session, Solution, Turn
from crest_train.environments.desk_world import World, differing
from crest_train.environments.protocol import Role


@dataclass
class State:
    """A session being played. Of its worlds only `world` is ever written to.

    expected: the right outcome of the turn; None where earlier errors left none that could be reached.
    solution: the right calls that lead there.
    read: files read in this turn and not written since.
    blame: of each file that is not as it should be, the number of the action that made it so.
    inherited: number of the earlier action whose error makes this turn's request fail or mislead; -1 for none.
    """

    session: Session
    world: World
    turn_index: int = -1
    num_actions: int = 0
    num_actions_in_turn: int = 0
    expected: World | None = None
    solution: Solution | None = None
    read: set[str] = field(default_factory=set)
    blame: dict[str, int] = field(default_factory=dict)
    inherited: int = -1

    @property
    def turn(self) -> Turn:
        return self.session.turns[self.turn_index]

    def copy(self) -> "State":
        return replace(self, world=dict(self.world), read=set(self.read), blame=dict(self.blame))

    def unlike_expected(self) -> list[str]:
        """Files that are not as the turn's right outcome has them; none where there is no such outcome."""
        return differing(self.world, self.expected) if self.expected is not None else []


def judge(state: State, words: tuple[str, ...] | None, reply: str | None, before: World, reward: float | None) -> dict:
    """Step.info (see `Desk`) of the action just played on `state`; also keeps its books of reads and blame.

    Info has `state_key` besides: 63 bits, equal for actions of one turn of the session that found the same world, right
    outcome and files read; how many actions the turn has had is left out, as in GiGPO (arXiv 2505.10978).
    words, reply: the call (None when not well formed) and what was answered; before: the world before it;
    reward: of the turn, when the action ended it.
    """
    refused = reply is not None and reply.startswith("err")
    changed = differing(before, state.world)
    wrong = state.unlike_expected()
    written_wrong = [name for name in changed if name in wrong]
    failed = reward == 0.0
    key = _state_key(state, before)
    name_read = words[1] if words is not None and words[0] == "cat" and not refused else None
    redundant = name_read in state.read if name_read is not None else reply == "ok" and not changed
    if reward is not None:
        role = Role.REGRESSION if failed else Role.PROGRESS
    elif name_read is not None:
        wanted = state.solution is not None and f"cat {name_read}" in state.solution.calls
        role = Role.EXPLORATION if wanted and not redundant else Role.NO_PROGRESS
    else:
        role = _role_of_write(state, before)
    error = refused or failed or bool(written_wrong)
    cause = _cause(state, words, reply, wrong if failed else []) if error else -1

    if name_read is not None:
        state.read.add(name_read)
    state.read.difference_update(changed)
    for name in changed:
        state.blame.pop(name, None)
    state.blame.update(dict.fromkeys(written_wrong, state.num_actions))
    if failed:
        for name in wrong:
            state.blame.setdefault(name, state.num_actions)
    feedback = -1 if refused else int(reply == "ok")
    said = {"role": role, "feedback": feedback, "error": error, "cause": cause, "redundant": redundant}
    return said | {"state_key": key}


def _state_key(state: State, world: World) -> int:
    right = sorted(state.expected.items()) if state.expected is not None else None
    answer = state.solution.answer if state.solution is not None else None
    known = (state.turn_index, sorted(world.items()), right, answer, sorted(state.read))
    return int.from_bytes(hashlib.blake2b(repr(known).encode(), digest_size=8).digest(), "big") >> 1


def _role_of_write(state: State, before: World) -> Role:
    if state.expected is None:
        return Role.NO_PROGRESS
    gained = len(differing(before, state.expected)) - len(state.unlike_expected())
    return Role.PROGRESS if gained > 0 else Role.REGRESSION if gained < 0 else Role.NO_PROGRESS


def _cause(state: State, words: tuple[str, ...] | None, reply: str | None, unfinished: list[str]) -> int:
    """The earlier action to blame: for the file a reply is about, else for a file left wrong, else for the turn."""
    if words is None:
        return -1
    if reply is not None and reply.startswith("err"):
        subject = words[2] if reply == "err exists" and words[0] == "ren" else words[1]
        return state.blame.get(subject, -1)
    return min((state.blame[name] for name in unfinished if name in state.blame), default=state.inherited)
