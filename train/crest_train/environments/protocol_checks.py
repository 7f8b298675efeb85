"""Asks an environment and holds its answer against the protocol: a session's opening, a step, the ground truth.

All raise ValueError that names the class, the turn, the field, what was found and what was wanted. Whatever a method of
the environment raises becomes one too, which names the class, the method, the session's seed and the line in question.
"""

import reprlib
import traceback
from numbers import Integral, Real
from typing import Any, NoReturn

from crest_train.environments.protocol import Environment, Step


def checked_opening(environment: Environment, seed: int) -> str:
    """The first request of a session; system and num_turns, which are valid from then on, are looked at too."""
    request = _asked(environment, seed, "reset", seed)
    if not isinstance(request, str):
        _refuse(environment, "reset() gave", request, "the first request, a text")
    system, num_turns = getattr(environment, "system", None), getattr(environment, "num_turns", None)
    if not isinstance(system, str):
        _refuse(environment, "after reset system is", system, "a text, empty when there is none")
    if not isinstance(num_turns, int) or isinstance(num_turns, bool) or num_turns < 1:
        _refuse(environment, "after reset num_turns is", num_turns, "a whole number of at least 1")
    return request


def checked_step(environment: Environment, seed: int, action: str, turn: int, num_turns: int) -> Step:
    """What is answered to an action in a turn (counted from 0) of session `seed`, which has num_turns."""
    step = _asked(environment, seed, "step", action)
    if not isinstance(step, Step):
        _refuse(environment, f"step() gave in turn {turn}", step, "a crest_train.environments.protocol.Step")
    observation, reward, request = step.observation, step.turn_reward, step.request
    if observation is not None and not isinstance(observation, str):
        _refuse(environment, f"Step.observation of turn {turn} is", observation, "a text or None")
    if request is not None and not isinstance(request, str):
        _refuse(environment, f"Step.request of turn {turn} is", request, "a text or None")
    if not isinstance(step.info, dict):
        _refuse(environment, f"Step.info of turn {turn} is", step.info, "a dict")
    key = step.info.get("state_key", 0)
    if not isinstance(key, Integral) or isinstance(key, bool) or not -(2**63) <= key < 2**63:
        _refuse(environment, f"Step.info['state_key'] of turn {turn} is", key, "a whole number of 64 bits, with sign")
    if reward is None and request is not None:
        _refuse(environment, f"Step.turn_reward of turn {turn} is", reward, "a number, as a request follows")
    if reward is not None and not (isinstance(reward, Real) and 0 <= reward <= 1):
        _refuse(environment, f"Step.turn_reward of turn {turn} is", reward, "a number in [0, 1], or None")
    if request is not None and turn + 1 >= num_turns:
        _refuse(environment, f"Step.request of turn {turn} is", request, f"None, as num_turns is {num_turns}")
    return step


def checked_gold(environment: Environment, seed: int, turn: int) -> str:
    """The ground truth of a turn of session `seed`."""
    if not callable(getattr(environment, "gold", None)):
        raise ValueError(
            f"environment {type(environment).__name__}: has no gold(), which this method, teacher or warm start reads; "
            "wanted one, or a method and a teacher.context without ground truth"
        )
    gold = _asked(environment, seed, "gold")
    if not isinstance(gold, str):
        _refuse(environment, f"gold() gave in turn {turn}", gold, "a text")
    return gold


def _asked(environment: Environment, seed: int, method: str, *given: Any) -> Any:
    try:
        return getattr(environment, method)(*given)
    except Exception as error:  # of a class that need not be the trainer's
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"environment {type(environment).__name__}: {method}() of session {seed} raised "
            f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        ) from error


def _refuse(environment: Environment, what: str, found: Any, wanted: str) -> NoReturn:
    raise ValueError(f"environment {type(environment).__name__}: {what} {reprlib.repr(found)}; wanted {wanted}")
