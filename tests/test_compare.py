"""Comparisons: which runs they consist of; runs that go on, are kept, or fail and are named."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from crest_train import compare as comparing
from crest_train.cli import METHOD_NAMES
from crest_train.compare import compare, last_words, play, rows_of
from crest_train.compare_plan import Run, difference, entries, plan, with_changes
from crest_train.compare_report import COLUMNS, read_rows
from crest_train.config import MethodSection, load_config
from crest_train.run_folder import RunFolder
from rich.console import Console
from test_cli import complaint
from toy_runs import quiet_train, toy_config

from crest_ops import METHODS

QUIET = Console(quiet=True)


class TestPlan:
    def test_runs_differ_in_method_rate_and_seed_alone(self, tmp_path):
        config = load_config(None, {"method": {"session_reward": "mean"}, "run": {"seed": 3}})
        runs = plan(config, "grpo,crest", tmp_path, seeds=2, rates="6e-4,1.2e-3")
        assert [run.name for run in runs[:5]] == [
            "grpo/rate0.0006-seed3",
            "crest/rate0.0006-seed3",
            "grpo/rate0.0012-seed3",
            "crest/rate0.0012-seed3",
            "grpo/rate0.0006-seed4",
        ]
        assert len(runs) == 8
        for run in runs:
            assert run.config.run.threads == 1 and run.config.method.session_reward == "mean"
            assert str(run.config.training.rate) in run.name and run.label == run.config.method.name
            back = {"method": {"name": "crest"}, "training": {"rate": 6e-4}, "run": {"seed": 3, "threads": 0}}
            tables = run.config.model_dump(mode="json")
            assert load_config(None, {key: tables[key] | back.get(key, {}) for key in tables}) == config

    def test_all_is_every_method_and_every_table(self, tmp_path):
        path = tmp_path / "options.toml"
        path.write_text('[crest.options]\nlam = 1.0\n[grpo_all]\nname = "grpo"\nsession_reward = "all"\n')
        found = entries("all", MethodSection(session_reward="mean"), path)
        assert list(found) == [*METHODS, "grpo_all"]
        assert found["crest"].options == {"lam": 1.0} and found["crest"].session_reward == "mean"
        assert (found["grpo_all"].name, found["grpo_all"].session_reward) == ("grpo", "all")

    def test_set(self):
        config = load_config(None, {"environment": {"options": {"num_turns": 8, "coupled": 0.5}}})
        changed = with_changes(config, ["environment.options.num_turns=4", "policy.model=/some/folder"])
        assert changed.environment.options == {"num_turns": 4, "coupled": 0.5}
        assert changed.policy.model == "/some/folder" and changed.training == config.training
        assert with_changes(config, []) == config
        assert difference(config, changed) == "environment.options.num_turns is 8 there, 4 here"
        assert difference(config, config) is None

    def test_help_names_every_method_without_torch(self):
        assert set(METHODS) <= set(re.findall(r"\w+", METHOD_NAMES))


def test_mistakes_are_told_before_any_work(monkeypatch, capsys, tmp_path):
    bad, other = tmp_path / "bad.toml", tmp_path / "other"
    bad.write_text("[crest]\noptionz = 1\n")
    crest_options = tmp_path / "crest.toml"
    crest_options.write_text("[crest.options]\nlamb = 1\n")
    renamed = tmp_path / "renamed.toml"
    renamed.write_text('[grpo]\nname = "crest"\n')
    flat = tmp_path / "flat.toml"
    flat.write_text("lam = 1\n")
    lam = tmp_path / "lam.toml"
    lam.write_text("[method.options]\nlam = 0.5\n")
    other.mkdir()
    (other / "thesis.txt").write_text("")
    output = tmp_path / "out"
    for arguments, words in (
        (["--methods", "grpo,cresst"], "--methods: unknown method 'cresst'; known: grpo, turn_grpo"),
        (["--methods", "grpo,grpo"], "--methods: grpo is there twice"),
        (["--seeds", 0], "--seeds: found 0, wanted at least 1"),
        (["--jobs", 0], "--jobs: found 0, wanted at least 1"),
        (["--rates", "6e-4,x"], "--rates: found '6e-4,x', wanted different numbers above 0"),
        (["--rates", "6e-4,-1"], "--rates: found '6e-4,-1'"),
        (["--rates", "6e-4,6e-4"], "--rates: found '6e-4,6e-4'"),
        (["--rates", "3e-4"], "--rates: found 3e-4, without training.rate = 0.0006"),
        (["--set", "steps=3"], "--set: found 'steps=3', wanted table.key=value"),
        (["--set", "training.steps.x=3"], "--set: found 'training.steps.x=3', but steps is a value"),
        (["--set", "training.stepz=3"], "--set: unknown key 'training.stepz'"),
        (["--set", "run.seed=-1"], "--set: run.seed: "),
        (["--set", "environment.options.num_turns=0"], "num_turns is 0"),
        (["--config", tmp_path / "none.toml"], "none.toml: could not be read"),
        (["--config", lam], "method.options: found lam; no option holds for every method"),
        (["--options", tmp_path / "none.toml"], "none.toml: could not be read"),
        (["--options", bad], "bad.toml: [crest]: unknown key 'method.optionz'"),
        (["--options", renamed], "renamed.toml: [grpo]: name is 'crest'; give the table a label of its own"),
        (["--options", flat], "flat.toml: found 'lam', wanted tables"),
        (["--options", crest_options], "crest has no option 'lamb'"),
        (["--output", other], "exists and holds no comparison"),
        (["--output", bad], "--output: cannot write there"),
        (["--from-csv", tmp_path / "none.csv"], "none.csv: could not be read"),
    ):
        where = [] if "--output" in arguments else ["--output", output]
        assert words in complaint(monkeypatch, capsys, "compare", *arguments, *where), arguments
    assert not output.exists()


@pytest.fixture
def shared(policy_folder, monkeypatch):
    """Two steps on the toy; the processes find it too."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    changes = {"training": {"steps": 2, "rate": 1e-3}, "evaluation": {"sessions": 8, "every": 1}}
    return toy_config(policy_folder, **changes)


def test_comparison_of_real_runs(shared, tmp_path, capsys):
    output = tmp_path / "out"
    compare(shared, "grpo,crest", output, seeds=1, console=Console(width=300))
    said = capsys.readouterr().out
    assert "run 2/2" in said and "toy:Toy, 2 turns, 2 steps of 3 x 4 rollouts, session reward all: all at" in said

    # The same as crest-train run would leave.
    folder = RunFolder(output / "crest" / "rate0.001-seed1")
    alone = quiet_train(load_config(folder.path / "config.toml"), tmp_path / "alone")
    assert [line.get("loss") for line in folder.metrics()] == [line.get("loss") for line in alone.metrics()]
    assert "held out, after step 2" in (folder.path / "console.log").read_text()

    # The CSV is that of the metrics.
    rows = [found for found in read_rows([output / "compare.csv"]) if found["method"] == "crest"]
    evaluations = [line for line in folder.metrics() if line["event"] == "evaluation"]
    first, second = [line for line in folder.metrics() if line["event"] == "step"]
    assert [(found["step"], found["turn_success"]) for found in rows] == [
        (line["step"], pytest.approx(line["turn_success"], rel=1e-5)) for line in evaluations
    ]
    for part in ("rollout_seconds", "teacher_seconds", "training_seconds"):
        assert rows[0][part] == 0
        assert [rows[1][part], rows[2][part]] == pytest.approx([first[part], first[part] + second[part]], rel=1e-4)
    assert rows[2]["needs"] == "turn_reward_K teacher_gap_N surprisal_N"
    assert (rows[2]["turns"], rows[2]["seed"], rows[2]["rate"]) == (2, 1, 1e-3)


STUB = """
import json, sys
from pathlib import Path
folder = Path(sys.argv[1])
name = f"{folder.parent.name}/{folder.name}"
with open(folder.parents[1] / "starts", "a") as file:
    file.write(name + "\\n")
if name in Path(folder.parents[1] / "broken").read_text().split():
    sys.exit("error: the disk is full")
(folder / "checkpoints" / "step-00002").mkdir(parents=True, exist_ok=True)
tops = {"credit_top_1": 0.1, "credit_top_5": 0.3, "credit_top_10": 0.5}
lines = [
    {"event": "warm_start", "step": 0, "warm_start_seconds": 9.0},
    {"event": "evaluation", "step": 0, "turn_success": 0.5, "session_success": 0.25, "evaluation_seconds": 9.0},
    {"event": "step", "step": 1, "rollout_seconds": 1.0, "value_seconds": 0.5, "training_seconds": 2.0, **tops},
    {"event": "step", "step": 2, "rollout_seconds": 3.0, "training_seconds": 4.0, "credit_top_1": 0.3},
    {"event": "evaluation", "step": 2, "turn_success": 0.75, "session_success": 0.5, "evaluation_seconds": 9.0},
]
(folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
"""


@pytest.fixture
def stub(monkeypatch, tmp_path):
    """Runs that do nothing, and fail where the file `broken` says so."""
    (tmp_path / "stub.py").write_text(STUB)
    popen = comparing.subprocess.Popen
    monkeypatch.setattr(
        comparing.subprocess,
        "Popen",
        lambda command, **how: popen([sys.executable, str(tmp_path / "stub.py"), command[-1]], **how),
    )


def begin(shared, output, broken=""):
    """A comparison's folder in which the named runs will fail."""
    with comparing.claim(shared, output, []):
        (output / "broken").write_text(broken)
    return output


def test_rows_by_hand(stub, shared, tmp_path):
    (run,) = plan(shared, "grpo", begin(shared, tmp_path / "out"), seeds=1)
    assert play([run], 1, QUIET) == {}
    before, after = rows_of(run, shared)
    assert (before["step"], before["turn_success"], before["seconds"], before["credit_top_1"]) == (0, 0.5, 0, None)
    assert (after["seconds"], after["rollout_seconds"], after["teacher_seconds"]) == (10.5, 4.0, 0)
    assert (after["credit_top_1"], after["credit_top_10"]) == (pytest.approx(0.2), 0.5)
    assert set(after) == set(COLUMNS)


def test_what_is_finished_is_kept_and_another_configuration_refused(stub, shared, tmp_path):
    output = begin(shared, tmp_path / "out")
    compare(shared, "grpo,crest", output, seeds=1, console=QUIET)
    compare(shared, "grpo,crest", output, seeds=2, rates="1e-3,2e-3", console=QUIET)
    started = (output / "starts").read_text().split()
    assert len(started) == len(set(started)) == 8
    assert {found["rate"] for found in read_rows([output / "compare.csv"])} == {1e-3, 2e-3}
    with pytest.raises(ValueError, match="of another comparison: training.steps is 2 there, 3 here"):
        compare(with_changes(shared, ["training.steps=3"]), "grpo", output, seeds=1, console=QUIET)
    options = tmp_path / "options.toml"
    options.write_text("[crest.options]\nlam = 1.0\n")
    with pytest.raises(ValueError, match=r"config.toml is of another comparison: method.options.lam is None there"):
        compare(shared, "crest", output, seeds=1, options=options, console=QUIET)
    with comparing.claim(shared, output, []), pytest.raises(ValueError, match="a comparison is going on there"):
        compare(shared, "crest", output, seeds=1, console=QUIET)


def test_failed_runs_are_named_and_tried_again(stub, shared, tmp_path, capsys):
    output = begin(shared, tmp_path / "out", broken="turn_grpo/rate0.001-seed2")
    with pytest.raises(SystemExit) as stop:
        compare(shared, "grpo,turn_grpo", output, seeds=2, jobs=3, console=Console(width=300))
    assert stop.value.code == 1
    said = capsys.readouterr().out
    assert said.count("failed: ") == 1
    assert "failed: turn_grpo/rate0.001-seed2: the disk is full (exit code 1; " in said
    rows = read_rows([output / "compare.csv"])
    assert {(found["method"], found["seed"]) for found in rows} == {("grpo", 1), ("grpo", 2), ("turn_grpo", 1)}
    assert len((output / "starts").read_text().split()) == 4

    (output / "broken").write_text("")
    compare(shared, "grpo,turn_grpo", output, seeds=2, console=QUIET)
    assert (output / "starts").read_text().split()[4:] == ["turn_grpo/rate0.001-seed2"]
    assert len(read_rows([output / "compare.csv"])) == 8


def test_last_words_of_a_run(shared, tmp_path):
    run = Run("grpo", tmp_path, shared)
    log = tmp_path / "console.log"
    log.write_text("step 1\nTraceback ...\nRuntimeError: no memory\n\n")
    assert last_words(run, 1) == f"RuntimeError: no memory (exit code 1; {log})"
    log.write_text("")
    assert last_words(run, -9) == f"it said nothing (signal 9; {log})"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_stops_the_runs_and_says_how_to_go_on(sent, shared, tmp_path, monkeypatch, capsys):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a process started in the background
    started = []
    popen = comparing.subprocess.Popen

    def sleeper(command, **how):
        started.append(popen([sys.executable, "-c", "import time; time.sleep(600)"], **how))
        return started[-1]

    def interrupt(seconds):
        signal.raise_signal(sent)

    monkeypatch.setattr(comparing.subprocess, "Popen", sleeper)
    monkeypatch.setattr(comparing.time, "sleep", interrupt)
    with pytest.raises(SystemExit) as stop:
        compare(shared, "grpo,crest", tmp_path / "out", seeds=1, console=Console())
    assert stop.value.code == 130 and "the same command goes on" in capsys.readouterr().out
    assert len(started) == 2 and all(process.poll() is not None for process in started)


def test_the_recipe_is_a_configuration():
    config = load_config(Path(__file__).parents[1] / "train" / "recipes" / "compare_desk.toml")
    assert config.method.session_reward == "mean" and config.training.steps == 20 and config.run.threads == 1
    assert config.rollout == load_config().rollout


def test_run_ends_when_its_comparison_is_killed(tmp_path):
    child = "import time; from crest_train.orphans import end_with_parent; end_with_parent()\n"
    child += "print('begun', flush=True); time.sleep(60)"
    parent = (
        "import os, subprocess, sys; from crest_train.orphans import PARENT\n"
        f"run = subprocess.Popen([sys.executable, '-c', {child!r}], env=os.environ | {{PARENT: str(os.getpid())}})\n"
        "run.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as comparison:
        assert comparison.stdout.readline() == "begun\n"
        comparison.kill()
        comparison.communicate(timeout=20)  # the run has this end of the pipe too, until it ends
