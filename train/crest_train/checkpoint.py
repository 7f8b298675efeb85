"""What a run goes on from: policy, optimizer, value, random states, step and configuration, in one folder.

The step is the cursor of everything drawn (see draws.py); there is no schedule apart from it. The policy and its
tokenizer are what `save_pretrained` writes, so that a checkpoint is a model's folder too.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crest_train.config import Config, PolicySection, load_config, to_toml
from crest_train.loading import read_pretrained
from crest_train.lora import save_model
from crest_train.model import first_line
from crest_train.whole import made_whole

_OPTIMIZER, _VALUE, _STATE, _CONFIG = "optimizer.safetensors", "value.safetensors", "trainer.json", "run.toml"

T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is whole: where it is and after which step it was written.

    What is read from it raises ValueError that names it where a library cannot take it (another release, say).
    """

    path: Path
    step: int

    def config(self) -> Config:
        """The configuration that the run had."""
        return load_config(self.path / _CONFIG)

    def restore_policy(self, section: PolicySection) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The policy and its tokenizer."""
        return self._read(lambda: read_pretrained(self.path, section))

    def restore_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer its state."""

        def read() -> None:
            state: dict[int, dict[str, Any]] = {}
            for key, value in (_tensors(self.path / _OPTIMIZER) | self._state()["optimizer"]).items():
                index, _, name = key.partition(".")
                state.setdefault(int(index), {})[name] = value
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})

        self._read(read)

    def restore_value(self) -> dict[str, torch.Tensor]:
        """What `write_checkpoint` was given as the value."""
        return self._read(lambda: _tensors(self.path / _VALUE))

    def random(self) -> dict[str, Any]:
        """What `write_checkpoint` was given as the random states."""
        return self._read(lambda: self._state()["random"])

    def _state(self) -> dict[str, Any]:
        return json.loads((self.path / _STATE).read_text(encoding="utf-8"))

    def _read(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except Exception as error:  # whatever the libraries raise
            raise ValueError(f"{self.path} is whole but cannot be read ({first_line(error)})") from error


def write_checkpoint(
    path: Path,
    config: Config,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: torch.optim.Optimizer,
    value: dict[str, torch.Tensor] | None,
    random: dict[str, Any],
) -> None:
    """Write a checkpoint, whole or not at all.

    value: what a value of states has learned (its state_dict), if the run has one. random: `draws.random_states`.
    """
    state = {
        f"{index}.{name}": value
        for index, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    numbers = {name: value for name, value in state.items() if name not in tensors}
    with made_whole(path) as folder:
        save_model(model, folder)
        tokenizer.save_pretrained(folder)
        save_file(_apart(tensors), folder / _OPTIMIZER)
        if value is not None:
            save_file(_apart(value), folder / _VALUE)
        (folder / _STATE).write_text(json.dumps({"optimizer": numbers, "random": random}), encoding="utf-8")
        (folder / _CONFIG).write_text(to_toml(config), encoding="utf-8")


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, out of the mapped file (see model.read_model)."""
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as safetensors takes them: contiguous, and no two in one memory (8-bit optimizers share tables)."""
    seen, found = set(), {}
    for name, tensor in tensors.items():
        found[name] = tensor.contiguous() if tensor.data_ptr() not in seen else tensor.clone()
        seen.add(found[name].data_ptr())
    return found
