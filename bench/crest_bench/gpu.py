"""The prepared script for one GPU (`bench/gpu.sh`): correctness, invariance, 64-bit offsets, linear ops, speed.

Every stage runs in a process of its own under a time budget. A process that dies (a device error takes its whole
context along) is started again behind the check that killed it. Rows are appended to gpu.csv as they come. Needs torch
and Triton only; without a GPU, --dry-run goes through all stages with tiny shapes in Triton's interpreter.
"""

import argparse
import csv
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path

from crest_bench.environment import commit, results

# Stage -> (seconds, module, function that gives its checks); 460 seconds in all. What a stage leaves, the next may use.
STAGES = {
    "correctness": (170, "gpu_checks", "correctness"),
    "invariance": (40, "gpu_invariance", "invariance"),
    "offsets": (40, "gpu_invariance", "offsets"),
    "linear": (60, "gpu_linear", "linear"),
    "speed": (150, "gpu_speed", "speed"),
}
DRY_RUN_SECONDS = 1200  # of every stage: Triton's interpreter on a slow machine
RESTARTS = 5  # of a stage whose process died
STATUSES = ("PASS", "FAIL", "MEASURED", "LEFT OUT", "DRY RUN")


@dataclass(frozen=True)
class Row:
    """What one check gave. value: of a PASS or FAIL the largest error over its tolerance, else what was measured; a dry
    run measures nothing.
    """

    stage: str
    name: str
    status: str
    value: float | None = None
    unit: str = ""
    detail: str = ""
    device: str = ""
    torch: str = ""
    triton: str = ""

    def line(self) -> str:
        value = "" if self.value is None else f"{self.value:.4g} {self.unit}"
        return f"{self.status:8} {self.stage}: {self.name}  {value}  {self.detail}".rstrip()


@dataclass(frozen=True)
class Found:
    """What a check gives; one check may give several, under names of their own."""

    status: str
    value: float | None = None
    unit: str = ""
    detail: str = ""
    name: str = ""


@dataclass(frozen=True)
class Check:
    name: str
    run: Callable[[], Found | list[Found]]


@dataclass(frozen=True)
class Setting:
    """Where the checks run: "cuda" (ROCm too) or "cpu", and whether shapes are tiny."""

    device: str
    tiny: bool


def checks_of(stage: str, setting: Setting) -> list[Check]:
    _, module, function = STAGES[stage]
    return list(getattr(import_module(f"crest_bench.{module}"), function)(setting))


def run_stage(stage: str, setting: Setting, start: int) -> None:
    """In the stage's process: run its checks from number `start`.

    Prints lines of JSON: the names of all checks, then what is begun and the rows it gave.
    """
    import torch
    import triton

    where = dict(
        device=torch.cuda.get_device_name() if setting.device == "cuda" else "cpu", torch=torch.__version__,
        triton=triton.__version__,
    )  # fmt: skip
    checks = checks_of(stage, setting)
    print(json.dumps({"checks": [check.name for check in checks]}), flush=True)
    for check in checks[start:]:
        print(json.dumps({"begin": check.name}), flush=True)
        try:
            found = check.run()
            if setting.device == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            found = Found("FAIL", detail=f"{type(error).__name__}: {error}"[:300])
        found = found if isinstance(found, list) else [found]
        if setting.tiny:
            found = [Found("DRY RUN", name=one.name) if one.status == "MEASURED" else one for one in found]
        rows = [
            Row(stage, one.name or check.name, one.status, one.value, one.unit, one.detail, **where) for one in found
        ]
        print(json.dumps({"rows": [asdict(row) for row in rows]}), flush=True)
        if setting.device == "cuda" and _device_is_lost():
            os._exit(1)


def _device_is_lost() -> bool:
    import torch

    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").add_(1).item()
    except Exception:
        return True
    return False


class Writer:
    """Appends rows to a CSV, each flushed at once, under the time and commit of this run; keeps them for the summary.

    Raises ValueError if the file has other columns.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._run = {"timestamp": datetime.now(timezone.utc).isoformat(timespec="seconds"), "commit": commit()}
        columns = [*self._run, *(field.name for field in fields(Row))]
        if path.exists() and path.stat().st_size:
            with path.open(newline="") as file:
                if (found := next(csv.reader(file))) != columns:
                    raise ValueError(f"{path} has the columns {', '.join(found)}, want {', '.join(columns)}")
        self._file = path.open("a", newline="")
        self._writer = csv.DictWriter(self._file, columns, lineterminator="\n")
        if not path.stat().st_size:
            self._writer.writeheader()
        self.rows: list[Row] = []

    def write(self, row: Row) -> None:
        self._writer.writerow(self._run | asdict(row))
        self._file.flush()
        self.rows.append(row)
        print(row.line(), flush=True)


def watch_stage(stage: str, setting: Setting, deadline: float, writer: Writer) -> None:
    """Run a stage in processes of its own until it is through, its time is over, or it has died too often.

    A check that is not come to fails.
    """
    start, names = 0, []
    for _ in range(RESTARTS + 1):
        code, following, running, listed = _one_process(stage, setting, start, deadline, writer)
        if code == 0:
            return
        names = names or listed
        why = "the stage's time is over" if code is None else f"its process ended with {code}"
        if code is None or running or following == start:
            writer.write(Row(stage, running or "(start)", "FAIL", detail=why))
        if code is None or following == start:
            break
        start = following
    else:
        why = f"its process ended {RESTARTS + 1} times"
    for name in names[following:]:
        writer.write(Row(stage, name, "FAIL", detail=f"not run: {why}"))


def _one_process(stage: str, setting: Setting, start: int, deadline: float, writer: Writer):
    """(exit code or None where time is over, number of the next check, name of the one it ended in or None, names of
    all checks).
    """
    command = [sys.executable, "-m", "crest_bench.gpu", "--stage", stage, "--start", str(start)]
    process = subprocess.Popen(command + ["--dry-run"] * setting.tiny, stdout=subprocess.PIPE, text=True)
    lines: queue.Queue = queue.Queue()

    def read() -> None:
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    following, running, names = start, None, []
    try:
        while (line := lines.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
            message = _message(line)
            names = message.get("checks", names)
            if "begin" in message:
                following, running = following + 1, message["begin"]
            for row in message.get("rows", ()):
                writer.write(Row(**row))
                running = None
        return process.wait(), following, running, names
    except queue.Empty:
        process.kill()
        process.wait()
        return None, following, running, names


def _message(line: str) -> dict:
    """The JSON of a line, or {} for what libraries print."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def summary(rows: list[Row], seconds: float) -> str:
    """A few lines: counts by stage, every failure, what was measured."""
    lines = [f"{seconds:.0f} s"]
    for stage in STAGES:
        counts = Counter(row.status for row in rows if row.stage == stage)
        lines.append(f"{stage}: " + ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status]))
    for row in rows:
        if row.status != "PASS":
            lines.append(row.line())
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, in Triton's interpreter")
    parser.add_argument("--only", choices=STAGES, action="append", help="this stage only; may be repeated")
    parser.add_argument(
        "--out", type=Path, help="folder of gpu.csv and gpu.txt; default $OUT, else bench/results (dry run: a new one)"
    )
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    setting = Setting("cpu" if options.dry_run else "cuda", options.dry_run)
    if options.stage:
        run_stage(options.stage, setting, options.start)
        return
    folder = options.out or Path(os.environ.get("OUT") or (tempfile.mkdtemp() if options.dry_run else results()))
    began = deadline = time.monotonic()
    try:
        writer = Writer(folder / "gpu.csv")
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    for stage in options.only or STAGES:
        deadline += DRY_RUN_SECONDS if options.dry_run else STAGES[stage][0]
        watch_stage(stage, setting, deadline, writer)
    text = summary(writer.rows, time.monotonic() - began)
    (folder / "gpu.txt").write_text(text)
    print(f"\n{text}{folder / 'gpu.csv'}")
    sys.exit(any(row.status == "FAIL" for row in writer.rows))


if __name__ == "__main__":
    main()
