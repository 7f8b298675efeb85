"""Environments played by the real libraries through our adapters: verifiers 0.1.14, openenv-core 0.3.0.

Neither installs next to the trainer's own requirements without dozens of others, so each has an environment of its own
(with pydantic and mpmath): `python tests/adapters_conformance.py verifiers`, and the same with openenv. Each plays
sessions of known reward and 1000 hostile actions. Last run: tests/adapters_conformance.txt.
"""

import importlib.metadata
import random
import sys
import threading
import time

from crest_train.environments import make_environment

ME = "adapters_conformance"
HOSTILE = [
    "",
    "{",
    "[" * 3000,
    '{"name": 1}',
    "add(",
    "add(1)",
    "nothing(1)",
    "\x00\ud800",
    "add('a', b=2)",
    "done " * 99,
]


def verifiers_tools():
    """A ToolEnv: add two numbers with a tool, then say the sum."""
    import verifiers as vf
    from datasets import Dataset

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def right(completion, answer):
        return float(completion[-1].content == answer)

    rows = [{"question": f"What is {n} + 5?", "answer": str(n + 5)} for n in range(9)]
    return vf.ToolEnv(tools=[add], dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]), max_turns=4)


def verifiers_game():
    """A MultiTurnEnv: guess a number in five tries."""
    import verifiers as vf
    from datasets import Dataset

    class Guess(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            said = messages[-1].content
            if said == state["answer"]:
                state["final_env_response"] = [{"role": "user", "content": "right"}]
                return state["final_env_response"]
            return [{"role": "user", "content": "higher" if said < state["answer"] else "lower"}]

    def right(completion, answer):
        return float(any(message.content == answer for message in completion if message.role == "assistant"))

    rows = [{"question": "Guess the digit.", "answer": str(n)} for n in range(10)]
    return Guess(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]), max_turns=5, system_prompt="Play.")


def check_verifiers():
    """Sessions of both kinds."""
    tools = make_environment("verifiers", {"factory": f"{ME}:verifiers_tools"})
    assert tools.reset(12) == "What is 3 + 5?" and '"add"' in tools.system
    steps = [tools.step(text) for text in ("add(3, b=5)", '{"name": "add", "arguments": {"a": 1, "b": 1}}', "8")]
    assert [step.observation for step in steps[:2]] == ["8", "2"], steps
    assert [step.turn_reward for step in steps] == [None, None, 1.0]
    tools.reset(0)
    assert tools.step("no idea").turn_reward == 0.0
    game = make_environment("verifiers", {"factory": f"{ME}:verifiers_game"})
    assert game.reset(6) == "Guess the digit." and game.system == "Play."
    steps = [game.step(text) for text in ("3", "8", "6")]
    assert [(step.observation, step.turn_reward) for step in steps[:2]] == [("higher", None), ("lower", None)], steps
    assert steps[2].turn_reward == 1.0
    game.reset(6)
    assert [game.step("1").turn_reward for _ in range(5)] == [None] * 4 + [0.0]
    return [hostile(tools), hostile(game)]


def check_openenv():
    """A server of openenv-core's own, in this process: echo the number that was told, in at most three tries."""
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Say(Action):
        number: int

    class Told(Observation):
        text: str

    class Echo(Environment):
        def __init__(self):
            super().__init__()
            self.told, self.tries = 0, 0

        def reset(self, seed=None, episode_id=None, **kwargs):
            self.told, self.tries = seed % 100, 0
            return Told(text=f"Say {self.told}.", done=False, reward=None)

        def step(self, action, timeout_s=None, **kwargs):
            self.tries += 1
            right = action.number == self.told
            return Told(text="right" if right else "wrong", done=right or self.tries == 3, reward=float(right))

        @property
        def state(self):
            return State(step_count=self.tries)

    app = create_fastapi_app(Echo, Say, Told)
    server = uvicorn.Server(uvicorn.Config(app, port=8765, log_level="error"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.1)
    url = "http://127.0.0.1:8765"
    typed = make_environment("openenv", {"url": url, "observation": "text"})
    assert typed.reset(142) == "Say 42."
    steps = [typed.step(text) for text in ('{"number": 7}', "seven", '{"number": "x"}', '{"number": 42}')]
    assert [step.observation for step in steps[::3]] == ["wrong", "right"], steps
    assert [step.info["error"] for step in steps] == [False, True, True, False], steps
    assert [step.turn_reward for step in steps] == [None, None, None, 1.0]
    counts = [hostile(typed)]
    del typed
    server.should_exit = True
    return counts


def hostile(environment):
    """1000 actions, each answered; a finished session is followed by another."""
    rng, sessions = random.Random(0), 0
    environment.reset(0)
    for _ in range(1000):
        step = environment.step(rng.choice(HOSTILE))
        assert step.done or isinstance(step.observation, str)
        if step.done:
            assert 0 <= step.turn_reward <= 1
            sessions += 1
            environment.reset(sessions)
    return sessions


if __name__ == "__main__":
    library = sys.argv[1]
    package = {"verifiers": "verifiers", "openenv": "openenv-core"}[library]
    sessions = {"verifiers": check_verifiers, "openenv": check_openenv}[library]()
    print(
        f"{package} {importlib.metadata.version(package)}: sessions as expected; 1000 hostile actions each: {sessions}"
    )
