"""`crest-bench plot`: figures of the linear policy loss, from the CSV alone.

One figure of seconds over the floor and one of peak memory per device, head and number of tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from crest_bench.linear_rows import Row

RESULTS = Path("bench/results")
GIB = 1 << 30
messages = Console(stderr=True)


def plot(
    csv: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help=f"Read this; may be repeated. [{RESULTS}/linear_*.csv]"),
    ] = None,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder of the figures.")] = RESULTS,
) -> None:
    """Draw the newest measurements in the CSV: seconds over the floor, and peak memory."""
    from crest_bench.linear_rows import latest, load_rows

    paths = csv or sorted(RESULTS.glob("linear_*.csv"))
    if not paths:
        raise typer.BadParameter(f"no {RESULTS}/linear_*.csv here: `crest-bench run` makes it", param_hint="--csv")
    try:
        rows = [row for path in paths for row in latest(load_rows(path))]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--csv") from None
    drawn = draw(rows, out)
    for path in drawn:
        messages.print(f"Wrote {path}")
    if not drawn:
        messages.print("Nothing to draw: no full-mode seconds and no memory in the rows")


def draw(rows: "Sequence[Row]", folder: Path) -> list[Path]:
    """Write the figures; returns their paths."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.mode == "full" and row.value:
            groups.setdefault((row.device, row.head, row.tokens), []).append(row)
    written = []
    for (device, head, tokens), own in groups.items():
        speed = [row for row in own if row.metric == "seconds" and row.ratio_to_floor]
        memory = [row for row in own if row.metric == "memory_peak"]
        where = f"{head}, {tokens} tokens, {own[-1].device_name}"
        threads = {row.threads for row in speed}
        for name, found, label, figure in (
            ("speed", speed, f"seconds / the three matrix products ({', '.join(sorted(threads))} threads)", _ratio),
            ("memory", memory, "peak GiB above the inputs", _gib),
        ):
            if found:
                path = folder / f"linear_{name}_{device}_{head}_{tokens}.png"
                _bars(found, figure, f"Forward + backward of a policy loss: {where}", label, path)
                written.append(path)
    return written


def _ratio(row: "Row") -> float:
    return float(row.ratio_to_floor)


def _gib(row: "Row") -> float:
    return float(row.value) / GIB


def _bars(rows: "Sequence[Row]", figure, title: str, label: str, path: Path) -> None:
    """A panel per dtype, a group of bars per provider, a bar per share of policy tokens."""
    from matplotlib.figure import Figure

    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    providers = list(dict.fromkeys(row.provider for row in rows))
    shares = sorted({float(row.policy_share) for row in rows}, reverse=True)
    values = {(row.dtype, row.provider, float(row.policy_share)): figure(row) for row in rows}
    height = 0.8 / len(shares)
    drawing = Figure(figsize=(5.5 * len(dtypes), 1.4 + 0.24 * len(providers) * (1 + len(shares))), layout="constrained")
    panels = drawing.subplots(1, len(dtypes), sharey=True, squeeze=False)[0]
    for panel, dtype in zip(panels, dtypes, strict=True):
        for i, share in enumerate(shares):
            at = [j + (i - (len(shares) - 1) / 2) * height for j in range(len(providers))]
            widths = [values.get((dtype, provider, share), 0) for provider in providers]
            bars = panel.barh(at, widths, height, label=f"{share:g}% policy tokens")
            panel.bar_label(bars, [f"{width:.3g}" if width else "" for width in widths], padding=2, fontsize=7)
        panel.set_title(dtype)
        panel.set_xlabel(label)
        panel.set_xscale("log")
        panel.margins(x=0.15)
        panel.grid(axis="x", alpha=0.3)
    panels[0].set_yticks(range(len(providers)), providers)
    panels[0].invert_yaxis()
    panels[-1].legend(loc="lower right", fontsize=8)
    drawing.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}")
    drawing.savefig(partial, format="png", dpi=120)
    partial.replace(path)
