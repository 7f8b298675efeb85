"""What every method's settings must keep to."""

from typing import Any

from ..reductions import REDUCTIONS


def check_settings(config: Any, **known: tuple[str, ...]) -> None:
    """Raises ValueError naming the field: std_eps < 0, an unknown reduction, or a field not among its known values."""
    if not config.std_eps >= 0:
        raise ValueError(f"std_eps is {config.std_eps}, want std_eps >= 0")
    for name, values in {"reduction": tuple(REDUCTIONS), **known}.items():
        if getattr(config, name) not in values:
            raise ValueError(f"{name} is {getattr(config, name)!r}, want one of {', '.join(map(repr, values))}")
