"""Runs credit methods side by side: every (method, rate, seed) is one ordinary run, in a process of its own.

All runs share the configuration, the warm start and, seed by seed, the sessions that they play. The folder holds
compare.toml (what they share), <method>/rate<rate>-seed<seed>/ (run folders, each with its console output), compare.csv
(a row per evaluation), summary.csv, table.txt and curves.png. The same command goes on with what was stopped or failed,
repeats nothing that is finished, and draws anew.
"""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console

from crest_train.compare_plan import Run, difference, plan
from crest_train.compare_report import CONCENTRATION, PARTS, Row, report
from crest_train.config import Config, MethodSection, load_config, to_toml
from crest_train.credit import needs_of
from crest_train.display import progress
from crest_train.environments import make_environment
from crest_train.orphans import PARENT
from crest_train.run_folder import RunFolder
from crest_train.warm_start import built_in_policy

_SHARED, _CONFIG, _LOG, _LOCK = "compare.toml", "config.toml", "console.log", ".lock"


def compare(
    config: Config,
    methods: str,
    output: Path,
    *,
    seeds: int = 3,
    rates: str = "",
    jobs: int = 2,
    options: Path | None = None,
    console: Console,
) -> None:
    """Run what is not finished, `jobs` at a time, then report on what is.

    methods: "all", or labels with commas between. seeds: how many, from run.seed on. rates: of Adam, with commas
    between; they hold training.rate, at which all methods are compared beside each one's best (empty: that one alone).
    options: TOML file with a [method] table for each method that is not to run with its defaults (see `entries`).

    Raises ValueError before any run: what is wrong with these, or a folder with another comparison. A run that fails is
    named with its error and the others go on: SystemExit (1) after the report then, and (130) when interrupted or
    terminated, which ends the runs under way too.
    """
    if jobs < 1:
        raise ValueError(f"--jobs: found {jobs}, wanted at least 1")
    runs = plan(config, methods, output, seeds=seeds, rates=rates, options=options)
    with claim(config, output, runs), terminated_like_interrupted():
        try:
            if config.policy.model == "desk" and not all(map(finished, runs)):
                built_in_policy(console=console)  # here, where its progress is seen, not in the first run
            failed = play(runs, jobs, console)
        except KeyboardInterrupt:
            console.print("stopped; the same command goes on", highlight=False)
            raise SystemExit(130) from None
        report([row for run in runs if run.name not in failed for row in rows_of(run, config)], output, console)
    for name, error in failed.items():
        console.print(f"failed: {name}: {error}", style="red", soft_wrap=True, highlight=False, markup=False)
    if failed:
        raise SystemExit(1)


@contextmanager
def claim(config: Config, output: Path, runs: list[Run]) -> Iterator[None]:
    """Hold the comparison's folder until the block ends. Raises ValueError: it holds something else, or is in use."""
    held = output / _SHARED
    if output.is_dir() and not held.is_file() and {path.name for path in output.iterdir()} - {_LOCK}:
        raise ValueError(f"--output: {output} exists and holds no comparison; name a new or an empty folder")
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = FileLock(output / _LOCK)
        lock.acquire(blocking=False)
    except Timeout:
        raise ValueError(f"--output: {output}: a comparison is going on there; wait for its end") from None
    except OSError as error:
        raise ValueError(f"--output: cannot write there ({error})") from error
    try:
        shared = config.model_copy(
            update={
                "method": MethodSection(session_reward=config.method.session_reward),
                "run": config.run.model_copy(update={"seed": 0}),
            }
        )
        for path, wanted in [(held, shared), *((run.path / _CONFIG, run.config) for run in runs)]:
            if path.is_file() and (found := difference(load_config(path), wanted)):
                raise ValueError(f"--output: {path} is of another comparison: {found}; name another folder")
        RunFolder(output).write(_SHARED, to_toml(shared))
        yield
    finally:
        lock.release()


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt: else the runs would go on with nobody to wait for them."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def finished(run: Run) -> bool:
    """Whether the run has its last checkpoint and the evaluation after it."""
    folder, steps = RunFolder(run.path), run.config.training.steps
    return folder.steps()[-1:] == [steps] and any(
        line["event"] == "evaluation" and line["step"] == steps for line in folder.metrics()
    )


def play(runs: list[Run], jobs: int, console: Console) -> dict[str, str]:
    """Start what is not finished, `jobs` at a time, and wait for it. Returns the error of each run that failed."""
    waiting = deque(run for run in runs if not finished(run))
    done, failed = len(runs) - len(waiting), {}
    going: list[tuple[Run, subprocess.Popen]] = []
    with progress(console, "run", len(runs), done) as show:
        try:
            while waiting or going:
                while waiting and len(going) < jobs:
                    run = waiting.popleft()
                    going.append((run, start(run)))
                for run, process in [(run, process) for run, process in going if process.poll() is not None]:
                    going.remove((run, process))
                    done += 1
                    if not finished(run):
                        failed[run.name] = last_words(run, process.returncode)
                    show(done, f"{run.name}{': failed' * (run.name in failed)}")
                time.sleep(0.05)
        finally:
            for _, process in going:
                process.terminate()
            for _, process in going:
                process.wait()
    return failed


def start(run: Run) -> subprocess.Popen:
    """Start, or go on with, a run as `crest-train run` does; what it says goes into its folder."""
    run.path.mkdir(parents=True, exist_ok=True)
    if not (run.path / _CONFIG).is_file():
        RunFolder(run.path).write(_CONFIG, to_toml(run.config))
    command = [sys.executable, "-m", "crest_train.cli", "run", str(run.path / _CONFIG), "--output", str(run.path)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(run.config.run.threads), PARENT: str(os.getpid())}
    with open(run.path / _LOG, "ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )


def last_words(run: Run, code: int) -> str:
    """Why a run failed: the last line that it wrote, and where the others are."""
    written = (run.path / _LOG).read_text(encoding="utf-8", errors="replace").split("\n")
    words = next((line.strip() for line in reversed(written) if line.strip()), "it said nothing")
    how = f"exit code {code}" if code >= 0 else f"signal {-code}"
    return f"{words.removeprefix('error: ')} ({how}; {run.path / _LOG})"


def rows_of(run: Run, shared: Config) -> list[Row]:
    """A row for each evaluation of a finished run; seconds are those of the steps so far, without evaluations."""
    lines, config = RunFolder(run.path).metrics(), run.config
    steps = [line for line in lines if line["event"] == "step"]
    environment = make_environment(config.environment.name, config.environment.options)
    setting = {
        "environment": config.environment.name,
        "turns": getattr(environment, "num_turns", None),
        "session_reward": shared.method.session_reward,
        "sessions": config.rollout.sessions,
        "group_size": config.rollout.group_size,
        "steps": config.training.steps,
        "common_rate": shared.training.rate,
        "needs": " ".join(needs_of(config.method)),
    }
    rows = []
    for evaluation in (line for line in lines if line["event"] == "evaluation"):
        so_far = [line for line in steps if line["step"] <= evaluation["step"]]
        spent = [(key, value) for line in so_far for key, value in line.items() if key.endswith("_seconds")]
        row = setting | {"method": run.label, "rate": config.training.rate, "seed": config.run.seed}
        row |= {key: evaluation[key] for key in ("step", "turn_success", "session_success")}
        row["seconds"] = sum(value for _, value in spent)
        row |= {part: sum(value for key, value in spent if key == part) for part in PARTS}
        for share in CONCENTRATION:
            found = [line[share] for line in so_far if line.get(share) is not None]
            row[share] = sum(found) / len(found) if found else None
        rows.append(row)
    return rows
