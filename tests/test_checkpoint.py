"""The checkpoints of a run: whole or not there, damage named, the last ones kept, what is read back."""

import shutil

import pytest
import torch
from crest_train import loop
from crest_train.checkpoint import Checkpoint
from crest_train.run_folder import RunFolder
from rich.console import Console
from safetensors.torch import load_file, save_file
from toy_runs import harm, last_of, quiet_train, toy_config


@pytest.fixture(scope="module", autouse=True)
def without_curves():
    """They take longer than so short a run, and nothing goes on from them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "draw_curves", lambda lines, path: None)
        yield


@pytest.fixture(scope="module")
def finished(policy_folder, tmp_path_factory):
    return quiet_train(toy_config(policy_folder), tmp_path_factory.mktemp("runs") / "run")


@pytest.mark.parametrize("shift", range(8))
def test_what_a_checkpoint_gives_back_is_aligned(policy_folder, finished, tmp_path, shift):
    """CPU kernels differ in the last bits between data at multiples of 64 bytes and other data."""
    checkpoint = Checkpoint(shutil.copytree(last_of(finished), tmp_path / "copy"), 4)
    for name in ("model.safetensors", "optimizer.safetensors"):
        tensors = {key: value.clone() for key, value in load_file(checkpoint.path / name).items()}
        save_file(tensors, checkpoint.path / name, metadata={"format": "pt", "shift": " " * 8 * shift})
    model, _ = checkpoint.restore_policy(toy_config(policy_folder).policy)
    optimizer = torch.optim.Adam(model.parameters())
    checkpoint.restore_optimizer(optimizer)
    moments = [value for state in optimizer.state.values() for value in state.values()]
    assert len(moments) > 20
    assert {tensor.data_ptr() % 64 for tensor in (*model.parameters(), *model.buffers(), *moments)} == {0}


FILES = [
    "model.safetensors",
    "config.json",
    "tokenizer.json",
    "optimizer.safetensors",
    "trainer.json",
    "run.toml",
    "manifest.json",
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["half", "one bit", "gone"])
def test_damage_is_named_and_the_checkpoint_before_used(finished, tmp_path, capsys, name, damage):
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(finished.path, folder.path)
    last = folder.checkpoints / "step-00004"
    assert folder.last_checkpoint(Console()) == Checkpoint(last, 4) and capsys.readouterr().out == ""
    harm(last / name, damage)
    assert folder.last_checkpoint(Console(width=40)) == Checkpoint(folder.checkpoints / "step-00002", 2)
    said = capsys.readouterr().out
    assert f"{last} is damaged ({name}" in said and said.endswith("): the one before, of step 2, is used\n")
    assert said.count("\n") == 1
