"""Environments written for other libraries: reading tool calls, and a class for TRL's environment_factory."""

import json
import random
import sys

import pytest
from crest_train.environments import make_environment
from crest_train.environments.adapters.calls import parse
from crest_train.environments.bfcl_calls import BadCall

HOSTILE = ["", "{", "[" * 5000, '{"name": 1}', "<tool_call>", '{"name": "guess", "arguments": []}', "guess(", "\x00"]
HOSTILE += [
    "guess(__import__('os'))",
    "__init__()",
    "get_reward()",
    "reset()",
    "guess(1, 2)",
    "guess(number=1, number=2)",
]
HOSTILE += [
    '{"name": "guess", "arguments": {"number": NaN}}',
    "guess(number='\\ud800')",
    "_hide()",
    "guess('x' * 9**9)",
]


class Guess:
    """As TRL's users write them: methods are tools, the reward is the environment's own."""

    def reset(self, secret, **row):
        self.secret, self.right = secret, False
        return f" It is below {row['below']}."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: What is guessed.
        """
        self.right = number == self.secret
        return "right" if self.right else "higher" if number < self.secret else "lower"

    def get_reward(self):
        return 0.75 * self.right

    def _hide(self):
        raise AssertionError("a private method was called")


class Drawn:
    """Without a data set: the prompt is what reset returns."""

    def reset(self, seed, **row):
        return f"Say {random.Random(seed).randint(0, 99)}"


def brevity(prompts, completions, environments, below, **columns):
    assert len(prompts) == len(completions) == len(environments) == len(below) == 1
    return [0.25 * (len(completions[0]) < 6)]


def count_words(completions, **columns):
    return [min(1.0, len(completions[0][0]["content"].split()) / 4)]


@pytest.fixture
def guess(tmp_path):
    system, user = {"role": "system", "content": "Play."}, {"role": "user", "content": "Guess."}
    rows = [{"prompt": [system, user], "secret": n, "below": 10} for n in range(10)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = {"factory": f"{__name__}:Guess", "dataset": str(file), "reward": f"{__name__}:brevity"}
    return make_environment("trl", options)


def test_a_class_for_trl_plays_its_tools_to_its_reward(guess):
    assert guess.reset(13) == "Guess. It is below 10."
    assert guess.system.startswith("Play.\n\n") and '"guess"' in guess.system and "What is guessed." in guess.system
    assert "reset" not in guess.system and "_hide" not in guess.system
    steps = [guess.step(text) for text in ("guess(7)", '{"name": "guess", "arguments": {"number": 3}}', "It is 3.")]
    assert [step.observation for step in steps] == ["lower", "right", None]
    assert [step.turn_reward for step in steps] == [None, None, 1.0]  # 0.75 of its own, 0.25 of the reward function
    assert [step.info["feedback"] for step in steps] == [1, 1, 0] and steps[-1].done
    guess.reset(13)
    assert guess.step("done").turn_reward == 0.25


def test_a_class_for_trl_survives_hostile_actions(guess):
    rng, pieces = random.Random(0), " ".join(HOSTILE[3:]).split(" ")
    for number in range(1000):
        if number % 20 == 0:
            guess.reset(number)
        action = rng.choice(HOSTILE) if number % 2 else " ".join(rng.choices(pieces, k=5))
        step = guess.step(action)
        assert isinstance(step.observation, str) or step.done
        if step.done:
            assert 0 <= step.turn_reward <= 1
            guess.reset(number)


def test_what_a_tool_refuses_is_its_reply(guess):
    guess.reset(0)
    for action in ("guess(1, 2)", "guess()", "reset()", "_hide()", "guess(number='x')"):
        step = guess.step(action)
        assert step.info == {"error": True, "feedback": -1} and "rror" in step.observation


def test_an_environment_that_owns_its_prompts_is_told_the_seed():
    env = make_environment("trl", {"factory": f"{__name__}:Drawn", "reward": f"{__name__}:count_words"})
    assert env.reset(4) == env.reset(4) != env.reset(5)
    assert env.step("two words").turn_reward == 0.5


@pytest.mark.parametrize(
    "options, said",
    [
        ({"factory": "no_such:Thing"}, "could not import"),
        ({"factory": f"{__name__}:Drawn"}, "has no get_reward"),
        ({"factory": f"{__name__}:Guess", "dataset": "none.jsonl"}, "dataset: none.jsonl: wanted a file"),
    ],
)
def test_what_cannot_be_played_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        make_environment("trl", options)


def test_calls_are_read_from_python_and_from_json():
    names = {"f": ["a", "b"]}
    tagged = 'So: <tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call><tool_call>{"name": "g"}</tool_call>'
    read = [(call.name, call.kwargs) for call in parse(tagged, names)[0]]
    assert read == [("f", {"a": [1]}), ("g", {})]
    calls, ends = parse("f(1, b='x')\ndone", names)
    assert (calls[0].kwargs, ends) == ({"a": 1, "b": "x"}, True)
    assert parse("no call here", names) == ([], True)
    for text in ("f(1, 2, 3)", "f(1, a=2)", '{"name": "f", "arguments": 3}', "<tool_call>f(1)</tool_call>"):
        with pytest.raises(BadCall):
            parse(text, names)


@pytest.mark.parametrize(
    "name, package, options",
    [
        ("openenv", "openenv-core==0.3.0", {"url": "http://127.0.0.1:1"}),
        ("verifiers", "verifiers==0.1.14", {"factory": f"{__name__}:Guess"}),
    ],
)
def test_a_missing_library_is_told_with_what_brings_it(name, package, options, monkeypatch):
    for module in ("openenv", "openenv.core", "openenv.core.generic_client", "verifiers"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=f"pip install '{package}'"):
        make_environment(name, options)
