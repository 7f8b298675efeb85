"""The benchmark as it lies in the fetch cache: sessions, tool docs, API classes, and its two checks of a turn."""

import functools
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crest_train.fetch import BFCL_CATEGORIES as CATEGORIES
from crest_train.fetch import path_of


@dataclass(frozen=True)
class Session:
    """One session of the benchmark. Turn k asks `requests[k]`; the tools `revealed[k]` become known with turn k."""

    id: str
    category: str
    requests: tuple[str | None, ...]
    gold: tuple[tuple[str, ...], ...]
    api_names: tuple[str, ...]
    initial_config: Mapping[str, Any]
    excluded: frozenset[str]
    revealed: Mapping[int, tuple[str, ...]]


@dataclass(frozen=True)
class Benchmark:
    sessions: Mapping[str, Session]
    docs: Mapping[str, tuple[Mapping[str, Any], ...]]
    """Per API class, its tools as the benchmark documents them."""
    new_instance: Callable[[str, Mapping[str, Any], bool], Any]
    """(API class, initial config, long context) -> a loaded instance that shares nothing with another."""
    same_state: Callable[[dict[str, Any], dict[str, Any]], bool]
    """(instances, ground-truth instances) -> equal in every public attribute."""
    covers: Callable[[list[str], list[str], int], bool]
    """(replies so far, ground-truth replies of the turn, turn) -> every ground-truth reply was seen."""


@functools.cache
def benchmark() -> Benchmark:
    """The fetched benchmark. Raises ValueError, with the command to run, where it was not fetched."""
    root = path_of("bfcl")
    config, checker, classes = _import_package(root)
    data = root / "bfcl_eval" / "data"
    docs = {
        api: tuple(_read_lines(data / "multi_turn_func_doc" / config.MULTI_TURN_FUNC_DOC_FILE_MAPPING[api]))
        for api in classes
    }

    def new_instance(api: str, scenario: Mapping[str, Any], long_context: bool) -> Any:
        instance = classes[api]()
        if api not in config.STATELESS_CLASSES:
            instance._load_scenario(scenario, long_context=long_context)
        return instance

    return Benchmark(
        sessions={session.id: session for category in CATEGORIES for session in _read_sessions(data, category)},
        docs=docs,
        new_instance=new_instance,
        same_state=lambda ours, gold: checker.state_checker(ours, gold)["valid"],
        covers=lambda ours, gold, turn: checker.response_checker(ours, gold, turn)["valid"],
    )


def session_id(category: str, number: int) -> str:
    return f"multi_turn_{category}_{number}"


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _read_sessions(data: Path, category: str) -> list[Session]:
    file_name = f"BFCL_v4_multi_turn_{category}.json"
    gold = {answer["id"]: answer["ground_truth"] for answer in _read_lines(data / "possible_answer" / file_name)}
    return [
        Session(
            id=entry["id"],
            category=category,
            requests=tuple(messages[0]["content"] if messages else None for messages in entry["question"]),
            gold=tuple(tuple(calls) for calls in gold[entry["id"]]),
            api_names=tuple(entry["involved_classes"]),
            initial_config=entry["initial_config"],
            excluded=frozenset(entry.get("excluded_function", ())),
            revealed={int(turn): tuple(names) for turn, names in entry.get("missed_function", {}).items()},
        )
        for entry in _read_lines(data / file_name)
    ]


def _import_package(root: Path) -> tuple[Any, Any, dict[str, type]]:
    """Import the unpacked modules, leaving alone a bfcl_eval that the user may have installed."""
    installed = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "bfcl_eval"}
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    try:
        config = importlib.import_module("bfcl_eval.constants.executable_backend_config")
        checker = importlib.import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker")
        classes = {}
        for api, module_name in config.CLASS_FILE_PATH_MAPPING.items():
            if (root / Path(*module_name.split("."))).with_suffix(".py").exists():
                classes[api] = getattr(importlib.import_module(module_name), api)
    finally:
        sys.path.remove(str(root))
        for name in [name for name in sys.modules if name.split(".")[0] == "bfcl_eval"]:
            del sys.modules[name]
        sys.modules.update(installed)
    return config, checker, classes
