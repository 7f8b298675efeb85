"""The alfworld environment: gold paths of all six task types, hostile text, the rules that its docs promise."""

import random

import pytest
from crest_train.environments import FIRST_HELD_OUT_SEED, make_environment
from crest_train.environments import alfworld_rules as rules
from crest_train.environments.alfworld_households import TASKS, Goal, Household, goals
from crest_train.environments.alfworld_rules import World
from crest_train.environments.protocol import Role

SEEDS = [*range(90), *range(FIRST_HELD_OUT_SEED, FIRST_HELD_OUT_SEED + 30)]


def started(seed=0, **options):
    env = make_environment("alfworld", options)
    return env, env.reset(seed)


def household(task, destination, lies_in, lamp=None):
    places = frozenset({"fridge", "microwave", "countertop", "sinkbasin"})
    names = ("fridge 1", "microwave 1", "countertop 1", "sinkbasin 1", "countertop 2")
    goal = Goal(task, "kitchen", "apple", destination)
    treatments = frozenset({"clean", "heat", "cool"})
    every = {"apple": places, "fork": places - {"fridge"}}
    return Household(goal, "", names, lies_in, every, {"apple": treatments, "fork": frozenset()}, lamp)


def test_gold_paths_reach_the_full_reward_in_every_task_type():
    env = make_environment("alfworld", {})
    for place, seed in enumerate(SEEDS):
        env.reset(seed)
        assert env.save().household.goal.task == TASKS[seed % 6]
        steps = [env.step(command) for command in env.gold().splitlines()]
        assert [step.turn_reward for step in steps] == [None] * (len(steps) - 1) + [1.0], place
        assert steps[-1].done and all(step.info["role"] == Role.PROGRESS for step in steps)
        assert not any(step.info["error"] or step.info["redundant"] for step in steps)


def test_gold_is_right_from_wherever_the_session_has_come():
    env, rng = make_environment("alfworld", {}), random.Random(5)
    for seed in range(30):
        env.reset(seed)
        for _ in range(20):
            state = env.save()
            command = rng.choice(sorted(rules.admissible(state.household, state.world)))
            if env.step(command).done:
                break
        else:
            steps = [env.step(line) for line in env.gold().splitlines()]
            assert steps[-1].turn_reward == 1.0


def test_goals_of_training_and_held_out_sessions_are_apart_and_nearly_all_goals():
    for task in TASKS:
        train, held_out = goals(task, held_out=False), goals(task, held_out=True)
        assert train and held_out and not set(train) & set(held_out)
        assert 3 * len(held_out) <= len(train) <= 4 * len(held_out)
    drawn = {}
    for seed in SEEDS:
        env, _ = started(seed)
        drawn.setdefault(seed >= FIRST_HELD_OUT_SEED, set()).add(env.save().household.goal)
    assert not drawn[True] & drawn[False]


def test_hostile_actions_are_answered():
    rng = random.Random(0)
    env, _ = started(max_actions=2000)
    words = "take apple 1 from fridge move to go open {r} {} % \\ \x00 \ud800 😀 ' \" ( ) __import__ nan -1 9999".split(
        " "
    )
    for _ in range(1000):
        action = " ".join(rng.choices(words, k=rng.randint(0, 9))) * rng.choice([1, 1, 1, 300])
        step = env.step(action)
        assert isinstance(step.observation, str) and step.turn_reward is None
    assert env.step("look").observation.startswith("You are")


def test_what_is_told_and_what_is_admitted():
    world = World({"apple 1": "fridge 1", "fork 1": "countertop 1", "fork 2": "countertop 1"})
    home = household("pick_heat_then_place_in_recep", "countertop", world.lies_in)
    said = [
        ("take apple 1 from fridge 1", "Nothing happens."),
        ("go to fridge 1", "You arrive at fridge 1. The fridge 1 is closed."),
        ("go to fridge 1", "Nothing happens."),
        ("take apple 1 from fridge 1", "Nothing happens."),
        ("open fridge 1", "You open the fridge 1. The fridge 1 is open. In it, you see a apple 1."),
        ("open fridge 1", "Nothing happens."),
        ("take apple 1 from fridge 1", "You pick up the apple 1 from the fridge 1."),
        ("cool apple 1 with fridge 1", "You cool the apple 1 using the fridge 1."),
        ("examine apple 1", "This is a cold apple 1."),
        ("heat apple 1 with microwave 1", "Nothing happens."),
        ("go to microwave 1", "You arrive at microwave 1. The microwave 1 is closed."),
        ("heat apple 1 with microwave 1", "You heat the apple 1 using the microwave 1."),
        ("examine apple 1", "This is a hot apple 1."),
        ("move apple 1 to microwave 1", "Nothing happens."),
        ("inventory", "You are carrying: a apple 1."),
        ("go to countertop 1", "You arrive at countertop 1. On the countertop 1, you see a fork 1, and a fork 2."),
        ("take fork 1 from countertop 1", "Nothing happens."),
        ("move apple 1 to countertop 1", "You move the apple 1 to the countertop 1."),
    ]
    for number, (command, reply) in enumerate(said):
        assert rules.won(home, world) is False
        assert command in rules.admissible(home, world) or reply == rules.NOTHING
        assert rules.play(home, world, command) == reply, number
    assert rules.won(home, world)


@pytest.mark.parametrize(
    "task, destination, left, wins",
    [
        ("pick_and_place_simple", "fridge", {"apple 1": "fridge 1"}, True),
        ("pick_and_place_simple", "fridge", {"fork 1": "fridge 1"}, False),
        ("pick_two_obj_and_place", "countertop", {"apple 1": "countertop 1", "apple 2": "countertop 1"}, True),
        ("pick_two_obj_and_place", "countertop", {"apple 1": "countertop 1", "apple 2": "countertop 2"}, False),
        ("pick_clean_then_place_in_recep", "fridge", {"apple 1": "fridge 1"}, False),
    ],
)
def test_goals(task, destination, left, wins):
    assert rules.won(household(task, destination, left), World(dict(left))) is wins


def test_looking_under_the_lamp_wants_the_lamp_used_and_the_object_in_hand_beside_it():
    lies_in = {"apple 1": "countertop 1", "desklamp 1": "countertop 2"}
    home, world = household("look_at_obj_in_light", "desklamp", lies_in, "desklamp 1"), World(dict(lies_in))
    for command in ("go to countertop 2", "use desklamp 1", "go to countertop 1", "take apple 1 from countertop 1"):
        assert rules.play(home, world, command) != rules.NOTHING and not rules.won(home, world)
    assert "take desklamp 1 from countertop 2" not in rules.admissible(home, world)
    rules.play(home, world, "go to countertop 2")
    assert rules.won(home, world)


def test_roles_feedback_and_redundancy():
    env, _ = started(0)
    state = env.save()
    right = env.gold().splitlines()[0]
    wrong = next(f"go to {name}" for name in state.household.receptacles if f"go to {name}" != right)
    infos = [env.step(command).info for command in (wrong, "look", "look", "jump", right, wrong)]
    assert [info["role"] for info in infos[:5]] == [
        Role.EXPLORATION,
        Role.EXPLORATION,
        Role.NO_PROGRESS,
        Role.NO_PROGRESS,
        Role.PROGRESS,
    ]
    assert infos[5]["role"] == Role.REGRESSION
    assert [info["feedback"] for info in infos] == [0, 0, 0, -1, 0, 0]
    assert [info["redundant"] for info in infos] == [False, False, True, False, False, False]
    assert infos[1]["state_key"] == infos[2]["state_key"] != infos[0]["state_key"]
    env.restore(state)
    assert env.step(wrong).info["state_key"] == infos[0]["state_key"]


def test_actions_run_out():
    env, request = started(3, max_actions=2, admissible=True)
    assert "\nCommands: " in request and "go to " in request
    assert env.step("look").turn_reward is None
    last = env.step("look")
    assert last.done and last.turn_reward == 0.0 and last.info["role"] == Role.REGRESSION
    with pytest.raises(ValueError, match="over"):
        env.step("look")


@pytest.mark.parametrize("options", [{"tasks": ["cook"]}, {"tasks": []}, {"max_actions": 0}])
def test_options_that_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        make_environment("alfworld", options)
