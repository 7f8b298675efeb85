"""What every method's settings and arguments must keep to."""

from dataclasses import fields
from typing import Any

import torch

from ..reductions import REDUCTIONS
from ..signals import Signals
from ..spans import Spans
from ..surrogates import check_surrogate

SMALLEST = torch.finfo(torch.float32).tiny
LARGEST = torch.finfo(torch.float32).max ** 0.5
"""Bounds of settings: what they multiply or divide in float32 stays finite."""


def check_settings(config: Any, **known: tuple[str, ...]) -> None:
    """Raises ValueError naming the field: a flag that is no bool, std_eps < 0, no surrogate, an unknown name."""
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(field.default, bool) and not isinstance(value, bool):
            raise ValueError(f"{field.name} is {value!r}, want True or False")
    if hasattr(config, "std_eps"):
        check_numbers(config, std_eps=(0, LARGEST))
    check_surrogate(config.surrogate)
    for name, values in {"reduction": tuple(REDUCTIONS), **known}.items():
        if getattr(config, name) not in values:
            raise ValueError(f"{name} is {getattr(config, name)!r}, want one of {', '.join(map(repr, values))}")


def check_numbers(config: Any, **bounds: tuple[float, float]) -> None:
    """Raises ValueError naming the field: no number, or outside [low, high]."""
    for name, (low, high) in bounds.items():
        check_number(name, getattr(config, name), low, high)


def check_number(name: str, value: Any, low: float, high: float) -> None:
    """Raises ValueError naming the argument: no number, or outside [low, high]."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}, want a number with {low} <= {name} <= {high}")


def check_counts(config: Any, *names: str) -> None:
    """Raises ValueError naming the field: no int >= 1."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is {value!r}, want an int >= 1")


def decayed(value: float, step: int, steps: int) -> float:
    """value * max(0, 1 - step / steps): linear to 0 over `steps` training steps. Raises ValueError: step < 0."""
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"step is {step!r}, want a training step >= 0")
    return value * max(0.0, 1 - step / steps)


def check_arguments(spans: Any, signals: Any, config: Any, wanted: type) -> None:
    """Raises ValueError naming the argument of `assign` that is of another type."""
    for name, value, kind in (("spans", spans, Spans), ("signals", signals, Signals), ("config", config, wanted)):
        if not isinstance(value, kind):
            raise ValueError(f"{name} is {type(value).__name__}, want {kind.__name__}")
