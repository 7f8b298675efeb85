"""Hints of the self-teacher: what each context takes, where hints are put in, what the teacher's pass makes of them."""

from typing import get_args

import pytest
import torch
from crest_train import imitation, teacher
from crest_train.chat import make_chat
from crest_train.config import TeacherSection
from crest_train.contexts import CONTEXTS, hints, teacher_stream
from crest_train.environments.desk import Desk
from crest_train.environments.desk_world import VOCABULARY
from crest_train.environments.protocol import Step
from crest_train.rollouts import Sampling, demonstrate, rollout
from crest_train.sessions import Action, Session, as_tensors
from crest_train.teacher import teacher_gap, teacher_states
from crest_train.tokenizer import build_tokenizer
from crest_train.warm_start import new_policy
from rich.console import Console
from toy import HINT, Toy, toy_model, toy_tokenizer
from toy_runs import toy_config

from crest_ops import linear_token_stats


def section_of(context="ground_truth", insert="turn", **others):
    return TeacherSection(**({"context": context, "insert": insert, "template": HINT} | others))


def act(turn, text, observation=None, feedback=0, key=0):
    return Action(turn, 0, text=text, observation=observation, info={"feedback": feedback}, state_key=key)


@pytest.fixture
def played():
    """Two groups. The first: a session that fails its first turn and wins its second, one that wins both, one that
    loses both; the second: a session alone."""
    sessions = [
        [[act(0, "cat x", "5", 0, 1), act(0, "set x 4", "ok", 1, 2), act(0, "done", None, 0, 3)], [act(1, "stop")]],
        [[act(0, "set x 6", "ok", 1, 1), act(0, "done", None, 0, 2)], [act(1, "wait", "no", -1), act(1, "go")]],
        [[act(0, "set y 6", "none", -1, 1)], [act(1, "", None)]],
        [[act(0, "done", None, 0, 1)]],
    ]
    rewards = [[0.0, 1.0], [1.0, 1.0], [0.5, 0.0], [1.0]]
    records = [
        Session(
            seed=0,
            system="",
            prompt=[],
            num_turns=2,
            requests=["one", "two"],
            gold=["G one", "G two"],
            ids=[],
            actions=[action for turn in turns for action in turn],
            turn_reward=reward,
            cut=False,
        )
        for turns, reward in zip(sessions, rewards, strict=True)
    ]
    for session in records:
        for action in session.actions:
            action.start = len(session.ids)
            action.tokens, action.logp, action.entropy = [1], [0.0], [0.0]
            session.ids += action.tokens
    return as_tensors(records, 0.0), torch.tensor([7, 7, 7, 9])


BY_TURN = {
    "ground_truth": [["G one", None, None, "G two"], ["G one", None, "G two", None], ["G one", "G two"], ["G one"]],
    "feedback": [["ok |", None, None, None], ["ok |", None, "no |", None], ["none |", None], [None]],
    "next_observation": [["5 | ok |", None, None, None], ["ok |", None, "no |", None], ["none |", None], [None]],
    "future_trajectory": [
        ["cat x | 5 | set x 4 | ok | done |", None, None, "stop |"],
        ["set x 6 | ok | done |", None, "wait | no | go |", None],
        ["set y 6 | none |", None],
        ["done |"],
    ],
    "successful_sibling": [
        ["set x 6 | done |", None, None, "wait | go |"],
        [None, None, "stop |", None],
        ["set x 6 | done |", "stop |"],
        [None],
    ],
    "hindsight_skill": [
        ["cat x | set x 4 | done | err |", None, None, "stop | ok |"],
        ["set x 6 | done | ok |", None, "wait | go | ok |", None],
        ["set y 6 | err |", "err |"],
        ["done | ok |"],
    ],
}

BY_STEP = {
    "ground_truth": [
        ["G one", "G one", "G one", "G two"],
        ["G one"] * 2 + ["G two"] * 2,
        ["G one", "G two"],
        ["G one"],
    ],
    "feedback": [[None, "ok |", None, None], ["ok |", None, "no |", None], ["none |", None], [None]],
    "next_observation": [["5 |", "ok |", None, None], ["ok |", None, "no |", None], ["none |", None], [None]],
    "future_trajectory": [
        ["cat x | 5 | set x 4 | ok | done |", "set x 4 | ok | done |", "done |", "stop |"],
        ["set x 6 | ok | done |", "done |", "wait | no | go |", "go |"],
        ["set y 6 | none |", None],
        ["done |"],
    ],
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_hints_of_a_turn_by_hand(played, context):
    assert hints(*played, section_of(context, end=" | ")) == BY_TURN[context]


@pytest.mark.parametrize("context", BY_STEP)
def test_hints_of_a_step_by_hand(played, context):
    assert hints(*played, section_of(context, "step", end=" | ")) == BY_STEP[context]


def test_anchor_group_shares_the_hints_of_its_actions(played):
    """State 1 was met by the first actions of three sessions of a group; the session alone shares with none."""
    found = hints(*played, section_of("next_observation", "anchor", end=" | "))
    assert found[0][0] == found[1][0] == found[2][0] == "5 |\nok |\nnone |"
    assert found[0][1] == found[1][1] == "ok |"  # state 2; the second session's action there was told nothing
    assert found[0][2] is None and found[3] == [None]
    once = hints(*played, section_of("ground_truth", "anchor"))
    assert once[0][0] == "G one"


def test_contexts_have_the_names_of_the_configuration():
    assert tuple(CONTEXTS) == get_args(TeacherSection.model_fields["context"].annotation)


def test_what_the_rollout_lacks_is_named(played):
    batch, group = played
    batch.sessions[1].gold = []
    with pytest.raises(ValueError, match=r"session 0 holds no ground truth of turn 0, .*Sampling\(gold=True\)"):
        hints(batch, group, section_of("ground_truth"))
    batch.sessions[0].actions[1].info = {}
    with pytest.raises(ValueError, match="Step.info in turn 0 of session 0 has no 'feedback', .*wanted an environment"):
        hints(batch, group, section_of("feedback", "step"))


class Judged(Toy):
    """The toy with feedback on its replies and one state per turn, which takes half of all actions for right."""

    def step(self, action):
        turn = self.turn
        step = super().step(self.letters[turn] if sum(map(ord, action)) % 2 else action)
        judged = {"feedback": 0 if step.observation is None else -1, "state_key": turn}
        return Step(step.observation, step.turn_reward, step.request, judged)


def play(model, toys, group_size=3, **sampling):
    options = Sampling(**({"max_action_tokens": 3, "gold": True} | sampling))
    seeds = [1 + at // group_size for at in range(len(toys))]
    generator = torch.Generator().manual_seed(0)
    played = rollout(model, make_chat(toy_tokenizer()), toys, seeds, generator=generator, sampling=options)
    return played, torch.arange(len(toys)) // group_size


@pytest.fixture(scope="module")
def toys():
    model = toy_model()
    return model, *play(model, [*(Judged(3, "be brief") for _ in range(3)), *(Judged(2) for _ in range(3))])


@pytest.mark.parametrize("insert", ["turn", "step", "anchor"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_stream_is_the_session_with_the_hints_in_its_texts(toys, context, insert):
    """Written anew as text, piece by piece, and encoded at once."""
    _, played, group = toys
    chat, section = make_chat(toy_tokenizer()), section_of(context, insert, end=" ")
    given = hints(played, group, section)
    ids, position = teacher_stream(chat, played, given, section)
    row, column = played.policy.nonzero(as_tuple=True)
    assert torch.equal(ids[row, position[row, column]], played.ids[row, column])
    assert (position[~played.policy] == 0).all()
    for at, (session, told) in enumerate(zip(played.sessions, given, strict=True)):
        text, turn, shown = "", -1, None
        for action, hint in zip(session.actions, told, strict=True):
            with_hint = "" if hint is None else f" hint {hint}"
            if action.turn > turn:
                text += f" <obs> {shown}" * (shown is not None)
                text += f" <user> {session.requests[action.turn]}{with_hint} >"
            else:
                text += f" <obs> {shown}{with_hint} >"
            text += f" {action.text} ;"
            turn, shown = action.turn, action.observation
        wanted = chat.encode(("<sys> be brief" if session.system else "") + text)[len(session.prompt) :]
        if session.actions[-1].cut:
            wanted = wanted[:-1]
        assert ids[at, : len(wanted)].tolist() == wanted
        assert (ids[at, len(wanted) :] == 0).all()
        assert any(told) or context == "successful_sibling"


def test_session_without_hints_comes_out_as_it_was_played(toys):
    _, played, _ = toys
    none = [[None] * len(session.actions) for session in played.sessions]
    ids, position = teacher_stream(make_chat(toy_tokenizer()), played, none, section_of())
    assert torch.equal(ids, played.ids)
    columns = torch.arange(played.ids.shape[1]).expand_as(position)
    assert torch.equal(position, columns.where(played.policy, 0))


def test_ground_truth_in_the_request_is_what_the_demonstrated_policy_learned():
    """On `desk` with the default section: the request, `<hint>`, the right calls, `</hint>`."""
    chat = make_chat(build_tokenizer(VOCABULARY))
    model = new_policy(0).eval()
    played = demonstrate(model, chat, [Desk(2)], [3], sampling=Sampling(gold=True))
    group, section = torch.zeros(1), TeacherSection()
    ids, _ = teacher_stream(chat, played, hints(played, group, section), section)
    session = played.sessions[0]
    wanted = chat.decode(session.ids)
    for request, gold in zip(session.requests, session.gold, strict=True):
        wanted = wanted.replace(f"{request} >", f"{request} <hint> {gold} </hint> >")
    assert chat.decode(ids[0].tolist()) == wanted
    twins = demonstrate(model, chat, [Desk(2), Desk(2)], [3, 3], sampling=Sampling(gold=True))
    by_sibling = hints(twins, torch.zeros(2), TeacherSection(context="successful_sibling"))
    assert by_sibling == hints(twins, torch.zeros(2), section)  # who did what is right is told in the same words


def gap_of(model, played, group, section, rows=None, temperature=1.0):
    rows = list(range(len(played.sessions))) if rows is None else rows
    chat = make_chat(toy_tokenizer())
    return teacher_gap(model, chat, played, group, rows, section, temperature=temperature, tokens_per_micro_batch=40)


@pytest.mark.parametrize(("context", "insert"), [("future_trajectory", "step"), ("next_observation", "turn")])
def test_gap_is_that_of_the_hinted_session(toys, context, insert):
    model, played, group = toys
    section = section_of(context, insert, end=" ")
    found = gap_of(model, played, group, section)
    ids, position = teacher_stream(make_chat(toy_tokenizer()), played, hints(played, group, section), section)
    for row, session in enumerate(played.sessions):
        whole = torch.tensor([session.prompt + ids[row].tolist()])
        with torch.no_grad():
            logp = model(whole).logits[0, :-1].log_softmax(-1).gather(1, whole[0, 1:, None])[:, 0]
        at = played.policy[row].nonzero().flatten()
        wanted = logp[position[row, at] + len(session.prompt) - 1] - played.old_logp[row, at]
        assert (found[row, at] - wanted).abs().max() < 1e-4
        assert (found[row][~played.policy[row]] == 0).all()


def test_session_without_a_hint_has_no_gap_and_no_pass(toys, monkeypatch):
    """Groups of one have no sibling; elsewhere, who alone succeeds has no hint."""
    model, played, _ = toys
    group, section = torch.tensor([0, 0, 0, 1, 1, 2]), section_of("successful_sibling")
    hinted = [any(given) for given in hints(played, group, section)]
    assert any(hinted) and not all(hinted)
    found = gap_of(model, played, group, section)
    assert (found != 0).any(1).tolist() == hinted
    monkeypatch.setattr(teacher, "hidden_states", None)  # a pass would fail
    assert (gap_of(model, played, torch.arange(6), section) == 0).all()
    assert not teacher_states(
        model, make_chat(toy_tokenizer()), played, torch.arange(6), [0, 5], section, tokens_per_micro_batch=40
    ).known.any()


def test_tokens_that_hints_push_out_of_the_context_have_no_gap():
    model = toy_model(context=24)
    played, group = play(model, [Judged(3, "be brief") for _ in range(4)])
    section = section_of(template="{text} hint {hint} hint {hint}")
    _, position = teacher_stream(make_chat(toy_tokenizer()), played, hints(played, group, section), section)
    prompt = torch.tensor([len(session.prompt) for session in played.sessions])[:, None]
    inside = played.policy & (position + prompt < 24)
    assert (inside != played.policy).any() and inside.any()
    assert torch.equal(gap_of(model, played, group, section) != 0, inside)
    known = teacher_states(
        model, make_chat(toy_tokenizer()), played, group, [0, 1, 2, 3], section, tokens_per_micro_batch=60
    ).known
    assert torch.equal(known, inside[played.policy])


def test_states_are_those_that_the_gap_is_taken_from(toys):
    model, played, group = toys
    rows, section = [0, 2, 3, 5], section_of()
    states = teacher_states(model, make_chat(toy_tokenizer()), played, group, rows, section, tokens_per_micro_batch=40)
    chosen = torch.zeros_like(played.policy)
    chosen[rows] = True
    assert torch.equal(states.known, chosen[played.policy])
    assert (states.hidden[~states.known] == 0).all()
    weight = model.get_output_embeddings().weight
    assert torch.equal(states.head_weight, weight) and states.head_weight.data_ptr() != weight.data_ptr()
    stats = linear_token_stats(states.hidden, states.head_weight, played.ids[played.policy], temperature=0.5)
    wanted = gap_of(model, played, group, section, rows, temperature=0.5)[played.policy]
    found = (stats.logp - played.old_logp[played.policy]).where(states.known, torch.tensor(0.0))
    assert (found - wanted).abs().max() < 1e-5


def test_imitation_learns_nothing_from_where_hints_reach_beyond_the_context(monkeypatch):
    """Sessions of 2 turns of 6 tokens fit into 13; their hints, of 3 tokens each, do not."""
    seen = []
    policy_logits = imitation.policy_logits
    monkeypatch.setattr(
        imitation,
        "policy_logits",
        lambda model, ids, *rest: seen.append(ids.shape[1]) or policy_logits(model, ids, *rest),
    )
    for hinted, longest in ((0.0, 12), (1.0, 13)):
        config = toy_config(
            "x", warm_start={"steps": 1, "hinted": hinted}, teacher={"template": "{text} hint {hint} hint"}
        )
        loss = imitation.imitate(toy_model(context=13), make_chat(toy_tokenizer()), config, Console(quiet=True))["loss"]
        assert 0 < loss < 10 and max(seen) <= longest and max(seen) > 6
