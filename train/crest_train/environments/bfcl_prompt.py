"""Tool docs in the system prompt: the benchmark's full JSON schemas, or one signature a line for small models."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

Doc = Mapping[str, Any]

_JSON_TYPES = {"dict": "object", "float": "number", "any": "string", "tuple": "array"}
_PYTHON_TYPES = {"integer": "int", "float": "float", "boolean": "bool", "array": "list", "dict": "dict", "any": "any"}
_CHOICES = re.compile(r"\[Enum\]:\s*(.+)")
_MAX_CHOICES = 8
_TASK = (
    "Do what the user asks by calling tools. Write the calls of a step, one a line, e.g. cd(folder='docs'). "
    "You are told their results. Write done when nothing is left to do, or when tool or information is missing."
)


def system_prompt(docs: Iterable[Doc], form: str) -> str:
    """The task and its tools; form is "compact" or "json"."""
    return f"{_TASK}\nTools:\n{tool_docs(docs, form)}"


def tool_docs(docs: Iterable[Doc], form: str) -> str:
    """One line per tool, in the order given."""
    line = {"compact": signature, "json": json_schema}[form]
    return "\n".join(line(doc) for doc in docs)


def json_schema(doc: Doc) -> str:
    """The tool as a chat template's `tools` takes it, with the benchmark's type names made JSON schema's."""
    function = {key: doc[key] for key in ("name", "description")} | {"parameters": _json_types(doc["parameters"])}
    return json.dumps({"type": "function", "function": function})


def signature(doc: Doc) -> str:
    """`name(argument, number: int, mode: on|off)`: text is the type left out, `?` marks what may be left out."""
    parameters = doc["parameters"]
    required = set(parameters.get("required", ()))
    arguments = [_argument(name, schema, name in required) for name, schema in parameters["properties"].items()]
    return f"{doc['name']}({', '.join(arguments)})"


def _argument(name: str, schema: Doc, required: bool) -> str:
    choices = _choices(schema)
    kind = "|".join(choices) if choices else _PYTHON_TYPES.get(schema["type"], "")
    return f"{name}{'' if required else '?'}{': ' + kind if kind else ''}"


def _choices(schema: Doc) -> list[str]:
    found = _CHOICES.search(schema.get("description", ""))
    choices = [choice.strip(" \"'[].") for choice in found[1].split(",")] if found else []
    return choices if len(choices) <= _MAX_CHOICES else []


def _json_types(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_json_types(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    typed = {key: _json_types(value) for key, value in schema.items()}
    if isinstance(typed.get("type"), str):
        typed["type"] = _JSON_TYPES.get(typed["type"], typed["type"])
    return typed
