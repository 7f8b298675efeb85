"""The command: what it prints, and that mistakes are one line and exit code 2."""

import subprocess
import sys
from pathlib import Path

import pytest
from crest_train.cli import main
from toy import HINT, toy_model, toy_tokenizer


def crest_train(monkeypatch, *arguments):
    """Run the command; its exit code."""
    monkeypatch.setattr(sys, "argv", ["crest-train", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code or 0


@pytest.fixture
def recipe(tmp_path):
    toy_model().save_pretrained(tmp_path / "policy")
    toy_tokenizer().save_pretrained(tmp_path / "policy")
    path = tmp_path / "run.toml"
    path.write_text(
        f'[environment]\nname = "toy:Toy"\n[policy]\nmodel = "{tmp_path}/policy"\n'
        "[rollout]\nsessions = 2\ngroup_size = 3\nmax_action_tokens = 3\n"
        f'[teacher]\ntemplate = "{HINT}"\n[evaluation]\nsessions = 8\n'
    )
    return path


def test_help_names_the_commands(monkeypatch, capsys):
    assert crest_train(monkeypatch, "--help") == 0
    said = capsys.readouterr().out
    assert "run" in said and "fetch" in said
    assert crest_train(monkeypatch, "run", "--help") == 0
    said = capsys.readouterr().out
    assert all(option in said for option in ("--method", "--steps", "--seed", "--output", "--threads"))


def test_run_prints_progress_and_the_closing_table(monkeypatch, capsys, recipe, tmp_path):
    options = ["--method", "turn_grpo", "--steps", 2, "--seed", 3, "--threads", 1, "--output", tmp_path / "out"]
    assert crest_train(monkeypatch, "run", recipe, *options) == 0
    said = capsys.readouterr().out
    assert "step 1/2" in said and "step 2/2" in said and "turn_grpo on toy:Toy, 2 steps" in said
    assert f"run folder: {tmp_path}/out" in said
    written = (tmp_path / "out" / "config.toml").read_text()
    assert 'name = "turn_grpo"' in written and "steps = 2" in written and "seed = 3" in written


def test_resume_goes_on_with_the_folders_own_configuration(monkeypatch, capsys, recipe, tmp_path):
    output = tmp_path / "out"
    assert crest_train(monkeypatch, "run", recipe, "--method", "turn_grpo", "--steps", 1, "--output", output) == 0
    recipe.unlink()
    capsys.readouterr()
    assert crest_train(monkeypatch, "run", "--resume", output, "--steps", 2) == 0
    said = capsys.readouterr().out
    assert "changed since then: training.steps 1 -> 2" in said and "step 2/2" in said and "step 1/" not in said
    words = complaint(monkeypatch, capsys, "run", "--resume", output, "--output", output)
    assert "--resume and --output: found both, wanted one" in words
    words = complaint(monkeypatch, capsys, "run", "--resume", tmp_path)
    assert f"--resume: {tmp_path} holds no run (found no config.toml in it)" in words
    words = complaint(monkeypatch, capsys, "run", "--resume", output, "--seed", 9)
    assert "run.seed 0 -> 9" in words


def test_mistakes_are_one_line_with_exit_code_2(monkeypatch, capsys, recipe, tmp_path):
    bad = tmp_path / "bad.toml"
    bad.write_text("[training]\nstep = 1\n")
    for arguments, words in (
        (["run", bad], "unknown key 'training.step'; known keys here: steps"),
        (["run", tmp_path / "none.toml"], "none.toml: could not be read"),
        (["run", recipe, "--method", "cresst"], "unknown method 'cresst'; known: grpo, turn_grpo, dr_grpo"),
        (["run", recipe, "--steps", "-1"], "training.steps"),
        (["run", recipe, "--output", bad], "exists and holds no run"),
        (["fetch", "smollm3"], "smollm3"),
    ):
        assert crest_train(monkeypatch, *arguments) == 2
        said = capsys.readouterr()
        assert said.out == "" and "Traceback" not in said.err
        assert said.err.count("\n") == 1 and said.err.startswith("error: ") and words in said.err


def complaint(monkeypatch, capsys, *arguments):
    """What a mistaken command says: one line, with exit code 2."""
    assert crest_train(monkeypatch, *arguments) == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.err and said.err.count("\n") == 1 and said.err.startswith("error: ")
    return said.err


def test_paths_that_cannot_be_written_are_named(monkeypatch, capsys, recipe, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert str(file) in complaint(monkeypatch, capsys, "run", recipe, "--output", file / "sub")
    assert "/proc/sub" in complaint(monkeypatch, capsys, "run", recipe, "--output", "/proc/sub")
    monkeypatch.setenv("CREST_CACHE", str(file))
    built_in = tmp_path / "built_in.toml"
    built_in.write_text("[training]\nsteps = 1\n")
    said = complaint(monkeypatch, capsys, "run", built_in, "--output", tmp_path / "out")
    assert f"{file}: wanted a folder there, found a file" in said


@pytest.mark.parametrize("end", [40, 130])
def test_chat_template_cut_in_half(monkeypatch, capsys, recipe, tmp_path, end):
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template[:end]
    tokenizer.save_pretrained(tmp_path / "policy")
    said = complaint(monkeypatch, capsys, "run", recipe, "--output", tmp_path / "out")
    assert "policy.model: the chat template of its tokenizer is broken: " in said


def test_installed_command_finds_a_module_in_the_current_folder(recipe, tmp_path):
    (tmp_path / "my_environment.py").write_text("class Mine:\n    def __init__(self):\n        print('found')\n")
    recipe.write_text(recipe.read_text().replace("toy:Toy", "my_environment:Mine"))
    command = Path(sys.executable).with_name("crest-train")
    done = subprocess.run([command, "run", recipe], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "found" in done.stdout
    assert "my_environment:Mine makes a Mine, which has no reset, step" in done.stderr


def test_mistakes_that_were_tracebacks(monkeypatch, capsys, tmp_path):
    path = tmp_path / "run.toml"
    for text, words in (
        ('[environment.options]\nnum_turns = "8"', "desk: num_turns: "),
        ('[environment.options]\ncoupled = "x"', "desk: coupled: "),
        ("[evaluation.options]\nnum_turns = 2.5", "desk: num_turns: "),
        ('[environment]\nname = "os:path"', "'os:path' is a module"),
        ('[environment]\nname = ":X"', "found ':X', wanted module:Class"),
        ('[policy]\ndevice = "foo"', "policy.device: "),
        ('[teacher]\ntemplate = "{foo}"', "teacher.template: "),
        ('[teacher]\ntemplate = "{ {hint}"', "teacher.template: "),
        ("[training]\nbetas = [0.9, 1.5]", "training.betas.1: "),
        ("[run]\nseed = true", "run.seed: "),
        ('[training]\nsteps = "1"', "training.steps: "),
    ):
        path.write_text(text + "\n")
        assert words in complaint(monkeypatch, capsys, "run", path, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()
