"""The folder of a run: resolved configuration, metrics line by line, and a checkpoint that is replaced as a whole."""

import json
import os
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crest_train.config import Config, load_config, to_toml

_OPTIMIZER, _STATE = "optimizer.safetensors", "trainer.json"


def find_run(config: Config, output: Path | None) -> "RunFolder":
    """The folder of a new run, or of the one to resume; writes nothing.

    Without `output`: runs/<environment>-<method>-seed<seed>, numbered where that is taken. With it: a folder that is
    new or empty, or holds a run with an equal configuration. Raises ValueError for any other.
    """
    if output is None:
        name = f"{config.environment.name.replace(':', '-')}-{config.method.name}-seed{config.run.seed}"
        names = (name if n == 1 else f"{name}-{n}" for n in count(1))
        return RunFolder(next(path for path in map(Path("runs").joinpath, names) if not path.exists()))
    written = output / "config.toml"
    if written.is_file():
        if load_config(written) != config:
            raise ValueError(
                f"--output: {output} holds a run with another configuration; name another folder, or resume that run "
                f"with `crest-train run {written} --output {output}`"
            )
    elif output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--output: {output} exists and holds no run; name a new or an empty folder")
    return RunFolder(output)


class RunFolder:
    """Paths and atomic writes inside one run's folder."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoint = path / "checkpoint"
        # A stop between the two renames of `save` leaves the older checkpoint under its other name.
        if not self.checkpoint.exists() and (path / "checkpoint.old").exists():
            (path / "checkpoint.old").rename(self.checkpoint)

    def begin(self, config: Config) -> None:
        """Make the folder and write the resolved configuration into it; what a start that came to nothing left goes."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "metrics.jsonl").unlink(missing_ok=True)
        self.write("config.toml", to_toml(config))

    def write(self, name: str, text: str) -> None:
        """Write a text file in one piece."""
        temporary = self.path / f"{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, self.path / name)

    def log(self, event: str, step: int, **values: Any) -> None:
        """Append a line to metrics.jsonl."""
        with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, "step": step, **values}) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl so far (one cut short by a stop left out)."""
        path = self.path / "metrics.jsonl"
        lines = []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return lines

    def forget_after(self, step: int) -> None:
        """Drop the metrics of steps that the checkpoint does not hold: they are about to be made again."""
        kept = [json.dumps(line) + "\n" for line in self.metrics() if line["step"] <= step]
        self.write("metrics.jsonl", "".join(kept))

    def save(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        optimizer: torch.optim.Optimizer,
        step: int,
    ) -> None:
        """Replace the checkpoint by the present state: what `save_pretrained` writes, the optimizer, the step."""
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
        (new / _STATE).write_text(json.dumps({"step": step}), encoding="utf-8")
        shutil.rmtree(old, ignore_errors=True)
        if self.checkpoint.exists():
            self.checkpoint.rename(old)
        new.rename(self.checkpoint)
        shutil.rmtree(old, ignore_errors=True)

    def saved_step(self) -> int | None:
        """The number of steps that the checkpoint holds, None without one. Raises ValueError when it is damaged."""
        if not self.checkpoint.exists():
            return None
        try:
            return json.loads((self.checkpoint / _STATE).read_text(encoding="utf-8"))["step"]
        except (OSError, ValueError, KeyError, TypeError) as error:
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
            state.setdefault(int(index), {})[name] = value.clone()  # out of the mapped file: see load_pretrained
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})

    def _damaged(self, error: Exception) -> ValueError:
        return ValueError(
            f"{self.checkpoint} is damaged ({str(error).strip() or type(error).__name__}); bring it back from a copy, "
            "or delete it to begin the run again"
        )
