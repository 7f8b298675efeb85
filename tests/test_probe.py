"""The probe: its reference is unbiased, its controls do what they say, its figures are those of the gradients."""

import csv
import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from crest_train.cli import app
from crest_train.credit import session_reward, spans_of
from crest_train.probe import backward, probe, variants_of
from crest_train.probe_credit import (
    complete,
    controlled,
    gradient_vector,
    reference_credit,
    token_sizes,
    token_statistics,
)
from crest_train.probe_report import REFERENCE
from crest_train.probe_statistics import alignment, inner_products
from crest_train.projection import count_sketch
from crest_train.recording import read_rollouts
from crest_train.sessions import Action, Session, as_tensors
from rich.console import Console
from toy import WORDS, toy_model, toy_tokenizer
from toy_runs import last_of, quiet_train, toy_config
from typer.testing import CliRunner

from crest_ops import CISPO, METHODS, Credit, Signals

CREST = {"method": {"name": "crest", "options": {"lam": 1.0}}}
BATCH = {"rollout": {"sessions": 8, "group_size": 8}}


@pytest.fixture(scope="module")
def run_folder(policy_folder, tmp_path_factory):
    config = toy_config(policy_folder, training={"steps": 0}, evaluation={"sessions": 1}, **CREST, **BATCH)
    return quiet_train(config, tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def probed(run_folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("probes") / "probe"
    console = Console(record=True, width=140, file=open("/dev/null", "w"))
    rows = probe(run_folder.path, ["crest"], batches=4, seed=3, output=output, console=console)
    return output, {row["method"]: row for row in rows}, console.export_text()


def session(rewards, num_turns=2, tokens=1):
    """Turns of one action each: an id of the request, then `tokens` of the policy's."""
    width = tokens + 1
    ids = [5, *[8] * tokens] * len(rewards)
    actions = [
        Action(turn, turn * width + 1, [8] * tokens, [-1.0] * tokens, [0.5] * tokens) for turn in range(len(rewards))
    ]
    return Session(0, "", [], num_turns, [], [], ids, actions, rewards, cut=False)


def test_reference_credit_by_hand():
    """To go 1, 0 and 1, 1: minus each other's 0, -1 and 0, 1; alone in its group 0 + 1 (reached one turn of two)."""
    batch = as_tensors([session([1.0, 0.0]), session([0.0, 1.0]), session([1.0])], 0.0)
    credit = reference_credit(batch, spans_of(batch, torch.tensor([0, 0, 1])))
    assert credit.credit_N.view(3, 4).tolist() == [[0, 0, 0, -1], [0, 0, 0, 1], [0, 1, 0, 0]]
    assert credit.token_weight_N.view(3, 4)[:2, 1::2].tolist() == [[pytest.approx(1 / 3)] * 2] * 2
    assert credit.token_weight_N.view(3, 4)[:, ::2].eq(0).all()


def test_expected_reference_gradient_is_that_of_the_expected_reward():
    """Two rollouts of two turns, one of two tokens each: summed over all 16 outcomes with their probabilities."""
    first = torch.tensor([0.3, -0.4], dtype=torch.float64, requires_grad=True)
    second = torch.tensor([[0.2, 0.9], [-0.5, 0.1]], dtype=torch.float64, requires_grad=True)
    reward_1, reward_2 = [0.0, 1.0], [[0.25, 1.0], [0.5, 0.0]]
    paths = list(itertools.product((0, 1), (0, 1)))
    logp = [first.log_softmax(0)[a] for a, _ in paths], [second.log_softmax(1)[a, b] for a, b in paths]
    expected = sum((p + q).exp() * (reward_1[a] + reward_2[a][b]) for p, q, (a, b) in zip(*logp, paths, strict=True))
    wanted = torch.autograd.grad(expected, (first, second), retain_graph=True)
    loss = 0.0
    for i, j in itertools.product(range(4), repeat=2):
        played = [session([reward_1[a], reward_2[a][b]]) for a, b in (paths[i], paths[j])]
        batch = as_tensors(played, 0.0)
        credit = reference_credit(batch, spans_of(batch, torch.zeros(2, dtype=torch.int64)))
        weight = (credit.credit_N * credit.token_weight_N).view(2, 4)[:, 1::2].double()
        probability = sum(part[i] + part[j] for part in logp).exp().detach()
        one = sum(weight[row, turn] * logp[turn][path] for row, path in enumerate((i, j)) for turn in (0, 1))
        loss = loss - probability * one
    found = torch.autograd.grad(loss, (first, second))
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a, -b, atol=1e-7) and b.abs().max() > 0.01


def scored_signals():
    """Three rollouts of 40 tokens, the last without a gap."""
    batch = as_tensors([session([1.0, 0.0], tokens=20) for _ in range(3)], 0.0)
    spans = spans_of(batch, torch.zeros(3, dtype=torch.int64))
    gap_N = torch.where(spans.mask, torch.randn(spans.num_tokens, generator=torch.Generator().manual_seed(0)), 0)
    gap_N[spans.trajectory_of_token == 2] = 0
    return spans, Signals(teacher_gap_N=gap_N, skill_gap_N=2 * gap_N, surprisal_N=torch.ones_like(gap_N))


def test_controls_change_the_gaps_alone_and_where_there_are_any():
    spans, signals = scored_signals()
    scored = spans.mask & (spans.trajectory_of_token < 2)
    gap = signals.teacher_gap_N
    assert controlled(signals, spans, None, torch.Generator()) is signals
    for control in ("shuffled", "noise", "reduction"):
        found = controlled(signals, spans, control, torch.Generator().manual_seed(1))
        again = controlled(signals, spans, control, torch.Generator().manual_seed(1))
        assert torch.equal(found.teacher_gap_N, again.teacher_gap_N) and found.surprisal_N is signals.surprisal_N
        assert (found.teacher_gap_N[~scored] == 0).all() and not torch.equal(found.teacher_gap_N, gap)
        if control == "shuffled":
            assert torch.equal(found.teacher_gap_N[scored].sort().values, gap[scored].sort().values)
            assert torch.equal(found.skill_gap_N, 2 * found.teacher_gap_N)
        if control == "noise":
            noise = (found.teacher_gap_N - gap)[scored]
            assert 0.7 < noise.std() < 1.3 and abs(noise.mean()) < 0.4
        if control == "reduction":
            assert (found.teacher_gap_N == 0).all() and (found.skill_gap_N == 0).all()


def test_shuffled_teacher_loses_the_direction_that_the_teacher_knew():
    """10 % of tokens decide (their gradient lies along the first axis, and their gap is 2); the rest pull elsewhere."""
    generator = torch.Generator().manual_seed(0)
    group = torch.zeros(2, dtype=torch.int64)
    x = {control: [] for control in (None, "shuffled")}
    reference = []
    for _ in range(30):
        batch = as_tensors([session([1.0, 0.0], tokens=50) for _ in range(2)], 0.0)
        spans = spans_of(batch, group)
        decides_N = (torch.rand(spans.num_tokens, generator=generator) < 0.1) & spans.mask
        feature_ND = torch.randn(spans.num_tokens, 8, generator=generator) * 0.3
        feature_ND[:, 0] += decides_N.float()
        feature_ND[:, 1] += (~decides_N & spans.mask).float()
        signals = Signals(teacher_gap_N=2 * decides_N.float())
        for control, found in x.items():
            found.append(controlled(signals, spans, control, generator).teacher_gap_N @ feature_ND)
        reference.append(torch.eye(8)[0] + 0.5 * torch.randn(8, generator=generator))
    aligned = {}
    reference = torch.stack(reference)
    for control, found in x.items():
        found = torch.stack(found)
        pairs = (found, found), (found, reference), (reference, reference)
        aligned[control] = alignment(*(inner_products(*pair) for pair in pairs))
    assert aligned[None] > 0.95 and aligned["shuffled"] < 0.3


def recorded(run_folder, output):
    (batch, group), *_ = read_rollouts(output / "rollouts.jsonl", len(WORDS))
    model, _ = run_folder.last_checkpoint(Console(quiet=True)).restore_policy(toy_config(run_folder.path).policy)
    return model.eval(), batch, spans_of(batch, group), toy_config(run_folder.path)


def test_token_statistics_and_sizes_are_those_of_the_logits(run_folder, probed):
    """Against the log-softmax of the model's own logits, and the gradient that autograd leaves there."""
    model, batch, spans, config = recorded(run_folder, probed[0])
    logp_BT, entropy_BT, sum_sq_BT = token_statistics(model, batch, config)
    assert torch.allclose(logp_BT, batch.old_logp, atol=1e-4) and torch.allclose(entropy_BT, batch.entropy, atol=1e-4)
    credit = METHODS["turn_grpo"].assign(
        spans, Signals(turn_reward_K=batch.turn_reward[spans.trajectory_of_turn, spans.turn_index])
    )
    credit = replace(credit, surrogate=CISPO())
    assert (credit.credit_N != 0).any()
    weight_BT = (credit.credit_N * credit.token_weight_N).view_as(batch.policy)
    wanted = []
    for row, one in enumerate(batch.sessions):
        logits = model(torch.tensor([one.prompt + one.ids])).logits[0].detach().requires_grad_()
        at = batch.policy[row].nonzero().flatten()
        place = at + len(one.prompt) - 1
        (logits[place].log_softmax(-1)[range(len(at)), batch.ids[row, at]] * weight_BT[row, at]).sum().backward()
        wanted.append(logits.grad[place].norm(dim=1))
    found = token_sizes(credit, batch, spans, logp_BT, sum_sq_BT)
    assert torch.allclose(found, torch.cat(wanted), rtol=1e-3, atol=1e-7) and found.max() > 0
    distilled = replace(credit, distill_N=-credit.token_weight_N, distill_kind="sampled_reverse_kl")
    without = Credit(torch.zeros_like(credit.credit_N), credit.token_weight_N, CISPO())
    both = token_sizes(replace(distilled, credit_N=without.credit_N), batch, spans, logp_BT, sum_sq_BT)
    assert (both > 0).any() and (token_sizes(without, batch, spans, logp_BT, sum_sq_BT) == 0).all()


def test_backward_leaves_one_batch_and_nothing_else(run_folder, probed):
    model, batch, spans, config = recorded(run_folder, probed[0])
    credit = reference_credit(batch, spans)
    backward(model, batch, credit, None, config)
    once = gradient_vector(model, 0, 0)
    backward(model, batch, credit, None, config)
    assert torch.equal(once, gradient_vector(model, 0, 0)) and once.abs().max() > 0
    assert len(once) == sum(p.numel() for p in model.parameters())
    parts = [p.grad for p in model.parameters()]
    assert torch.equal(gradient_vector(model, 32, 5), count_sketch(parts, 32, seed=5))
    nothing = replace(credit, credit_N=torch.zeros_like(credit.credit_N))
    backward(model, batch, nothing, None, config)
    assert (gradient_vector(model, 0, 0) == 0).all() and (gradient_vector(model, 32, 5) == 0).all()


def test_log_probs_that_were_not_recorded_are_the_policys():
    batch = as_tensors([session([1.0, 0.0])], 0.0)
    batch.old_logp[0, 1] = math.nan
    batch.entropy[0, 1] = math.nan
    assert complete(batch, torch.tensor([[0.0, -3.0, 0.0, -1.5]]), torch.full((1, 4), 0.25)) == 0.5
    assert batch.old_logp.tolist() == [[0, -3, 0, -1]] and batch.entropy.tolist() == [[0, 0.25, 0, 0.5]]


def test_variants_follow_their_method_and_keep_the_runs_options(policy_folder):
    config = toy_config(policy_folder, **CREST)
    found = variants_of(["crest", "grpo", "crest"], config, controls=True)
    names = ["grpo", "turn_grpo", "crest", "crest@shuffled", "crest@noise", "crest@reduction"]
    assert [variant.name for variant in found] == names
    assert all(v.section.options == ({"lam": 1.0} if v.section.name == "crest" else {}) for v in found)
    found = variants_of(["crest@noise"], config, controls=True)
    assert [variant.name for variant in found] == ["grpo", "turn_grpo", "crest@noise"]
    assert [v.name for v in variants_of(["crest"], config, controls=False)] == ["grpo", "turn_grpo", "crest"]


def test_options_give_methods_settings_and_rows_of_their_own(policy_folder, tmp_path):
    path = tmp_path / "options.toml"
    path.write_text(
        '[crest]\nsession_reward = "mean"\n[strict]\nname = "crest"\noptions = { lam = 0.5 }\n'
        '[grpo_mean]\nname = "grpo"\nsession_reward = "mean"\n[triage.options]\ntable = [0.1, 0.2, 0.3, 0.4]\n'
    )
    config = toy_config(policy_folder, **CREST)
    found = {v.name: v for v in variants_of(["crest", "strict@noise", "grpo_mean", "triage"], config, False, path)}
    assert list(found) == ["grpo", "turn_grpo", "crest", "strict@noise", "grpo_mean", "triage"]
    assert found["crest"].section.options == {"lam": 1.0} and found["crest"].section.session_reward == "mean"
    assert found["strict@noise"].section.options == {"lam": 0.5} and found["strict@noise"].control == "noise"
    assert (found["grpo"].section.session_reward, found["grpo_mean"].section.session_reward) == ("all", "mean")
    assert {v.name for v in variants_of(["all"], config, False, path)} == {*METHODS, "strict", "grpo_mean"}
    path.write_text("[crest]\noptions = {}\n")
    assert variants_of(["crest"], config, False, path)[-1].section.options == {}
    path.write_text(f'[{REFERENCE}]\nname = "crest"\n')
    with pytest.raises(ValueError, match="the row of the reference has that name"):
        variants_of([REFERENCE], config, False, path)


def test_what_a_probe_leaves(run_folder, probed):
    output, rows, said = probed
    assert {path.name for path in output.iterdir()} == {
        "probe.csv",
        "probe.png",
        "probe_batches.csv",
        "rollouts.jsonl",
    }
    names = ["grpo", "turn_grpo", "crest", "crest@shuffled", "crest@noise", "crest@reduction", REFERENCE]
    assert list(rows) == names and all(name in said for name in names) and "batch 4/4" in said
    with open(output / "probe.csv", newline="") as file:
        written = list(csv.DictReader(file))
    assert [row["method"] for row in written] == names
    for row in written:
        for key, value in row.items():
            assert key == "method" or float(value) == pytest.approx(rows[row["method"]][key], rel=1e-5, nan_ok=True)
    with open(output / "probe_batches.csv", newline="") as file:
        by_batch = list(csv.DictReader(file))
    assert len(by_batch) == 4 * len(names)
    for name in names:
        mean = sum(float(row["cosine"]) for row in by_batch if row["method"] == name) / 4
        assert mean == pytest.approx(rows[name]["cosine"], abs=1e-5)
    sessions = [json.loads(line) for line in (output / "rollouts.jsonl").read_text().splitlines()]
    assert len(sessions) == 4 * 64 and len({s["seed"] for s in sessions}) == 4 * 8
    assert all(s["gold"] and s["requests"] for s in sessions)


def test_figures_that_must_be(probed):
    """A method against itself differs by 0; without a gap CrEST is turn_grpo; the reference is aligned with itself."""
    rows = probed[1]
    for name in ("turn_grpo", "grpo"):
        for key in ("snr", "cosine"):
            assert rows[name][f"{key}_vs_{name}"] == rows[name][f"{key}_vs_{name}_error"] == 0
    same = {key: value for key, value in rows["turn_grpo"].items() if key != "method"}
    assert {key: rows["crest@reduction"][key] for key in same} == pytest.approx(same, nan_ok=True)
    assert rows["crest"]["cosine_vs_turn_grpo"] != 0 != rows["crest@shuffled"]["cosine_vs_turn_grpo"]
    assert rows[REFERENCE]["alignment"] == pytest.approx(1)
    assert rows["turn_grpo"]["cosine"] > 0.2 and rows["turn_grpo"]["cosine_error"] > 0
    assert 0 < rows["crest"]["top_1"] < rows["crest"]["top_5"] < rows["crest"]["top_10"] < 1


def test_a_probe_of_recorded_rollouts_is_the_same(run_folder, probed, tmp_path):
    """On the model's folder, which knows nothing of the run, with the run's configuration; sketched, it is near."""
    output, rows, _ = probed
    config = toy_config(run_folder.path, **CREST)
    options = dict(batches=4, seed=3, config=config, controls=False, console=Console(quiet=True))
    options["rollouts"] = output / "rollouts.jsonl"
    for project in (0, 4096):
        found = probe(last_of(run_folder), ["crest"], output=tmp_path / str(project), project=project, **options)
        assert not (tmp_path / str(project) / "rollouts.jsonl").exists()
        near = 1e-4 if project == 0 else 0.1
        for row in found:
            for key, error in (("cosine", near), ("alignment", near), ("top_5", 1e-4)):
                assert row[key] == pytest.approx(rows[row["method"]][key], abs=error), (row["method"], key)


def test_value_head_learns_from_batches_that_are_not_measured(run_folder, tmp_path):
    """Five more of them, recorded behind the measured ones; a file without any is refused."""
    given = dict(batches=3, controls=False, console=Console(quiet=True), config=toy_config(run_folder.path))
    rows = probe(run_folder.path, ["factor", "trace"], output=tmp_path / "one", **given)
    assert [row["method"] for row in rows] == ["grpo", "turn_grpo", "factor", "trace", REFERENCE]
    lines = (tmp_path / "one" / "rollouts.jsonl").read_text().splitlines(keepends=True)
    assert {json.loads(line)["batch"] for line in lines} == set(range(8))
    given["rollouts"] = tmp_path / "one" / "rollouts.jsonl"
    again = probe(last_of(run_folder), ["factor", "trace"], output=tmp_path / "two", **given)
    for row, same in zip(rows, again, strict=True):
        assert row["cosine"] == pytest.approx(same["cosine"], abs=1e-4) or row["cosine"] == same["cosine"]
    given["rollouts"].write_text("".join(line for line in lines if json.loads(line)["batch"] < 3))
    with pytest.raises(ValueError, match="holds 3 batches, want 3, and one or more that the value head learns from"):
        probe(last_of(run_folder), ["factor"], output=tmp_path / "three", **given)


def test_sessions_of_another_policy_are_told(run_folder, probed, tmp_path, capsys):
    toy_model(seed=1).save_pretrained(tmp_path / "other")
    toy_tokenizer().save_pretrained(tmp_path / "other")
    given = dict(rollouts=probed[0] / "rollouts.jsonl", console=Console(width=200))
    probe(tmp_path / "other", ["grpo"], batches=3, output=tmp_path / "probe", **given)
    said = capsys.readouterr().out
    assert said.count("recorded log-probs differ from the policy's by") == 3


def test_bad_input_is_refused_before_any_work(run_folder, probed, policy_folder, tmp_path):
    recorded = probed[0] / "rollouts.jsonl"

    def refused(words, policy=run_folder.path, methods=("grpo",), **options):
        options = {"batches": 3, "output": tmp_path / "never", "console": Console(quiet=True)} | options
        with pytest.raises(ValueError, match=words):
            probe(policy, list(methods), **options)
        assert not (tmp_path / "never").exists()

    refused("--batches: 2 are too few, want 3 or more", batches=2)
    refused("--methods: unknown method 'grop'; known: grpo, turn_grpo", methods=["grop"])
    refused("--methods: none named", methods=[])
    refused("unknown control 'crest@noisy'; known: shuffled, noise, reduction", methods=["crest@noisy"])
    refused("unknown control 'grpo@noise'; known: none for grpo", methods=["grpo@noise"])
    refused("--project: found -1", project=-1)
    refused("no run folder; want a run's folder, or a model's with --rollouts or --config", policy=policy_folder)
    refused("is no model folder", policy=tmp_path / "nothing", rollouts=recorded)
    refused("holds 4 batches, want 5", rollouts=recorded, batches=5)
    lone = tmp_path / "lone.jsonl"
    lines = [json.loads(line) for line in recorded.read_text().splitlines()]
    lone.write_text("".join(json.dumps(line | {"group": place}) + "\n" for place, line in enumerate(lines)))
    refused("lone.jsonl: batch 0 holds one rollout of group 0, want two or more", rollouts=lone)
    refused("nothing is not there; want a run's folder", policy=tmp_path / "nothing")
    refused("holds a probe already", output=probed[0])
    toy_model(vocab_size=8).save_pretrained(tmp_path / "small")
    toy_tokenizer().save_pretrained(tmp_path / "small")
    refused(r"line 1: ids\[\d+\] is \d+, the policy's vocabulary is 0..7", policy=tmp_path / "small", rollouts=recorded)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.toml").write_text((run_folder.path / "config.toml").read_text())
    refused("has no checkpoint yet", policy=tmp_path / "new")


def test_command(run_folder, tmp_path):
    """A run's folder with its own configuration; a model's folder alone has no way to play."""
    given = ["--methods", "turn_grpo, crest", "--batches", "3", "--no-controls", "--project", "64", "--output"]
    done = CliRunner().invoke(app, ["probe", str(run_folder.path), *given, str(tmp_path / "probe")])
    assert done.exit_code == 0 and "sketches of 64" in done.output
    with open(tmp_path / "probe" / "probe.csv", newline="") as file:
        assert [row["method"] for row in csv.DictReader(file)] == ["grpo", "turn_grpo", "crest", REFERENCE]
    done = CliRunner().invoke(app, ["probe", str(last_of(run_folder)), *given, str(tmp_path / "other")])
    assert "is no run folder; want a run's folder" in str(done.exception)


def test_no_signal_is_told_and_no_zero(run_folder, tmp_path, monkeypatch, capsys):
    """A reward per session that never pays: grpo has no gradient, by the mean of the turns it has one."""
    monkeypatch.setattr("crest_train.signals.session_reward", never_all)
    path = tmp_path / "options.toml"
    path.write_text('[grpo_mean]\nname = "grpo"\nsession_reward = "mean"\n')
    given = dict(batches=3, controls=False, output=tmp_path / "probe", console=Console(width=100))
    rows = probe(run_folder.path, ["grpo_mean"], options=path, **given)
    silent, _, paid, _ = rows
    assert (silent["method"], silent["zero_gradients"]) == ("grpo", 3) and math.isnan(silent["cosine"])
    assert math.isnan(paid["cosine_vs_grpo"]) and paid["cosine"] > 0 and paid["zero_gradients"] == 0
    said = capsys.readouterr().out
    assert said.count("no signal") == 1 and "method.session_reward=mean" in said
    again = tmp_path / "again"
    given = ["--methods", "grpo", "--batches", "3", "--set", 'method.session_reward="mean"', "--output", str(again)]
    done = CliRunner().invoke(app, ["probe", str(run_folder.path), *given])
    assert done.exit_code == 0 and "no signal" not in done.output
    done = CliRunner().invoke(app, ["probe", str(run_folder.path), "--set", "method.session_rewards=1"])
    assert "--set: unknown key 'method.session_rewards'" in str(done.exception)


def never_all(rollout, kind):
    return session_reward(rollout, kind) * (kind == "mean")
