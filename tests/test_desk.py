"""The built-in environment: sessions, verification, rules."""

import copy
import os
import random
import subprocess
import sys

import pytest
from crest_train.environments.desk import Desk
from crest_train.environments.desk_rules import Role, State
from crest_train.environments.desk_sessions import Request, Session, Turn, draw_session, right_calls, solve
from crest_train.environments.desk_world import KINDS, VOCABULARY, File, call, parse
from hypothesis import given, settings
from hypothesis import strategies as st

WORLD = {"f1": File("d0", "o1", "n4"), "f2": File("d2", "o3", "n9"), "f3": File("d1", "o5", "n0")}

PRINT_SESSIONS = """
from crest_train.environments.desk import Desk
for seed in range(20):
    desk = Desk(num_turns=16, coupled=0.5)
    request = desk.reset(seed)
    while request is not None:
        print(request, "|", desk.gold())
        for action in desk.gold().split(";")[:-1]:
            step = desk.step(action)
            print(step.observation, step.info)
        request = step.request
"""


def begun(desk, world, *requests, coupled=False):
    """`desk` at the beginning of a session of the given requests, e.g. "copy f1 f2"."""
    turns, now = [], world
    for text in requests:
        kind, *arguments = text.split()
        request = Request(kind, tuple(arguments))
        solution = solve(request, now)
        turns.append(Turn(request, coupled and bool(turns), solution))
        now = solution.world
    desk.num_turns = len(turns)
    desk._state = State(Session(world, tuple(turns)), dict(world))
    desk._begin_turn()
    return desk


def play(desk, *actions):
    return [desk.step(action) for action in actions]


def play_gold(desk):
    """Play the right calls of one turn; the last step."""
    return play(desk, *(action.strip() for action in desk.gold().split(";")[:-1]))[-1]


def test_sessions_are_the_same_in_every_process():
    outputs = [
        subprocess.run(
            [sys.executable, "-c", PRINT_SESSIONS],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "12345")
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0].splitlines()) > 20 * 16


def test_vocabulary_is_small_and_without_doubles():
    assert len(VOCABULARY) < 100
    assert len(set(VOCABULARY)) == len(VOCABULARY)


@pytest.mark.parametrize("num_turns", [4, 8, 16])
def test_right_calls_earn_every_turn(num_turns):
    kinds = set()
    for seed in range(200):
        desk = Desk(num_turns=num_turns)
        request = desk.reset(seed)
        for turn in range(num_turns):
            kinds.add(request.split()[0])
            step = play_gold(desk)
            assert step.turn_reward == 1.0
            assert step.info["error"] is False
            request = step.request
            assert step.done == (request is None) == (turn == num_turns - 1)
    assert kinds == set(KINDS)


@pytest.mark.parametrize(
    "request_text, calls",
    [
        ("move f3 d2", ["mv f3 d2", "done"]),
        ("delete f3", ["rm f3", "done"]),
        ("rename f3 f9", ["ren f3 f9", "done"]),
        ("give f3 o2", ["own f3 o2", "done"]),
        ("make f9 d3", ["new f9 d3", "done"]),
        ("copy f1 f2", ["cat f1", "set f2 n4", "done"]),
        ("bring f1 f2", ["cat f2", "mv f1 d2", "done"]),
        ("owner f2", ["cat f2", "answer o3"]),
        ("inc f2", ["cat f2", "set f2 n0", "done"]),
        ("swap f1 f2", ["cat f1", "cat f2", "set f1 n9", "set f2 n4", "done"]),
    ],
)
def test_right_calls_of_every_kind(request_text, calls):
    desk = begun(Desk(), WORLD, request_text)
    kind, *arguments = request_text.split()
    assert list(right_calls(Request(kind, tuple(arguments)), WORLD)) == calls
    assert desk.gold() == " ; ".join(calls) + " ;"


def test_replies_to_calls():
    world = dict(WORLD)
    assert call(world, parse("cat f2")) == "d2 o3 n9"
    assert call(world, parse("cat f4")) == "err nofile"
    assert call(world, parse("new f2 d0")) == "err exists"
    assert call(world, parse("ren f1 f2")) == "err exists"
    assert world == WORLD
    assert call(world, parse("new f4 d3")) == "ok"
    assert call(world, parse("ren f1 f7")) == "ok"
    assert call(world, parse("own f7 o2")) == "ok"
    assert call(world, parse("rm f3")) == "ok"
    assert world == {"f2": WORLD["f2"], "f4": File("d3", "o0", "n0"), "f7": File("d0", "o2", "n4")}


@pytest.mark.parametrize(
    "action", ["", ";", "mv f1", "mv f1 d1 d2", "mv d1 f1", "set f1 o1", "cat", "done f1", "answer", "answer n1", "zz"]
)
def test_what_is_no_call_is_answered(action):
    step = begun(Desk(), WORLD, "move f3 d2").step(action)
    assert step.observation == "err syntax"
    assert step.turn_reward is None


@pytest.mark.parametrize(
    "request_text, actions",
    [
        ("move f3 d2", ["done"]),
        ("move f3 d2", ["mv f3 d3", "done"]),
        ("move f3 d2", ["mv f3 d2", "mv f1 d1", "done"]),
        ("move f3 d2", ["mv f3 d2", "answer o5"]),
        ("copy f1 f2", ["set f2 n5", "done"]),
        ("owner f2", ["cat f2", "answer o4"]),
        ("owner f2", ["cat f2", "done"]),
        ("swap f1 f2", ["cat f1", "set f2 n4", "done"]),
        ("make f9 d3", ["new f9 d3", "own f9 o1", "done"]),
        ("move f3 d2", ["mv f3 d2", "cat f1", "cat f1", "cat f1", "cat f1", "cat f1"]),
    ],
)
def test_wrong_actions_earn_nothing(request_text, actions):
    steps = play(begun(Desk(), WORLD, request_text), *actions)
    assert [step.turn_reward for step in steps] == [None] * (len(actions) - 1) + [0.0]
    assert steps[-1].info["role"] == Role.REGRESSION
    assert steps[-1].info["error"] is True


def test_another_way_to_the_right_outcome_earns_the_turn():
    steps = play(begun(Desk(), WORLD, "move f3 d2"), "zz", "cat f9", "mv f3 d0", "mv f3 d2", "done")
    assert steps[-1].turn_reward == 1.0


def test_an_uncoupled_turn_is_judged_on_the_world_as_it_is():
    desk = begun(Desk(), WORLD, "give f1 o2", "copy f1 f2")
    play(desk, "set f1 n7", "done")
    assert desk.gold() == "cat f1 ; set f2 n7 ; done ;"
    assert play_gold(desk).turn_reward == 1.0


def test_a_coupled_turn_keeps_its_right_outcome_whatever_went_wrong_before():
    desk = begun(Desk(), WORLD, "inc f1", "copy f1 f2", coupled=True)
    play(desk, "set f1 n9", "done")
    assert desk.gold() == "cat f1 ; set f2 n5 ; done ;"
    other = Desk(num_turns=2)
    other.restore(desk.save())
    assert play(other, "cat f1", "set f2 n9", "done")[-1].turn_reward == 0.0
    assert play_gold(desk).turn_reward == 1.0


def test_a_turn_that_earlier_errors_made_impossible_earns_nothing():
    desk = begun(Desk(), WORLD, "move f3 d2", "give f1 o2")
    play(desk, "rm f1", "done")
    assert desk.gold() == "own f1 o2 ; done ;"
    steps = play(desk, "own f1 o2", "done")
    assert steps[0].observation == "err nofile"
    assert steps[1].turn_reward == 0.0
    assert [step.info["cause"] for step in steps] == [0, 0]


def test_coupled_share():
    def draw(seed, coupled):
        return draw_session(random.Random(seed), num_turns=8, coupled=coupled, num_files=6)

    def share(coupled):
        return sum(turn.coupled for seed in range(300) for turn in draw(seed, coupled).turns) / (300 * 8)

    assert share(0.0) == 0.0
    assert 0.2 < share(0.3) < 0.28  # 7 of 8 turns may be, less those after a delete
    assert 0.8 < share(1.0) <= 7 / 8
    assert not draw(0, 1.0).turns[0].coupled


def test_coupled_turns_work_on_a_file_of_the_turn_before():
    for seed in range(100):
        desk = Desk(num_turns=8, coupled=1.0)
        desk.reset(seed)
        turns = desk._state.session.turns
        for before, turn in zip(turns, turns[1:], strict=False):
            if turn.coupled:
                assert set(turn.request.arguments) & set(before.request.arguments)


def test_a_shorter_session_begins_the_longer():
    short, long = Desk(num_turns=4), Desk(num_turns=8)
    assert short.reset(5) == long.reset(5)
    for _ in range(3):
        assert play_gold(short).request == play_gold(long).request


def facts(*steps):
    names = ("role", "feedback", "error", "cause", "redundant")
    return [tuple(step.info[name] for name in names) for step in steps]


def test_roles_and_feedback_by_rule():
    desk = begun(Desk(max_actions=10), WORLD, "copy f1 f2")
    steps = play(desk, "cat f1", "cat f1", "cat f3", "set f2 n7", "own f3 o1", "own f3 o5", "own f3 o5", "set f2 n4")
    assert facts(*steps) == [
        (Role.EXPLORATION, 0, False, -1, False),
        (Role.NO_PROGRESS, 0, False, -1, True),  # read already
        (Role.NO_PROGRESS, 0, False, -1, False),  # not what the request needs, but new
        (Role.NO_PROGRESS, 1, True, -1, False),  # wrong before and after
        (Role.REGRESSION, 1, True, -1, False),
        (Role.PROGRESS, 1, False, -1, False),
        (Role.NO_PROGRESS, 1, False, -1, True),  # it was so already
        (Role.PROGRESS, 1, False, -1, False),
    ]
    assert facts(*play(desk, "zz", "done")) == [
        (Role.NO_PROGRESS, -1, True, -1, False),
        (Role.PROGRESS, 0, False, -1, False),
    ]


def test_causes_follow_the_file_that_was_left_wrong():
    desk = begun(Desk(), WORLD, "copy f1 f2", "inc f2", "owner f2", coupled=True)
    steps = play(desk, "cat f1", "set f2 n7", "done")
    assert facts(*steps) == [
        (Role.EXPLORATION, 0, False, -1, False),
        (Role.NO_PROGRESS, 1, True, -1, False),
        (Role.REGRESSION, 0, True, 1, False),  # the set was wrong
    ]
    steps = play(desk, "cat f2", "set f2 n8", "done")  # right calls would set n5
    assert facts(*steps) == [
        (Role.EXPLORATION, 0, False, -1, False),
        (Role.NO_PROGRESS, 1, True, 1, False),  # it read what action 1 had written
        (Role.REGRESSION, 0, True, 4, False),
    ]
    steps = play(desk, "answer o1")  # the owner was never touched: an error of its own
    assert facts(*steps) == [(Role.REGRESSION, 0, True, -1, False)]


def test_causes_of_missing_and_occupied_names():
    desk = begun(Desk(), WORLD, "move f1 d2", "give f2 o1", "rename f1 f5")
    play(desk, "mv f1 d2", "rm f2", "done")
    steps = play(desk, "cat f2", "cat f8", "new f5 d0", "done")
    assert facts(*steps) == [
        (Role.NO_PROGRESS, -1, True, 1, False),  # action 1 removed it
        (Role.NO_PROGRESS, -1, True, -1, False),  # never was there
        (Role.NO_PROGRESS, 1, False, -1, False),  # no right outcome left to compare with
        (Role.REGRESSION, 0, True, 1, False),
    ]
    assert desk.step("ren f1 f5").observation == "err exists"


def test_an_ending_that_leaves_work_undone_is_the_cause_of_what_follows():
    desk = begun(Desk(), WORLD, "inc f1", "copy f1 f2", coupled=True)
    steps = play(desk, "done", "cat f1", "set f2 n4")
    assert facts(*steps) == [
        (Role.REGRESSION, 0, True, -1, False),
        (Role.EXPLORATION, 0, False, -1, False),
        (Role.NO_PROGRESS, 1, True, 0, False),
    ]


def test_state_keys_are_equal_for_equal_states_alone():
    """Keys are of the state before an action: the world, what was read, the turn and what is right in it."""

    def keys(*actions, requests=("copy f1 f2", "inc f1")):
        return [step.info["state_key"] for step in play(begun(Desk(), WORLD, *requests), *actions)]

    start, after_read, again, after_error, written = keys("cat f1", "cat f1", "zz", "set f2 n7", "zz")
    assert start != after_read == again == after_error and written not in (start, after_read)
    roundabout = keys("set f2 n7", "cat f1", "set f2 n9", "zz")  # f2 held n9 before
    assert roundabout[0] == start and roundabout[3] == after_read and len(set(roundabout)) == 4
    assert keys("zz", requests=("copy f1 f2", "move f3 d2")) == [start]  # what comes later is no part of it
    next_turn, after_wrong = keys("done", "zz")[1], keys("set f1 n5", "done", "set f1 n4", "zz")[3]
    assert len({start, next_turn, after_wrong}) == 3  # as next_turn, but there n5 is right and here n6 was
    assert all(0 <= key < 2**63 for key in (start, after_read, written, next_turn))


def test_save_and_restore_are_exact():
    desk = Desk(num_turns=4, coupled=1.0)
    desk.reset(11)
    play(desk, "cat f1", "rm f2", "new f3 d1", "cat f3")
    state = desk.save()
    unchanged = copy.deepcopy(state)
    actions = ["mv f3 d0", "rm f3", "done", "cat f3", "done", "set f1 n2", "done"]
    first = play(desk, *actions)
    assert state == unchanged
    for other in (desk, Desk(num_turns=4)):
        other.restore(state)
        assert play(other, *actions) == first
        assert state == unchanged


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="reset"):
        Desk().step("done")
    desk = Desk(num_turns=1)
    desk.reset(0)
    assert desk.step("done").done
    with pytest.raises(ValueError, match="over"):
        desk.step("done")
    for name, value in [("num_turns", 0), ("coupled", 1.5), ("max_actions", 4), ("num_files", 3), ("num_files", 30)]:
        with pytest.raises(ValueError, match=name):
            Desk(**{name: value})


words = st.sampled_from(VOCABULARY)
calls = st.one_of(
    st.lists(words, max_size=6).map(" ".join),
    st.tuples(st.sampled_from(["cat", "rm", "set", "mv", "own", "ren", "new"]), words, words).map(" ".join),
    st.text(max_size=20),
)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), actions=st.lists(calls, min_size=100, max_size=100))
def test_no_action_raises(seed, actions):
    desk = Desk(num_turns=4, coupled=0.5)
    desk.reset(seed)
    number = 0
    for action in actions:
        step = desk.step(action)
        assert step.turn_reward in (None, 0.0, 1.0)
        assert -1 <= step.info["cause"] < number
        assert step.info["error"] or step.info["cause"] == -1
        number += 1
        if step.done:
            desk.reset(seed + 1)
            number = 0
