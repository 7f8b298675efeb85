"""Environments: multi-turn tool-use sessions with verified turn rewards."""

import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from crest_train.environments.protocol import Environment

ENVIRONMENTS = {
    "alfworld": "crest_train.environments.alfworld:Alfworld",
    "bfcl": "crest_train.environments.bfcl:Bfcl",
    "desk": "crest_train.environments.desk:Desk",
    "openenv": "crest_train.environments.adapters.openenv:OpenEnvironment",
    "scienceworld": "crest_train.environments.scienceworld:ScienceWorld",
    "supervised": "crest_train.environments.supervised:Supervised",
    "textcraft": "crest_train.environments.textcraft:TextCraft",
    "textworld_express": "crest_train.environments.textworld_express:TextworldExpress",
    "trl": "crest_train.environments.adapters.trl:TrlEnvironment",
    "verifiers": "crest_train.environments.adapters.verifiers:VerifiersEnvironment",
}
"""Name -> where the class is; imported when first asked for."""

FIRST_HELD_OUT_SEED = 1 << 30
"""Seeds from here on name held-out sessions; training never uses them."""


def make_environment(name: str, options: dict[str, Any]) -> Environment:
    """A fresh environment: one of ENVIRONMENTS, or your own class as "module:Class"; options are its constructor's.

    The module of your own class is looked for in the current folder first. Options are held against the constructor's
    annotations, strictly ("8" and True are no int), as far as these are types that pydantic knows.
    Raises ValueError that names the environment: unknown, cannot be imported, makes no environments; an option unknown
    or of another type; whatever the constructor raises.
    """
    factory = _factory(name)
    known, takes_any = _parameters(factory)
    given = {}
    for option, value in options.items():
        if option not in known and not takes_any:
            raise ValueError(
                f"environment.options: {name} has no option {option!r}; known: {', '.join(known) or 'none'}"
            )
        given[option] = _checked(name, option, value, known.get(option))
    try:
        environment = factory(**given)
    except Exception as error:  # of a class that is not the trainer's
        raise ValueError(f"environment: {name} could not be made with options {given}: {_told(error)}") from error
    missing = [method for method in ("reset", "step") if not callable(getattr(environment, method, None))]
    if missing:
        raise ValueError(
            f"environment.name: {name} makes a {type(environment).__name__}, which has no {', '.join(missing)}; "
            "wanted a class with the methods of crest_train.environments.protocol.Environment"
        )
    return environment


def _factory(name: str) -> Callable[..., Any]:
    where = name if ":" in name else ENVIRONMENTS.get(name)
    if where is None:
        raise ValueError(
            f"environment.name: unknown environment {name!r}; known: {', '.join(ENVIRONMENTS)}, or module:Class"
        )
    try:
        factory = imported(where)
    except ValueError as error:
        raise ValueError(f"environment.name: {error}") from error
    if not callable(factory):
        raise ValueError(f"environment.name: {where!r} is a {type(factory).__name__}; wanted a class")
    return factory


def imported(where: str) -> Any:
    """What stands at "module:name"; the module is looked for in the current folder first.

    Raises ValueError: not of this form, cannot be imported, has no such name.
    """
    module, _, attribute = where.partition(":")
    if not module or not attribute.isidentifier():
        raise ValueError(f"found {where!r}, wanted module:Class")
    here = os.getcwd()
    if not module.startswith("crest_train.") and here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does; an installed command has its own folder there
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # of a module that is not the trainer's
        raise ValueError(f"could not import {where!r}: {_told(error)}") from error


@lru_cache
def _parameters(factory: Callable[..., Any]) -> tuple[dict[str, TypeAdapter | None], bool]:
    """What checks each argument (None: nothing), and whether any other name is taken too."""
    try:
        parameters = inspect.signature(factory, eval_str=True).parameters
    except (NameError, AttributeError, SyntaxError):  # annotations that only a type checker can read
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return {}, True
    kinds = {parameter.kind for parameter in parameters.values()}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    checks = {name: _adapter(parameter.annotation) for name, parameter in parameters.items() if parameter.kind in named}
    return checks, inspect.Parameter.VAR_KEYWORD in kinds


def _adapter(annotation: Any) -> TypeAdapter | None:
    if annotation is inspect.Parameter.empty or isinstance(annotation, str):
        return None
    try:
        return TypeAdapter(annotation)
    except PydanticUserError:  # no type that pydantic knows
        return None


def _checked(name: str, option: str, value: Any, adapter: TypeAdapter | None) -> Any:
    """The value as the annotation has it: a list from the file becomes the tuple, a text the path that is wanted."""
    if adapter is None:
        return value
    try:
        return adapter.validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join([option, *map(str, problem["loc"])])
        raise ValueError(f"environment.options: {name}: {key}: {problem['msg']}, found {value!r}") from error


def _told(error: BaseException) -> str:
    """An error in words; its type where the message alone does not say what is wrong."""
    return str(error) if isinstance(error, ValueError | ImportError) else f"{type(error).__name__}: {error}"
