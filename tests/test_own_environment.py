"""Environments of the user's own: the example, what they may leave out, what is said when they raise."""

import re
from pathlib import Path

import pytest
import torch
from crest_train.chat import make_chat
from crest_train.config import load_config
from crest_train.environments import make_environment
from crest_train.rollouts import Sampling, rollout
from crest_train.signals import check_environment
from toy import Toy, toy_model, toy_tokenizer

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


class WithoutGold(Toy):
    gold = save = restore = None


class Broken(Toy):
    def step(self, action):
        return self.letters[99]


class NoReset(Toy):
    def reset(self, seed):
        raise FileNotFoundError("levels.json")


def played(environment):
    generator = torch.Generator().manual_seed(0)
    model, chat = toy_model(), make_chat(toy_tokenizer())
    return rollout(model, chat, [environment], [7], generator=generator, sampling=Sampling())


def test_the_example_plays_its_ground_truth_to_full_reward(monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    env = make_environment("own_environment:Sums", {})
    for seed in range(20):
        question = env.reset(seed)
        for turn in range(env.num_turns):
            left, right = re.fullmatch(r"(\d) \+ (\d) =", question).groups()
            assert env.gold() == str(int(left) + int(right))
            step = env.step(env.gold())
            assert step.turn_reward == 1.0 and step.done == (turn == 2)
            question = step.request
    assert env.reset(5) == env.reset(5)
    assert env.step("x" * 10_000).turn_reward == 0.0


def test_the_example_is_as_short_as_said():
    code = (EXAMPLES / "own_environment.py").read_text().split("class Sums:")[1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20


def test_the_example_trains(monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    batch = played(make_environment("own_environment:Sums", {}))
    assert batch.sessions[0].num_turns == 3 and len(batch.sessions[0].turn_reward) == 3


def test_ground_truth_may_be_missing_until_something_reads_it():
    there = {"environment": {"name": f"{__name__}:WithoutGold"}}
    env = make_environment(f"{__name__}:WithoutGold", {})
    assert played(env).sessions[0].turn_reward
    check_environment(load_config(None, there | {"method": {"name": "turn_grpo"}}))
    with pytest.raises(ValueError, match=r"WithoutGold: has no gold\(\), which this method"):
        check_environment(load_config(None, there | {"method": {"name": "crest"}}))


@pytest.mark.parametrize(
    "environment, said",
    [
        (Broken(), r"environment Broken: step\(\) of session 7 raised IndexError: list index out of range"),
        (NoReset(), r"environment NoReset: reset\(\) of session 7 raised FileNotFoundError: levels.json"),
    ],
)
def test_what_it_raises_is_told_with_class_method_session_and_line(environment, said):
    with pytest.raises(ValueError, match=rf"{said} \(.*test_own_environment.py:\d+\)") as caught:
        played(environment)
    assert isinstance(caught.value.__cause__, IndexError | FileNotFoundError)
