"""`verifiers`: an environment written for the verifiers library (SingleTurnEnv, MultiTurnEnv, ToolEnv), as of 0.1.14.

The environment plays its own rollout and scores it by its own rubric; the model that it asks is this trainer's policy.
Later versions (0.2 and on) hand the model to a harness in a process of its own and are not played.
"""

import asyncio
import json
from typing import Any

from crest_train.environments import imported
from crest_train.environments.adapters.calls import parse
from crest_train.environments.bfcl_calls import BadCall
from crest_train.environments.bfcl_prompt import system_prompt
from crest_train.environments.protocol import Step


class VerifiersEnvironment:
    """An environment of the verifiers library (see environments/protocol.py).

    factory: "module:load_environment", what makes it, in the current folder or an installed package; arguments: what
    that is given. split: "train" or "eval" data set. Seeds run through its rows and wrap around.

    Action: a text, or calls of the environment's tools where it has some (adapters/calls.py). The session is one turn;
    it ends when the environment's own conditions say so (`max_turns`, at most `max_actions`, is one) and is scored by
    its rubric, whose reward has to lie in [0, 1]; what `max_actions` cuts off behind calls that cannot be read has
    failed. There is no ground truth. Step.info: `error` (a call could not be read), `feedback` (-1 after one, else 0).
    """

    num_turns = 1

    def __init__(
        self, factory: str, arguments: dict[str, Any] | None = None, split: str = "train", max_actions: int = 20
    ) -> None:
        if split not in ("train", "eval"):
            raise ValueError(f"split: found {split!r}, wanted train or eval")
        if max_actions < 1:
            raise ValueError(f"max_actions: found {max_actions}, wanted at least 1")
        try:
            from verifiers import MultiTurnEnv
        except ImportError as error:
            raise ValueError("verifiers 0.1 is not installed; pip install 'verifiers==0.1.14'") from error
        self._environment = imported(factory)(**(arguments or {}))
        if not isinstance(self._environment, MultiTurnEnv):
            raise ValueError(f"factory: {factory} made a {type(self._environment).__name__}, wanted a MultiTurnEnv")
        self._rows = self._environment.get_dataset() if split == "train" else self._environment.get_eval_dataset()
        self.max_actions = max_actions
        self.system = ""
        self._loop = asyncio.new_event_loop()
        self._rollout: asyncio.Task | None = None

    def reset(self, seed: int) -> str:
        """Start a session with the row that the seed names."""
        self._stop()
        self._num_actions, self._shown = 0, 0
        self._asked: asyncio.Queue = asyncio.Queue()
        client = _policy(self._asked)
        self._environment.set_kwargs(max_turns=self._limit())
        row = dict(self._rows[seed % len(self._rows)])
        self._rollout = self._loop.create_task(self._environment.run_rollout(row, client, "policy", {}))
        if not self._go_on():
            raise ValueError(f"the session of row {seed % len(self._rows)} was over before it began")
        docs = [tool.model_dump() for tool in self._tools]
        self._parameters = {doc["name"]: list(doc["parameters"].get("properties", {})) for doc in docs}
        tools = [system_prompt(docs, "json")] if docs else []
        self.system = "\n\n".join([*(_text(part) for part in self._messages if part.role == "system"), *tools])
        return "\n\n".join(_text(part) for part in self._messages if part.role != "system")

    def step(self, action: str) -> Step:
        """Hand an action to the environment and wait until it asks again, or is done."""
        self._num_actions += 1
        calls, observation = [], None
        if self._parameters:
            try:
                calls, _ = parse(action, self._parameters)
            except BadCall as error:
                observation = str(error)
        over = self._num_actions >= self.max_actions
        if observation is not None and not over:
            return Step(observation=observation, info={"error": True, "feedback": -1})
        told = len(self._messages) + 1
        self._answer.set_result((action.encode(errors="replace").decode(), calls))
        if self._go_on():
            observation = "\n".join(_text(part) for part in self._messages[told:])
            return Step(observation, 0.0 if over else None, None, {"error": False, "feedback": 0})
        output = self._rollout.result()
        if output.get("error"):
            raise RuntimeError(f"the environment's rollout failed: {output['error']}")
        bad = observation is not None
        return Step(observation, float(output["reward"]), None, {"error": bad, "feedback": -int(bad)})

    def _limit(self) -> int:
        own = self._environment.max_turns
        return min(own, self.max_actions) if own > 0 else self.max_actions

    def _go_on(self) -> bool:
        """Let the environment run until it asks the policy (True) or its rollout is over."""
        asked = self._loop.create_task(self._asked.get())
        self._loop.run_until_complete(asyncio.wait({asked, self._rollout}, return_when=asyncio.FIRST_COMPLETED))
        if not asked.done():
            asked.cancel()
            return False
        self._messages, self._tools, self._answer = asked.result()
        return True

    def _stop(self) -> None:
        if self._rollout is not None and not self._rollout.done():
            self._rollout.cancel()
            self._loop.run_until_complete(asyncio.wait({self._rollout}))


def _policy(asked: asyncio.Queue) -> Any:
    """A client of the verifiers library whose every answer is what another sets in the future that `asked` is given."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage, ToolCall

    class Policy(Client):
        async def get_response(self, prompt, model, sampling_args, tools=None, **kwargs):
            answer = asyncio.get_running_loop().create_future()
            await asked.put((prompt, tools or [], answer))
            text, calls = await answer
            made = [
                ToolCall(id=str(number), name=call.name, arguments=json.dumps(call.kwargs))
                for number, call in enumerate(calls)
            ]
            reason = "tool_calls" if made else "stop"
            message = ResponseMessage(content=text, tool_calls=made or None, finish_reason=reason, is_truncated=False)
            return Response(id="", created=0, model=model, message=message)

        def setup_client(self, config): ...
        async def to_native_tool(self, tool): ...
        async def to_native_prompt(self, messages): ...
        async def get_native_response(self, *given, **named): ...
        async def raise_from_native_response(self, response): ...
        async def from_native_response(self, response): ...
        async def close(self): ...

    return Policy(None)


def _text(message: Any) -> str:
    content = message.content
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] if isinstance(part, dict) else part.text for part in content)
