"""scienceworld and textworld_express: gold paths, seeds, state, hostile actions, a Java machine that dies or hangs."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from crest_train.environments import FIRST_HELD_OUT_SEED, make_environment
from hostile import hostile_actions, play_gold, survive

pytest.importorskip("scienceworld")
pytest.importorskip("textworld_express")
pytestmark = pytest.mark.skipif(shutil.which("java") is None, reason="Java is not installed")

EASY = ("find-plant", "use-thermometer", "lifespan-longest-lived")
SCIENCE = ("scienceworld", {"tasks": list(EASY)})
TEXTWORLD = ("textworld_express", {})
each = pytest.mark.parametrize(("name", "options"), [SCIENCE, TEXTWORLD], ids=["scienceworld", "textworld_express"])


@pytest.mark.parametrize(("name", "options", "count"), [(*SCIENCE, 3), (*TEXTWORLD, 8)])
@pytest.mark.parametrize("first", [0, FIRST_HELD_OUT_SEED], ids=["train", "held out"])
def test_gold_paths_earn_the_whole_reward(name, options, count, first):
    environment = make_environment(name, options)
    for seed in range(first, first + count):
        assert play_gold(environment, seed) == [1.0]


@each
def test_a_seed_is_one_session_and_held_out_ones_are_others(name, options):
    environment, other = make_environment(name, options), make_environment(name, options)
    first = environment.reset(4)
    other.reset(9)
    assert other.reset(4) == first != environment.reset(FIRST_HELD_OUT_SEED + 4)
    assert environment.num_turns == 1 and environment.system


@each
def test_a_saved_session_goes_on_the_same_way(name, options):
    environment, other = make_environment(name, options), make_environment(name, options)
    environment.reset(1)
    gold = environment.gold().splitlines()
    environment.step(gold[0])
    state = environment.save()
    wanted = [environment.step(action) for action in gold[1:3]]
    other.restore(state)
    assert [other.step(action) for action in gold[1:3]] == wanted


@each
def test_hostile_actions_are_answered(name, options):
    environment = make_environment(name, options | {"max_actions": 100})
    environment.reset(0)
    assert survive(environment, hostile_actions(environment.gold().splitlines())) > 300


def java_of(process):
    """The Java machine that a process started."""
    for task in Path(f"/proc/{process}/task").iterdir():
        for child in (task / "children").read_text().split():
            if "java" in Path(f"/proc/{child}/cmdline").read_bytes().decode():
                return int(child)
    raise AssertionError("no Java machine runs there")


def send(process, sent):
    """Send a signal and wait for it to be taken: the process has stopped or is gone."""
    os.kill(process, sent)
    told = Path(f"/proc/{process}/stat")
    while told.exists() and told.read_text().rpartition(") ")[2][0] not in "TZX":
        time.sleep(0.01)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_java_machine_that_is_lost_costs_one_session(sent):
    environment, other = (make_environment("textworld_express", {"games": ["coin"], "timeout": 8.0}) for _ in range(2))
    environment.reset(0)
    other.reset(1)
    seen = other.step("look around").observation
    send(java_of(environment._host.process.pid), sent)
    step = environment.step("look around")
    assert step.info["lost"] and step.turn_reward == 0 and step.done
    assert other.step("look around").observation == seen
    assert environment.reset(0)


def test_wrong_options_and_a_missing_java_are_told(monkeypatch):
    for name, options, words in (
        ("scienceworld", {"tasks": ["cook"]}, "tasks: found .*'cook'"),
        ("scienceworld", {"max_actions": 0}, "max_actions: found 0"),
        ("scienceworld", {"tasks": ["power-component"], "simplifications": ["noElectricalAction"]}, "makes impossible"),
        ("textworld_express", {"games": []}, "games: found"),
    ):
        with pytest.raises(ValueError, match=words):
            make_environment(name, options)
    monkeypatch.setattr(shutil, "which", lambda program: None)
    with pytest.raises(ValueError, match="apt-get install default-jre-headless"):
        make_environment(*TEXTWORLD)
