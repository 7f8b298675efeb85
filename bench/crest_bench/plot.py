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
        typer.Option(exists=True, dir_okay=False, help=f"Read this; may be repeated (default {RESULTS}/linear_*.csv)."),
    ] = None,
    head: Annotated[list[str] | None, typer.Option(help="Only this head; may be repeated (default all).")] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(help="Only so many tokens; may be repeated (default all).")
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
    wanted = [row for row in rows if (not head or row.head in head) and (not tokens or int(row.tokens) in tokens)]
    drawn = draw(wanted, out)
    for path in drawn:
        messages.print(f"Wrote {path}")
    if not drawn:
        messages.print("Nothing to draw: no full-mode seconds and no memory in the chosen rows")


def draw(rows: "Sequence[Row]", folder: Path) -> list[Path]:
    """Write the figures; returns their paths. Of several processors or thread counts, those of the newest row."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.mode == "full" and row.value:
            groups.setdefault((row.device, row.head, row.tokens), []).append(row)
    written = []
    for (device, head, tokens), own in groups.items():
        newest = max(own, key=lambda row: row.timestamp)
        machine = (newest.device_name, newest.threads)
        own = [row for row in own if (row.device_name, row.threads) == machine]
        speed = [row for row in own if row.metric == "seconds" and row.ratio_to_floor and row.objective != "products"]
        memory = [row for row in own if row.metric == "memory_peak"]
        where = f"{head}, {tokens} tokens\n{newest.device_name}, threads: {newest.threads}"
        for name, found, label, figure in (
            ("speed", speed, "seconds over those of the three matrix products", _ratio),
            ("memory", memory, "peak GiB above the inputs", _gib),
        ):
            if found:
                path = folder / f"linear_{name}_{device}_{head}_{tokens}.png"
                _bars(found, figure, f"Policy loss, forward and backward: {where}", label, path)
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
    start = 1.0 if figure is _ratio else min(values.values()) / 2  # of the logarithmic axis
    height = 0.8 / len(shares)
    drawing = Figure(figsize=(5.5 * len(dtypes), 1.6 + 0.18 * len(providers) * (1 + len(shares))), layout="constrained")
    panels = drawing.subplots(1, len(dtypes), sharey=True, squeeze=False)[0]
    for panel, dtype in zip(panels, dtypes, strict=True):
        for i, share in enumerate(shares):
            at = [j + (i - (len(shares) - 1) / 2) * height for j in range(len(providers))]
            widths = [values.get((dtype, provider, share), 0) for provider in providers]
            bars = panel.barh(
                at,
                [width - start if width else 0 for width in widths],
                height,
                left=start,
                label=f"{share:g}% policy tokens",
            )
            panel.bar_label(bars, [f"{width:.3g}" if width else "" for width in widths], padding=2, fontsize=7)
        panel.set_title(dtype)
        panel.set_xlabel(label)
        panel.set_xscale("log")
        for axis_format in (panel.xaxis.set_major_formatter, panel.xaxis.set_minor_formatter):
            axis_format("{x:g}")
        panel.set_xlim(start, 1.5 * max(values.values()))
        panel.grid(axis="x", alpha=0.3)
    panels[0].set_yticks(range(len(providers)), providers)
    panels[0].invert_yaxis()
    drawing.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(shares), fontsize=8)
    drawing.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}")
    drawing.savefig(partial, format="png", dpi=120)
    partial.replace(path)
