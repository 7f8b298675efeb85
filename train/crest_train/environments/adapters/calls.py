"""Tool calls of an action, as the policy writes them: Python calls, or JSON as chat templates with tools have it."""

import json
import re
from collections.abc import Mapping
from typing import Any

from crest_train.environments.bfcl_calls import MAX_CHARACTERS, BadCall, Call
from crest_train.environments.bfcl_calls import parse as parse_python

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_WANTED = 'Error: a tool call is {"name": "...", "arguments": {...}}'


def parse(action: str, parameters: Mapping[str, list[str]]) -> tuple[list[Call], bool]:
    """The calls of an action, all arguments by name, and whether it ends the session: it does without any call.

    parameters: tool -> the names of its parameters, for arguments given by place. Raises BadCall, whose message is the
    observation, for what looks like a call and is none. Nothing is evaluated.
    """
    bodies = _TAGGED.findall(action) or [action] * action.lstrip().startswith("{")
    if bodies:
        return [call for body in bodies for call in _json_calls(body)], False
    calls, ends = parse_python(action)
    return [_named(call, parameters.get(call.name, [])) for call in calls], ends


def _json_calls(body: str) -> list[Call]:
    if len(body) > MAX_CHARACTERS:
        raise BadCall(f"Error: {len(body)} characters are too long for an action; the limit is {MAX_CHARACTERS}")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadCall(f"{_WANTED}: {type(error).__name__}") from None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        raise BadCall(_WANTED)
    arguments = found.get("arguments", {})
    if not isinstance(arguments, dict):
        raise BadCall(_WANTED)
    return [Call(found["name"], (), arguments, body)]


def _named(call: Call, names: list[str]) -> Call:
    if len(call.args) > len(names):
        raise BadCall(f"Error: {call.name} takes {len(names)} arguments by place, found {len(call.args)}")
    given: dict[str, Any] = dict(zip(names, call.args, strict=False))
    twice = given.keys() & call.kwargs.keys()
    if twice:
        raise BadCall(f"Error: {call.name}: {min(twice)} is given twice")
    return Call(call.name, (), given | call.kwargs, call.text)


def as_text(value: Any) -> str:
    """A tool's reply as text that a tokenizer takes: a text as it is, anything else as JSON where it can be."""
    if not isinstance(value, str):
        try:
            value = json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            value = str(value)
    return value.encode(errors="replace").decode()
