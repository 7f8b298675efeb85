"""Trackers: what they are told, under which names, and once; one that is missing or fails; the log without any."""

import json
import sys

import pytest
from crest_train.config import load_config
from crest_train.credit import session_reward
from crest_train.metrics import outcome_metrics
from crest_train.sessions import Action, Session, as_tensors
from crest_train.trackers import Log, check_trackers, tracked
from toy_runs import quiet_train, save_policy, toy_config


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


def session(rewards, lengths, *, prompt=3, cut=False, lost=False, num_turns=2):
    """A session whose turn k is one action of lengths[k] tokens, with entropy k + 1 at each."""
    ids, actions = [], []
    for turn, length in enumerate(lengths):
        ids += [9]
        actions.append(Action(turn, len(ids), [7] * length, [-0.5] * length, [turn + 1.0] * length))
        ids += [7] * length
    actions[-1].info = {"lost": lost}
    return Session(0, "", [1] * prompt, num_turns, ["ask"] * num_turns, [], ids, actions, rewards, cut)


def test_metrics_of_sessions_with_known_outcomes():
    sessions = [
        session([1.0, 1.0], [2, 4]),
        session([1.0, 0.0], [2, 2], lost=True),
        session([0.0], [6], cut=True),
        session([0.0, 0.0], [1, 1]),
    ]
    batch = as_tensors(sessions, 1.0)
    found = outcome_metrics(batch, session_reward(batch, "all"), group_size=2)
    wanted = {
        "turn_success": 3 / 8,
        "session_success": 1 / 4,
        "reward": 1 / 4,
        "reward_std": 0.5,  # of 1, 0, 0, 0: sqrt((9/16 + 3/16) / 3)
        "frac_reward_zero_std": 1 / 2,
        "completions/mean_length": (6 + 4 + 6 + 2) / 4,
        "completions/min_length": 2,
        "completions/max_length": 6,
        "completions/clipped_ratio": 1 / 4,
        "cut_sessions": 1,
        "lost_sessions": 1,
        "prompt_tokens": 12,
        "sampled_tokens": 18,
        "fed_tokens": 18 + 7,
        "turn_success/turn_1": 2 / 4,
        "turn_success/turn_2": 1 / 4,
        "entropy/turn_1": 1,
        "entropy/turn_2": 2,
        "completions/mean_length/turn_1": (2 + 2 + 6 + 1) / 4,
        "completions/mean_length/turn_2": (4 + 2 + 1) / 3,
    }
    assert found == pytest.approx(wanted)


def test_a_turn_that_only_some_sessions_have():
    batch = as_tensors([session([1.0], [1], num_turns=1), session([1.0, 0.0], [1, 1])], 1.0)
    found = outcome_metrics(batch, session_reward(batch, "mean"), group_size=1)
    assert found["turn_success/turn_2"] == 0 and found["turn_success/turn_1"] == 1
    assert found["reward"] == pytest.approx(0.75) and found["frac_reward_zero_std"] == 1


def test_one_session_has_no_spread():
    batch = as_tensors([session([1.0, 1.0], [1, 1])], 1.0)
    assert outcome_metrics(batch, session_reward(batch, "all"), group_size=1)["reward_std"] == 0


def test_names_are_those_of_trl():
    told = tracked("step", {"clipped": 0.25, "rollout_seconds": 1.5, "training_seconds": 2.0, "words": "none"})
    assert told == {
        "clip_ratio/region_mean": 0.25,
        "rollout_seconds": 1.5,
        "training_seconds": 2.0,
        "step_time": 3.5,
    }
    assert tracked("evaluation", {"turn_success": 0.5}) == {"eval_turn_success": 0.5}


def test_an_unknown_tracker_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"run\.trackers\.0: Input should be 'tensorboard', 'trackio' or 'wandb'"):
        load_config(None, {"run": {"trackers": ["mlflow"]}})


def test_a_missing_package_is_told_with_its_command_before_any_work(policy, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "trackio" else object())
    with pytest.raises(ValueError, match="run.trackers: trackio needs trackio, not installed: pip install trackio"):
        quiet_train(toy_config(policy, run={"trackers": ["trackio"]}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    check_trackers([])
    check_trackers(["wandb"])


class Recorder:
    """A tracker that keeps what it is told, and fails at a step."""

    def __init__(self, fails_at=None):
        self.told, self.fails_at, self.finished = [], fails_at, False

    def log(self, values, step):
        if step == self.fails_at:
            raise ConnectionError("no route to host")
        self.told.append((step, values))

    def finish(self):
        self.finished = True


@pytest.fixture
def recorders(monkeypatch):
    """The trackers of each start of a run, in place of real ones."""
    made = []

    def started(name, run, folder, config):
        made.append(Recorder(fails_at=3 if name == "wandb" else None))
        return made[-1]

    monkeypatch.setattr("crest_train.trackers._started", started)
    monkeypatch.setattr("crest_train.loop.check_trackers", lambda names: None)
    return made


def test_a_failing_tracker_is_said_once_and_ends_nothing(policy, recorders, tmp_path, capsys):
    from crest_train.loop import train
    from rich.console import Console

    config = toy_config(policy, run={"trackers": ["wandb", "trackio"], "checkpoint_every": 2})
    folder = train(config, tmp_path / "run", Console(file=sys.stdout))
    failing, other = recorders
    assert [step for step, _ in failing.told] == [0, 0, 1, 2, 2] and not failing.finished
    assert [step for step, _ in other.told] == [0, 0, 1, 2, 2, 3, 4, 4] and other.finished
    said = capsys.readouterr().out
    assert said.count("run.trackers: wandb failed and is left out from here on: no route to host") == 1
    lines = folder.metrics()
    assert [(line["event"], line["step"]) for line in lines if line["event"] == "step"] == [
        ("step", k + 1) for k in range(4)
    ]
    _, last = next(pair for pair in reversed(other.told) if "loss" in pair[1])
    written = next(line for line in reversed(lines) if line["event"] == "step")
    assert last["reward"] == written["reward"] and last["learning_rate"] == 1e-3
    assert last["num_tokens"] == sum(
        line["prompt_tokens"] + line["sampled_tokens"] for line in lines if line["event"] == "step"
    )


def test_a_resumed_run_tells_each_line_once(policy, recorders, monkeypatch, tmp_path):
    """Stopped in step 4, after step 3 was told and before it lay in a checkpoint."""
    from crest_train import loop

    config = toy_config(policy, run={"trackers": ["trackio"], "checkpoint_every": 2})
    real, calls = loop.update, []

    def stops(*arguments, **options):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(loop, "update", stops)
    with pytest.raises(SystemExit):
        quiet_train(config, tmp_path / "run")
    name = json.loads((tmp_path / "run" / "trackers.json").read_text())["name"]
    monkeypatch.setattr(loop, "update", real)
    folder = quiet_train(config, tmp_path / "run")
    first, second = recorders
    assert [step for step, _ in first.told] == [0, 0, 1, 2, 2, 3]
    assert [step for step, _ in second.told] == [4, 4]
    assert json.loads((tmp_path / "run" / "trackers.json").read_text())["name"] == name
    tokens = [line["num_tokens"] for line in folder.metrics() if line["event"] == "step"]
    assert tokens == sorted(tokens) and second.told[0][1]["num_tokens"] == tokens[-1]


def test_tensorboard_files_hold_the_steps(policy, tmp_path):
    pytest.importorskip("tensorboard")
    pytest.importorskip("accelerate")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = quiet_train(toy_config(policy, training={"steps": 2}, run={"trackers": ["tensorboard"]}), tmp_path / "run")
    shown = EventAccumulator(str(folder.path / "tensorboard")).Reload()
    steps = [line for line in folder.metrics() if line["event"] == "step"]
    points = [(point.step, point.value) for point in shown.Scalars("turn_success/turn_1")]
    assert points == [(line["step"], pytest.approx(line["turn_success/turn_1"])) for line in steps]
    assert {"reward", "clip_ratio/region_mean", "step_time", "eval_session_success"} <= set(shown.Tags()["scalars"])


def test_a_tracker_that_cannot_start_is_told_before_any_work(policy, monkeypatch, tmp_path):
    def no_account(*arguments):
        raise RuntimeError("api_key not configured\nlog in")

    monkeypatch.setattr("crest_train.trackers._started", no_account)
    monkeypatch.setattr("crest_train.loop.check_trackers", lambda names: None)
    with pytest.raises(ValueError, match="run.trackers: wandb could not be started: api_key not configured$"):
        quiet_train(toy_config(policy, run={"trackers": ["wandb"]}), tmp_path / "run")


def test_log_without_trackers_asks_for_no_package(monkeypatch, tmp_path):
    from crest_train.run_folder import RunFolder

    monkeypatch.setitem(sys.modules, "accelerate", None)
    log = Log(toy_config("policy"), RunFolder(tmp_path), None, resumed=False)
    log("evaluation", 0, turn_success=0.5)
    log.close()
    assert RunFolder(tmp_path).metrics() == [{"event": "evaluation", "step": 0, "turn_success": 0.5}]
    assert not (tmp_path / "trackers.json").exists()
