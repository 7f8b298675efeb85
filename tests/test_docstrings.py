"""A public name says what it computes, from which source, on which shapes, and what it refuses."""

import importlib
import inspect
import pkgutil
import re

import pytest

import crest_ops

MODULES = [
    importlib.import_module(module.name)
    for package in ("crest_ops", "crest_kernels", "crest_train", "crest_bench")
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + ".")
]
FORMULAS = ("advantages", "allocation", "reductions", "returns", "segments", "token_returns")
LETTERS = re.compile(r"\[[BGHKNSTV.\d][^\]]*\]|shape|scalar")


def public(module):
    """Functions and classes that the module defines under a public name."""
    for name, value in vars(module).items():
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__:
            if inspect.isclass(value) or inspect.isfunction(value):
                yield pytest.param(value, id=f"{module.__name__}.{name}")


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_module_says_what_it_is_for(module):
    assert module.__doc__


@pytest.mark.parametrize("name", crest_ops.__all__)
def test_every_exported_name_has_a_docstring(name):
    value = getattr(crest_ops, name)
    assert name == "METHODS" or (value.__doc__ and not value.__doc__.startswith(f"{name}("))


@pytest.mark.parametrize(
    "value", [p for module in MODULES if module.__name__.startswith("crest_ops") for p in public(module)]
)
def test_docstring_names_every_argument(value):
    """Of functions that users call: those of the package's top level and of the modules of formulas."""
    if not inspect.isfunction(value):
        assert inspect.getdoc(value)
        return
    exported = getattr(crest_ops, value.__name__, None) is value
    formula = value.__module__.split(".")[-1] in FORMULAS
    if not (exported or formula):
        return
    text = inspect.getdoc(value)
    around = text + inspect.getmodule(value).__doc__
    for name in inspect.signature(value).parameters:
        assert re.search(rf"\b{name}\b", around), f"{value.__qualname__} does not say what {name} is"
    assert "=" in text or ":" in text, "no equation"
    assert "arXiv" in around or "this project" in around or formula or "lse" in text, "no source"
    assert LETTERS.search(around), "no shape"
    if "raise ValueError" in inspect.getsource(value):
        assert "Raises" in around


@pytest.mark.parametrize("name", crest_ops.METHODS)
def test_methods_name_their_source(name):
    method = crest_ops.METHODS[name]
    assert re.search(r"arXiv \d{4}\.\d{5}", method.assign.__doc__ + method.__doc__)
    assert "Needs" in method.assign.__doc__ and "Raises" in method.assign.__doc__
    assert method.Config.__doc__ and all(isinstance(need, str) for need in method.needs)
