"""`trl`: an environment class written for TRL's GRPOTrainer (`environment_factory`), as of trl 1.16."""

import inspect
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.utils import get_json_schema

from crest_train.environments import imported
from crest_train.environments.adapters.calls import as_text, parse
from crest_train.environments.bfcl_calls import BadCall, Call
from crest_train.environments.bfcl_prompt import system_prompt
from crest_train.environments.protocol import Step


class TrlEnvironment:
    """A class for TRL's `environment_factory`, played by this trainer (see environments/protocol.py).

    factory: "module:Class"; the module is looked for in the current folder first. Its public methods are the tools, its
    `reset(**row)` may return a text behind the prompt, as in TRL. dataset: a file with a row of TRL's data set in each
    line, as JSON: `prompt` (a text, or messages: system ones and one of the user) and what else `reset` takes; without
    it, `reset` gives the prompt, from its own source. Seeds run through the rows and wrap around; a `reset` with an
    argument `seed` is told it, which one that draws at random needs: the rollouts of a group share their session.
    reward: "module:function" of TRL's kind, called with the lists `prompts`, `completions`, `environments` and the
    row's columns; added to the class's `get_reward()` where it has one. One of the two is needed.

    Action: calls of the tools (adapters/calls.py). The session is one turn; it ends with an action without a call, or
    after `max_actions` actions. Its reward has to lie in [0, 1]. What a tool raises is its reply, as in TRL. There is
    no ground truth. Step.info: `error` (a call failed or could not be read), `feedback` (-1 after one, +1 when all
    calls worked, 0 without calls).
    """

    num_turns = 1

    def __init__(self, factory: str, dataset: str = "", reward: str = "", max_actions: int = 20) -> None:
        if max_actions < 1:
            raise ValueError(f"max_actions: found {max_actions}, wanted at least 1")
        self.max_actions = max_actions
        self.system = ""
        self._environment = imported(factory)()
        self._reward: Callable[..., list[float]] | None = imported(reward) if reward else None
        self._rows = _rows(Path(dataset)) if dataset else [{"prompt": [{"role": "user", "content": ""}]}]
        owns = inspect.getmembers(type(self._environment), inspect.isfunction)
        self._tools = {
            name: getattr(self._environment, name)
            for name, _ in owns
            if name not in ("reset", "get_reward") and not name.startswith("_")
        }
        if not callable(getattr(self._environment, "reset", None)):
            raise ValueError(f"factory: {factory} has no reset(), which TRL's environments have")
        if not self._reward and not hasattr(self._environment, "get_reward"):
            raise ValueError(f"reward: found none, and {factory} has no get_reward(); wanted one of them")
        self._docs = [get_json_schema(tool)["function"] for tool in self._tools.values()]
        self._parameters = {name: list(inspect.signature(tool).parameters) for name, tool in self._tools.items()}

    def reset(self, seed: int) -> str:
        """Start a session with the row that the seed names."""
        self._row = self._rows[seed % len(self._rows)]
        seeded = {"seed": seed} if "seed" in inspect.signature(self._environment.reset).parameters else {}
        self._messages: list[dict[str, Any]] = []
        self._num_actions = 0
        system, request = _texts(self._row["prompt"])
        self.system = "\n\n".join([*system, *([system_prompt(self._docs, "json")] if self._docs else [])])
        told = self._environment.reset(**seeded | self._row)
        if told is not None and not isinstance(told, str):
            raise ValueError(f"reset() gave {type(told).__name__}; wanted a text or None: images are not played")
        return request + (told or "")

    def step(self, action: str) -> Step:
        """Make the calls of one action."""
        self._num_actions += 1
        self._messages.append({"role": "assistant", "content": action})
        try:
            calls, ends = parse(action, self._parameters)
        except BadCall as error:
            calls, ends, replies, worked = [], False, [str(error)], [False]
        else:
            results = [self._call(call) for call in calls]
            replies, worked = [reply for reply, _ in results], [fine for _, fine in results]
        self._messages += [{"role": "tool", "content": reply} for reply in replies]
        failed = not all(worked)
        over = ends or self._num_actions >= self.max_actions
        return Step(
            observation="\n".join(replies) or None,
            turn_reward=self._score() if over else None,
            info={"error": failed, "feedback": -1 if failed else int(bool(calls))},
        )

    def _call(self, call: Call) -> tuple[str, bool]:
        try:
            if call.name not in self._tools:
                raise ValueError(f"Tool {call.name} not found.")
            return as_text(self._tools[call.name](**call.kwargs)), True
        except Exception as error:  # of a tool, or of arguments that it does not take
            return as_text({"error": str(error)}), False

    def _score(self) -> float:
        parts = []
        if hasattr(self._environment, "get_reward"):
            parts.append(self._environment.get_reward())
        if self._reward:
            columns = {name: [value] for name, value in self._row.items() if name != "prompt"}
            given = {"prompts": [self._row["prompt"]], "completions": [self._messages]}
            parts += self._reward(**given, environments=[self._environment], **columns)
        return math.fsum(part for part in parts if part is not None)


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"dataset: {path}: wanted a file with a JSON object in each line ({error})") from error
    if not rows or not all(isinstance(row, dict) and "prompt" in row for row in rows):
        raise ValueError(f"dataset: {path}: wanted a JSON object with a prompt in each line")
    return rows


def _texts(prompt: str | list[dict[str, Any]]) -> tuple[list[str], str]:
    """System texts and the user's."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    roles = [message["role"] for message in messages]
    if roles[-1:] != ["user"] or set(roles[:-1]) - {"system"}:
        raise ValueError(
            f"dataset: found a prompt with messages of {', '.join(roles)}; wanted system, then one of user"
        )
    return [message["content"] for message in messages[:-1]], messages[-1]["content"]
