"""`openenv`: an environment that an OpenEnv server plays, over its client; as of openenv-core 0.3.0."""

import json
import math
from typing import Any, Literal

from crest_train.environments.adapters.calls import as_text
from crest_train.environments.protocol import Step


class OpenEnvironment:
    """A session of an OpenEnv server (see environments/protocol.py), over openenv-core's GenericEnvClient.

    url: of the server. action: the field of the server's action that takes the policy's text; empty where the policy
    writes the whole action as a JSON object. observation: the field of the observation that is told; empty: all of it,
    as JSON. reward: "last" (of the step that ended the session) or "sum" of all steps'. system: the system prompt.

    The session is one turn; it ends when the server says so, or after `max_actions` actions, and its reward has to lie
    in [0, 1]. An action that the server refuses is answered with the refusal. The seed is the server's to honour. There
    is no ground truth. Step.info: `error` (the action was refused), `feedback` (-1 after one, else 0).
    """

    num_turns = 1

    def __init__(
        self,
        url: str,
        action: str = "",
        observation: str = "",
        reward: Literal["last", "sum"] = "last",
        system: str = "",
        max_actions: int = 20,
    ) -> None:
        if max_actions < 1:
            raise ValueError(f"max_actions: found {max_actions}, wanted at least 1")
        try:
            from openenv.core.generic_client import GenericEnvClient
        except ImportError as error:
            raise ValueError("openenv-core is not installed; pip install 'openenv-core==0.3.0'") from error
        self.url, self.action, self.observation = url, action, observation
        self.reward, self.system, self.max_actions = reward, system, max_actions
        self._client = GenericEnvClient(base_url=url).sync()

    def reset(self, seed: int) -> str:
        """Start a session with the seed and return what the server tells first."""
        self._rewards: list[float] = []
        self._num_actions = 0
        return self._told(self._client.reset(seed=seed).observation)

    def step(self, action: str) -> Step:
        """Send one action."""
        self._num_actions += 1
        over, refusal = self._num_actions >= self.max_actions, None
        try:
            result = self._client.step(self._typed(action))
        except (ValueError, RuntimeError) as error:  # not JSON, or an error that the server answers with
            refusal = as_text(f"Error: {error}")
        else:
            over = over or result.done
            self._rewards.append(float(result.reward or 0))
        return Step(
            observation=refusal if refusal is not None else self._told(result.observation),
            turn_reward=self._score() if over else None,
            info={"error": refusal is not None, "feedback": -1 if refusal is not None else 0},
        )

    def _typed(self, action: str) -> dict[str, Any]:
        if self.action:
            return {self.action: as_text(action)}
        try:
            typed = json.loads(action)
        except RecursionError:
            typed = None
        if not isinstance(typed, dict):
            raise ValueError("an action is a JSON object")
        return typed

    def _score(self) -> float:
        return math.fsum(self._rewards if self.reward == "sum" else self._rewards[-1:])

    def _told(self, observation: dict[str, Any]) -> str:
        if self.observation and self.observation not in observation:
            known = ", ".join(observation)
            raise ValueError(f"observation: the server's has no field {self.observation!r}; known: {known}")
        return as_text(observation[self.observation] if self.observation else observation)
