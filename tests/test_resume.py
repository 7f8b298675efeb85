"""The folder of a run: exact resume, one run at a time, what is damaged, what must not be overwritten."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from crest_train.config import load_config
from crest_train.loop import train
from crest_train.model import read_pretrained
from crest_train.policy import TinyConfig, TinyForCausalLM
from crest_train.run_folder import RunFolder, claim_run
from rich.console import Console
from safetensors.torch import load_file, save_file
from toy import WORDS, toy_model, toy_tokenizer
from toy_runs import assert_same_run, quiet_train, toy_config


class Stop(Exception):
    """A run ends here."""


@pytest.fixture(scope="module")
def finished(policy_folder, tmp_path_factory):
    return quiet_train(toy_config(policy_folder), tmp_path_factory.mktemp("runs") / "run")


def stop_after_save(monkeypatch, step):
    """Stop the next run as soon as the checkpoint of `step` is written."""
    save = RunFolder.save

    def save_and_stop(folder, model, tokenizer, optimizer, at, value):
        save(folder, model, tokenizer, optimizer, at, value)
        if at == step:
            raise Stop

    monkeypatch.setattr(RunFolder, "save", save_and_stop)


@pytest.mark.parametrize("kind", ["llama", "built-in"])
def test_run_stopped_after_any_step_is_bitwise_the_uninterrupted_one(policy_folder, tmp_path, monkeypatch, kind):
    changes = {"run": {"seed": 1, "threads": 1, "checkpoint_every": 1}, "evaluation": {"sessions": 8, "every": 3}}
    if kind == "built-in":
        torch.manual_seed(0)
        tiny = TinyForCausalLM(TinyConfig(vocab_size=len(WORDS), eos_token_id=WORDS.index(";")))
        tiny.save_pretrained(tmp_path / "tiny")
        toy_tokenizer().save_pretrained(tmp_path / "tiny")
        changes["warm_start"] = {"steps": 8, "rate": 3e-3, "sessions": 8}
    config = toy_config(policy_folder if kind == "llama" else tmp_path / "tiny", **changes)
    whole = quiet_train(config, tmp_path / "whole")
    assert sum(line.get("trained_rows", 0) > 0 for line in whole.metrics()) >= 3
    for step in (0, 1, 2, 3):
        with monkeypatch.context() as patch, pytest.raises(Stop):
            stop_after_save(patch, step)
            quiet_train(config, tmp_path / f"{step}")
        assert (tmp_path / f"{step}" / "trajectories.html").exists() == (step > 0)
        assert_same_run(quiet_train(config, tmp_path / f"{step}"), whole)


@pytest.mark.parametrize(("method", "options"), [("trace", {}), ("factor", {"warmup": 1})])
def test_reference_and_value_go_on_bitwise_too(policy_folder, tmp_path, monkeypatch, method, options):
    changes = {
        "method": {"name": method, "options": options, "session_reward": "mean"},
        "run": {"seed": 1, "threads": 1, "checkpoint_every": 1},
        "evaluation": {"sessions": 2, "every": 0},
        "value": {"replay": 2},
    }
    config = toy_config(policy_folder, **changes)
    whole = quiet_train(config, tmp_path / "whole")
    assert sum(line.get("trained_rows", 0) > 0 for line in whole.metrics()) >= 3
    for step in (0, 2):
        with monkeypatch.context() as patch, pytest.raises(Stop):
            stop_after_save(patch, step)
            quiet_train(config, tmp_path / f"{step}")
        assert_same_run(quiet_train(config, tmp_path / f"{step}"), whole)


@pytest.mark.parametrize("damage", ["garbage", "gone"])
@pytest.mark.parametrize(("method", "name"), [("trace", "reference"), ("factor", "checkpoint")])
def test_damaged_reference_or_value_is_told(policy_folder, tmp_path, method, name, damage):
    config = toy_config(
        policy_folder, method={"name": method}, training={"steps": 1}, evaluation={"sessions": 2, "every": 0}
    )
    folder = quiet_train(config, tmp_path / "run")
    path = folder.path / name / ("model.safetensors" if method == "trace" else "value.safetensors")
    path.unlink() if damage == "gone" else path.write_bytes(b"no tensors")
    with pytest.raises(
        ValueError, match=f"{folder.path / name} is damaged .*; bring it back .* to begin the run again"
    ):
        quiet_train(config, folder.path)


@pytest.mark.parametrize("shift", range(8))
def test_what_a_checkpoint_gives_back_is_aligned(policy_folder, finished, tmp_path, shift):
    """CPU kernels differ in the last bits between data at multiples of 64 bytes and other data."""
    config, folder = toy_config(policy_folder), RunFolder(tmp_path)
    shutil.copytree(finished.checkpoint, folder.checkpoint)
    for name in ("model.safetensors", "optimizer.safetensors"):
        tensors = {key: value.clone() for key, value in load_file(folder.checkpoint / name).items()}
        save_file(tensors, folder.checkpoint / name, metadata={"format": "pt", "shift": " " * 8 * shift})
    model, _ = read_pretrained(folder.checkpoint, config.policy)
    optimizer = torch.optim.Adam(model.parameters())
    folder.restore_optimizer(optimizer)
    moments = [value for state in optimizer.state.values() for value in state.values()]
    assert len(moments) > 20
    assert {tensor.data_ptr() % 64 for tensor in (*model.parameters(), *model.buffers(), *moments)} == {0}


@pytest.mark.parametrize("stop_at", ["between checkpoints", "before the renames", "between the renames"])
def test_stopped_run_goes_on_as_if_it_had_not_been(policy_folder, finished, tmp_path, monkeypatch, stop_at):
    config = toy_config(policy_folder)

    class Stop(Exception):
        pass

    def stop(*_, **__):
        raise Stop

    folder, log, save = tmp_path / "run", RunFolder.log, RunFolder.save
    if stop_at == "between checkpoints":
        monkeypatch.setattr(RunFolder, "log", lambda s, e, n, **v: log(s, e, n, **v) or (n == 3 and stop()))
    else:
        monkeypatch.setattr(
            RunFolder, "save", lambda s, m, t, o, n, v: half_save(s, m, t, o, n) if n == 4 else save(s, m, t, o, n, v)
        )

    def half_save(run, model, tokenizer, optimizer, step):
        model.save_pretrained(run.path / "checkpoint.tmp")
        if stop_at == "between the renames":
            run.checkpoint.rename(run.path / "checkpoint.old")
        stop()

    with pytest.raises(Stop):
        quiet_train(config, folder)
    monkeypatch.undo()
    assert RunFolder(folder).saved_step() == 2
    assert_same_run(quiet_train(config, folder), finished)


def test_start_that_came_to_nothing_leaves_no_trace(policy_folder, finished, tmp_path):
    """Not even when it was of another configuration."""
    folder = RunFolder(tmp_path)
    folder.begin(toy_config(policy_folder, training={"steps": 9}))
    folder.log("warm_start", 0, loss=9.0)
    folder.write("trajectories.html", "old")
    assert_same_run(quiet_train(toy_config(policy_folder), folder.path), finished)


def test_finished_run_is_left_as_it_is(policy_folder, finished):
    before = (finished.path / "metrics.jsonl").read_text()
    quiet_train(toy_config(policy_folder), finished.path)
    assert (finished.path / "metrics.jsonl").read_text() == before


def test_new_runs_get_folders_of_their_own(policy_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = toy_config(policy_folder)
    with claim_run(config, None) as first, claim_run(config, None) as second:
        assert [str(first.path), str(second.path)] == ["runs/toy-Toy-crest-seed1", "runs/toy-Toy-crest-seed1-2"]
        second.checkpoint.mkdir()
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
    assert quiet_train(toy_config(policy_folder, training={"steps": 1}), tmp_path / "run").saved_step() == 1


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
        assert said == f"stopped; go on with: crest-train run '{output}/config.toml' --output '{output}'"
        assert_same_run(quiet_train(load_config(output / "config.toml"), output), finished)


def test_output_that_holds_something_else_is_refused_unharmed(policy_folder, finished, tmp_path):
    with pytest.raises(ValueError, match="holds a run with another configuration"):
        quiet_train(toy_config(policy_folder, training={"steps": 9}), finished.path)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists and holds no run"):
        quiet_train(toy_config(policy_folder), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


CHECKPOINT = ["model.safetensors", "config.json", "tokenizer.json", "optimizer.safetensors", "trainer.json"]


@pytest.mark.parametrize("name", CHECKPOINT)
@pytest.mark.parametrize("damage", ["half", "garbage", "gone"])
def test_damaged_checkpoint_is_told_and_left_alone(policy_folder, finished, tmp_path, name, damage):
    config, folder = toy_config(policy_folder), tmp_path / "run"
    shutil.copytree(finished.path, folder)
    path = folder / "checkpoint" / name
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2] if damage == "half" else b"\xff" * len(content))
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError) as refused:
        quiet_train(config, folder)
    said = str(refused.value)
    assert said.startswith(f"{folder / 'checkpoint'} is damaged (") and "\n" not in said
    assert said.endswith("; bring it back from a copy, or delete it to begin the run again")
    assert (folder / "metrics.jsonl").read_bytes() == before
    path.write_bytes(content)
    assert_same_run(quiet_train(config, folder), finished)


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
