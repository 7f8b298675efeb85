"""Runs on two processes of gloo: the metrics and the weights of one process, up to the rounding of float32 sums."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from crest_train import cli
from crest_train.config import to_toml
from crest_train.ranks import joined, rank
from crest_train.run_folder import RunFolder
from ranks import run_ranks
from toy import Toy
from toy_runs import drawn, quiet_train, toy_config, weights

TESTS = Path(__file__).parent
ODD = {
    "rollout": {"sessions": 3, "group_size": 3, "max_action_tokens": 3, "rows": 4},
    "evaluation": {"sessions": 5, "every": 0},
    "training": {"steps": 2, "rate": 1e-3, "tokens_per_micro_batch": 40},
}
"""Numbers that two processes cannot share evenly."""


class FailsInOne(Toy):
    """An environment that breaks in the second process alone."""

    def step(self, action):
        return None if rank() == 1 else super().step(action)


class TellsOne(Toy):
    """An environment in which the second process alone is told to end, twice, while it plays the third step."""

    def reset(self, seed):
        if rank() == 1 and seed % 1_000_000 in (6, 7, 8):
            os.kill(os.getpid(), signal.SIGTERM)
        return super().reset(seed)


def torchrun(config, output):
    """`crest-train run` on two processes, in the tests' folder."""
    path = output.with_suffix(".toml")
    path.write_text(to_toml(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "crest_train.cli", "run", str(path), "--output", str(output)]
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    return subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=600)


def train_in_turn(runs, told, failing, rank):
    """Work of a rank: all runs, one after the other, one that the second process is told to end, one that fails."""
    for config, output in runs:
        quiet_train(config, output)
    with pytest.raises(SystemExit) as stop:
        quiet_train(*told)
    assert stop.value.code == 143
    with pytest.raises((ValueError, OSError)) as failed:
        quiet_train(*failing)
    return f"{failed.type.__name__}: {failed.value}"


def stopped_after(step, config, output):
    """A run of one process that ends as soon as the checkpoint of `step` is written."""
    save = RunFolder.save

    def save_and_stop(folder, *state):
        save(folder, *state)
        if folder.steps()[-1] == step:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(RunFolder, "save", save_and_stop)
        quiet_train(config, output)


def assert_equal_runs(two, one, *, weight_atol):
    """Log-probs differ by up to 1e-6 between batch sizes; Adam makes more of it where a gradient is next to nothing."""
    assert len(drawn(two)) == len(drawn(one)) > 3
    for found, wanted in zip(drawn(two), drawn(one), strict=True):
        assert found.pop("event") == wanted.pop("event")
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    for name, wanted in weights(one).items():
        assert torch.allclose(weights(two)[name], wanted, rtol=0, atol=weight_atol), name


def test_torchrun_makes_the_run_of_one_process(policy_folder, tmp_path):
    config = toy_config(policy_folder, **ODD, warm_start={"steps": 1, "sessions": 3})
    one = quiet_train(config, tmp_path / "one")
    assert any(line.get("trained_rows") for line in one.metrics())
    done = torchrun(config, tmp_path / "two")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 2/2") == done.stdout.count("run folder:") == 1
    two = RunFolder(tmp_path / "two")
    assert_equal_runs(two, one, weight_atol=2e-5)
    assert {path.name for path in two.path.iterdir()} == {path.name for path in one.path.iterdir()}


METHODS = {
    "trace": {"method": {"name": "trace", "session_reward": "mean"}},
    "factor": {"method": {"name": "factor", "session_reward": "mean", "options": {"warmup": 1}}},
    "continuations": {
        "method": {"name": "factor", "session_reward": "mean", "options": {"warmup": 1}},
        "value": {"source": "continuations", "checkpoints": 1, "continuations": 3},
    },
    "toolopd": {"method": {"name": "toolopd", "session_reward": "mean", "options": {"kind": "reverse_kl"}}},
    "minibatches of one row": {
        "method": {"name": "turn_grpo"},
        "training": {**ODD["training"], "minibatches": 9},
    },
    "resumed": {"run": {"seed": 1, "threads": 1, "checkpoint_every": 1}},
}
"""A frozen reference, a value, continuations, a distilled teacher, a process without a row, a run that was stopped."""

TOLD = ODD | {
    "environment": {"name": "test_distributed_train:TellsOne"},
    "training": {**ODD["training"], "steps": 4},
    "run": {"seed": 1, "threads": 1, "checkpoint_every": 4},
}


@pytest.fixture(scope="module")
def on_two(policy_folder, tmp_path_factory):
    """The folder of these runs on two processes, and how each of the two saw one fail."""
    folder = tmp_path_factory.mktemp("two")
    runs = {name: (toy_config(policy_folder, **ODD | changes), folder / name) for name, changes in METHODS.items()}
    stopped_after(1, *runs["resumed"])
    failing = toy_config(policy_folder, environment={"name": "test_distributed_train:FailsInOne"}), folder / "failed"
    told = toy_config(policy_folder, **TOLD), folder / "told"
    return folder, run_ranks(partial(train_in_turn, list(runs.values()), told, failing), folder, 2)


@pytest.mark.parametrize("name", METHODS)
def test_what_a_run_needs_is_shared_too(policy_folder, tmp_path, on_two, name):
    one = quiet_train(toy_config(policy_folder, **ODD | METHODS[name]), tmp_path / "one")
    assert any(line.get("trained_rows") for line in one.metrics())
    assert_equal_runs(RunFolder(on_two[0] / name), one, weight_atol=1e-4)


def test_one_process_told_to_end_ends_all_with_the_last_whole_step_kept(on_two):
    assert RunFolder(on_two[0] / "told").steps() == [0, 2]


def test_error_of_one_process_ends_all(on_two):
    folder, (first, second) = on_two
    assert first.startswith("ConnectionError: another process of the run has ended")
    assert second.startswith("ValueError: environment") and "FailsInOne" in second
    assert not (folder / "failed").exists()


def test_what_takes_one_process_is_refused_with_several(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for command, arguments in ((cli.compare, {"output": tmp_path}), (cli.probe, {"policy": tmp_path})):
        with pytest.raises(ValueError, match=f"crest-train {command.__name__}: found WORLD_SIZE=2, wanted one process"):
            command(**arguments)
    for device, words in (("cuda:1", "found cuda:1, wanted cuda with"), ("cuda", "found 0 CUDA devices")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        with pytest.raises(ValueError, match=f"policy.device: {words}"), joined(device):
            pass
