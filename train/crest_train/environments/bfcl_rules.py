"""What can be said of an action of `bfcl` by rule: its role, the earlier action to blame, a key of the state before it.

All of it is read off the API instances' public attributes, laid out flat, beside those of the ground truth's instances
at the end of the turn.
"""

import hashlib
import re
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from crest_train.environments.protocol import Role

Path = tuple[Any, ...]
Layout = Mapping[Path, Any]
"""Where a plain value stands (API class, attribute or key or place in a list, ...) -> the value."""

_PLAIN = (str, int, float, bool, type(None))


def layout(instances: Mapping[str, Any]) -> dict[Path, Any]:
    """All plain values in the instances' public attributes; what is met again, a parent or a copy, is not laid out.

    A private attribute that points into what was laid out (the current folder) is the path that it points to.
    """
    values: dict[Path, Any] = {}
    met: dict[int, Path] = {}
    waiting: deque[tuple[Path, Any]] = deque(((api,), instance) for api, instance in instances.items())
    while waiting:
        path, value = waiting.popleft()
        if isinstance(value, _PLAIN):
            values[path] = value
        elif id(value) not in met:
            met[id(value)] = path
            waiting += [((*path, key), part) for key, part in _parts(value)]
    for api, instance in instances.items():
        for name, value in vars(instance).items():
            if name.startswith("_") and id(value) in met:
                values[api, name] = met[id(value)]
    return values


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return ((_Key(key), part) for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    if hasattr(value, "__dict__"):
        return ((name, part) for name, part in vars(value).items() if not name.startswith("_"))
    return [("", repr(sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value))]


class _Key(str):
    """A key of a dict, which may be the name of a file, a user, an order; an attribute's name is none."""

    def __new__(cls, key: Any) -> "_Key":
        return super().__new__(cls, key)


def differing(left: Layout, right: Layout) -> list[Path]:
    """Where the two differ; a private pointer does not count, as in the benchmark."""
    paths = dict.fromkeys([*left, *right])
    absent = object()
    return [
        path for path in paths if left.get(path, absent) != right.get(path, absent) and not str(path[1]).startswith("_")
    ]


def state_key(turn: int, found: Layout) -> int:
    """63 bits, equal for equal states in the same turn of the session."""
    known = repr((turn, sorted((repr(path), repr(value)) for path, value in found.items())))
    return int.from_bytes(hashlib.blake2b(known.encode(errors="replace"), digest_size=8).digest(), "big") >> 1


def role(before: Layout, found: Layout, target: Layout, *, reads: bool, reward: float | None) -> Role:
    """Of an action that left `found`; target: the state that the ground truth leaves at the turn's end.

    Ending the turn: progress when it was earned, else regression. Else progress or regression when fewer or more values
    differ from the target than before; with as many, exploration when it only read, all its calls worked and told
    something new (`reads`), no progress otherwise.
    """
    if reward is not None:
        return Role.PROGRESS if reward > 0 else Role.REGRESSION
    gained = len(differing(before, target)) - len(differing(found, target))
    if gained:
        return Role.PROGRESS if gained > 0 else Role.REGRESSION
    return Role.EXPLORATION if reads and before == found else Role.NO_PROGRESS


def names_of(paths: Iterable[Path]) -> set[str]:
    """The names of what stands there: the keys of dicts on the way."""
    return {str(part) for path in paths for part in path if isinstance(part, _Key)}


def differing_names(left: Layout, right: Layout) -> set[str]:
    """Names of what differs: of what is there on one side alone, or the innermost that holds the value."""
    sides = [{path[:end] for path in side for end in range(1, len(path) + 1)} for side in (left, right)]
    names = set()
    for path in differing(left, right):
        keys = [end for end, part in enumerate(path, 1) if isinstance(part, _Key)]
        new = (end for end in keys if (path[:end] in sides[0]) != (path[:end] in sides[1]))
        if keys:
            names.add(str(path[next(new, keys[-1]) - 1]))
    return names


def cause(blame: Mapping[str, int], failures: Iterable[str]) -> int:
    """The earliest action that is to blame for something that the texts of failed calls name in full; -1 for none."""
    text = "\n".join(failures)
    return min((number for name, number in blame.items() if _names(text, name)), default=-1)


def blamed(
    blame: Mapping[str, int],
    number: int,
    before: Layout,
    found: Layout,
    target: Layout,
    *,
    failed_calls: Iterable[str],
    turn_failed: bool,
) -> dict[str, int]:
    """Who is to blame for what after action `number`: name -> the action that left it other than the target has it.

    It did so by a change, by a failed call for something that the target has and the state lacks, or by ending the turn
    in failure with it undone; what was changed into what it should be is no one's fault any more.
    """
    wrong, changed = differing_names(found, target), differing_names(before, found)
    after = {name: action for name, action in blame.items() if name not in changed}
    after |= dict.fromkeys(changed & wrong, number)
    calls = "\n".join(failed_calls)
    if calls:
        missing = names_of(target) - names_of(found)
        after = dict.fromkeys((name for name in missing if _names(calls, name)), number) | after
    return dict.fromkeys(wrong, number) | after if turn_failed else after


def _names(text: str, name: str) -> bool:
    return bool(name) and re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text) is not None
