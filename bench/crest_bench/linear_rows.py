"""The long-format table of linear-loss measurements: one row per case, provider, mode and metric."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from filelock import FileLock

from crest_bench.rows_file import read_rows, write_rows

KEY = (
    *("device", "device_name", "threads", "head", "hidden", "vocabulary", "tokens", "policy_tokens", "dtype"),
    *("provider", "mode", "metric"),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement.

    objective, entropy, entropy_gradient, full_logits: what the provider computes (`contract.Provider`). metric: seconds
    (median; p20, p80: percentiles of the repeats), memory_peak (bytes above the inputs), memory_gradients (bytes of it
    that are the gradients), logp_error, entropy_error, hidden_grad_error, weight_grad_error. ratio_to_floor: seconds
    over those of the faster floor in the same run, mode full only. notes: why there is no value.
    """

    timestamp: str
    commit: str
    device: str
    device_name: str
    threads: int | str
    torch: str
    triton: str
    packages: str
    head: str
    hidden: int | str
    vocabulary: int | str
    tokens: int | str
    policy_share: float | str
    policy_tokens: int | str
    dtype: str
    provider: str
    provider_version: str
    objective: str
    entropy: bool | str
    entropy_gradient: bool | str
    full_logits: bool | str
    mode: str
    metric: str
    value: float | str
    unit: str
    p20: float | str = ""
    p80: float | str = ""
    ratio_to_floor: float | str = ""
    notes: str = ""


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def append_rows(rows: Sequence[Row], path: Path) -> None:
    """Add rows at the end; the file is replaced whole, by one writer at a time. Raises as `load_rows`."""
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        write_rows([*load_rows(path), *rows] if path.exists() else rows, path)


def load_rows(path: Path) -> list[Row]:
    """All rows, as text. Raises ValueError with file and line for other columns or a damaged row."""
    return [Row(**row) for row in read_rows(path, Row)]


def latest(rows: Sequence[Row]) -> list[Row]:
    """The last row of every KEY, in the order in which the keys first occur."""
    return list({tuple(str(getattr(row, name)) for name in KEY): row for row in rows}.values())
