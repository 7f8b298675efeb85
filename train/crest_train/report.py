"""What a run leaves to look at: the closing table and the curves."""

import csv
import inspect
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from crest_train.config import Config
from crest_train.environments.desk import Desk

REFERENCE_RESULTS = Path(__file__).parents[1] / "results" / "desk.csv"
"""Held-out success of earlier runs, by desk.py beside it: turns, method, seed, step, turn_success, session_success."""

_DEFAULT = Config()
_DESK_OPTIONS = {name: option.default for name, option in inspect.signature(Desk).parameters.items()}
_PANELS = (
    ("success", ("turn_success", "session_success")),
    ("loss", ("loss",)),
    ("entropy (nats)", ("entropy",)),
    ("share of tokens", ("clipped", "share_amplified")),
)


def closing_table(lines: list[dict[str, Any]], config: Config) -> Table:
    """Success before and after on held-out sessions, speed, memory and time, from the lines of metrics.jsonl."""
    evaluations = [line for line in lines if line["event"] == "evaluation"]
    steps = [line for line in lines if line["event"] == "step"]
    before, after = evaluations[0], evaluations[-1]
    table = Table(
        title=f"{config.method.name} on {config.environment.name}, {after['step']} steps", title_justify="left"
    )
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    for key in ("turn_success", "session_success"):
        name = f"{key.replace('_', ' ')} (held out)"
        table.add_row(name, f"{before[key]:.3f}", f"{after[key]:.3f}")
    for name, tokens, seconds in (
        ("rollout, sampled tokens/s", "sampled_tokens", "rollout_seconds"),
        ("training, tokens/s", "trained_tokens", "training_seconds"),
    ):
        spent = sum(line[seconds] for line in steps)
        if spent:
            table.add_row(name, "", f"{sum(line[tokens] for line in steps) / spent:,.0f}")
    table.add_row("peak memory, MiB", "", f"{max(line['peak_memory_mib'] for line in lines):,.0f}")
    seconds = sum(value for line in lines for key, value in line.items() if key.endswith("_seconds"))
    table.add_row("minutes", "", f"{seconds / 60:.1f}")
    return table


def grpo_reference(config: Config, results: Path = REFERENCE_RESULTS) -> str | None:
    """Where GRPO was after as many steps in the same setting; None where no earlier run says so."""
    given = {**_DESK_OPTIONS, **config.environment.options}
    turns, steps = given["num_turns"], config.training.steps
    same_setting = (
        config.environment.name == "desk"
        and given == {**_DESK_OPTIONS, "num_turns": turns}
        and config.training.model_copy(update={"steps": _DEFAULT.training.steps}) == _DEFAULT.training
        and config.evaluation.model_copy(update={"every": _DEFAULT.evaluation.every}) == _DEFAULT.evaluation
        and (config.policy, config.warm_start, config.rollout)
        == (_DEFAULT.policy, _DEFAULT.warm_start, _DEFAULT.rollout)
    )
    if not same_setting or config.method.name == "grpo" or not results.is_file():
        return None
    sought = ("grpo", str(turns), str(steps))
    with open(results, newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if (row["method"], row["turns"], row["step"]) == sought]
    if not rows:
        return None
    turn, session = (sum(float(row[key]) for row in rows) / len(rows) for key in ("turn_success", "session_success"))
    return (
        f"GRPO after as many steps (mean of {len(rows)} seeds, {results.parent.name}/{results.name}): "
        f"turn success {turn:.3f}, session success {session:.3f}"
    )


def draw_curves(lines: list[dict[str, Any]], path: Path) -> None:
    """Draw success (training and held out), loss, entropy and shares of tokens over the steps."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    for axes, (title, keys) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        for key in keys:
            for event, style in (("step", "-"), ("evaluation", "o--")):
                points = [(line["step"], line[key]) for line in lines if line["event"] == event and key in line]
                if points:
                    name = key.replace("_", " ") + (", held out" if event == "evaluation" else "")
                    axes.plot(*zip(*points, strict=True), style, label=name, markersize=4)
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if axes.has_data():
            axes.legend()
    figure.savefig(path, dpi=120)
