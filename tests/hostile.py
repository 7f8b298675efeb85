"""A thousand actions that a policy in trouble might write, and what an environment must make of each."""

import math
import random

from crest_train.environments.protocol import Environment, Step

_PIECES = (
    *("", " ", "\n", "\x00\x1b[31m\x07", "\ud800", "\U0001f600" * 40, "\u202e\u200b", "'; DROP TABLE x; --", "%s%n%x"),
    *('{"name": "get", "arguments": {"n": [1, null]}}', "<tool_call>", "</s>", "```python\nimport os\n```", "../../.."),
    *("__import__('os').abort()", "done", "reset task", "quit", "0", "-1", "9" * 5000, "1e999", "nan", "[0]", "\\n\\"),
    *("get 99999999999999999999 stick", "craft 1 stick using ", "craft  using ,,", "get -3 oak planks", "help", "task"),
)


def hostile_actions(gold: list[str], count: int = 1000) -> list[str]:
    """Odd texts, pieces glued together, and right actions with letters and words changed."""
    drawn, actions = random.Random(0), [*_PIECES, "a" * 100_000, " ".join(["put"] * 20_000)]
    while len(actions) < count:
        if drawn.random() < 0.4:
            actions.append(drawn.choice((" ", "\n", "")).join(drawn.choices(_PIECES, k=drawn.randint(1, 4)))[:20_000])
            continue
        words = drawn.choice(gold).split(" ")
        place = drawn.randrange(len(words))
        words[place] = drawn.choice((*words, drawn.choice(_PIECES), words[place].upper(), words[place][:-1], ""))
        actions.append(drawn.choice((" ", "\t", "  ")).join(words))
    return actions


def survive(environment: Environment, actions: list[str]) -> int:
    """Play them all, starting anew where a session ends; the number of those that were answered as errors."""
    seed = errors = 0
    environment.reset(seed)
    for action in actions:
        step = environment.step(action)
        assert isinstance(step, Step) and step.observation
        assert not step.info.get("lost"), (action[:200], step.observation)
        assert step.turn_reward is None or (math.isfinite(step.turn_reward) and 0 <= step.turn_reward <= 1)
        step.observation.encode()  # text that a tokenizer takes
        errors += step.info["error"]
        if step.done:
            seed += 1
            environment.reset(seed)
    return errors


def play_gold(environment: Environment, seed: int) -> list[float]:
    """The turn rewards of a session that is played by its ground truth."""
    environment.reset(seed)
    rewards = []
    while True:
        for action in environment.gold().splitlines():
            step = environment.step(action)
            if step.turn_reward is not None:
                rewards.append(step.turn_reward)
                break
        else:
            raise AssertionError(f"the ground truth of turn {len(rewards)} of session {seed} ends no turn")
        if step.done:
            return rewards
