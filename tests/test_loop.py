"""The loop: same seed same run, gradients that no split changes, what a run leaves behind."""

import math
from dataclasses import replace

import pytest
import torch
from crest_train.chat import make_chat
from crest_train.config import TeacherSection, TrainingSection, load_config
from crest_train.contexts import hints, teacher_stream
from crest_train.credit import assign_credit, needs_of, rows_with_signal, session_reward, spans_of
from crest_train.draws import session_seeds
from crest_train.environments import FIRST_HELD_OUT_SEED
from crest_train.evaluate import evaluate
from crest_train.imitation import imitate
from crest_train.loop import train
from crest_train.recording import read_rollouts
from crest_train.report import closing_table, grpo_reference
from crest_train.rollouts import Sampling, rollout
from crest_train.signals import Scorers, gather
from crest_train.teacher import teacher_gap
from crest_train.update import update
from crest_train.view import page_data
from rich.console import Console
from toy import HINT, WORDS, Toy, toy_model, toy_tokenizer
from toy_runs import assert_same_run, drawn, quiet_train, toy_config

from crest_ops import Credit, PPOClip


@pytest.fixture(scope="module")
def finished(policy_folder, tmp_path_factory):
    return quiet_train(toy_config(policy_folder), tmp_path_factory.mktemp("runs") / "run")


def test_same_seed_gives_the_same_run_and_another_does_not(policy_folder, finished, tmp_path):
    assert_same_run(finished, quiet_train(toy_config(policy_folder), tmp_path / "again"))
    other = quiet_train(toy_config(policy_folder, run={"seed": 2, "threads": 1}), tmp_path / "other")
    assert drawn(other) != drawn(finished)


def test_what_a_run_leaves(policy_folder, finished):
    config = toy_config(policy_folder)
    assert load_config(finished.path / "config.toml") == config
    assert {path.name for path in finished.path.iterdir()} - {".lock"} == {
        "checkpoints",
        "config.toml",
        "curves.png",
        "metrics.jsonl",
        "records",
        "view.html",
    }
    events = [(line["event"], line["step"]) for line in finished.metrics()]
    assert events[:2] == [("warm_start", 0), ("evaluation", 0)]
    assert events[2:] == [
        ("step", 1),
        ("step", 2),
        ("evaluation", 2),
        ("step", 3),
        ("step", 4),
        ("evaluation", 4),
    ]
    step = finished.metrics()[2]
    assert {"turn_success", "session_success", "loss", "entropy", "teacher_gap", "share_amplified"} <= set(step)
    assert all(math.isfinite(value) for key, value in step.items() if key != "event")
    assert [path.name for path in finished.records.iterdir()] == ["step-00004.jsonl"]
    ((played, group),) = read_rollouts(finished.records / "step-00004.jsonl", len(WORDS))
    assert group.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert [session.seed for session in played.sessions[::4]] == session_seeds(config, 4)[::4]
    assert len(page_data(finished.path)["sessions"]) == 12
    console = Console(record=True, width=100, file=open("/dev/null", "w"))
    console.print(closing_table(finished.metrics(), config))
    for words in ("turn success (held out)", "session success", "tokens/s", "peak memory", "minutes"):
        assert words in console.export_text(clear=False)


def test_sessions_that_outgrow_the_context_are_told_once_and_train_on(policy_folder, tmp_path, capsys):
    model = toy_model(context=12)
    model.save_pretrained(tmp_path / "short")
    toy_tokenizer().save_pretrained(tmp_path / "short")
    console = Console(width=200)
    folder = train(toy_config(tmp_path / "short"), tmp_path / "run", console)
    said = capsys.readouterr().out
    assert said.count("reached the model's context of 12 tokens") == 1
    assert folder.metrics()[-1]["step"] == 4


class Hopeless(Toy):
    """Nothing is ever right."""

    def step(self, action):
        return super().step("none of the letters")


@pytest.mark.parametrize(("environment", "times"), [("test_loop:Hopeless", 1), ("toy:Toy", 0)])
def test_run_without_any_signal_says_so_once(policy_folder, tmp_path, capsys, environment, times):
    config = toy_config(policy_folder, environment={"name": environment}, training={"steps": 2})
    train(config, tmp_path / "run", Console(width=60))
    said = capsys.readouterr().out
    assert said.count("nothing was learned") == said.count("[warm_start]") == times


def play(model, toys, group_size=4, seed=0):
    seeds = [1 + i // group_size for i in range(len(toys))]
    sampling = Sampling(max_action_tokens=3, gold=True)
    chat, generator = make_chat(toy_tokenizer()), torch.Generator().manual_seed(seed)
    return rollout(model, chat, toys, seeds, generator=generator, sampling=sampling)


def test_teacher_gap_is_that_of_the_hinted_session():
    model = toy_model()
    played = play(model, [Toy(2, "be brief") for _ in range(3)] + [Toy(2)])
    chat, group, section = make_chat(toy_tokenizer()), torch.zeros(4), TeacherSection(template=HINT)
    found = teacher_gap(model, chat, played, group, [0, 2, 3], section, temperature=0.5, tokens_per_micro_batch=40)
    teacher_ids, position = teacher_stream(chat, played, hints(played, group, section), section)
    assert (found[1] == 0).all() and (found[~played.policy] == 0).all()
    for row in (0, 2, 3):
        session = played.sessions[row]
        ids = torch.tensor([session.prompt + teacher_ids[row].tolist()])
        with torch.no_grad():
            logp = (model.double()(ids).logits[0, :-1] / 0.5).log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        model.float()
        column = played.policy[row].nonzero().flatten()
        wanted = logp[position[row, column] + len(session.prompt) - 1]
        assert (found[row, column] - (wanted - played.old_logp[row, column])).abs().max() < 1e-4


def test_sessions_without_an_action_are_left_out_of_every_pass(policy_folder):
    model, chat = toy_model(context=8), make_chat(toy_tokenizer())
    played = play(model, [Toy(1), Toy(1, "say no be brief say a")], group_size=1)
    assert played.policy.any(1).tolist() == [True, False]
    group, section = torch.zeros(2), TeacherSection(template="{hint}")  # "a" for "say a": no longer than the request
    found = teacher_gap(model, chat, played, group, [0, 1], section, temperature=1.0, tokens_per_micro_batch=20)
    assert (found[1] == 0).all() and (found[0][played.policy[0]] != 0).all()
    config = toy_config(policy_folder, warm_start={"steps": 1})
    with pytest.raises(ValueError, match="no action fits into its context of 4 tokens"):
        imitate(toy_model(context=4), chat, config, Console(quiet=True))


def gradients_of(model, played, credit, **section):
    """The gradient of one update, read off a plain gradient step."""
    before = [weight.detach().clone() for weight in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = TrainingSection(minibatches=1, clip=1e9, **section)
    metrics = update(model, optimizer, played, credit, options, temperature=0.8, generator=torch.Generator())
    steps = [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]
    for weight, old in zip(model.parameters(), before, strict=True):
        weight.data.copy_(old)
    return steps, metrics


@pytest.mark.parametrize("surrogate", [PPOClip(0.2, 0.28), PPOClip(0.2, 0.28, level="trajectory", ratio="sum")])
@pytest.mark.parametrize("system", ["", "be brief"])
def test_gradient_is_that_of_the_plain_loss_however_it_is_split(system, surrogate):
    model = toy_model().double()
    played = play(model, [Toy(k, system) for k in (1, 2, 3, 2, 1, 3)])
    credit_BT = torch.randn(played.policy.shape, generator=torch.Generator().manual_seed(0)) * played.policy
    credit_BT[2] = 0
    weight = 1.0 / played.policy.sum()
    credit = Credit(credit_BT.flatten(), weight.expand(played.policy.numel()).contiguous(), surrogate)

    loss = 0.0
    for row, session in enumerate(played.sessions):
        ids = torch.tensor([session.prompt + session.ids])
        logp = (model(ids).logits[0, :-1] / 0.8).log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        at = played.policy[row, : len(session.ids)].nonzero().flatten()
        logp = logp[at + len(session.prompt) - 1]
        ratio = (logp - played.old_logp[row, at]).exp()
        if surrogate.level == "trajectory":
            ratio = ratio.detach().prod() * (logp - logp.detach()).exp()
        advantage = credit_BT[row, at].double()
        loss = loss - (torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage) * weight).sum()
    wanted = torch.autograd.grad(loss, list(model.parameters()))

    for tokens in (1, 30, 1000):
        found, metrics = gradients_of(model, played, credit, tokens_per_micro_batch=tokens)
        assert metrics["trained_rows"] == 5
        assert metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
        for one, other in zip(found, wanted, strict=True):
            assert (one - other).abs().max() < 1e-5 * max(1.0, float(other.abs().max()))


def test_ratios_per_action_are_those_of_the_recorded_actions_also_where_two_touch():
    model = toy_model().double()
    played = play(model, [Toy(k) for k in (1, 2, 3)])
    session = played.sessions[1]
    place = next(i for i, action in enumerate(session.actions) if len(action.tokens) > 1)
    action = session.actions[place]
    second = replace(action, start=action.start + 1, tokens=action.tokens[1:], logp=action.logp[1:])
    session.actions[place : place + 1] = [replace(action, tokens=action.tokens[:1], logp=action.logp[:1]), second]
    credit_BT = torch.randn(played.policy.shape, generator=torch.Generator().manual_seed(0)) * played.policy
    weight_BT = played.policy / played.policy.sum()
    surrogate = PPOClip(1.0, 9.0, level="action", ratio="sum")

    loss = 0.0
    for row, session in enumerate(played.sessions):
        ids = torch.tensor([session.prompt + session.ids])
        logp = (model(ids).logits[0, :-1] / 0.8).log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        for action in session.actions:
            written = slice(action.start, action.start + len(action.tokens))
            own = logp[torch.arange(written.start, written.stop) + len(session.prompt) - 1]
            ratio = (own - torch.tensor(action.logp)).sum().exp().detach() * (own - own.detach()).exp()
            loss = loss - (ratio * credit_BT[row, written] * weight_BT[row, written]).sum()
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    found, _ = gradients_of(model, played, Credit(credit_BT.flatten(), weight_BT.flatten(), surrogate))
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() < 1e-5 * max(1.0, float(other.abs().max()))


def test_update_without_signal_changes_nothing():
    model = toy_model()
    played = play(model, [Toy(1) for _ in range(4)])
    credit = Credit(torch.zeros(played.policy.numel()), torch.ones(played.policy.numel()), PPOClip(0.2, 0.28))
    steps, metrics = gradients_of(model, played, credit)
    assert all((step == 0).all() for step in steps)
    assert metrics["trained_rows"] == metrics["trained_tokens"] == metrics["loss"] == 0


def outcome(rewards, reached=None, num_turns=None):
    """A rollout with given turn rewards, two tokens an action and one action a turn."""
    played = play(toy_model(), [Toy(1)])
    rewards = torch.tensor(rewards)
    played.turn_reward = rewards
    played.reached = torch.ones_like(rewards, dtype=torch.bool) if reached is None else torch.tensor(reached)
    played.num_turns = torch.tensor([rewards.shape[1]] * len(rewards) if num_turns is None else num_turns)
    return played


def test_session_rewards():
    played = outcome([[1.0, 1.0, 0.0], [1.0, 0.5, 1.0], [1.0, 1.0, 0.0]], num_turns=[3, 3, 2])
    assert session_reward(played, "all").tolist() == [0.0, 0.5, 1.0]
    assert session_reward(played, "mean").tolist() == pytest.approx([2 / 3, 2.5 / 3, 1.0])


def test_rows_with_signal_are_those_of_groups_that_differ():
    played = outcome(
        [[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]],
        reached=[[True, True]] * 4 + [[True, False], [True, True]],
    )
    assert rows_with_signal(played, torch.tensor([0, 0, 1, 1, 2, 2])) == [2, 3, 4, 5]


def test_turn_credit_of_a_rollout_by_hand():
    """Turn 0: rewards 1, 0: advantages +-1/sqrt 2 (sample std sqrt .5); turn 1: both 1, no credit."""
    model = toy_model()
    played = play(model, [Toy(2), Toy(2)])
    played.turn_reward = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    group = torch.tensor([0, 0])
    config = load_config(None, {"method": {"name": "turn_grpo"}})
    scorers, spans = Scorers(model, None), spans_of(played, group)
    signals = gather(needs_of(config.method, 1), played, group, spans, config, scorers)
    credit_BT = assign_credit(spans, signals, config.method, 1).credit_N.view_as(played.policy)
    for row, sign in ((0, 1), (1, -1)):
        first = credit_BT[row][played.turn[row] == 0]
        assert first.tolist() == pytest.approx([sign * 0.5 / math.sqrt(0.5)] * len(first), abs=1e-4)
        assert (credit_BT[row][played.turn[row] != 0] == 0).all()


def test_training_and_held_out_sessions_never_meet():
    config = toy_config("x", run={"seed": 10**6}, rollout={"sessions": 5, "group_size": 2})
    for step in (1, 2, 10**6):
        seeds = session_seeds(config, step)
        assert len(seeds) == 10 and max(seeds) < FIRST_HELD_OUT_SEED and min(seeds) >= 0
    assert session_seeds(toy_config("x", run={"seed": 0}), 2) == [3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5]


def test_evaluation_counts_turns_and_whole_sessions(policy_folder):
    model, chat = toy_model(), make_chat(toy_tokenizer())
    found = evaluate(model, chat, toy_config(policy_folder))
    seeds = [FIRST_HELD_OUT_SEED + i for i in range(20)]
    generator = torch.Generator().manual_seed(0)
    sampling = Sampling(max_action_tokens=3)
    played = rollout(model, chat, [Toy(2) for _ in seeds], seeds, generator=generator, sampling=sampling)
    won = [sum(session.turn_reward) for session in played.sessions]
    assert found["turn_success"] == pytest.approx(sum(won) / 40)
    assert found["session_success"] == pytest.approx(won.count(2.0) / 20)


def test_imitation_learns_with_and_without_hints(policy_folder):
    model, chat = toy_model(), make_chat(toy_tokenizer())
    config = toy_config(policy_folder, warm_start={"steps": 1}, environment={"options": {"system": "be brief"}})
    first = imitate(model, chat, config, Console(quiet=True))["loss"]
    config = toy_config(
        policy_folder,
        warm_start={"steps": 40, "rate": 3e-3},
        environment={"options": {"system": "be brief"}},
    )
    assert imitate(model, chat, config, Console(quiet=True))["loss"] < 0.5 * first


def test_grpo_reference_is_read_from_the_results_file(tmp_path):
    path = tmp_path / "desk.csv"
    default = load_config()
    assert grpo_reference(default, path) is None
    last = default.training.steps
    path.write_text(
        f"turns,method,seed,step,turn_success,session_success\n8,grpo,0,{last},0.9,0.5\n8,grpo,1,{last},0.8,0.7\n"
        f"8,grpo,0,{last - 10},0.1,0.1\n8,crest,0,{last},1.0,1.0\n16,grpo,0,{last},0.2,0.1\n"
    )
    line = grpo_reference(default, path)
    assert "mean of 2 seeds" in line and "turn success 0.850, session success 0.600" in line
    assert grpo_reference(load_config(None, {"method": {"name": "grpo"}}), path) is None
    assert grpo_reference(load_config(None, {"environment": {"options": {"num_turns": 4}}}), path) is None
    assert "0.200" in grpo_reference(load_config(None, {"environment": {"options": {"num_turns": 16}}}), path)
    assert grpo_reference(load_config(None, {"environment": {"options": {"coupled": 0.9}}}), path) is None
