"""Tool calls as text: parsing without evaluating, and running one on API instances of the caller's own.

An action holds calls as BFCL writes them, `[cd(folder='a'), ls()]`, or bare, or one a line; arguments are Python
literals. `done` or `done()`, alone or on the last line, ends the turn, and so does a message without any call (BFCL's
rule).
"""

import ast
import decimal
import inspect
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mpmath

DONE = "done"
MAX_CHARACTERS = 8000
MAX_INTEGER = 10**18
COSTLY_ARGUMENTS = {
    "logarithm": "precision",
    "power": "exponent",
    "round_number": "decimal_places",
    "square_root": "precision",
}
"""Arguments that say how much work a MathAPI tool does, refused beyond MAX_COST in either direction."""
MAX_COST = 1000

_NO_CALL = "Error: an action is made of calls such as name(argument='value')"
_LOOKS_LIKE_A_CALL = re.compile(r"\w\s?\(")


class BadCall(ValueError):
    """The text is no call that can be run; the message is the observation."""


@dataclass(frozen=True)
class Call:
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    text: str


@dataclass(frozen=True)
class Result:
    text: str
    """What the tool replied, as the benchmark's own executor would write it."""
    failed: bool
    """The tool raised or returned an error, or there is no such tool."""


def parse(action: str) -> tuple[list[Call], bool]:
    """The calls of an action, and whether it ends the turn. Raises BadCall for what looks like calls and is none."""
    text = action.strip("` \t\r\n").removeprefix("python\n")
    if text in ("", "[]") or not _LOOKS_LIKE_A_CALL.search(text):
        return [], True
    if len(text) > MAX_CHARACTERS:
        raise BadCall(f"Error: {len(text)} characters are too long for an action; the limit is {MAX_CHARACTERS}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            statements = ast.parse(text).body
        ends_turn = bool(statements) and _is_done(statements[-1])
        calls = [call for statement in statements[: -1 if ends_turn else None] for call in _calls_of(statement)]
    except BadCall:
        raise
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        raise BadCall(f"Error: this is not a call that can be read: {_reason(error)}") from None
    if not calls and not ends_turn:
        raise BadCall(_NO_CALL)
    return calls, ends_turn


def run(call: Call, instances: Mapping[str, Any]) -> Result:
    """Run one call on the instances, whose later ones win a name that several have; whatever goes wrong is the reply.

    The text is that of the benchmark's executor. Decimal and mpmath precision, which MathAPI sets for the whole
    process, is put back.
    """
    tool = find_tool(call.name, instances)
    if tool is None:
        return Result(f"Error during execution: name {call.name!r} is not defined", failed=True)
    with decimal.localcontext(), mpmath.workdps(mpmath.mp.dps):
        try:
            _refuse_costly(call, tool)
            value = tool(*call.args, **call.kwargs)
            text = _as_text(value)
        except Exception as error:
            return Result(f"Error during execution: {error}", failed=True)
    return Result(text, failed=isinstance(value, dict) and "error" in value)


def find_tool(name: str, instances: Mapping[str, Any]) -> Any | None:
    """The public method of that name, or None."""
    if name.startswith("_"):
        return None
    for instance in reversed(list(instances.values())):
        tool = getattr(instance, name, None)
        if inspect.ismethod(tool):
            return tool
    return None


def _is_done(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and ast.unparse(statement.value) in (DONE, f"{DONE}()")


def _calls_of(statement: ast.stmt) -> list[Call]:
    if not isinstance(statement, ast.Expr):
        raise BadCall(_NO_CALL)
    value = statement.value
    nodes = value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]
    return [_call_of(node) for node in nodes]


def _call_of(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise BadCall(_NO_CALL)
    if any(keyword.arg is None for keyword in node.keywords):
        raise BadCall(f"Error: {node.func.id}: arguments are written out, not unpacked")
    names = [keyword.arg for keyword in node.keywords]
    if len(set(names)) < len(names):
        raise BadCall(f"Error: {node.func.id}: an argument is given twice")
    args = tuple(_literal(node.func.id, value) for value in node.args)
    kwargs = dict(zip(names, (_literal(node.func.id, keyword.value) for keyword in node.keywords), strict=True))
    return Call(node.func.id, args, kwargs, ast.unparse(node))


def _literal(tool: str, node: ast.expr) -> Any:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, int) and part.value > MAX_INTEGER:
            raise BadCall(f"Error: {tool}: an argument is larger than {MAX_INTEGER}")
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        raise BadCall(f"Error: {tool}: arguments must be literals such as 'text', 3, True or ['a', 'b']") from None


def _refuse_costly(call: Call, tool: Any) -> None:
    if call.name not in COSTLY_ARGUMENTS:
        return
    name = COSTLY_ARGUMENTS[call.name]
    value = inspect.signature(tool).bind(*call.args, **call.kwargs).arguments.get(name, 0)
    if isinstance(value, int) and abs(value) > MAX_COST:
        raise ValueError(f"{name} is limited to {MAX_COST}")


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        try:
            return json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            return str(value)
    return str(value)


def _reason(error: Exception) -> str:
    return error.msg if isinstance(error, SyntaxError) else type(error).__name__
