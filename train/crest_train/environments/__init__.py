"""Environments: multi-turn tool-use sessions with verified turn rewards."""

import importlib
import inspect
from typing import Any

from crest_train.environments.protocol import Environment

ENVIRONMENTS = {
    "bfcl": "crest_train.environments.bfcl:Bfcl",
    "desk": "crest_train.environments.desk:Desk",
}
"""Name -> where the class is; imported when first asked for."""

FIRST_HELD_OUT_SEED = 1 << 30
"""Seeds from here on name held-out sessions; training never uses them."""


def make_environment(name: str, options: dict[str, Any]) -> Environment:
    """A fresh environment: one of ENVIRONMENTS, or your own class as "module:Class"; options are its constructor's.

    Raises ValueError for an unknown name or option, naming the known ones.
    """
    where = name if ":" in name else ENVIRONMENTS.get(name)
    if where is None:
        raise ValueError(f"environment.name: unknown environment {name!r}; known: {', '.join(ENVIRONMENTS)}")
    module, _, attribute = where.partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"environment.name: could not import {where!r}: {error}") from error
    known = inspect.signature(factory).parameters
    for option in options:
        if option not in known:
            raise ValueError(
                f"environment.options: {name} has no option {option!r}; known: {', '.join(known) or 'none'}"
            )
    return factory(**options)
