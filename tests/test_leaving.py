"""Runs that are told to end, or that cannot go on: what they keep and say, and that they then are as if nothing was."""

import errno
import os
import signal
import subprocess
from contextlib import contextmanager

import pytest
import torch
from crest_train import loop
from crest_train.failures import out_of_memory, refuse_bad_steps
from crest_train.leaving import leaving
from crest_train.loop import train
from crest_train.run_folder import RunFolder
from rich.console import Console
from safetensors import SafetensorError
from toy_runs import assert_same_run, quiet_train, toy_config


@pytest.fixture(scope="module", autouse=True)
def without_curves():
    """They take longer than so short a run, and nothing goes on from them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "draw_curves", lambda lines, path: None)
        yield


@pytest.fixture(scope="module")
def config(policy_folder):
    run = {"seed": 1, "threads": 1, "checkpoint_every": 3, "records": 3}
    return toy_config(policy_folder, run=run, evaluation={"sessions": 4, "every": 3})


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    return quiet_train(config, tmp_path_factory.mktemp("runs") / "run")


@contextmanager
def at_call(patch, name, number, do):
    """`do` is done when the loop calls its function of this name for the so-many-th time, before and after the call."""
    function, calls = getattr(loop, name), []

    def called(*arguments, **options):
        calls.append(name)
        if len(calls) == number:
            do()
        found = function(*arguments, **options)
        if len(calls) == number:
            do()
        return found

    with patch.context() as patched:
        patched.setattr(loop, name, called)
        yield


@pytest.mark.parametrize(
    ("name", "number", "kept"),
    [
        ("rollout", 3, 2),  # given up: the third step has changed nothing yet
        ("assign_credit", 3, 2),
        ("outcome_metrics", 3, 3),  # finished: the policy has moved
        ("evaluate_where_due", 4, 3),  # after the third step
    ],
)
@pytest.mark.parametrize(("number_of_signal", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_told_once_a_run_keeps_its_last_whole_step(
    config, finished, tmp_path, monkeypatch, capsys, name, number, kept, number_of_signal, code
):
    output, told = tmp_path / "run", []

    def tell():
        if not told:
            told.append(os.kill(os.getpid(), number_of_signal))

    before = signal.getsignal(number_of_signal)
    with at_call(monkeypatch, name, number, tell), pytest.raises(SystemExit) as stop:
        train(config, output, Console(width=40))
    assert stop.value.code == code and signal.getsignal(number_of_signal) is before
    assert capsys.readouterr().out.splitlines()[-1] == f"stopped; go on with: crest-train run --resume {output}"
    assert RunFolder(output).steps()[-1] == kept
    assert_same_run(quiet_train(config, output), finished)


def test_told_twice_a_run_does_not_wait(config, finished, tmp_path, monkeypatch):
    with (
        at_call(monkeypatch, "outcome_metrics", 2, lambda: os.kill(os.getpid(), signal.SIGINT)),
        pytest.raises(SystemExit) as stop,
    ):
        quiet_train(config, tmp_path / "run")
    assert stop.value.code == 130 and RunFolder(tmp_path / "run").steps() == [0]
    assert_same_run(quiet_train(config, tmp_path / "run"), finished)


def test_leaving_has_to_be_told_inside():
    with leaving() as leave:
        with leave.unbroken():
            pass
        assert leave.whole and leave.exit_code == 130
        with pytest.raises(ZeroDivisionError), leave.unbroken():
            raise ZeroDivisionError
        assert not leave.whole


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 3 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", path], capture_output=True)
    if mounted.returncode:
        pytest.skip("a disk cannot be mounted here")
    yield path
    subprocess.run(["umount", path], check=True)


def fill(path):
    """Leave no room on its disk."""
    with open(path, "wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize(("name", "number"), [("outcome_metrics", 3), ("records_of", 1), ("evaluate", 2)])
def test_full_disk(config, finished, small_disk, monkeypatch, capsys, name, number):
    """Full before the line of a step's metrics, before the records and the checkpoint, before an evaluation's line."""
    output, filler = small_disk / "run", small_disk / "filler"
    with (
        at_call(monkeypatch, name, number, lambda: filler.exists() or fill(filler)),
        pytest.raises(OSError, match="No space left") as stop,
    ):
        quiet_train(config, output)
    assert stop.value.errno == errno.ENOSPC and str(stop.value.filename).startswith(str(output))
    assert "0.0 MiB are free; make room; go on with: crest-train run --resume" in stop.value.strerror
    assert not list(output.rglob("*.tmp"))
    folder = RunFolder(output)
    last = folder.last_checkpoint(Console()).step
    assert last == folder.steps()[-1] == (3 if name == "evaluate" else 0) and capsys.readouterr().out == ""
    filler.unlink()
    assert_same_run(quiet_train(config, output), finished)


def test_full_disk_in_the_words_of_safetensors(config, tmp_path, monkeypatch):
    def save_file(tensors, path):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("crest_train.checkpoint.save_file", save_file)
    with pytest.raises(OSError, match=r"No space left on device: \d+\.\d MiB are free; make room; there was no"):
        quiet_train(config, tmp_path / "run")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
        MemoryError(),
    ],
)
def test_too_little_memory_is_told_and_the_checkpoint_stays(config, finished, tmp_path, monkeypatch, error):
    def fail():
        raise error

    with at_call(monkeypatch, "gather", 4, fail), pytest.raises(ValueError, match="^out of memory") as stop:
        quiet_train(config, tmp_path / "run")
    said = str(stop.value)
    assert f"`crest-train plan {tmp_path}/run/config.toml` says what fits" in said
    assert said.endswith(f"go on with: crest-train run --resume {tmp_path}/run")
    assert_same_run(quiet_train(config, tmp_path / "run"), finished)


def test_torch_cannot_allocate_in_words_that_are_known():
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**60, dtype=torch.uint8)
    assert out_of_memory(refused.value) and not out_of_memory(RuntimeError("shape mismatch"))


def lines(*skipped):
    """Steps that skipped so many optimizer steps; None: there was no credit, and nothing to skip."""
    return [
        {"event": "step", "step": step, "skipped_steps": number or 0, "trained_rows": 0 if number is None else 4}
        for step, number in enumerate(skipped, 1)
    ]


def test_bad_steps_in_a_row_are_counted():
    for found in (lines(), lines(0, 0), lines(2, 1, 0), lines(1, 1, 0, 1, 2), lines(1, 0, 1), lines(1, None, 1, 0)):
        refuse_bad_steps(found, 3)
    evaluation = {"event": "evaluation", "step": 3}
    for found in (lines(0, 1, 1, 1), lines(1, None, 1, None, 1), [*lines(1, 1, 1), evaluation]):
        with pytest.raises(ValueError, match=r"step \d: the loss or its gradient was not finite in 3 steps in a row"):
            refuse_bad_steps(found, 3)


def test_steps_that_are_not_finite_end_the_run(policy_folder, tmp_path, monkeypatch):
    config = toy_config(
        policy_folder,
        training={"steps": 6, "rate": 1e-3, "bad_steps": 2},
        evaluation={"sessions": 2, "every": 0},
        run={"seed": 1, "threads": 1, "checkpoint_every": 1, "checkpoints_kept": 4},
    )
    assign = loop.assign_credit

    def poisoned(spans, signals, section, step):
        credit = assign(spans, signals, section, step)
        if step >= 3:
            for factor in (credit.credit_N, credit.token_weight_N):
                factor.mul_(1e30)  # each is finite, and their product is not
        return credit

    monkeypatch.setattr(loop, "assign_credit", poisoned)
    with pytest.raises(ValueError, match="step 6: .* in 2 steps in a row .training.bad_steps = 2., from step 3 on"):
        quiet_train(config, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    steps = [line for line in folder.metrics() if line["event"] == "step"]
    assert [(line["trained_rows"], line["skipped_steps"]) for line in steps[2:]] == [(8, 2), (0, 0), (0, 0), (4, 2)]
    assert folder.steps() == [2, 3, 4, 5]
    two, five = (folder.checkpoints / f"step-0000{step}" / "model.safetensors" for step in (2, 5))
    assert two.read_bytes() == five.read_bytes()
