"""Signals of a rollout: by rule, from the teacher, from scorers; every method through the trainer; distillation."""

import pytest
import torch
from crest_train.chat import make_chat
from crest_train.config import TrainingSection, load_config
from crest_train.credit import action_reward, assign_credit, needs_of, session_reward, spans_of
from crest_train.environments.desk import Desk
from crest_train.environments.desk_world import VOCABULARY
from crest_train.metrics import credit_metrics
from crest_train.policy import TinyConfig, TinyForCausalLM
from crest_train.rollouts import Sampling, rollout
from crest_train.sessions import Action, Session, as_tensors
from crest_train.signals import Scorers, check_environment, gather, teacher_of
from crest_train.teacher import teacher_gap
from crest_train.tokenizer import build_tokenizer
from crest_train.update import accumulate_gradient
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import Toy, toy_model, toy_tokenizer
from toy_runs import last_of, quiet_train, save_policy, toy_config

from crest_ops import METHODS, AdditiveCredit, Credit, PPOClip, Spans
from crest_ops.methods.abc import clue_score

TURNS = st.tuples(st.integers(1, 3), st.floats(0, 1, width=32))
SESSIONS = (
    ["cat f1", "zz", "rm f2", "done", "cat f2", "cat f9", "done"],
    ["cat f3", "cat f3", "done", "done"],
)


def session_of(seed, actions, cut=False):
    """A session of `desk` with two turns that plays the actions, each of them three tokens long, one given before."""
    desk = Desk(num_turns=2, num_files=6)
    session = Session(seed, "", [], 2, [desk.reset(seed)], [], [], [], [], cut)
    for text in actions:
        turn = len(session.turn_reward)
        step = desk.step(text)
        action = Action(turn, len(session.ids) + 1, [7, 8, 9], [-0.5] * 3, [0.25] * 3, step.info["state_key"])
        action.observation, action.info = step.observation, step.info
        session.ids += [1, 7, 8, 9]
        session.actions.append(action)
        if step.turn_reward is not None:
            session.turn_reward.append(step.turn_reward)
        if step.done:
            break
    return session


def gathered(batch, group, *needs, **method):
    config = load_config(None, {"method": method})
    return gather(needs, batch, group, spans_of(batch, group), config, Scorers(toy_model(), None))


def test_signals_of_desk_are_what_the_environment_said():
    batch, group = as_tensors([session_of(k, actions) for k, actions in enumerate(SESSIONS)], 0.0), torch.tensor([0, 1])
    infos = [action.info for session in batch.sessions for action in session.actions]
    first = len(batch.sessions[0].actions)
    infos[3]["cause"], infos[first + 2]["cause"] = 1, 0
    names = ("role_S", "feedback_S", "error_S", "cause_S", "clue_score_S", "state_key_S", "action_mask_S", "entropy_N")
    found = gathered(batch, group, *names)
    found.require(spans_of(batch, group), *names)
    for name in ("role", "feedback", "error", "state_key"):
        assert getattr(found, f"{name}_S").tolist() == [info[name] for info in infos]
    causes = [info["cause"] for info in infos]
    counted = [cause if cause < 0 or k < first else cause + first for k, cause in enumerate(causes)]
    assert found.cause_S.tolist() == counted and found.action_mask_S.all()
    assert found.entropy_N.tolist() == [0.25 if value else 0.0 for value in batch.policy.flatten().tolist()]
    assert found.reward_B is None and found.teacher_gap_N is None  # only what was asked for


def test_clue_scores_follow_the_roles():
    batch = as_tensors([session_of(0, SESSIONS[0])], 0.0)
    for action, role in zip(batch.sessions[0].actions, (0, 1, 2, 3), strict=False):
        action.info = action.info | {"role": role}
    score = gathered(batch, torch.tensor([0]), "clue_score_S").clue_score_S[:4]
    assert score.tolist() == pytest.approx([1.8, 1.8, 1.0, 0.2])
    one, none = torch.tensor([True]), torch.tensor([False])
    assert score[0] == clue_score(one, none, none) and score[3] == clue_score(none, none, one)


def test_an_action_that_was_never_played_is_an_error_of_its_own():
    session = session_of(0, SESSIONS[1][:1], cut=True)
    session.ids += [1, 7]
    session.actions.append(Action(0, len(session.ids) - 1, [7], [-0.5], [0.0], cut=True))
    session.turn_reward.append(0.0)
    found = gathered(as_tensors([session], 0.0), torch.tensor([0]), "role_S", "feedback_S", "error_S", "cause_S")
    last = (found.role_S[-1], found.feedback_S[-1], found.error_S[-1], found.cause_S[-1])
    assert tuple(map(int, last)) == (3, 0, 1, -1)


@settings(max_examples=40, deadline=None)
@given(turns=st.lists(st.lists(TURNS, max_size=3), min_size=1, max_size=3))
def test_action_rewards_sum_to_the_session_reward(turns):
    """A session is its turns: number of actions, reward; up to three may not have been reached."""
    sessions = []
    for row, played in enumerate(turns):
        actions = [Action(k, 0, [1]) for k, (count, _) in enumerate(played) for _ in range(count)]
        for place, action in enumerate(actions):
            action.start = 2 * place + 1
            action.logp = action.entropy = [0.0]
        rewards = [reward for _, reward in played]
        sessions.append(Session(row, "", [], 3, [], [], [1] * (2 * len(actions) + 1), actions, rewards, False))
    batch, group = as_tensors(sessions, 0.0), torch.arange(len(sessions))
    trajectory = spans_of(batch, group).trajectory_of_action
    for kind in ("all", "mean"):
        summed = torch.zeros(len(sessions)).index_add(0, trajectory, action_reward(batch, kind))
        assert torch.allclose(summed, session_reward(batch, kind), atol=1e-6)


def test_spans_are_those_of_the_mask_and_tell_actions_apart_that_touch():
    played = play(Toy)
    group = torch.tensor([0, 0, 1, 1])
    found, wanted = spans_of(played, group), Spans.from_mask(played.policy, group=group, turn=played.turn)
    for name in Spans.__dataclass_fields__:
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    session = session_of(0, SESSIONS[0])
    session.actions[1].start -= 1  # no token is given between the first two
    spans = spans_of(as_tensors([session], 0.0), torch.tensor([0]))
    assert spans.num_actions == len(session.actions)
    assert spans.action_of_token[:8].tolist() == [-1, 0, 0, 0, 1, 1, 1, -1]


def play(toy, seed=0):
    chat, generator = make_chat(toy_tokenizer()), torch.Generator().manual_seed(seed)
    sampling = Sampling(max_action_tokens=3, gold=True)
    return rollout(toy_model(), chat, [toy(2) for _ in range(4)], [1, 1, 2, 2], generator=generator, sampling=sampling)


class Strange(Toy):
    """Says what no method can read."""

    said = {"feedback": 5, "role": True, "error": 0, "cause": 0, "state_key": 7}

    def step(self, action):
        step = super().step(action)
        step.info.clear()
        step.info.update(self.said)
        return step


@pytest.mark.parametrize(
    ("method", "environment", "said"),
    [
        ("triage", "toy:Toy", r"triage needs role_S, .*Step.info\['role'\]; environment toy:Toy gave 'error' "),
        ("efca", "toy:Toy", r"efca needs feedback_S, .*\['feedback'\]; environment toy:Toy gave no such key"),
        ("responsibility", "toy:Toy", r"needs error_S, .*\['error'\]; .* no such key .*wanted True or False"),
        ("abc", "test_signals_train:Strange", "clue_score_S, .* gave True .*wanted a .*Role"),
        ("efca", "test_signals_train:Strange", "feedback_S, .* gave 5 .*wanted -1, 0 or 1"),
        ("responsibility", "test_signals_train:Strange", "error_S, .* gave 0 "),
    ],
)
def test_an_environment_that_cannot_serve_a_method_is_told_before_any_work(tmp_path, method, environment, said):
    config = toy_config(tmp_path / "nothing", method={"name": method}, environment={"name": environment})
    with pytest.raises(ValueError, match=said):
        quiet_train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


class Nameless(Strange):
    """Names its states with texts."""

    said = {"state_key": "the first"}


@pytest.mark.parametrize(
    ("method", "environment", "context", "said"),
    [
        ("serl", "toy:Toy", "feedback", "serl needs the teacher's context feedback, .*'feedback'.* gave no such key "),
        ("gigpo", "test_signals_train:Nameless", "ground_truth", "environment Nameless: .*'state_key'.* 'the first'"),
    ],
)
def test_what_the_teacher_and_anchor_groups_need_is_asked_before_any_work_too(
    tmp_path, method, environment, context, said
):
    changes = {"environment": {"name": environment}, "teacher": {"context": context}}
    with pytest.raises(ValueError, match=said):
        quiet_train(toy_config(tmp_path / "nothing", method={"name": method}, **changes), tmp_path / "run")
    for other in ("grpo", "toolopd"):  # without a teacher, or with the skill for its context
        check_environment(toy_config("x", method={"name": other}, **changes))


class Untold(Toy):
    def gold(self):
        return 7


def test_a_ground_truth_that_is_no_text_is_refused_before_any_work(tmp_path):
    config = toy_config(
        tmp_path / "nothing", method={"name": "crest"}, environment={"name": "test_signals_train:Untold"}
    )
    with pytest.raises(ValueError, match="environment Untold: gold\\(\\) gave in turn 0 7; wanted a text"):
        quiet_train(config, tmp_path / "run")


def test_environments_are_asked_for_what_the_method_needs_alone():
    for method in ("grpo", "crest", "gigpo", "trace"):
        check_environment(toy_config("x", method={"name": method}))
    for method in METHODS:
        check_environment(load_config(None, {"method": {"name": method}}))


def test_a_cause_that_is_not_earlier_and_scorers_that_lack_are_refused():
    played, group = play(Strange), torch.tensor([0, 0, 1, 1])
    with pytest.raises(ValueError, match=r"Step.info\['cause'\] of action 0 of session 1 is 0; wanted the number"):
        gathered(played, group, "cause_S")
    for needs, missing in (("value_S", "value"), ("gold_logp", "reference"), ("teacher_gap_N", "chat")):
        with pytest.raises(ValueError, match=f"scorers.{missing} is None, want one, which .* needs"):
            gathered(played, group, needs)
    with pytest.raises(ValueError, match="needs luck_S, which the trainer does not gather"):
        gathered(played, group, "luck_S")


def test_the_skill_is_the_teacher_of_a_method_that_reads_it():
    played, group, chat = play(Toy), torch.tensor([0, 0, 1, 1]), make_chat(toy_tokenizer())
    played.turn_reward[0], played.turn_reward[1] = 1.0, 0.0
    config = toy_config("x", method={"name": "toolopd"}, teacher={"template": "{text} hint {hint}"})
    scorers, spans = Scorers(toy_model(), chat), spans_of(played, group)

    def gap(context):
        section = config.teacher.model_copy(update={"context": context})
        options = {"temperature": 1.0, "tokens_per_micro_batch": 80}
        return teacher_gap(scorers.model, chat, played, group, [0, 1, 2, 3], section, **options).flatten()

    both = gather(("skill_gap_N", "teacher_gap_N"), played, group, spans, config, scorers)
    assert torch.equal(both.skill_gap_N, both.teacher_gap_N)
    told = both.skill_gap_N != 0
    assert told.any() and torch.allclose(both.skill_gap_N[told], gap("hindsight_skill")[told], atol=1e-5)
    alone = gather(("teacher_gap_N",), played, group, spans, config, scorers).teacher_gap_N
    assert torch.allclose(alone[told], gap("ground_truth")[told], atol=1e-5) and not torch.equal(
        alone, both.skill_gap_N
    )


def test_schedules_follow_the_step():
    batch, group = as_tensors([session_of(0, SESSIONS[0]) for _ in range(2)], 0.0), torch.tensor([0, 0])
    batch.turn_reward[0] = 1.0
    gap = {"teacher_gap_N": torch.where(batch.policy, 1.0, 0.0).flatten()}
    signals = gathered(batch, group, "reward_B")
    signals = type(signals)(reward_B=signals.reward_B, **gap)
    section = load_config(None, {"method": {"name": "rlsd"}}).method
    spans = spans_of(batch, group)
    early, late = (assign_credit(spans, signals, section, step).credit_N for step in (1, 50))
    grpo = assign_credit(spans, signals, load_config(None, {"method": {"name": "grpo"}}).method, 1).credit_N
    assert torch.equal(late, grpo) and not torch.equal(early, grpo)
    factor = load_config(None, {"method": {"name": "factor"}}).method
    assert "value_S" in needs_of(factor) and "value_S" not in needs_of(factor, 1) and "value_S" in needs_of(factor, 11)


def test_credit_metrics():
    """Twenty tokens, one of size 3 and the others 1 each: 3/22 on the first, 4/22 on the first two."""
    spans = Spans.from_mask(torch.ones(1, 20, dtype=torch.bool), group=torch.tensor([0]))
    credit_N = torch.ones(20)
    credit_N[4] = -3.0
    credit = AdditiveCredit(credit_N, torch.ones(20), PPOClip(), advantage_N=torch.ones(20))
    found = credit_metrics(credit, spans)
    assert found == pytest.approx(
        {"credit_top_1": 3 / 22, "credit_top_5": 3 / 22, "credit_top_10": 4 / 22, "sign_flipped": 1 / 20}
    )
    assert "sign_flipped" not in credit_metrics(Credit(credit_N, torch.ones(20), PPOClip()), spans)
    assert credit_metrics(Credit(0 * credit_N, torch.ones(20), PPOClip()), spans) == {}


@pytest.mark.parametrize("tokens", [20, 200])
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "sampled_reverse_kl"])
def test_distillation_has_the_gradient_of_its_definition(kind, tokens):
    model, played, group = toy_model(), play(Toy), torch.tensor([0, 0, 1, 1])
    model, temperature = model.double(), 1.5
    weight_N = torch.randn(played.policy.numel(), generator=torch.Generator().manual_seed(0)) * played.policy.flatten()
    weight_N.view_as(played.policy)[1] = 0  # no pass for this one
    credit = Credit(0 * weight_N, torch.ones_like(weight_N), PPOClip(), weight_N, kind)
    config = toy_config("x", teacher={"template": "{text} hint {hint}"})
    teacher = teacher_of(credit, played, group, config, Scorers(model, make_chat(toy_tokenizer())))
    assert (teacher is None) == (kind == "sampled_reverse_kl")

    loss, place = 0.0, (played.policy.flatten().cumsum(0) - 1).view_as(played.policy)
    for row, session in enumerate(played.sessions):
        ids = torch.tensor([session.prompt + session.ids])
        at = played.policy[row, : len(session.ids)].nonzero().flatten()
        logp_TV = (model(ids).logits[0, at + len(session.prompt) - 1] / temperature).log_softmax(-1)
        weight_T = weight_N.view_as(played.policy)[row, at]
        if kind == "sampled_reverse_kl":
            term_T = logp_TV.gather(1, played.ids[row, at][:, None])[:, 0]
        else:
            taught = teacher.hidden[place[row, at]] @ teacher.head_weight.T / temperature
            taught_TV = taught.detach().log_softmax(-1)
            over, under = (taught_TV, logp_TV) if kind == "forward_kl" else (logp_TV, taught_TV)
            term_T = (over.exp() * (over - under)).sum(1)
        loss = loss + (weight_T * term_T).sum()
    wanted = torch.autograd.grad(loss, list(model.parameters()))

    model.zero_grad()
    section = TrainingSection(tokens_per_micro_batch=tokens)
    sums = accumulate_gradient(
        model, played, credit, [0, 2, 3], section, temperature=temperature, teacher=teacher, scale=2.0
    )
    assert float(sums["distillation"]) == pytest.approx(2 * float(loss.detach()), rel=1e-5)
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert torch.allclose(parameter.grad, 2 * gradient, atol=1e-6, rtol=1e-4)
    if teacher is not None:
        with pytest.raises(ValueError, match="teacher is None, want one"):
            accumulate_gradient(model, played, credit, [0], section, temperature=1.0)


@pytest.fixture(scope="module")
def desk_policy(tmp_path_factory):
    """The built-in policy without its warm start."""
    folder, tokenizer = tmp_path_factory.mktemp("policies") / "tiny", build_tokenizer(VOCABULARY)
    torch.manual_seed(0)
    config = TinyConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    TinyForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_teacher_keeps_its_head_while_the_policy_learns():
    model, played, group = toy_model(), play(Toy), torch.tensor([0, 0, 1, 1])
    model.lm_head = torch.nn.Linear(32, model.config.vocab_size)
    weight_N = played.policy.flatten().float()
    credit = Credit(0 * weight_N, weight_N, PPOClip(), weight_N, "forward_kl")
    config = toy_config("x", teacher={"template": "{text} hint {hint}"})
    teacher = teacher_of(credit, played, group, config, Scorers(model, make_chat(toy_tokenizer())))
    taught = (teacher.hidden @ teacher.head_weight.T + model.lm_head.bias).detach().log_softmax(-1)
    with torch.no_grad():
        model.lm_head.bias += torch.randn(len(model.lm_head.bias), generator=torch.Generator().manual_seed(0))
    found = accumulate_gradient(
        model, played, credit, [0, 1, 2, 3], TrainingSection(), temperature=1.0, teacher=teacher
    )["distillation"]
    wanted, first = 0.0, 0
    for row, session in enumerate(played.sessions):
        at = played.policy[row, : len(session.ids)].nonzero().flatten()
        logits_TV = model(torch.tensor([session.prompt + session.ids])).logits[0, at + len(session.prompt) - 1]
        taught_TV, first = taught[first : first + len(at)], first + len(at)
        wanted += (taught_TV.exp() * (taught_TV - logits_TV.log_softmax(-1))).sum().item()
    assert float(found) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize(("name", "options"), [("serl", {"kl": True}), ("toolopd", {"kind": "reverse_kl"})])
def test_distillation_over_the_vocabulary_through_the_trainer(tmp_path, name, options):
    method = {"name": name, "options": options, "session_reward": "mean"}
    config = toy_config(save_policy(tmp_path / "policy"), method=method, training={"steps": 2})
    lines = [line for line in quiet_train(config, tmp_path / "run").metrics() if line["event"] == "step"]
    assert len(lines) == 2 and all(line["distillation"] > 0 for line in lines)  # a divergence


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_by_name_on_desk(desk_policy, tmp_path, method):
    options = {"warmup": 0} if method == "factor" else {}
    tables = {
        "method": {"name": method, "options": options, "session_reward": "mean"},
        "policy": {"model": str(desk_policy)},
        "environment": {"options": {"num_turns": 2}},
        "warm_start": {"steps": 1, "sessions": 8, "rate": 3e-3},
        "rollout": {"sessions": 2, "group_size": 3},
        "training": {"steps": 1},
        "evaluation": {"sessions": 2},
        "run": {"threads": 1, "records": 0},
    }
    folder = quiet_train(load_config(None, tables), tmp_path / "run")
    lines = [line for line in folder.metrics() if line["event"] == "step"]
    assert [line["step"] for line in lines] == [1] and all("credit_seconds" in line for line in lines)
    assert (folder.path / "reference").exists() == (method == "trace")
    assert (last_of(folder) / "value.safetensors").exists() == (method == "factor")
