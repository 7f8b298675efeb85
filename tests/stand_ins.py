"""A trainer's module, as far as a drop-in imports it, for tests where the trainer is not installed."""

import sys
import types
from functools import partial

import pytest

near = partial(pytest.approx, rel=1e-5, abs=1e-6)  # a few roundings of float32


def install(monkeypatch, module: str, **contents) -> None:
    """`module` and its parents in sys.modules for the length of a test."""
    parts = module.split(".")
    for end in range(1, len(parts)):
        parent = ".".join(parts[:end])
        if parent not in sys.modules:
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    stand_in = types.ModuleType(module)
    vars(stand_in).update(contents)
    monkeypatch.setitem(sys.modules, module, stand_in)


def registrar(registry: dict):
    """A decorator factory that writes into `registry`."""

    def register(name):
        def keep(function):
            assert name not in registry, name
            registry[name] = function
            return function

        return keep

    return register
