"""`crest-bench plot`: figures of the linear policy loss, from the CSV alone.

One figure of seconds over the floor and one of peak memory per device, head and number of tokens.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from crest_bench.linear_rows import Row

RESULTS = Path("bench/results")
GIB = 1 << 30
CUT = 2  # times the next largest figure: beyond, the axis is cut
CUT_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
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
    leave_out: Annotated[
        list[str] | None, typer.Option(help="Not this provider; may be repeated. The figure names it.")
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
    drawn = draw(wanted, out, leave_out or ())
    for path in drawn:
        messages.print(f"Wrote {path}")
    if not drawn:
        messages.print("Nothing to draw: no full-mode seconds and no memory in the chosen rows")


def draw(rows: "Sequence[Row]", folder: Path, leave_out: Sequence[str] = ()) -> list[Path]:
    """Write the figures; returns their paths. Of several processors or thread counts, those of the newest row."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.mode == "full" and row.value and row.objective != "products":
            groups.setdefault((row.device, row.head, row.tokens), []).append(row)
    written = []
    for (device, head, tokens), own in groups.items():
        newest = max(own, key=lambda row: row.timestamp)
        machine = (newest.device_name, newest.threads)
        own = [row for row in own if (row.device_name, row.threads) == machine]
        speed = [row for row in own if row.metric == "seconds" and row.ratio_to_floor]
        memory = [row for row in own if row.metric == "memory_peak"]
        where = f"{head}: H={newest.hidden}, V={newest.vocabulary}, {tokens} tokens; {newest.device_name}, threads: "
        for name, found, figure, title, label in (
            ("speed", speed, _ratio, "time over that of the three matrix products alone", "time / floor (1: as fast)"),
            ("memory", memory, _gib, "peak memory above the inputs", "GiB"),
        ):
            kept = [row for row in found if row.provider not in leave_out]
            if kept:
                missing = sorted({row.provider for row in found} & set(leave_out))
                caption = "Loss, and gradients by hidden states and head weight. Providers by their geometric mean."
                caption += f" Left out: {', '.join(missing)}." if missing else ""
                path = folder / f"linear_{name}_{device}_{head}_{tokens}.png"
                texts = (f"Policy loss from hidden states: {title}", f"{where}{newest.threads}", label, caption)
                _bars(kept, figure, *texts, path)
                written.append(path)
    return written


def _ratio(row: "Row") -> float:
    return float(row.ratio_to_floor)


def _gib(row: "Row") -> float:
    return float(row.value) / GIB


def _label(row: "Row") -> str:
    """The provider, and what it keeps or does not compute."""
    marks = ["keeps all logits"] * _true(row.full_logits)
    if objective := row.objective.removeprefix("ppo").removeprefix(", "):
        marks.append(f"only {objective}")
    if not _true(row.entropy):
        marks.append("no entropy")
    elif not _true(row.entropy_gradient):
        marks.append("entropy without gradient")
    return row.provider + ("\n" + ", ".join(marks) if marks else "")


def _true(flag: bool | str) -> bool:
    return str(flag) == "True"


def _order(rows: "Sequence[Row]", figure) -> list[str]:
    """Providers by the geometric mean of their figures."""
    logs: dict[str, list[float]] = {}
    for row in rows:
        logs.setdefault(row.provider, []).append(math.log(figure(row)))
    return sorted(logs, key=lambda provider: sum(logs[provider]) / len(logs[provider]))


def axis_end(values: dict[str, float]) -> float:
    """Where the axis ends, given the largest figure of each provider: one far beyond the others is cut."""
    *others, largest = sorted(values.values())
    return 1.2 * (others[-1] if others and largest > CUT * others[-1] else largest)


def _bars(rows: "Sequence[Row]", figure, title: str, where: str, label: str, caption: str, path: Path) -> None:
    """A panel per dtype, a group of bars per provider, a bar per share of policy tokens."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    providers = _order(rows, figure)
    labels = {row.provider: _label(row) for row in rows}
    shares = sorted({float(row.policy_share) for row in rows}, reverse=True)
    values = {(row.dtype, row.provider, float(row.policy_share)): figure(row) for row in rows}
    end = axis_end({p: max(value for key, value in values.items() if key[1] == p) for p in providers})
    height = 0.84 / len(shares)
    drawing = Figure(figsize=(9, 1.5 + len(providers) * (0.12 + 0.15 * len(shares))), layout="constrained")
    panels = drawing.subplots(1, len(dtypes), sharey=True, squeeze=False)[0]
    for panel, dtype in zip(panels, dtypes, strict=True):
        for i, share in enumerate(shares):
            at = [j + (i - (len(shares) - 1) / 2) * height for j in range(len(providers))]
            found = [values.get((dtype, provider, share), 0.0) for provider in providers]
            colour = colormaps["Blues"](0.9 - 0.6 * i / max(1, len(shares) - 1))
            panel.barh(at, [min(value, end) for value in found], height, color=colour, label=f"{share:.3g} %")
            for y, value in zip(at, found, strict=True):
                if value > end:
                    beyond = f"{value:.1f} \N{RIGHTWARDS ARROW}"
                    panel.text(0.98 * end, y, beyond, va="center", ha="right", fontsize=7.5, bbox=CUT_BOX)
                elif value:
                    panel.text(value + 0.01 * end, y, f"{value:.2f}", va="center", fontsize=7.5)
        panel.set_title(dtype, fontsize=10)
        panel.set_xlabel(label, fontsize=9)
        panel.set_xlim(0, end)
        panel.tick_params(labelsize=8.5)
        panel.spines[["top", "right"]].set_visible(False)
        if figure is _ratio:
            panel.axvline(1, color="black", linewidth=0.8, linestyle="--")
    panels[0].set_yticks(range(len(providers)), [labels[provider] for provider in providers])
    for text, provider in zip(panels[0].get_yticklabels(), providers, strict=True):
        text.set_fontweight("bold" if provider.startswith("crest") else "normal")
    panels[0].set_ylim(len(providers) - 0.5, -0.5)
    panels[-1].legend(title="policy tokens", loc="upper right", fontsize=8, title_fontsize=8)
    drawing.suptitle(f"{title}\n{where}", fontsize=10)
    cut = " \N{RIGHTWARDS ARROW}: beyond the axis." if max(values.values()) > end else ""
    drawing.supxlabel(caption + cut, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}")
    drawing.savefig(partial, format="png", dpi=120)
    partial.replace(path)
