"""Credit-assignment methods, one file per paper, by name: METHODS["crest"].assign(spans, signals, config).

Each method is a module with `assign`, `Config` (a frozen dataclass, the paper's defaults) and `needs` (signals, with
these defaults). Where the settings decide what is needed the config has `needs` too; where the paper changes a setting
from training step to training step, `config.at(step)` is the config of that step. What `assign` returns says how a
method uses what it knows beside the verifier: see signals.Credit.
"""

from types import MappingProxyType, ModuleType
from typing import Any

from . import (
    abc,
    cispo,
    crest,
    dapo,
    dr_grpo,
    efca,
    factor,
    gigpo,
    grpo,
    gspo,
    mt_grpo,
    responsibility,
    rlsd,
    serl,
    toolopd,
    trace,
    triage,
    turn_grpo,
)


class _Methods(dict):
    def __missing__(self, name: str) -> ModuleType:
        raise ValueError(f"method {name!r} is unknown, want one of {', '.join(self)}")


METHODS = MappingProxyType(
    _Methods(
        grpo=grpo,
        turn_grpo=turn_grpo,
        dr_grpo=dr_grpo,
        dapo=dapo,
        gspo=gspo,
        cispo=cispo,
        gigpo=gigpo,
        mt_grpo=mt_grpo,
        rlsd=rlsd,
        serl=serl,
        crest=crest,
        factor=factor,
        trace=trace,
        efca=efca,
        triage=triage,
        abc=abc,
        toolopd=toolopd,
        responsibility=responsibility,
    )
)
"""Name -> method module. An unknown name raises ValueError listing the known ones."""


def needs_of(method: str, config: Any) -> tuple[str, ...]:
    """Names of the fields of Signals that the method needs with this config, an instance of METHODS[method].Config."""
    return tuple(getattr(config, "needs", METHODS[method].needs))
