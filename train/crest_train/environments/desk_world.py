"""The small world of `desk`: files with a folder, an owner and an amount, and the calls that read and change it."""

from typing import NamedTuple

FILES = tuple(f"f{i}" for i in range(24))
FOLDERS = tuple(f"d{i}" for i in range(4))
OWNERS = tuple(f"o{i}" for i in range(8))
AMOUNTS = tuple(f"n{i}" for i in range(10))

KINDS = ("move", "delete", "rename", "copy", "owner", "swap", "give", "bring", "inc", "make")
"""What a user may ask for."""

ARGUMENTS = {
    "mv": (FILES, FOLDERS),
    "rm": (FILES,),
    "ren": (FILES, FILES),
    "cat": (FILES,),
    "set": (FILES, AMOUNTS),
    "own": (FILES, OWNERS),
    "new": (FILES, FOLDERS),
    "answer": (OWNERS,),
    "done": (),
}
"""The words that each argument of a call may be. `done` and `answer` end the turn, `cat` reads, the others write."""

MARKERS = ("<pad>", "<unk>", "<user>", "<obs>", "<hint>", "</hint>", ">", ";")
REPLIES = ("ok", "err", "nofile", "exists", "syntax")
VOCABULARY = MARKERS + tuple(ARGUMENTS) + KINDS + REPLIES + FILES + FOLDERS + OWNERS + AMOUNTS
"""Every word that a session of `desk` may hold, in the order of the token ids of the built-in policy."""


class File(NamedTuple):
    """What the world knows of a file."""

    folder: str
    owner: str
    amount: str


World = dict[str, File]


def parse(action: str) -> tuple[str, ...] | None:
    """The words of an action, or None when they are not one well-formed call."""
    words = tuple(action.split())
    if not words or words[0] not in ARGUMENTS:
        return None
    allowed = ARGUMENTS[words[0]]
    if len(words) != 1 + len(allowed) or any(
        word not in choices for word, choices in zip(words[1:], allowed, strict=True)
    ):
        return None
    return words


def ends_turn(words: tuple[str, ...]) -> bool:
    """True for the calls that hand the turn back to the user."""
    return words[0] in ("done", "answer")


def call(world: World, words: tuple[str, ...]) -> str:
    """Play a well-formed read or write on `world`, in place, and return the reply; `err ...` leaves it as it was."""
    verb, name, *rest = words
    if verb == "new":
        if name in world:
            return "err exists"
        world[name] = File(rest[0], OWNERS[0], AMOUNTS[0])
        return "ok"
    if name not in world:
        return "err nofile"
    if verb == "cat":
        return " ".join(world[name])
    if verb == "rm":
        del world[name]
    elif verb == "ren":
        if rest[0] in world:
            return "err exists"
        world[rest[0]] = world.pop(name)
    else:
        field = {"mv": "folder", "own": "owner", "set": "amount"}[verb]
        world[name] = world[name]._replace(**{field: rest[0]})
    return "ok"


def differing(left: World, right: World) -> list[str]:
    """Names of the files that are not the same in both worlds, sorted."""
    return sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))
