"""`textworld_express`: eight text games of TextWorld-Express, 1000 seeds a split, in a Java machine of their own.

Needs the package `textworld-express` and Java.
"""

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from crest_train.environments import FIRST_HELD_OUT_SEED
from crest_train.environments.jvm import Jvm, check_java
from crest_train.environments.protocol import Step
from crest_train.environments.supervised import Supervised
from crest_train.environments.text_game import MAX_CHARACTERS, Outcome, TextGame, plain

GAMES = ("cookingworld", "twc", "coin", "mapreader", "arithmetic", "sorting", "simonsays", "peckingorder")
NUM_SEEDS = 1000
"""Of each split; the package counts the training split from 0, the test split from 20,000."""
_FIRST_TEST_SEED = 20_000
_SYSTEM = """You play a text game by actions, one at a time, each of them one line. OBJ is the name of a thing that \
you see.
look around; inventory; examine OBJ; read OBJ; open OBJ; close OBJ; move north, east, south or west
take OBJ; put OBJ in OBJ; open door to north (east, south, west); use OBJ on OBJ
cook OBJ in OBJ; slice, chop or dice OBJ; prepare meal; eat OBJ
Some games name further actions in what they tell you."""


class TextworldExpress(Supervised):
    """TextWorld-Express (arXiv 2208.01174; see environments/protocol.py): one turn a session, many actions.

    games: those played, all by default; seeds go round them. Training seeds name games of the package's training split,
    held-out ones (from FIRST_HELD_OUT_SEED on) those of its test split. Turn reward: the score when the game ends or
    after `max_actions` actions, in [0, 1]; a success is 1. `gold` is the engine's own path from the session's
    beginning, an action a line; it takes turns that chance draws anew in every process. Step.info: see TextGame; the
    state is the room seen, the inventory and the score.

    The sessions of a trainer process share one Java machine: about 0.2 GiB with 64 of them. A call that takes longer
    than `timeout` seconds loses its session: see Supervised. Raises ValueError for wrong options, a missing package or
    a missing Java.
    """

    def __init__(self, games: Sequence[str] = GAMES, max_actions: int = 50, timeout: float = 120.0) -> None:
        if isinstance(games, str) or not games or not set(games) <= set(GAMES):
            raise ValueError(f"games: found {games!r}, wanted a list of {', '.join(GAMES)}")
        if max_actions < 1:
            raise ValueError(f"max_actions: found {max_actions}, wanted at least 1")
        if find_spec("textworld_express") is None:
            raise ValueError(
                "the package textworld-express was not found; it comes with: pip install textworld-express"
            )
        check_java()
        super().__init__(f"{__name__}:Session", timeout, games=list(games), max_actions=max_actions)


class Session:
    """The engine's side: a session in this process's Java machine."""

    system = _SYSTEM
    num_turns = 1
    begun_last: "Session | None" = None
    """Of all sessions: engines that sort share their things, which the last one to begin puts in place."""

    def __init__(self, games: list[str], max_actions: int) -> None:
        self.games, self.max_actions = games, max_actions

    def reset(self, seed: int) -> str:
        """Start the game that the seed names."""
        held_out, number = divmod(seed, FIRST_HELD_OUT_SEED)
        self.name = self.games[number % len(self.games)]
        self.fold = "test" if held_out else "train"
        self.number = number // len(self.games) % NUM_SEEDS + (_FIRST_TEST_SEED if held_out else 0)
        self._texts: list[str] = []
        told = self._begin(gold=False)
        self._game = TextGame(self.max_actions, _state(told))
        return f"{self._call('getTaskDescription')}\n{told['observation']}".strip()

    def gold(self) -> str:
        """The engine's path, generated in a session of its own."""
        return "\n".join(_gold(self.name, self.fold, self.number))

    def step(self, action: str) -> Step:
        """Play one action."""
        text = plain(action)
        if text is None:
            said = f"An action has 1 to {MAX_CHARACTERS} characters."
            return self._game.judge(action, Outcome(said, self._game.score, False, True, self._game.state))
        if self.name == "sorting" and Session.begun_last is not self:
            self._begin(gold=False)
            for earlier in self._texts:
                self._call("stepJSON", earlier)
        self._texts.append(text)
        try:
            told = json.loads(self._call("stepJSON", text))
        except RuntimeError as error:  # what Java threw: the engine's own mistake
            said = f"Unknown action: {error}"
            return self._game.judge(text, Outcome(said, self._game.score, False, True, self._game.state))
        said, score = told["observation"].strip(), float(told["score"])
        over = told["tasksuccess"] or told["taskfailure"] or score >= 1
        return self._game.judge(text, Outcome(said, score, over, said.startswith("Unknown action"), _state(told)))

    @cached_property
    def _engine(self):
        return _machine().new("textworldexpress.runtime.PythonInterface")

    def _call(self, method: str, *args):
        return _machine().call(self._engine, method, *args)

    def _begin(self, gold: bool) -> dict[str, Any]:
        Session.begun_last = self
        self._call("load", self.name, "")
        return json.loads(self._call("generateNewGameJSON", self.number, self.fold, gold))


def _state(told: dict[str, Any]) -> str:
    return f"{told['look']}\n{told['inventory']}"


@lru_cache
def _machine() -> Jvm:
    from textworld_express.constants import JAR_PATH

    return Jvm(Path(JAR_PATH))


@lru_cache
def _scout() -> Session:
    """A session of nobody's, to ask the engine for paths."""
    return Session(list(GAMES), 1)


@lru_cache(maxsize=1024)
def _gold(name: str, fold: str, number: int) -> tuple[str, ...]:
    scout = _scout()
    scout.name, scout.fold, scout.number = name, fold, number
    scout._begin(gold=True)
    return scout._call("getGoldActionSequence")
