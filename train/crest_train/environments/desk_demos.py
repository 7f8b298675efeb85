"""Demonstrations of `desk` that slip now and then, for a policy to imitate before it learns from reward."""

import random
from dataclasses import dataclass

from crest_train.environments.desk import Desk
from crest_train.environments.desk_sessions import Request, right_calls
from crest_train.environments.desk_world import AMOUNTS, FILES, FOLDERS, OWNERS
from crest_train.environments.protocol import Step

SLIP_RATE = {
    "move": 0.3,
    "delete": 0.3,
    "rename": 0.35,
    "copy": 0.6,
    "owner": 0.35,
    "swap": 0.65,
    "give": 0.3,
    "bring": 0.6,
    "inc": 0.65,
    "make": 0.3,
}
"""Share of turns of each kind that are demonstrated with a slip, so that imitation leaves something to be learned."""

HINTED_SLIP_RATE = 0.03
"""The same where the request tells the right calls."""

HINT = "{request} <hint> {gold} </hint>"
"""How the right calls of a turn stand in its request."""


@dataclass(frozen=True)
class Demonstration:
    """A played session: its first request, then every action with what the environment answered (requests hinted)."""

    request: str
    played: tuple[tuple[str, Step], ...]


def demonstrate(desk: Desk, seed: int, rng: random.Random, *, hinted: bool) -> Demonstration:
    """Play session `seed` as one who sees the world but slips; `hinted` puts the right calls into the requests."""

    def shown(request: str) -> str:
        return HINT.format(request=request, gold=desk.gold()) if hinted else request

    request = desk.reset(seed)
    first, played = shown(request), []
    while request is not None:
        for action in _demonstrated_calls(desk, request, rng, hinted):
            step = desk.step(action)
            request = step.request
            if request is not None:
                step = Step(step.observation, step.turn_reward, shown(request), step.info)
            played.append((action, step))
            if step.turn_reward is not None:
                break
    return Demonstration(first, tuple(played))


def _demonstrated_calls(desk: Desk, request_text: str, rng: random.Random, hinted: bool) -> list[str]:
    """The calls shown for a turn: right for the world as it is (as hinted, if so), unless the demonstrator slips."""
    kind, *arguments = request_text.split()
    world = desk.save().world
    calls = [call.strip() for call in desk.gold().split(";")[:-1]]
    if not hinted:
        try:
            calls = list(right_calls(Request(kind, tuple(arguments)), world))
        except KeyError:
            pass
    rate = HINTED_SLIP_RATE if hinted else SLIP_RATE[kind]
    return slip(rng, calls, sorted(world) or list(FILES)) if rng.random() < rate else calls


def slip(rng: random.Random, calls: list[str], names: list[str]) -> list[str]:
    """The calls with one slip: a value guessed instead of read, an early end, a needless read, or a wrong word.

    names: the files that are there.
    """
    draw = rng.random()
    if draw < 0.35 and calls[0].startswith("cat"):
        return _guess(rng, calls)
    if draw < 0.45 and calls[-1] == "done":
        return [*calls[:-2], "done"]
    if draw < 0.55:
        return [f"cat {rng.choice(names)}", *calls]
    return _mistake(rng, calls, names)


def _guess(rng: random.Random, calls: list[str]) -> list[str]:
    """One of the first two calls left out, and the last value drawn at random."""
    skipped = 0 if len(calls) < 3 or rng.random() < 0.5 else 1
    calls = calls[:skipped] + calls[skipped + 1 :]
    last = len(calls) - (2 if calls[-1] == "done" else 1)
    *words, value = calls[last].split()
    if value not in FILES:
        calls[last] = " ".join((*words, rng.choice(_like(value))))
    return calls


def _mistake(rng: random.Random, calls: list[str], names: list[str]) -> list[str]:
    """One wrong word in one call; at times a wrong value is put right by the next call."""
    place = rng.choice([place for place, call in enumerate(calls) if call != "done"])
    words = calls[place].split()
    wrong = rng.randrange(1, len(words))
    choices = _like(words[wrong])
    if choices is FILES and rng.random() < 0.8:
        choices = names
    bad = list(words)
    bad[wrong] = rng.choice([word for word in choices if word != words[wrong]] or FILES)
    shown = [" ".join(bad)]
    if bad[0] in ("mv", "set", "own") and bad[1] == words[1] and rng.random() < 0.2:
        shown.append(calls[place])
    return calls[:place] + shown + calls[place + 1 :]


def _like(word: str) -> tuple[str, ...]:
    """All words that mean the same sort of thing."""
    return next(choices for choices in (FILES, FOLDERS, OWNERS, AMOUNTS) if word in choices)
