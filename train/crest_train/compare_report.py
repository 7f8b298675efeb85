"""What a comparison says: compare.csv (a row per evaluation), summary.csv, a table and the learning curves.

Methods are compared by how fast they learn, since end points converge: by the area under the curve of held-out turn
success, and paired by seed, since runs of one seed play the same sessions. Each method is shown at its best rate (of
those with the most seeds, the one with the largest area: chosen on the very seeds it is reported on, which flatters
every method that had more than one to choose from) and at the rate that is common to all.
"""

import csv
import os
from collections.abc import Iterable
from math import inf, isfinite, sqrt
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
Curve = list[Row]
"""The evaluations of a run, step by step."""
Curves = dict[str, dict[float, dict[int, Curve]]]
"""By method, rate and seed."""

SETTING = ("environment", "turns", "session_reward", "sessions", "group_size", "steps", "common_rate")
PARTS = ("rollout_seconds", "teacher_seconds", "credit_seconds", "training_seconds")
CONCENTRATION = ("credit_top_1", "credit_top_5", "credit_top_10")
COLUMNS = (
    *SETTING, "method", "rate", "seed", "step", "turn_success", "session_success", "seconds", *PARTS, *CONCENTRATION,
    "needs",
)  # fmt: skip
REFERENCES = ("grpo", "turn_grpo")
MARKS = (5, 10, 20)
LEVEL = 0.9

_T_QUANTILE = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t at .975 for 1 to 10 degrees of freedom."""
_TABLE_WIDTH = 150
_TEXTS = ("environment", "session_reward", "method", "needs")
_WHOLE = ("turns", "sessions", "group_size", "steps", "seed", "step")
_MAY_BE_EMPTY = ("turns", *CONCENTRATION, "needs")


def report(rows: list[Row], output: Path, console: Console) -> None:
    """Write compare.csv, summary.csv, table.txt and curves.png, and print the table.

    Rows of several settings give a table each, and curves-2.png and so on.
    """
    settings = list(dict.fromkeys(setting_of(row) for row in rows))
    summaries = {setting: summarise([row for row in rows if setting_of(row) == setting]) for setting in settings}
    write_rows(output / "compare.csv", rows, COLUMNS)
    everything = [row for summary in summaries.values() for row in summary]
    write_rows(output / "summary.csv", everything, list(everything[0]) if everything else [*SETTING, "choice"])
    with open(output / "table.txt", "w", encoding="utf-8") as file:
        for summary in summaries.values():
            for choice in dict.fromkeys(row["choice"] for row in summary):
                table = comparison_table([row for row in summary if row["choice"] == choice])
                Console(file=file, width=_TABLE_WIDTH).print(table)
    text = (output / "table.txt").read_text(encoding="utf-8")
    console.print(text, soft_wrap=True, highlight=False, markup=False)  # as wide as it is: cells are not cut
    for number, (setting, summary) in enumerate(summaries.items(), 1):
        name = "curves.png" if number == 1 else f"curves-{number}.png"
        draw_comparison([row for row in rows if setting_of(row) == setting], summary, output / name)
    console.print(f"comparison: {output}", soft_wrap=True, highlight=False)


def setting_of(row: Row) -> tuple:
    """What the runs of a row's comparison share."""
    return tuple(row[key] for key in SETTING)


def write_rows(path: Path, rows: list[Row], columns: Iterable[str]) -> None:
    """Write a CSV in one piece; numbers to six digits, None as nothing."""
    partial = path.with_suffix(f".{os.getpid()}")
    with open(partial, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(columns), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()})
    partial.replace(path)


def read_rows(paths: Iterable[Path]) -> list[Row]:
    """The rows of files that `report` wrote as compare.csv. Raises ValueError that names the file and what is wrong."""
    rows = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: is no text in UTF-8 ({error})") from error
        reader = csv.DictReader(lines)
        if missing := [name for name in COLUMNS if name not in (reader.fieldnames or ())]:
            raise ValueError(f"{path}: has no column {', '.join(missing)}; wanted the compare.csv of a comparison")
        if len(lines) < 2:
            raise ValueError(f"{path}: has no rows")
        try:
            rows += [{key: _read(key, row[key]) for key in COLUMNS} for row in reader]
        except ValueError as error:
            raise ValueError(f"{path}: line {reader.line_num}: {error}") from error
    return rows


def _read(key: str, written: str | None) -> Any:
    if not written and (written is None or key not in _MAY_BE_EMPTY):
        raise ValueError(f"{key} is missing")
    if key in _TEXTS:
        return written
    value = None if written == "" else int(written) if key in _WHOLE else float(written)
    if value is not None and not isfinite(value):
        raise ValueError(f"{key} is {written}, wanted a finite number")
    return value


def curves_of(rows: list[Row]) -> Curves:
    """The curves of one setting. Raises ValueError when a run is there twice, or not up to its last step."""
    found: Curves = {}
    for row in sorted(rows, key=lambda row: row["step"]):
        curve = found.setdefault(row["method"], {}).setdefault(row["rate"], {}).setdefault(row["seed"], [])
        if curve and curve[-1]["step"] == row["step"]:
            raise ValueError(f"{row['method']}, rate {row['rate']}, seed {row['seed']}: step {row['step']} twice")
        curve.append(row)
    runs = [curve for rates in found.values() for seeds in rates.values() for curve in seeds.values()]
    steps = [row["step"] for row in runs[0]]
    for curve in runs:
        last = curve[-1]
        if last["step"] != last["steps"]:
            raise ValueError(
                f"{last['method']}, rate {last['rate']}, seed {last['seed']}: ends with step {last['step']} of "
                f"{last['steps']}; wanted finished runs"
            )
        if [row["step"] for row in curve] != steps:
            raise ValueError(
                f"{last['method']}, rate {last['rate']}, seed {last['seed']}: held out after other steps than "
                f"{runs[0][0]['method']}; wanted runs of one configuration"
            )
    return found


def area_under_curve(curve: Curve) -> float:
    """Mean turn success over the steps: trapezoids between the evaluations, divided by the steps they span."""
    spans = [
        ((one["turn_success"] + other["turn_success"]) / 2, other["step"] - one["step"])
        for one, other in zip(curve, curve[1:], strict=False)
    ]
    width = sum(steps for _, steps in spans)
    return sum(height * steps for height, steps in spans) / width if width else curve[-1]["turn_success"]


def steps_to(curve: Curve, level: float = LEVEL) -> float:
    """The step at which the line through the evaluations first reaches a turn success; inf when it does not."""
    before = None
    for row in curve:
        if row["turn_success"] >= level:
            if before is None:
                return row["step"]
            share = (level - before["turn_success"]) / (row["turn_success"] - before["turn_success"])
            return before["step"] + share * (row["step"] - before["step"])
        before = row
    return inf


def paired(one: dict[int, Curve], other: dict[int, Curve]) -> tuple[float, float | None, int] | None:
    """Mean, sd and number of the differences in area, seed by seed; None without a seed that both have."""
    found = [area_under_curve(one[seed]) - area_under_curve(other[seed]) for seed in one if seed in other]
    return (mean(found), _spread(found), len(found)) if found else None


def beyond_noise(difference: float, spread: float | None, number: int) -> bool | None:
    """Whether the 95 % t interval of a mean of paired differences, +- t sd / sqrt(n), leaves 0 out; None without sd."""
    if spread is None:
        return None
    t = _T_QUANTILE[min(number - 1, len(_T_QUANTILE)) - 1]
    return abs(difference) > t * spread / sqrt(number)


def _spread(values: list[float]) -> float | None:
    return stdev(values) if len(values) > 1 else None


def summarise(rows: list[Row]) -> list[Row]:
    """A row per method of one setting, at its best rate (where several were swept) and at the common one, best first.

    Of each figure the mean and the sd over seeds; steps_to_0.9: the median, None where half of the seeds never did.
    """
    curves = curves_of(rows)
    common = rows[0]["common_rate"]
    best = {method: max(rates, key=lambda rate: _rank(rates[rate])) for method, rates in curves.items()}
    at_common = {method: common for method, rates in curves.items() if common in rates}
    swept = any(row["rate"] != common for row in rows)
    summary = []
    for choice, rate_of in ([("best", best)] if swept else []) + [("common", at_common)]:
        chosen = {method: curves[method][rate] for method, rate in rate_of.items()}
        found = [
            {**{key: rows[0][key] for key in SETTING}, "choice": choice, "method": method, "rate": rate_of[method]}
            | _summary_of(seeds)
            | _against(seeds, chosen)
            | {"needs": next(iter(seeds.values()))[0]["needs"]}
            for method, seeds in chosen.items()
        ]
        summary += sorted(found, key=lambda row: -row["area_mean"])
    return summary


def _rank(seeds: dict[int, Curve]) -> tuple[int, float]:
    return len(seeds), mean(map(area_under_curve, seeds.values()))


def _summary_of(seeds: dict[int, Curve]) -> Row:
    """Figures of a method at a rate, over its seeds."""
    each: dict[str, list[float | None]] = {"area": [area_under_curve(curve) for curve in seeds.values()]}
    for success in ("turn_success", "session_success"):
        for mark in MARKS:
            each[f"{success}_{mark}"] = [_at(curve, mark, success) for curve in seeds.values()]
        each[f"{success}_end"] = [curve[-1][success] for curve in seeds.values()]
    each["seconds_per_step"] = [curve[-1]["seconds"] / max(curve[-1]["step"], 1) for curve in seeds.values()]
    for share in CONCENTRATION:
        each[share] = [curve[-1][share] for curve in seeds.values()]
    found: Row = {"seeds": len(seeds)}
    for name, values in each.items():
        there = [value for value in values if value is not None]
        found |= {f"{name}_mean": mean(there) if there else None, f"{name}_sd": _spread(there)}
    reached = median(steps_to(curve) for curve in seeds.values())
    return found | {f"steps_to_{LEVEL}": reached if reached < inf else None}


def _at(curve: Curve, step: int, key: str) -> float | None:
    return next((row[key] for row in curve if row["step"] == step), None)


def _against(seeds: dict[int, Curve], chosen: dict[str, dict[int, Curve]]) -> Row:
    """Paired differences to the references, and seconds per step as a multiple of GRPO's."""
    found: Row = {}
    for name in REFERENCES:
        pair = paired(seeds, chosen[name]) if name in chosen and chosen[name] is not seeds else None
        for part, value in zip(("mean", "sd", "n"), pair or (None, None, 0), strict=True):
            found[f"area_minus_{name}_{part}"] = value
        found[f"beyond_noise_{name}"] = beyond_noise(*pair) if pair else None
    grpo = _summary_of(chosen["grpo"])["seconds_per_step_mean"] if "grpo" in chosen else None
    return found | {"seconds_to_grpo": _summary_of(seeds)["seconds_per_step_mean"] / grpo if grpo else None}


def comparison_table(summary: list[Row]) -> Table:
    """The rows of one setting and choice of rate, in their order; a method that does not beat GRPO is marked so."""
    first = summary[0]
    rate = "each at its best rate" if first["choice"] == "best" else f"all at rate {first['common_rate']:g}"
    turns = f", {first['turns']} turns" if first["turns"] else ""
    table = Table(
        title=f"{first['environment']}{turns}, {first['steps']} steps of {first['sessions']} x {first['group_size']} "
        f"rollouts, session reward {first['session_reward']}: {rate}",
        caption="Held-out success, mean±sd over n seeds. area: under the curve, that is mean turn success over the "
        f"steps; to {LEVEL:g}: steps until turn success {LEVEL:g}, median; minus ...: difference in area, paired by "
        "seed; beats grpo: yes (or worse) where the 95 % t interval of that difference lies above (below) 0, NO where "
        "it is within paired noise (each method by itself: with many, one in 20 leaves 0 by chance); top: share of "
        "|credit| on the top 1, 5 and 10 % of tokens."
        + (" Best rates are chosen by area, on these very seeds." if first["choice"] == "best" else ""),
        title_justify="left",
        caption_justify="left",
        box=SIMPLE,
        padding=(0, 0, 0, 1),
    )
    last = first["steps"]
    marks = [mark for mark in MARKS if mark < last and first[f"turn_success_{mark}_mean"] is not None]
    table.add_column("method", no_wrap=True)
    names = ["rate", "n", "area", *(f"turn\n@{mark}" for mark in marks), f"turn\n@{last}", f"session\n@{last}"]
    names += [f"to\n{LEVEL:g}", "minus\ngrpo", "beats\ngrpo", "minus\nturn_grpo", "s/step", "x grpo", "top\n1/5/10 %"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in summary:
        table.add_row(
            row["method"],
            f"{row['rate']:g}",
            str(row["seeds"]),
            _with_spread(row, "area"),
            *(_with_spread(row, f"turn_success_{mark}") for mark in [*marks, "end"]),
            _with_spread(row, "session_success_end"),
            _number(row[f"steps_to_{LEVEL}"], ".1f", f">{last}"),
            _with_spread(row, "area_minus_grpo", "+"),
            _verdict(row),
            _with_spread(row, "area_minus_turn_grpo", "+"),
            _number(row["seconds_per_step_mean"], ".2f"),
            _number(row["seconds_to_grpo"], ".2f"),
            "/".join(_bare(_number(row[f"{share}_mean"], ".2f")) for share in CONCENTRATION),
        )
    return table


def _number(value: float | None, form: str, absent: str = "-") -> str:
    return absent if value is None else format(value, form)


def _with_spread(row: Row, name: str, sign: str = "") -> str:
    value, spread = row[f"{name}_mean"], row[f"{name}_sd"]
    if value is None:
        return "-"
    return _bare(f"{value:{sign}.3f}") + (f"±{_bare(f'{spread:.3f}')}" if spread is not None else "")


def _bare(number: str) -> str:
    """Without the 0 before the point: the table is wide."""
    return number.replace("0.", ".", 1) if number.lstrip("+-").startswith("0.") else number


def _verdict(row: Row) -> str:
    if row["area_minus_grpo_mean"] is None:
        return "-"
    if row["beyond_noise_grpo"] is None:
        return "one seed"
    return ("yes" if row["area_minus_grpo_mean"] > 0 else "worse") if row["beyond_noise_grpo"] else "NO"


def draw_comparison(rows: list[Row], summary: list[Row], path: Path) -> None:
    """A panel per method, best first: mean turn success ± sd over seeds, GRPO and turn GRPO in grey.

    Rates are those of the summary's first choice.
    """
    curves = curves_of(rows)
    best = [row for row in summary if row["choice"] == summary[0]["choice"]]
    references = {row["method"]: curves[row["method"]][row["rate"]] for row in best if row["method"] in REFERENCES}
    columns = min(6, len(best))
    lines = -(-len(best) // columns)
    figure = Figure(figsize=(2.4 * columns + 1, 2.2 * lines + 1), layout="constrained")
    panels = list(figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat)
    for axes, row in zip(panels, best, strict=False):
        for name, seeds in references.items():
            if name != row["method"]:
                _draw(axes, seeds, color="0.55", linestyle="--" if name == "grpo" else "-", linewidth=1, label=name)
        seeds = curves[row["method"]][row["rate"]]
        _draw(axes, seeds, band=True, color="C0", linewidth=1.8, label="the method, ± sd over seeds")
        axes.set_title(f"{row['method']}  {row['area_mean']:.3f}\nrate {row['rate']:g}", fontsize=9)
        axes.grid(alpha=0.3)
        axes.set_xlabel("step" if len(best) - panels.index(axes) <= columns else "")
        axes.tick_params(labelbottom=len(best) - panels.index(axes) <= columns)
    for axes in panels[len(best) :]:
        axes.set_visible(False)
    named = {
        label: line
        for axes in panels[: len(best)]
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=3, fontsize=9)
    figure.supylabel("held-out turn success", fontsize=9)
    turns = f", {best[0]['turns']} turns" if best[0]["turns"] else ""
    figure.suptitle(f"{best[0]['environment']}{turns}: methods by area under the curve", fontsize=10)
    figure.savefig(path, dpi=120)


def _draw(axes: Axes, seeds: dict[int, Curve], band: bool = False, **style: Any) -> None:
    """The mean over seeds at the steps that all of them have, with a band of one sd."""
    steps = sorted(set.intersection(*({row["step"] for row in curve} for curve in seeds.values())))
    values = [[_at(curve, step, "turn_success") for curve in seeds.values()] for step in steps]
    middle, spread = [mean(found) for found in values], [_spread(found) or 0.0 for found in values]
    axes.plot(steps, middle, **style)
    if band:
        low, high = ([m + sign * s for m, s in zip(middle, spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(steps, low, high, color=style["color"], alpha=0.2, linewidth=0)
