"""The prepared GPU script: its stages, what it does when a process dies, and that its checks can fail."""

import csv
import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from crest_bench import gpu, gpu_checks, gpu_linear
from crest_bench.gpu import STAGES, Found, Row, Setting, Writer, checks_of, summary, watch_stage

from crest_ops import chunks

ROOT = Path(__file__).parent.parent
TINY = Setting("cpu", True)
linear_op = importlib.import_module("crest_ops.linear_policy_loss")  # crest_ops has a function of that name


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_lists_checks_under_names_of_their_own(stage):
    names = [check.name for check in checks_of(stage, TINY)]
    assert names and len(set(names)) == len(names)


def test_stages_leave_room_in_eight_minutes():
    assert list(STAGES) == ["correctness", "invariance", "offsets", "linear", "speed"]
    assert sum(seconds for seconds, _, _ in STAGES.values()) <= 460


def test_errors_are_seen():
    exact = torch.tensor([1.0, -math.inf, 0.0], dtype=torch.float64)
    assert gpu_checks.worst((exact.float(), exact, 1e-6)) == Found("PASS", 0.0, "of tolerance")
    found = gpu_checks.worst((torch.tensor([1.5, -math.inf, 0.0]), exact, 0.25))
    assert (found.status, found.value) == ("FAIL", 2.0)
    for wrong in ([1.0, 0.0, 0.0], [1.0, -math.inf, math.nan]):
        assert gpu_checks.worst((torch.tensor(wrong), exact, 1.0)).status == "FAIL"


def test_rows_are_appended_under_the_run_they_are_of(tmp_path):
    for name in "ab":
        Writer(tmp_path / "gpu.csv").write(Row("offsets", name, "PASS"))
    with (tmp_path / "gpu.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["a", "b"] and all(row["timestamp"] for row in rows)
    (tmp_path / "other.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match="other.csv has the columns a, b, want timestamp, commit, stage"):
        Writer(tmp_path / "other.csv")


def test_a_dry_run_measures_nothing(monkeypatch, capsys):
    found = [Found("MEASURED", 1.5, "ms", "3 TB/s", "x"), Found("PASS", 0.5, name="y"), Found("LEFT OUT", name="z")]
    monkeypatch.setattr(gpu, "checks_of", lambda *_: [gpu.Check("all", lambda: found)])
    gpu.run_stage("speed", TINY, 0)
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["name"], row["status"], row["value"], row["detail"]) for row in rows] == [
        ("x", "DRY RUN", None, ""), ("y", "PASS", 0.5, ""), ("z", "LEFT OUT", None, ""),
    ]  # fmt: skip


FAKE_STAGE = """
import json, os, sys, time
start = int(sys.argv[1])
for number, name in enumerate(["fine", "dies", "fine too", "loses the device", "last"]):
    if number >= start:
        print(json.dumps({"begin": name}), flush=True)
        if name == "dies":
            os._exit(9)
        print("a library prints something", flush=True)
        status = "FAIL" if name == "loses the device" else "PASS"
        print(json.dumps({"rows": [{"stage": "offsets", "name": name, "status": status}]}), flush=True)
        if name == "loses the device":
            os._exit(1)
"""


def run_fake(monkeypatch, tmp_path, program, seconds):
    popen = subprocess.Popen

    def start(command, **options):
        return popen([sys.executable, "-c", program, command[command.index("--start") + 1]], **options)

    (tmp_path / "gpu.csv").unlink(missing_ok=True)
    writer = Writer(tmp_path / "gpu.csv")
    monkeypatch.setattr(gpu.subprocess, "Popen", start)
    watch_stage("offsets", TINY, gpu.time.monotonic() + seconds, writer)
    with (tmp_path / "gpu.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == [row.name for row in writer.rows]
    return [(row["name"], row["status"], row["detail"]) for row in rows]


def test_a_stage_goes_on_behind_what_killed_it(monkeypatch, tmp_path):
    assert run_fake(monkeypatch, tmp_path, FAKE_STAGE, 60) == [
        ("fine", "PASS", ""), ("dies", "FAIL", "its process ended with 9"), ("fine too", "PASS", ""),
        ("loses the device", "FAIL", ""), ("last", "PASS", ""),
    ]  # fmt: skip


def test_a_stage_that_cannot_start_or_hangs_is_told(monkeypatch, tmp_path):
    assert run_fake(monkeypatch, tmp_path, "import os; os._exit(3)", 60) == [
        ("(start)", "FAIL", "its process ended with 3")
    ]
    monkeypatch.undo()
    hanging = 'import time; print(\'{"begin": "hangs"}\', flush=True); time.sleep(60)'
    assert run_fake(monkeypatch, tmp_path, hanging, 1) == [("hangs", "FAIL", "the stage's time is over")]


def test_checks_that_are_not_come_to_fail(monkeypatch, tmp_path):
    listed = 'print(\'{"checks": ["a", "b", "c", "d"]}\', flush=True)\n'
    dying = listed + 'import os, sys; print(f\'{{"begin": "{"abcd"[int(sys.argv[1])]}"}}\', flush=True); os._exit(9)'
    monkeypatch.setattr(gpu, "RESTARTS", 1)
    assert run_fake(monkeypatch, tmp_path, dying, 60) == [
        ("a", "FAIL", "its process ended with 9"), ("b", "FAIL", "its process ended with 9"),
        ("c", "FAIL", "not run: its process ended 2 times"), ("d", "FAIL", "not run: its process ended 2 times"),
    ]  # fmt: skip
    monkeypatch.undo()
    hanging = listed + 'import time; print(\'{"begin": "a"}\', flush=True); time.sleep(60)'
    over = "the stage's time is over"
    assert run_fake(monkeypatch, tmp_path, hanging, 1) == [
        ("a", "FAIL", over), *((name, "FAIL", f"not run: {over}") for name in "bcd"),
    ]  # fmt: skip


@pytest.mark.parametrize("precision", gpu_linear.PRECISIONS, ids=lambda precision: precision.name)
def test_linear_checks_add_over_chunks_and_move_rows(precision, monkeypatch):
    """Wanted are the rows 1, 2, 4 | 5, 7, 8 | 10, 11, in chunks of 3. Credits of 2, 7, 10 and 11 are not 0, and the
    odd ones of these are clipped.
    """
    kept, betas = [], []
    move, add = linear_op.move_rows_forward, chunks.add_product
    monkeypatch.setattr(linear_op, "move_rows_forward", lambda z, keep: (kept.append(keep.tolist()), move(z, keep))[1])
    monkeypatch.setattr(chunks, "add_product", lambda *given: (betas.append(given[-1]), add(*given))[1])
    assert gpu_linear._policy(TINY, precision, "PPOClip", few=True).status == "PASS"
    assert kept == [[False, True, False], [False, False, False], [True, False]] and 1.0 in betas
    betas.clear()
    assert gpu_linear._divergence(TINY, precision, "reverse_kl").status == "PASS"
    assert betas.count(1.0) == 2  # of three chunks


def test_a_gradient_that_does_not_add_up_is_seen(monkeypatch):
    add = chunks.add_product
    monkeypatch.setattr(chunks, "add_product", lambda sum_, a, b, beta: add(sum_, a, b, 0.0))
    assert gpu_linear._policy(TINY, gpu_linear.PRECISIONS[0], "PPOClip").status == "FAIL"
    assert gpu_linear._policy(TINY, gpu_linear.PRECISIONS[0], "PPOClip", few=True).status == "FAIL"
    assert gpu_linear._divergence(TINY, gpu_linear.PRECISIONS[0], "jsd").status == "FAIL"


def test_summary_counts_and_names():
    rows = [
        Row("offsets", "a", "PASS", 0.0), Row("offsets", "b", "FAIL", detail="why"),
        Row("speed", "c", "MEASURED", 1.5, "ms"), Row("speed", "d", "LEFT OUT", detail="not installed"),
    ]  # fmt: skip
    text = summary(rows, 12.3)
    assert "offsets: 1 PASS, 1 FAIL" in text and "FAIL     offsets: b" in text and "why" in text
    assert "1.5 ms" in text and "not installed" in text and "offsets: a" not in text


def test_dry_run_of_one_stage(tmp_path):
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path)}
    command = [ROOT / "bench" / "gpu.sh", "--dry-run", "--only", "offsets"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    with (tmp_path / "gpu.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["status"] for row in rows} == {"PASS"} and len(rows) == len(list(checks_of("offsets", TINY)))
    assert (tmp_path / "gpu.txt").read_text().count("PASS") == 1
