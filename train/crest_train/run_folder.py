"""The folder of a run: resolved configuration, metrics line by line, and a checkpoint that is replaced as a whole.

Where a method compares with a frozen reference, the policy as it was when the run began lies there too.
"""

import json
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crest_train.config import Config, PolicySection, load_config, to_toml
from crest_train.model import first_line, read_model, read_pretrained
from crest_train.ranks import from_first, is_first

_OPTIMIZER, _VALUE, _STATE = "optimizer.safetensors", "value.safetensors", "trainer.json"
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
    that is new or empty, holds a run with an equal configuration, or one that came to no checkpoint. Raises ValueError
    for any other, and while a run is going on there. A new folder without a checkpoint at the end goes again.
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
        if folder.has_checkpoint() and load_config(path / _CONFIG) != config:
            raise ValueError(
                f"--output: {path} holds a run with another configuration; name another folder, or resume that run "
                f"with `{folder.command}`"
            )
        yield folder
    finally:
        if made and not folder.has_checkpoint():
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
    if names - {_LOCK} and not (output / _CONFIG).is_file():
        raise ValueError(f"--output: {output} exists and holds no run; name a new or an empty folder")
    return output, False


class RunFolder:
    """Paths and atomic writes inside one run's folder."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoint = path / "checkpoint"
        self.reference = path / "reference"

    @property
    def command(self) -> str:
        """The command that goes on with the run."""
        return shlex.join(["crest-train", "run", str(self.path / _CONFIG), "--output", str(self.path)])

    def has_checkpoint(self) -> bool:
        """Whether a checkpoint is there; a stop between the two renames of `save` left it under its other name."""
        if not self.checkpoint.exists() and (self.path / "checkpoint.old").exists():
            (self.path / "checkpoint.old").rename(self.checkpoint)
        return self.checkpoint.exists()

    def begin(self, config: Config) -> None:
        """Write the resolved configuration; what a run without a checkpoint left there goes."""
        for name in (_METRICS, "trajectories.html", "curves.png"):
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.reference, ignore_errors=True)
        self.write(_CONFIG, to_toml(config))

    def write(self, name: str, text: str) -> None:
        """Write a text file in one piece."""
        temporary = self.path / f"{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, self.path / name)

    def log(self, event: str, step: int, **values: Any) -> None:
        """Append a line to metrics.jsonl."""
        with open(self.path / _METRICS, "a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, "step": step, **values}) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl so far; what is no line of it (cut short by a stop, damaged) is left out."""
        return [line for line in map(_metrics_line, self._written_lines()) if line]

    def forget_after(self, step: int) -> int:
        """Drop the metrics of steps that the checkpoint does not hold, which are about to be made again.

        Returns how many lines before the last were damaged; these go too.
        """
        written = self._written_lines()
        self.write(_METRICS, "".join(json.dumps(line) + "\n" for line in self.metrics() if line["step"] <= step))
        return sum(_metrics_line(line) is None for line in written[:-1])

    def _written_lines(self) -> list[str]:
        path = self.path / _METRICS
        return path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []

    def save(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        optimizer: torch.optim.Optimizer,
        step: int,
        value: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Replace the checkpoint by the present state: what `save_pretrained` writes, the optimizer, the step.

        value: what a value of states has learned (its state_dict), if the run has one.
        """
        new, old = self.path / "checkpoint.tmp", self.path / "checkpoint.old"
        shutil.rmtree(new, ignore_errors=True)
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
        tensors = {
            f"{index}.{name}": value.contiguous()
            for index, values in optimizer.state_dict()["state"].items()
            for name, value in values.items()
        }
        save_file(tensors, new / _OPTIMIZER)
        if value is not None:
            save_file({name: tensor.contiguous() for name, tensor in value.items()}, new / _VALUE)
        (new / _STATE).write_text(json.dumps({"step": step}), encoding="utf-8")
        shutil.rmtree(old, ignore_errors=True)
        if self.checkpoint.exists():
            self.checkpoint.rename(old)
        new.rename(self.checkpoint)
        shutil.rmtree(old, ignore_errors=True)

    def saved_step(self) -> int | None:
        """The number of steps that the checkpoint holds, None without one. Raises ValueError when it is damaged."""
        if not self.has_checkpoint():
            return None
        try:
            return json.loads((self.checkpoint / _STATE).read_text(encoding="utf-8"))["step"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._damaged(error) from error

    def restore_policy(self, section: PolicySection) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The checkpoint's model and tokenizer. Raises ValueError when it is damaged."""
        try:
            return read_pretrained(self.checkpoint, section)
        except Exception as error:  # whatever the libraries raise for a damaged file
            raise self._damaged(error) from error

    def restore_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer the checkpoint's state. Raises ValueError when it is damaged."""
        try:
            tensors = load_file(self.checkpoint / _OPTIMIZER)
        except (OSError, SafetensorError) as error:
            raise self._damaged(error) from error
        state: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in tensors.items():
            index, _, name = key.partition(".")
            state.setdefault(int(index), {})[name] = value.clone()  # out of the mapped file: see read_pretrained
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})

    def restore_value(self) -> dict[str, torch.Tensor]:
        """What `save` was given as the value. Raises ValueError when it is damaged."""
        try:
            tensors = load_file(self.checkpoint / _VALUE)
        except (OSError, SafetensorError) as error:
            raise self._damaged(error) from error
        return {name: tensor.clone() for name, tensor in tensors.items()}

    def save_reference(self, model: PreTrainedModel) -> None:
        """Keep the policy as it is now, whole or not at all."""
        new = self.path / "reference.tmp"
        shutil.rmtree(new, ignore_errors=True)
        model.save_pretrained(new)
        shutil.rmtree(self.reference, ignore_errors=True)
        new.rename(self.reference)

    def restore_reference(self, section: PolicySection) -> PreTrainedModel:
        """The policy that `save_reference` kept, frozen. Raises ValueError when it is damaged."""
        try:
            model = read_model(self.reference, section)
        except Exception as error:  # whatever the libraries raise for a damaged file
            raise self._damaged(error, self.reference) from error
        return model.eval().requires_grad_(False)

    def _damaged(self, error: Exception, folder: Path | None = None) -> ValueError:
        return ValueError(
            f"{folder or self.checkpoint} is damaged ({first_line(error)}); bring it back from a copy, "
            f"or delete {'it' if folder is None else self.checkpoint} to begin the run again"
        )


class WatchedFolder(RunFolder):
    """The folder of a run in a process that is not the first: what the run is to write there, this one does not."""

    def has_checkpoint(self) -> bool:
        """Whether a checkpoint is there."""
        return self.checkpoint.exists()

    def _leave(self, *_: Any, **__: Any) -> None:
        pass

    begin = write = log = forget_after = save = save_reference = _leave


def _metrics_line(written: str) -> dict[str, Any] | None:
    """A line of metrics.jsonl, None when it is damaged."""
    try:
        line = json.loads(written)
    except ValueError:
        return None
    return line if isinstance(line, dict) and "event" in line and isinstance(line.get("step"), int) else None
