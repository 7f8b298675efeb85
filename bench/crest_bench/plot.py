"""`crest-bench plot`: figures of the linear policy loss, from the CSV alone.

One figure of seconds over the floor and one of peak memory per device, head and number of tokens.
"""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crest_bench.command import RESULTS_HELP, messages, rows_of, say_written
from crest_bench.environment import results

if TYPE_CHECKING:
    from crest_bench.linear_rows import Row

GIB = 1 << 30
CUT = 2  # times the next largest figure: beyond, the axis is cut
CUT_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}


def plot(
    csv: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True, dir_okay=False, help=f"Read this; may be repeated (default linear_*.csv in {RESULTS_HELP})."
        ),
    ] = None,
    head: Annotated[list[str] | None, typer.Option(help="Only this head; may be repeated (default all).")] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(help="Only so many tokens; may be repeated (default all).")
    ] = None,
    leave_out: Annotated[
        list[str] | None, typer.Option(help="Not this provider; may be repeated. The figure names it.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help=f"Folder of the figures; default {RESULTS_HELP}.")
    ] = None,
) -> None:
    """Draw the newest measurements in the CSV: seconds over the floor, and peak memory."""
    from crest_bench.linear_rows import Row, latest

    paths = csv or sorted(results().glob("linear_*.csv"))
    if not paths:
        message = f"no linear_*.csv in {results()}: `crest-bench run` makes it"
        raise typer.BadParameter(message, param_hint="--csv")
    rows = [row for path in paths for row in latest([Row(**each) for each in rows_of(path, Row, "--csv")])]
    for option, given, column in (
        ("--head", head, "head"), ("--tokens", tokens, "tokens"), ("--leave-out", leave_out, "provider"),
    ):  # fmt: skip
        known = dict.fromkeys(getattr(row, column) for row in rows)
        if unknown := [str(value) for value in given or () if str(value) not in known]:
            message = f"found {', '.join(unknown)}, wanted some of {', '.join(known)}"
            raise typer.BadParameter(message, param_hint=option)
    wanted = [row for row in rows if (not head or row.head in head) and (not tokens or int(row.tokens) in tokens)]
    drawn = draw(wanted, out or results(), leave_out or ())
    for path in drawn:
        say_written(path)
    if not drawn:
        messages.print("Nothing to draw: no full-mode seconds and no memory in the chosen rows")
        raise typer.Exit(1)


def draw(rows: "Sequence[Row]", folder: Path, leave_out: Sequence[str] = ()) -> list[Path]:
    """Write the figures; returns their paths. Each is of one processor and thread count, those of its newest row."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.mode == "full" and row.value and row.objective != "products":
            groups.setdefault((row.device, row.head, row.tokens), []).append(row)
    written = []
    for (device, head, tokens), own in groups.items():
        speed = [row for row in own if row.metric == "seconds" and row.ratio_to_floor]
        memory = [row for row in own if row.metric == "memory_peak"]
        for name, found, figure, title, label in (
            ("speed", speed, _ratio, "time over that of the three matrix products alone", "time / floor (1: as fast)"),
            ("memory", memory, _gib, "peak memory above the inputs", "GiB"),
        ):
            found = _of_newest_machine(found)
            kept = [row for row in found if row.provider not in leave_out]
            if kept:
                first = kept[0]
                where = f"{head}: H={first.hidden}, V={first.vocabulary}, {tokens} tokens; {first.device_name}, "
                where += f"threads: {first.threads}"
                path = folder / f"linear_{name}_{device}_{head}_{tokens}.png"
                caption = _caption(kept, sorted({row.provider for row in found} & set(leave_out)))
                _bars(kept, figure, f"Policy loss from hidden states: {title}", where, label, caption, path)
                written.append(path)
    return written


def _of_newest_machine(rows: "Sequence[Row]") -> "list[Row]":
    newest = max(rows, key=lambda row: row.timestamp, default=None)
    return [row for row in rows if (row.device_name, row.threads) == (newest.device_name, newest.threads)]


def _caption(rows: "Sequence[Row]", left_out: Sequence[str]) -> str:
    commits = list(dict.fromkeys(row.commit or "unknown" for row in sorted(rows, key=lambda row: row.timestamp)))
    caption = "Loss, and gradients by hidden states and head weight. Providers by their geometric mean."
    caption += f" Commit{'s' * (len(commits) > 1)} {', '.join(commits)}."
    return caption + (f" Left out: {', '.join(left_out)}." if left_out else "")


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
        value = figure(row)
        logs.setdefault(row.provider, []).append(math.log(value) if value > 0 else -math.inf)
    return sorted(logs, key=lambda provider: sum(logs[provider]) / len(logs[provider]))


def axis_end(values: dict[str, float]) -> float:
    """Where the axis ends, given the largest figure of each provider: one far beyond the others is cut."""
    *others, largest = sorted(values.values())
    beyond = others and 0 < CUT * others[-1] < largest
    return 1.2 * (others[-1] if beyond else largest) or 1.0


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
    end = max(end, 1.1) if figure is _ratio else end  # so that the line at 1 is seen
    height = 0.84 / len(shares)
    drawing = Figure(figsize=(9, 1.5 + len(providers) * (0.12 + 0.15 * len(shares))), layout="constrained")
    panels = drawing.subplots(1, len(dtypes), sharey=True, squeeze=False)[0]
    for panel, dtype in zip(panels, dtypes, strict=True):
        for i, share in enumerate(shares):
            at = [j + (i - (len(shares) - 1) / 2) * height for j in range(len(providers))]
            found = [values.get((dtype, provider, share)) for provider in providers]
            colour = colormaps["Blues"](0.9 - 0.6 * i / max(1, len(shares) - 1))
            panel.barh(at, [min(value or 0.0, end) for value in found], height, color=colour, label=f"{share:.3g} %")
            for y, value in zip(at, found, strict=True):
                if value is None:
                    continue
                if value > end:
                    beyond = f"{value:.1f} \N{RIGHTWARDS ARROW}"
                    panel.text(0.98 * end, y, beyond, va="center", ha="right", fontsize=7.5, bbox=CUT_BOX)
                else:
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
    drawing.supxlabel(textwrap.fill(caption + cut, 150), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}")
    drawing.savefig(partial, format="png", dpi=120)
    partial.replace(path)
