"""The folder of a run: exact resume, one run at a time, what is damaged, what must not be overwritten."""

import json
import random
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from crest_train import loop
from crest_train.config import load_config
from crest_train.loop import train
from crest_train.resuming import MAY_CHANGE
from crest_train.run_folder import RunFolder, claim_run
from rich.console import Console
from toy import Toy, toy_model, toy_tokenizer
from toy_runs import assert_same_run, harm, quiet_train, toy_config


class Stop(Exception):
    """A run ends here."""


@pytest.fixture(scope="module", autouse=True)
def without_curves():
    """They take longer than so short a run, and nothing goes on from them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "draw_curves", lambda lines, path: None)
        yield


@pytest.fixture(scope="module")
def finished(policy_folder, tmp_path_factory):
    return quiet_train(toy_config(policy_folder), tmp_path_factory.mktemp("runs") / "run")


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stop_after_save(monkeypatch, step):
    """Stop the next run as soon as the checkpoint of `step` is written."""
    save = RunFolder.save

    def save_and_stop(folder, *state):
        save(folder, *state)
        if folder.steps()[-1] == step:
            raise Stop

    monkeypatch.setattr(RunFolder, "save", save_and_stop)


@pytest.mark.parametrize("damage", ["garbage", "gone"])
def test_damaged_reference_is_told(policy_folder, tmp_path, damage):
    config = toy_config(
        policy_folder, method={"name": "trace"}, training={"steps": 1}, evaluation={"sessions": 2, "every": 0}
    )
    folder = quiet_train(config, tmp_path / "run")
    path = folder.reference / "model.safetensors"
    path.unlink() if damage == "gone" else path.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=f"{folder.reference} is damaged .*; bring it back .* to begin the run again"):
        quiet_train(config, folder.path)


def test_run_stopped_between_checkpoints_goes_on_from_the_last(policy_folder, finished, tmp_path, monkeypatch):
    log = RunFolder.log

    def log_and_stop(folder, event, step, **values):
        log(folder, event, step, **values)
        if step == 3:
            raise Stop

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(RunFolder, "log", log_and_stop)
        quiet_train(toy_config(policy_folder), tmp_path / "run")
    assert RunFolder(tmp_path / "run").steps() == [0, 2]
    assert_same_run(quiet_train(toy_config(policy_folder), tmp_path / "run"), finished)


class Restless(Toy):
    """A toy that tosses coins of every global random state: what it says wrong tries are depends on them."""

    def step(self, action):
        tosses = random.random(), np.random.random(), float(torch.rand(()))
        found = super().step(action)
        if found.turn_reward != 0:
            return found
        return replace(found, turn_reward=float(sum(tosses) < 1.5))


def test_global_random_states_go_on_too(policy_folder, tmp_path, monkeypatch):
    config = toy_config(
        policy_folder,
        environment={"name": "test_resume:Restless"},
        method={"name": "trace", "session_reward": "mean"},  # loads a reference before the first step
        evaluation={"sessions": 4, "every": 1},
        run={"seed": 1, "threads": 1, "checkpoint_every": 1},
    )
    whole = quiet_train(config, tmp_path / "whole")
    for step in (0, 2):
        with monkeypatch.context() as patch, pytest.raises(Stop):
            stop_after_save(patch, step)
            quiet_train(config, tmp_path / f"{step}")
        random.seed(step), np.random.seed(step), torch.manual_seed(step)
        assert_same_run(quiet_train(config, tmp_path / f"{step}"), whole)


def test_start_that_came_to_nothing_leaves_no_trace(policy_folder, finished, tmp_path):
    """Not even when it was of another configuration."""
    folder = RunFolder(tmp_path)
    folder.begin(toy_config(policy_folder, training={"steps": 9}))
    folder.log("warm_start", 0, loss=9.0)
    folder.write("view.html", "old")
    folder.write("records/step-00009.jsonl", "old")
    assert_same_run(quiet_train(toy_config(policy_folder), folder.path), finished)
    assert (folder.path / "view.html").read_text() != "old"
    assert [path.name for path in folder.records.iterdir()] == ["step-00004.jsonl"]


def test_records_of_steps_to_be_made_again_go(finished, tmp_path):
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(finished.path, folder.path)
    folder.write("records/step-00005.jsonl", "old")
    folder.forget_after(4)
    assert [path.name for path in folder.records.iterdir()] == ["step-00004.jsonl"]


def test_finished_run_is_left_as_it_is(policy_folder, finished):
    before = (finished.path / "metrics.jsonl").read_text()
    quiet_train(toy_config(policy_folder), finished.path)
    assert (finished.path / "metrics.jsonl").read_text() == before


def test_new_runs_get_folders_of_their_own(policy_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = toy_config(policy_folder)
    with claim_run(config, None) as first, claim_run(config, None) as second:
        assert [str(first.path), str(second.path)] == ["runs/toy-Toy-crest-seed1", "runs/toy-Toy-crest-seed1-2"]
        (second.checkpoints / "step-00000").mkdir(parents=True)
    assert not first.path.exists() and second.path.exists()
    (tmp_path / first.path).mkdir()
    with claim_run(config, None) as third:
        assert str(third.path) == "runs/toy-Toy-crest-seed1-3"


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_holds_one_run_at_a_time(policy_folder, tmp_path, exists):
    config, output = toy_config(policy_folder, training={"steps": 1}), tmp_path / "run"
    if exists:
        output.mkdir()
    with claim_run(config, output) as folder:
        folder.begin(config)
        with pytest.raises(ValueError, match=f"{output}: a run is going on there"):
            quiet_train(config, output)
        assert (output / "config.toml").exists()
    quiet_train(config, output)


def test_lock_of_a_killed_process_does_not_block(policy_folder, tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from crest_train.config import load_config\n"
        "from crest_train.run_folder import claim_run\n"
        "with claim_run(load_config(), Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True)
    assert done.returncode == -9 and (tmp_path / "run").exists()
    assert quiet_train(toy_config(policy_folder, training={"steps": 1}), tmp_path / "run").steps() == [0, 1]


def test_folder_of_a_run_killed_in_its_first_write_is_taken(policy_folder, tmp_path):
    (tmp_path / ".lock").touch()
    (tmp_path / "config.toml.tmp").write_text("[pol")
    assert quiet_train(toy_config(policy_folder, training={"steps": 1}), tmp_path).steps() == [0, 1]


@pytest.mark.parametrize("exists", [False, True])
def test_start_that_fails_does_not_block_a_corrected_one(policy_folder, tmp_path, exists):
    output = tmp_path / "run"
    if exists:
        output.mkdir()
    toy_model(context=4).save_pretrained(tmp_path / "short")
    toy_tokenizer().save_pretrained(tmp_path / "short")
    for model in ("nothing", "short"):  # before anything is written, and in the warm start
        with pytest.raises(ValueError, match="policy.model"):
            quiet_train(toy_config(tmp_path / model, warm_start={"steps": 1}), output)
        assert output.exists() == exists
    quiet_train(toy_config(policy_folder, training={"steps": 1}), output)


def test_output_that_cannot_be_made_is_refused(policy_folder, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for output, words in ((tmp_path / "notes.txt", "holds no run"), (tmp_path / "notes.txt" / "run", "cannot write")):
        with pytest.raises(ValueError, match=f"--output: .*{words}"):
            quiet_train(toy_config(policy_folder), output)


@pytest.mark.parametrize("at", [0, 2])
def test_interrupt_tells_how_to_go_on(policy_folder, finished, tmp_path, monkeypatch, capsys, at):
    log, output = RunFolder.log, tmp_path / "my run"

    def interrupt(folder, event, step, **values):
        if step > at or event == "warm_start" and at == 0:
            raise KeyboardInterrupt
        log(folder, event, step, **values)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(RunFolder, "log", interrupt)
        train(toy_config(policy_folder), output, Console(width=40))
    assert stop.value.code == 130
    said = capsys.readouterr().out.splitlines()[-1]
    if at == 0:
        assert said == "stopped; there was no checkpoint yet, nothing is kept" and not output.exists()
    else:
        assert said == f"stopped; go on with: crest-train run --resume '{output}'"
        assert_same_run(quiet_train(load_config(output / "config.toml"), output), finished)


def test_output_that_holds_something_else_is_refused_unharmed(policy_folder, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists and holds no run"):
        quiet_train(toy_config(policy_folder), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_damaged_checkpoint_is_put_aside_and_its_steps_made_again(policy_folder, finished, tmp_path, capsys):
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(finished.path, folder.path)
    harm(folder.checkpoints / "step-00004" / "model.safetensors", "one bit")
    for times in (1, 0):
        train(toy_config(policy_folder), folder.path, Console(width=40))
        said = capsys.readouterr().out
        assert said.count("is damaged") == said.count("holds 2 of 4 steps: going on") == times
        assert_same_run(folder, finished)
    assert folder.steps() == [2, 4] and (folder.checkpoints / "step-00004.damaged").is_dir()


def test_run_with_all_checkpoints_damaged_is_left_alone(policy_folder, finished, tmp_path):
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(finished.path, folder.path)
    for step in (2, 4):
        harm(folder.checkpoints / f"step-0000{step}" / "model.safetensors", "half")
    before = contents(folder.path)
    with pytest.raises(ValueError) as refused:
        quiet_train(toy_config(policy_folder), folder.path)
    said = str(refused.value)
    for step in (4, 2):
        assert f"{folder.checkpoints}/step-0000{step} is damaged (model.safetensors has " in said
    assert said.endswith(f"; bring one back from a copy, or delete {folder.path} to begin the run again")
    assert contents(folder.path) == before


def test_run_without_its_checkpoints_is_left_alone(policy_folder, finished, tmp_path):
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(finished.path, folder.path)
    shutil.rmtree(folder.checkpoints)
    before = contents(folder.path)
    with pytest.raises(ValueError, match="holds the metrics of steps and no checkpoint to go on from; name another"):
        quiet_train(toy_config(policy_folder), folder.path)
    assert contents(folder.path) == before


@pytest.mark.parametrize("kept", [1, 3])
def test_the_last_checkpoints_are_kept(policy_folder, tmp_path, kept):
    run = {"seed": 1, "threads": 1, "checkpoint_every": 1, "checkpoints_kept": kept}
    config = toy_config(policy_folder, run=run, evaluation={"sessions": 2, "every": 0})
    assert quiet_train(config, tmp_path / "run").steps() == [0, 1, 2, 3, 4][-kept:]


def test_finished_run_is_extended(policy_folder, tmp_path, finished):
    longer = toy_config(policy_folder, training={"steps": 6, "rate": 1e-3, "tokens_per_micro_batch": 80})
    whole = quiet_train(longer, tmp_path / "whole")
    shutil.copytree(finished.path, tmp_path / "run")
    folder = quiet_train(longer, tmp_path / "run")
    assert_same_run(folder, whole)
    assert load_config(folder.path / "config.toml") == longer


def test_safe_keys_may_change_and_others_are_refused_by_name(policy_folder, tmp_path, finished, capsys):
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(finished.path, folder.path)
    run = {"seed": 1, "threads": 1, "checkpoint_every": 2}
    refused = toy_config(policy_folder, method={"name": "trace"}, run=run | {"seed": 2, "records": 1})
    before = contents(folder.path)
    with pytest.raises(ValueError) as stop:
        quiet_train(refused, folder.path)
    last = folder.checkpoints / "step-00004"
    assert str(stop.value).startswith(
        f"{last} is of a run with another configuration: method.name 'crest' -> 'trace', run.seed 1 -> 2; put these"
    )
    with pytest.raises(ValueError, match="training.steps: found 3, but the run has 4 behind it"):
        quiet_train(toy_config(policy_folder, training={"steps": 3, "rate": 1e-3}), folder.path)
    assert contents(folder.path) == before
    safe = toy_config(policy_folder, run=run | {"records": 1}, evaluation={"sessions": 4, "every": 1})
    train(safe, folder.path, Console(width=40))
    said = capsys.readouterr().out
    assert "changed since then: evaluation.sessions 20 -> 4, evaluation.every 2 -> 1, run.records 10 -> 1" in said
    assert load_config(folder.path / "config.toml") == safe


def test_keys_that_may_change_are_keys():
    tables = load_config().model_dump()
    assert all(key.partition(".")[2] in tables[key.partition(".")[0]] for key in MAY_CHANGE)


def test_bad_input_leaves_no_folder(policy_folder, tmp_path):
    bare = toy_model()
    bare.save_pretrained(tmp_path / "bare")
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "bare")
    for changes, complaint in (
        ({"policy": {"model": str(tmp_path / "nothing")}}, "no model folder"),
        ({"policy": {"model": str(tmp_path / "bare")}}, "no chat template"),
        ({"method": {"name": "cresst"}}, "unknown method"),
        ({"environment": {"name": "dsk"}}, "unknown environment"),
        ({"environment": {"options": {"turn": 3}}}, "no option 'turn'"),
    ):
        with pytest.raises(ValueError, match=complaint):
            quiet_train(toy_config(policy_folder, **changes), tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_metrics_line_cut_short_by_a_stop_is_dropped(tmp_path):
    folder = RunFolder(tmp_path)
    folder.log("step", 1, loss=0.5)
    folder.log("step", 2, loss=0.25)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"event": "step", "step": 3})[:10])
    assert [line["step"] for line in folder.metrics()] == [1, 2]
    folder.forget_after(1)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"event": "step", "step": 1, "loss": 0.5}\n'


@pytest.mark.parametrize("bad", [b'{"event": "step", "st', b"5", b'{"loss": 1.0}', b"\xff\xfe"])
def test_damaged_metrics_line_costs_no_other_and_is_told_once(policy_folder, finished, tmp_path, capsys, bad):
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(finished.path, folder.path)
    path = folder.path / "metrics.jsonl"
    before = path.read_bytes()
    lines = before.splitlines()
    path.write_bytes(b"\n".join([*lines[:3], bad, *lines[3:], bad]))
    assert folder.metrics() == finished.metrics()
    for times in (1, 0):
        train(toy_config(policy_folder), folder.path, Console(width=200))
        assert capsys.readouterr().out.count("metrics.jsonl: left out 1 damaged line(s)") == times
        assert path.read_bytes() == before
