"""Credit-assignment methods, one file per paper, by name: METHODS["crest"].assign(spans, signals, config).

Each method is a module with `assign`, `Config` (a frozen dataclass, the paper's defaults) and `needs` (signals).
"""

from types import MappingProxyType, ModuleType

from . import crest, grpo, turn_grpo


class _Methods(dict):
    def __missing__(self, name: str) -> ModuleType:
        raise ValueError(f"method {name!r} is unknown, want one of {', '.join(self)}")


METHODS = MappingProxyType(_Methods(grpo=grpo, turn_grpo=turn_grpo, crest=crest))
"""Name -> method module. An unknown name raises ValueError listing the known ones."""
