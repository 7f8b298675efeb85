"""`crest-train eval`: what is played and kept, going on after a stop, the table, and pairs of evaluations."""

import csv
import json

import pytest
from crest_train import evaluation
from crest_train.environments import FIRST_HELD_OUT_SEED
from crest_train.environments.bfcl_data import CATEGORIES
from crest_train.evaluation import Sample, evaluate_policy, evaluation_config, held_out, read_samples
from crest_train.evaluation_report import differences, estimates, measures
from rich.console import Console
from test_cli import complaint, crest_train
from toy import Toy, toy_model, toy_tokenizer
from toy_runs import quiet_train, save_policy, toy_config


class Sorted(Toy):
    """The toy with categories by the seed, and no more than 12 sessions."""

    session_ids = range(12)

    def reset(self, seed):
        self.category = ("odd", "even")[seed % 2]
        return super().reset(seed % 12)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def config(policy):
    return toy_config(
        policy,
        environment={"name": "test_evaluation:Sorted"},
        rollout={"rows": 8},
        evaluation={"temperature": 0.7},
    )


def evaluate(config, folder, samples=2, sessions=None, policy=None):
    evaluate_policy(
        policy or config.policy.model,
        config,
        sessions=sessions,
        samples=samples,
        output=folder,
        console=Console(quiet=True),
    )
    return (folder / "sessions.jsonl").read_text()


def test_every_session_is_played_as_often_as_asked(config, tmp_path):
    evaluate(config, tmp_path / "eval", samples=3)
    found = read_samples(tmp_path / "eval")
    assert {(sample.session - FIRST_HELD_OUT_SEED, sample.sample) for sample in found} == {
        (session, i) for session in range(12) for i in range(3)
    }
    assert len(found) == 36 and all(sample.category == ("odd", "even")[sample.session % 2] for sample in found)
    assert all(0 < sample.tokens <= 2 * 2 * 3 and sample.num_turns == 2 for sample in found)
    assert 0 < sum(sample.success for sample in found) < 36
    rows = list(csv.DictReader(open(tmp_path / "eval" / "eval.csv")))
    row = next(row for row in rows if (row["category"], row["measure"]) == ("odd", "session_success"))
    odd = [sample for sample in found if sample.session % 2 == 0]
    assert float(row["value"]) == pytest.approx(sum(sample.turn_reward == [1, 1] for sample in odd) / 18)
    assert row["sessions"] == "6" and float(row["low"]) <= float(row["value"]) <= float(row["high"])
    assert "pass@3" in (tmp_path / "eval" / "table.txt").read_text()


def test_an_evaluation_that_was_stopped_goes_on_to_the_same_lines(config, tmp_path, monkeypatch):
    whole = evaluate(config, tmp_path / "whole")
    real, calls = evaluation.rollout, []

    def stops(*arguments, **options):
        calls.append(len(arguments[3]))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(evaluation, "rollout", stops)
    with pytest.raises(SystemExit) as stop:
        evaluate(config, tmp_path / "stopped")
    assert stop.value.code == 130 and calls == [8, 8, 8]
    path = tmp_path / "stopped" / "sessions.jsonl"
    written = path.read_text()
    assert whole.startswith(written) and written.count("\n") == 16
    path.write_text(written[:-30])  # as a kill in the middle of a write leaves it
    calls.clear()
    monkeypatch.setattr(evaluation, "rollout", lambda *a, **o: calls.append(len(a[3])) or real(*a, **o))
    assert sorted(evaluate(config, tmp_path / "stopped").splitlines()) == sorted(whole.splitlines())
    assert calls == [8, 8]
    calls.clear()
    evaluate(config, tmp_path / "stopped")
    assert calls == []


def test_another_evaluation_in_the_folder_is_refused_with_the_difference(config, tmp_path):
    evaluate(config, tmp_path / "eval")
    with pytest.raises(ValueError, match="holds another evaluation: samples is 2 there, 3 here"):
        evaluate(config, tmp_path / "eval", samples=3)
    toy_model(seed=1).save_pretrained(policy_folder := tmp_path / "other")
    toy_tokenizer().save_pretrained(policy_folder)
    changed = config.model_copy(update={"policy": config.policy.model_copy(update={"model": str(policy_folder)})})
    with pytest.raises(ValueError, match="holds another evaluation: policy is"):
        evaluate(changed, tmp_path / "eval")
    (tmp_path / "something").mkdir()
    (tmp_path / "something" / "file").touch()
    with pytest.raises(ValueError, match="exists and holds no evaluation"):
        evaluate(config, tmp_path / "something")


def test_no_session_is_counted_twice(config):
    assert len(held_out(config, None)) == 12  # [evaluation] says 20
    with pytest.raises(ValueError, match="--sessions: found 13, but test_evaluation:Sorted has 12"):
        held_out(config, 13)
    assert [seed - FIRST_HELD_OUT_SEED for seed, _, _ in held_out(config, 3)] == [0, 1, 2]


def test_what_a_run_or_a_model_is_evaluated_with(policy, tmp_path):
    folder = quiet_train(
        toy_config(policy, training={"steps": 1}, evaluation={"options": {"turns": 3}}), tmp_path / "run"
    )
    own = evaluation_config(str(folder.path), None, None)
    assert own.environment.name == "toy:Toy" and own.held_out_options() == {"turns": 3}
    table = evaluation_config(str(folder.path), None, "bfcl")
    assert table.environment.name == "bfcl" and table.held_out_options() == {"split": "eval"}
    assert table.rollout.max_action_tokens == 3 and table.policy.model == str(policy)
    plain = evaluation_config("smollm2", None, "bfcl")
    assert plain.policy.model == "smollm2" and plain.rollout.max_action_tokens == 128
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[environment]\nname = "bfcl"\noptions = {max_actions = 3}\n')
    assert evaluation_config("smollm2", recipe, "bfcl").held_out_options() == {"max_actions": 3}
    assert evaluation_config("desk", None, None).environment.name == "desk"


def test_a_run_is_evaluated_at_its_newest_checkpoint_in_its_own_folder(policy, tmp_path, monkeypatch, capsys):
    for name, seed in (("a", 1), ("b", 2)):
        quiet_train(toy_config(policy, training={"steps": 2, "rate": 1e-2}, run={"seed": seed}), tmp_path / name)
        assert crest_train(monkeypatch, "eval", tmp_path / name, "--samples", 2, "--sessions", 10, "--seed", 5) == 0
        assert "step 2 on toy:Toy" in capsys.readouterr().out
    settings = [json.loads((tmp_path / name / "eval-toy-Toy" / "settings.json").read_text()) for name in "ab"]
    assert settings[0]["policy"]["weights"] != settings[1]["policy"]["weights"] and settings[0]["seed"] == 5
    arguments = ["eval", "--compare", tmp_path / "a", tmp_path / "b", "--output", tmp_path / "pairs"]
    assert crest_train(monkeypatch, *arguments) == 0
    said = capsys.readouterr().out
    assert f"A: {tmp_path}/a, step 2" in said and "B - A" in said
    rows = list(csv.DictReader(open(tmp_path / "pairs" / "comparison.csv")))
    assert [row["measure"] for row in rows] == ["turn_success", "session_success", "pass@2"]
    assert all(float(row["value"]) == pytest.approx(float(row["b"]) - float(row["a"])) for row in rows)

    held = tmp_path / "b" / "eval-toy-Toy"
    lines = (held / "sessions.jsonl").read_text().splitlines(keepends=True)
    (held / "sessions.jsonl").write_text("".join(lines[:-1]))
    assert "holds 19 of 20 samples; go on with it first" in complaint(monkeypatch, capsys, *arguments)
    (held / "settings.json").write_text(json.dumps(settings[1] | {"temperature": 0.5}))
    assert "temperature is 1.0 there, 0.5 here" in complaint(monkeypatch, capsys, *arguments)


def test_mistakes_are_told_before_any_work(policy, monkeypatch, capsys, tmp_path):
    assert "wanted a policy" in complaint(monkeypatch, capsys, "eval")
    assert "wanted a policy" in complaint(monkeypatch, capsys, "eval", "desk", "--compare", tmp_path, tmp_path)
    assert "--samples: found 0" in complaint(monkeypatch, capsys, "eval", "desk", "--samples", 0)
    assert "unknown environment 'deks'" in complaint(monkeypatch, capsys, "eval", "desk", "--env", "deks")
    assert "is no model folder" in complaint(monkeypatch, capsys, "eval", tmp_path)
    assert "holds no evaluation" in complaint(monkeypatch, capsys, "eval", "--compare", tmp_path, tmp_path)
    assert not list(tmp_path.iterdir())


def sample(session, number, rewards, category=None, num_turns=2):
    return Sample(session, number, category, num_turns, rewards, 5, False)


def test_estimates_of_known_sessions():
    samples = [
        sample(0, 0, [1, 1], "base"),
        sample(0, 1, [1, 0], "base"),
        sample(1, 0, [1], "base"),  # at the context's end before its second turn began
        sample(1, 1, [0, 0], "base"),
        sample(2, 0, [1, 1, 0], "long", num_turns=3),
        sample(2, 1, [1, 1, 1], "long", num_turns=3),
    ]
    found = {(row.category, row.measure): row.value for row in estimates(samples)}
    wanted = {
        ("base", "turn_success"): 4 / 8,
        ("base", "session_success"): 1 / 4,
        ("base", "pass@2"): 1 / 2,
        ("long", "turn_success"): 5 / 6,
        ("long", "session_success"): 1 / 2,
        ("long", "pass@2"): 1,
        ("average", "turn_success"): (4 / 8 + 5 / 6) / 2,
        ("average", "session_success"): 3 / 8,
        ("average", "pass@2"): 3 / 4,
    }
    assert found == pytest.approx(wanted)
    assert [row.sessions for row in estimates(samples)[::3]] == [2, 1, 3]


def test_measures_by_number_of_samples():
    names = [[name.removeprefix("pass@") for name in measures(n)[2:]] for n in (1, 2, 3, 8, 10)]
    assert names == [[], ["2"], ["2", "3"], ["2", "4", "8"], ["2", "4", "8", "10"]]


def test_pairing_takes_out_what_the_sessions_have_in_common():
    """B does one turn of two more in every fourth session: sessions differ much, the differences little."""
    a = [sample(i, 0, [i % 2, 0]) for i in range(80)]
    b = [sample(i, 0, [i % 2, int(i % 4 == 0)]) for i in reversed(range(80))]
    found = {row.measure: row for row in differences(a, b)}
    turn = found["turn_success"]
    assert (turn.a, turn.b, turn.value) == pytest.approx((1 / 4, 3 / 8, 1 / 8))
    assert (turn.wins, turn.losses) == (20, 0) and turn.p == pytest.approx(2 / 2**20)
    half = 1.96 * (0.5 * 3**0.5 / 4) / 80**0.5  # of differences 1/2 with chance 1/4, else 0
    assert (turn.low, turn.high) == pytest.approx((1 / 8 - half, 1 / 8 + half), abs=0.008)
    assert found["session_success"].value == 0 and found["session_success"].p == 1


@pytest.mark.fetched
def test_bfcl_has_the_four_categories_of_the_papers_table():
    from crest_train.fetch import path_of

    try:
        path_of("bfcl")
    except ValueError:
        pytest.skip("bfcl was not fetched")
    chosen = held_out(evaluation_config("smollm2", None, "bfcl"), None)
    counted = [category for _, _, category in chosen]
    assert {category: counted.count(category) for category in CATEGORIES} == dict.fromkeys(CATEGORIES, 100)
