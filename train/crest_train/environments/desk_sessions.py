"""Sessions of `desk`: what the user asks for turn by turn, and the calls that do it."""

import random
from dataclasses import dataclass

from crest_train.environments.desk_world import (
    AMOUNTS,
    FILES,
    FOLDERS,
    KINDS,
    OWNERS,
    File,
    World,
    call,
    ends_turn,
    parse,
)

READING_KINDS = ("copy", "owner", "swap", "bring", "inc")
"""The requests whose right calls depend on what a file holds; coupled turns are of these kinds."""

FEWEST_FILES, MOST_FILES = 4, 9
"""A delete is asked for only while as many files are there, a make only up to the second number."""


@dataclass(frozen=True)
class Request:
    """One user request, e.g. kind `move` with arguments (`f3`, `d1`)."""

    kind: str
    arguments: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join((self.kind, *self.arguments))


@dataclass(frozen=True)
class Solution:
    """The right calls of a request, the world after them, the answer they give (or None) and the files they write."""

    calls: tuple[str, ...]
    world: World
    answer: str | None
    written: tuple[str, ...]


@dataclass(frozen=True)
class Turn:
    """One turn as the session was drawn: a coupled one is judged by `solution`, whatever went wrong before."""

    request: Request
    coupled: bool
    solution: Solution


@dataclass(frozen=True)
class Session:
    """The world at the start and the turns."""

    world: World
    turns: tuple[Turn, ...]


def right_calls(request: Request, world: World) -> tuple[str, ...]:
    """The calls that do what is asked, reading a value first where it is not told; KeyError if a file is not there."""
    first, second = request.arguments[0], request.arguments[-1]
    match request.kind:
        case "move":
            return f"mv {first} {second}", "done"
        case "delete":
            return f"rm {first}", "done"
        case "rename":
            return f"ren {first} {second}", "done"
        case "give":
            return f"own {first} {second}", "done"
        case "make":
            return f"new {first} {second}", "done"
        case "copy":
            return f"cat {first}", f"set {second} {world[first].amount}", "done"
        case "bring":
            return f"cat {second}", f"mv {first} {world[second].folder}", "done"
        case "owner":
            return f"cat {first}", f"answer {world[first].owner}"
        case "inc":
            return f"cat {first}", f"set {first} {next_amount(world[first].amount)}", "done"
        case "swap":
            writes = f"set {first} {world[second].amount}", f"set {second} {world[first].amount}"
            return f"cat {first}", f"cat {second}", *writes, "done"


def next_amount(amount: str) -> str:
    """The amount that follows, n9 being followed by n0."""
    return AMOUNTS[(AMOUNTS.index(amount) + 1) % len(AMOUNTS)]


def solve(request: Request, world: World) -> Solution | None:
    """The right calls on `world` and what they lead to; None where the world does not let the request be done."""
    try:
        calls = right_calls(request, world)
    except KeyError:
        return None
    after, answer, written = dict(world), None, []
    for words in map(parse, calls):
        if words[0] == "answer":
            answer = words[1]
        elif not ends_turn(words):
            if call(after, words).startswith("err"):
                return None
            if words[0] != "cat":
                written += [word for word in words[1:] if word in FILES]
    return Solution(calls, after, answer, tuple(sorted(set(written))))


def draw_session(rng: random.Random, *, num_turns: int, coupled: float, num_files: int) -> Session:
    """Draw a session; the same state of `rng` gives the same one in every process.

    With probability `coupled` a turn works on a file that the turn before wrote or read (never the first turn, nor one
    that follows a delete), else on files that no turn has written yet, as long as there are any.
    """
    names = rng.sample(FILES, num_files)
    world = {name: File(rng.choice(FOLDERS), rng.choice(OWNERS), rng.choice(AMOUNTS)) for name in names}
    start, turns, recent, written = world, [], [], set()
    for _ in range(num_turns):
        is_coupled = bool(recent) and rng.random() < coupled
        untouched = [name for name in world if name not in written]
        fresh = untouched or [name for name in world if name not in recent] or list(world)
        name = rng.choice(recent if is_coupled else fresh)
        candidates = [other for other in (world if is_coupled else fresh) if other != name]
        other = rng.choice(candidates or [other for other in world if other != name])
        kind = rng.choice([kind for kind in KINDS if _may_ask(kind, is_coupled, len(world))])
        request = Request(kind, _draw_arguments(rng, kind, name, other, world))
        solution = solve(request, world)
        turns.append(Turn(request, is_coupled, solution))
        world = solution.world
        recent = [name for name in solution.written or (name,) if name in world]
        written.update(solution.written)
    return Session(start, tuple(turns))


def _may_ask(kind: str, coupled: bool, num_files: int) -> bool:
    if coupled:
        return kind in READING_KINDS
    if kind == "delete":
        return num_files >= FEWEST_FILES
    return kind != "make" or num_files <= MOST_FILES


def _draw_arguments(rng: random.Random, kind: str, name: str, other: str, world: World) -> tuple[str, ...]:
    """Arguments that make the request a change: another folder, another owner, a name that is free."""
    match kind:
        case "move":
            return name, rng.choice([folder for folder in FOLDERS if folder != world[name].folder])
        case "give":
            return name, rng.choice([owner for owner in OWNERS if owner != world[name].owner])
        case "rename":
            return name, rng.choice([free for free in FILES if free not in world])
        case "make":
            return rng.choice([free for free in FILES if free not in world]), rng.choice(FOLDERS)
        case "copy" | "swap":
            return name, other
        case "bring":
            return other, name
        case _:
            return (name,)
