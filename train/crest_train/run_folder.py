"""The folder of a run: resolved configuration, metrics line by line, and the last checkpoints.

Where a method compares with a frozen reference, the policy as it was when the run began lies there too.
"""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crest_train.checkpoint import Checkpoint, write_checkpoint
from crest_train.config import Config, PolicySection, to_toml
from crest_train.loading import read_model
from crest_train.lora import save_model
from crest_train.model import first_line
from crest_train.ranks import from_first, is_first
from crest_train.whole import damage, made_whole, synced, write_whole

_CONFIG, _METRICS, _LOCK = "config.toml", "metrics.jsonl", ".lock"


@contextmanager
def claim_run(config: Config, output: Path | None) -> Iterator["RunFolder"]:
    """The folder that `_claimed` holds; of several processes the first one holds it, and the others only read there."""
    if is_first():
        with _claimed(config, output) as folder:
            from_first(folder.path)
            yield folder
    else:
        yield WatchedFolder(from_first(None))


@contextmanager
def _claimed(config: Config, output: Path | None) -> Iterator["RunFolder"]:
    """The folder of a new run, or of the one to resume, held against every other run until the block ends.

    Without `output` a new one: runs/<environment>-<method>-seed<seed>, numbered where that is taken. With it: a folder
    that is new, empty or holds a run. Raises ValueError for any other, and while a run is going on there. A new folder
    without a checkpoint at the end goes again.
    """
    try:
        path, made = _make_folder(config, output)
        lock = FileLock(path / _LOCK)  # the operating system's: that of a killed process is free
        lock.acquire(blocking=False)
    except Timeout:
        raise ValueError(f"--output: {path}: a run is going on there; wait for its end or name another one") from None
    except OSError as error:
        raise ValueError(f"--output: cannot write there ({error})") from error
    folder = RunFolder(path)
    try:
        yield folder
    finally:
        if made and not folder.steps():
            shutil.rmtree(path, ignore_errors=True)
        lock.release()


def _make_folder(config: Config, output: Path | None) -> tuple[Path, bool]:
    """The folder of a run, and whether it was made now."""
    if output is None:
        name = f"{config.environment.name.replace(':', '-')}-{config.method.name}-seed{config.run.seed}"
        for n in count(1):
            path = Path("runs", name if n == 1 else f"{name}-{n}")
            with suppress(FileExistsError):
                path.mkdir(parents=True)
                return path, True
    if not output.exists():
        output.mkdir(parents=True, exist_ok=True)
        return output, True
    names = {path.name for path in output.iterdir()} if output.is_dir() else {output.name}
    if names - {_LOCK, f"{_CONFIG}.tmp"} and not (output / _CONFIG).is_file():
        raise ValueError(f"--output: {output} exists and holds no run; name a new or an empty folder")
    return output, False


class RunFolder:
    """Paths and atomic writes inside one run's folder."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.reference = path / "reference"
        self.records = path / "records"

    @property
    def command(self) -> str:
        """The command that goes on with the run."""
        return shlex.join(["crest-train", "run", "--resume", str(self.path)])

    @property
    def way_on(self) -> str:
        """How a run that was stopped goes on, in words."""
        return f"go on with: {self.command}" if self.steps() else "there was no checkpoint yet, nothing is kept"

    def steps(self) -> list[int]:
        """The steps after which the checkpoints that are there were written, in order; damaged ones among them."""
        names = [path.name for path in self.checkpoints.iterdir()] if self.checkpoints.is_dir() else []
        return sorted(int(found[1]) for found in map(re.compile(r"step-(\d+)").fullmatch, names) if found)

    def last_checkpoint(self, console: Console) -> Checkpoint | None:
        """The last one that is whole, None without any; what is damaged behind it is named on the console.

        Raises ValueError when all are damaged, and when steps were made of which there is none.
        """
        found = []
        for step in reversed(self.steps()):
            path = self._of_step(step)
            wrong = damage(path)
            if wrong is None:
                for words in found:
                    console.print(f"{words}: the one before, of step {step}, is used", style="red", soft_wrap=True)
                return Checkpoint(path, step)
            found.append(f"{path} is damaged ({wrong})")
        if found:
            raise ValueError(
                f"{'; '.join(found)}; bring one back from a copy, or delete {self.path} to begin the run again"
            )
        if any(line["event"] == "step" for line in self.metrics()):
            raise ValueError(
                f"{self.path} holds the metrics of steps and no checkpoint to go on from; name another --output, or "
                "delete the folder to begin the run again"
            )
        return None

    def begin(self, config: Config) -> None:
        """Write the resolved configuration; what a run without a checkpoint left there goes."""
        for name in (_METRICS, "view.html", "curves.png"):
            (self.path / name).unlink(missing_ok=True)
        for folder in (self.reference, self.records):
            shutil.rmtree(folder, ignore_errors=True)
        self.write(_CONFIG, to_toml(config))

    def write(self, name: str, text: str) -> None:
        """Write a text file in one piece; the folder that it is in is made."""
        (self.path / name).parent.mkdir(exist_ok=True)
        write_whole(self.path / name, text)

    def log(self, event: str, step: int, **values: Any) -> None:
        """Append a line to metrics.jsonl."""
        with open(self.path / _METRICS, "a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, "step": step, **values}) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl so far; what is no line of it (cut short by a stop, damaged) is left out."""
        return [line for line in map(_metrics_line, self._written_lines()) if line]

    def forget_after(self, step: int) -> int:
        """Drop the metrics and records of later steps, which are about to be made again.

        Damaged checkpoints of them are put aside.

        Returns how many lines of metrics before the last were damaged; these go too.
        """
        for path in self.checkpoints.glob("*.tmp"):
            shutil.rmtree(path)
        for later in (self._of_step(found) for found in self.steps() if found > step):
            aside = later.with_name(f"{later.name}.damaged")
            shutil.rmtree(aside, ignore_errors=True)
            later.rename(aside)
        for path in self.records.glob("step-*.jsonl"):
            if int(path.stem.removeprefix("step-")) > step:
                path.unlink()
        written = self._written_lines()
        self.write(_METRICS, "".join(json.dumps(line) + "\n" for line in self.metrics() if line["step"] <= step))
        return sum(_metrics_line(line) is None for line in written[:-1])

    def _written_lines(self) -> list[str]:
        path = self.path / _METRICS
        return path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []

    def save(
        self,
        config: Config,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        optimizer: torch.optim.Optimizer,
        step: int,
        value: dict[str, torch.Tensor] | None,
        random: dict[str, Any],
    ) -> None:
        """Write the checkpoint of a step (see `write_checkpoint`) if it is not there; run.checkpoints_kept stay."""
        if step in self.steps():
            return
        if (self.path / _METRICS).exists():
            synced(self.path / _METRICS)
        write_checkpoint(self._of_step(step), config, model, tokenizer, optimizer, value, random)
        for old in self.steps()[: -config.run.checkpoints_kept]:
            shutil.rmtree(self._of_step(old))

    def _of_step(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:05d}"

    def save_reference(self, model: PreTrainedModel) -> None:
        """Keep the policy as it is now, whole or not at all."""
        with made_whole(self.reference) as folder:
            save_model(model, folder)

    def restore_reference(self, section: PolicySection) -> PreTrainedModel:
        """The policy that `save_reference` kept, frozen. Raises ValueError when it is damaged."""
        try:
            model = read_model(self.reference, section)
        except Exception as error:  # whatever the libraries raise for a damaged file
            wrong = damage(self.reference) or first_line(error)
            raise ValueError(
                f"{self.reference} is damaged ({wrong}); bring it back from a copy, or delete {self.path} to begin the "
                "run again"
            ) from error
        return model.eval().requires_grad_(False)


class WatchedFolder(RunFolder):
    """The folder of a run in a process that is not the first: what the run is to write there, this one does not."""

    def _leave(self, *_: Any, **__: Any) -> None:
        pass

    last_checkpoint = begin = write = log = forget_after = save = save_reference = _leave


def _metrics_line(written: str) -> dict[str, Any] | None:
    """A line of metrics.jsonl, None when it is damaged."""
    try:
        line = json.loads(written)
    except ValueError:
        return None
    return line if isinstance(line, dict) and "event" in line and isinstance(line.get("step"), int) else None
