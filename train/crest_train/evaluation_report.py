"""What an evaluation found, as a table per category and a CSV; and two of them, session by session.

Shape letters: S sessions, C columns (see `columns`).
"""

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from crest_train.evaluation_statistics import bootstrap_interval, pass_at_k, sign_test
from crest_train.run_folder import RunFolder

if TYPE_CHECKING:
    from crest_train.evaluation import Sample

AVERAGE = "average"
FEW = 20
"""Below so many sessions the table says that its intervals are too narrow, by the factor sqrt((n - 1) / n) and more."""
_ALIKE = (
    "-: all sessions alike, of which resampling makes no interval; a rate of 0 or 1 in n sessions leaves 3 / n open "
    "(95 %, one-sided)"
)


@dataclass(frozen=True)
class Estimate:
    """A measure of a category, or of the average, with its 95 % interval."""

    category: str
    measure: str
    sessions: int
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference(Estimate):
    """B - A, with both values; wins and losses: sessions in which B did better, or worse, than A; p: of the sign test.

    value, low and high are those of the difference.
    """

    a: float
    b: float
    wins: int
    losses: int
    p: float


def measures(samples: int) -> list[str]:
    """What is measured with so many samples per session: success of turns, of sessions, pass@k for k = 2, 4, ..., n."""
    ks = sorted({2**i for i in range(1, samples.bit_length()) if 2**i <= samples} | {samples}) if samples > 1 else []
    return ["turn_success", "session_success", *(f"pass@{k}" for k in ks)]


def columns(samples: list["Sample"]) -> np.ndarray:
    """[C] of one session: turns done, turns, then 1 and, in the order of `measures`, the other measures' values.

    Every measure of a category is a ratio of sums over its sessions: turn success sum(done) / sum(turns), as the
    trainer evaluates; the others sum(value) / sum(1).
    """
    n, successes = len(samples), sum(sample.success for sample in samples)
    turns = [sum(sum(sample.turn_reward) for sample in samples), sum(sample.num_turns for sample in samples)]
    passed = [pass_at_k(n, successes, int(name.removeprefix("pass@"))) for name in measures(n)[2:]]
    return np.array([*turns, 1, successes / n, *passed])


def ratio(place: int) -> Callable[[np.ndarray], np.ndarray]:
    """The measure at a place of `measures`, of sums [..., C] over sessions."""
    if place == 0:
        return lambda sums: sums[..., 0] / sums[..., 1]
    return lambda sums: sums[..., 2 + place] / sums[..., 2]


def by_category(samples: list["Sample"]) -> dict[str, dict[int, np.ndarray]]:
    """Category -> session -> its columns; "all" where the environment has no categories."""
    sessions: dict[tuple[str, int], list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: sample.session):
        sessions.setdefault((sample.category or "all", sample.session), []).append(sample)
    found: dict[str, dict[int, np.ndarray]] = {}
    for (category, session), alike in sessions.items():
        found.setdefault(category, {})[session] = columns(alike)
    return found


def rows_and_strata(tables: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """The rows of a table and the categories of each: every category, and where there are several their average."""
    rows = [(category, [category]) for category in tables]
    return rows + [(AVERAGE, list(tables))] if len(tables) > 1 else rows


def estimates(samples: list["Sample"]) -> list[Estimate]:
    """Every measure of every category, and of the unweighted mean over categories, with bootstrap intervals."""
    tables = {category: np.stack(list(rows.values())) for category, rows in by_category(samples).items()}
    num_samples = len({sample.sample for sample in samples})
    found = []
    for name, strata in rows_and_strata(tables):
        for place, measure in enumerate(measures(num_samples)):
            value = float(np.mean([ratio(place)(tables[stratum].sum(0)) for stratum in strata]))
            interval = bootstrap_interval([tables[stratum] for stratum in strata], ratio(place))
            found.append(Estimate(name, measure, sum(len(tables[stratum]) for stratum in strata), value, *interval))
    return found


def differences(samples_a: list["Sample"], samples_b: list["Sample"]) -> list[Difference]:
    """B - A in every measure, the same sessions drawn of both in every bootstrap draw; rows as `estimates` has them.

    A session is won where its own value of the measure is greater in B. Both hold the same sessions and samples.
    """
    a, b = by_category(samples_a), by_category(samples_b)
    both = {
        category: np.stack([np.concatenate([rows[session], b[category][session]]) for session in rows])
        for category, rows in a.items()
    }
    num_samples = len({sample.sample for sample in samples_a})
    found = []
    for name, strata in rows_and_strata(both):
        tables = [both[stratum] for stratum in strata]
        for place, measure in enumerate(measures(num_samples)):
            of = ratio(place)
            width = tables[0].shape[1] // 2

            def change(sums: np.ndarray, of=of, width=width) -> np.ndarray:
                return of(sums[..., width:]) - of(sums[..., :width])

            values = [float(np.mean([of(t[:, half].sum(0)) for t in tables])) for half in _halves(width)]
            single_S = np.concatenate([change(table) for table in tables])
            wins, losses = int((single_S > 1e-12).sum()), int((single_S < -1e-12).sum())
            interval = bootstrap_interval(tables, change)
            found.append(
                Difference(
                    name,
                    measure,
                    len(single_S),
                    values[1] - values[0],
                    *interval,
                    a=values[0],
                    b=values[1],
                    wins=wins,
                    losses=losses,
                    p=sign_test(wins, losses),
                )
            )
    return found


def _halves(width: int) -> tuple[slice, slice]:
    return slice(None, width), slice(width, None)


def report(samples: list["Sample"], settings: dict[str, Any], folder: Path, console: Console) -> None:
    """Write eval.csv and table.txt, and print the table."""
    found = estimates(samples)
    write_csv(folder, "eval.csv", [vars(estimate) for estimate in found])
    policy, step = settings["policy"]["name"], settings["policy"]["step"]
    title = f"{policy}{'' if step is None else f', step {step}'} on {settings['environment']}, held out, %"
    table = Table("")
    names = list(dict.fromkeys(estimate.category for estimate in found))
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    cells = {(estimate.category, estimate.measure): estimate for estimate in found}
    table.add_row("sessions", *(str(cells[name, "turn_success"].sessions) for name in names), end_section=True)
    for measure in measures(settings["samples"]):
        table.add_row(measure.replace("_", " "), *(_cell(cells[name, measure]) for name in names))
    notes = [
        f"{settings['samples']} sample(s) per session at temperature {settings['temperature']:g}; below each value: "
        "95 %, percentile bootstrap over sessions within each category; average: unweighted over the categories"
    ]
    if any(estimate.low == estimate.high for estimate in found):
        notes.append(_ALIKE)
    if min(estimate.sessions for estimate in found) < FEW:
        notes.append(f"intervals from fewer than {FEW} sessions are too narrow")
    if cut := sum(sample.cut for sample in samples):
        notes.append(f"{cut} of {len(samples)} plays reached the model's context, and failed there")
    with io.StringIO() as written:
        for place in (console, Console(file=written, width=120)):
            place.print(title, soft_wrap=True, highlight=False, markup=False)
            place.print(table)
            for note in notes:
                place.print(note, soft_wrap=True, highlight=False, markup=False)
        RunFolder(folder).write("table.txt", written.getvalue())
    console.print(f"evaluation: {folder}", soft_wrap=True, highlight=False, markup=False)


def report_differences(found: list[Difference], names: tuple[str, str], output: Path | None, console: Console) -> None:
    """Print the table of differences; with an output folder, write it there as comparison.csv too."""
    table = Table()
    for column in ("%", "", "sessions", "A", "B", "B - A", "better", "worse", "p"):
        table.add_column(column, justify="left" if column in ("%", "") else "right")
    for row in found:
        counted = (str(row.wins), str(row.losses), f"{row.p:.3f}" if row.p >= 0.0005 else "<0.001")
        values = (f"{100 * row.a:.1f}", f"{100 * row.b:.1f}", _cell(row, sign="+", to=" to "))
        table.add_row(
            row.category.replace("_", " "), row.measure.replace("_", " "), str(row.sessions), *values, *counted
        )
    console.print(f"A: {names[0]}\nB: {names[1]}", soft_wrap=True, highlight=False, markup=False)
    console.print(table)
    console.print(
        "below B - A: 95 %, percentile bootstrap over sessions, the same drawn of both (-: all alike); better, worse: "
        "sessions in which B did; p: exact sign test over those; average: unweighted over the categories",
        soft_wrap=True,
        highlight=False,
    )
    if output:
        output.mkdir(parents=True, exist_ok=True)
        write_csv(output, "comparison.csv", [vars(row) for row in found])


def write_csv(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    """Write rows with equal keys in one piece."""
    with io.StringIO(newline="") as written:
        writer = csv.DictWriter(written, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        RunFolder(folder).write(name, written.getvalue())


def _cell(row: Estimate, sign: str = "", to: str = "-") -> str:
    interval = "-" if row.low == row.high else f"{100 * row.low:{sign}.1f}{to}{100 * row.high:{sign}.1f}"
    return f"{100 * row.value:{sign}.1f}\n{interval}"
