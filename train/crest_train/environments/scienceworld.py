"""`scienceworld`: the 30 elementary-science tasks of ScienceWorld, 7207 variations, in a Java machine of their own.

Needs the package `scienceworld` and Java. Learning by doing in a house of ten rooms: boil, melt, grow, connect, mix.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path

from crest_train.environments import FIRST_HELD_OUT_SEED
from crest_train.environments.jvm import Jvm, check_java
from crest_train.environments.protocol import Step
from crest_train.environments.supervised import Supervised
from crest_train.environments.text_game import MAX_CHARACTERS, Outcome, TextGame, plain

TASKS = (
    "boil",
    "change-the-state-of-matter-of",
    "chemistry-mix",
    "chemistry-mix-paint-secondary-color",
    "chemistry-mix-paint-tertiary-color",
    "find-animal",
    "find-living-thing",
    "find-non-living-thing",
    "find-plant",
    "freeze",
    "grow-fruit",
    "grow-plant",
    "identify-life-stages-1",
    "identify-life-stages-2",
    "inclined-plane-determine-angle",
    "inclined-plane-friction-named-surfaces",
    "inclined-plane-friction-unnamed-surfaces",
    "lifespan-longest-lived",
    "lifespan-longest-lived-then-shortest-lived",
    "lifespan-shortest-lived",
    "measure-melting-point-known-substance",
    "measure-melting-point-unknown-substance",
    "melt",
    "mendelian-genetics-known-plant",
    "mendelian-genetics-unknown-plant",
    "power-component",
    "power-component-renewable-vs-nonrenewable-energy",
    "test-conductivity",
    "test-conductivity-of-unknown-substances",
    "use-thermometer",
)
SIMPLIFICATIONS = (
    "easy",
    "noElectricalAction",
    "openContainers",
    "openDoors",
    "selfWateringFlowerPots",
    "teleportAction",
)
_STRIDE = 37
_SYSTEM = """You are in a house and do a task by actions, one at a time, each of them one line. OBJ is the name of a \
thing that you see.
look around; look at OBJ; look in OBJ; read OBJ; inventory; task; wait; wait1
go to LOCATION; teleport to LOCATION (where the task allows it); open OBJ; close OBJ
pick up OBJ; put down OBJ; move OBJ to OBJ; pour OBJ into OBJ; dunk OBJ into OBJ; mix OBJ; eat OBJ; flush OBJ
focus on OBJ (says that it is the thing the task asks for: a wrong one fails the task)
use OBJ; use OBJ on OBJ; activate OBJ; deactivate OBJ; connect OBJ to OBJ; disconnect OBJ
Where a name is ambiguous you are asked for a number: answer with it alone."""
_REFUSALS = ("No known action matches that input", "Unknown action")


class ScienceWorld(Supervised):
    """ScienceWorld (arXiv 2203.07540; see environments/protocol.py): one turn a session, many actions.

    tasks: those played, all by default; seeds go round them. simplifications: of SIMPLIFICATIONS. Training seeds name
    variations of the package's training split, held-out ones (from FIRST_HELD_OUT_SEED on) those of its test split.
    Turn reward: the score when the task is completed or failed (0 then) or after `max_actions` actions, in [0, 1];
    a success is 1. `gold` is the engine's own path from the session's beginning, an action a line, which chance draws
    anew in every process. Step.info: see TextGame; the state is the room seen, the inventory and the score.

    The sessions of a trainer process share one Java machine: about 0.3 GiB with one of them, 1.6 GiB with 64. A call
    that takes longer than `timeout` seconds loses its session: see Supervised. Raises ValueError for wrong options,
    a missing package or a missing Java.
    """

    def __init__(
        self,
        tasks: Sequence[str] = TASKS,
        simplifications: Sequence[str] = ("easy",),
        max_actions: int = 200,
        timeout: float = 120.0,
    ) -> None:
        for argument, found, known in (("tasks", tasks, TASKS), ("simplifications", simplifications, SIMPLIFICATIONS)):
            if isinstance(found, str) or not set(found) <= set(known):
                raise ValueError(f"{argument}: found {found!r}, wanted a list of {', '.join(known)}")
        electrical = [task for task in tasks if "power-component" in task or "conductivity" in task]
        if "noElectricalAction" in simplifications and electrical:
            raise ValueError(
                f"tasks: found {electrical}, which noElectricalAction makes impossible; wanted none of them"
            )
        if not tasks:
            raise ValueError("tasks: found none, wanted at least one")
        if max_actions < 1:
            raise ValueError(f"max_actions: found {max_actions}, wanted at least 1")
        if find_spec("scienceworld") is None:
            raise ValueError("the package scienceworld was not found; it comes with: pip install scienceworld")
        check_java()
        options = {"tasks": list(tasks), "simplifications": list(simplifications), "max_actions": max_actions}
        super().__init__(f"{__name__}:Session", timeout, **options)


class Session:
    """The engine's side: a session in this process's Java machine."""

    system = _SYSTEM
    num_turns = 1

    def __init__(self, tasks: list[str], simplifications: list[str], max_actions: int) -> None:
        self.tasks, self.simplifications, self.max_actions = tasks, ",".join(simplifications), max_actions
        self.task, self.variation = tasks[0], 0

    def reset(self, seed: int) -> str:
        """Start the variation that the seed names."""
        held_out, number = divmod(seed, FIRST_HELD_OUT_SEED)
        self.task = self.tasks[number % len(self.tasks)]
        variations = _variations(self.task, held_out > 0)
        self.variation = variations[number // len(self.tasks) * _STRIDE % len(variations)]
        self._load(gold=False)
        self._game = TextGame(self.max_actions, self._state())
        return f"{self._call('getTaskDescription')}\n{self._call('freeActionLook')}".strip()

    def gold(self) -> str:
        """The engine's path, generated in a session of its own."""
        return "\n".join(_gold(self.task, self.variation, self.simplifications))

    def step(self, action: str) -> Step:
        """Play one action."""
        text = plain(action)
        if text is None:
            said = f"An action has 1 to {MAX_CHARACTERS} characters."
            return self._game.judge(action, Outcome(said, self._game.score, False, True, self._game.state))
        try:
            said = self._call("step", text).strip()
        except RuntimeError as error:  # what Java threw: the engine's own mistake
            said = f"Unknown action: {error}"
        score = self._call("getScore")
        over = self._call("getCompleted") or score < 0
        return self._game.judge(text, Outcome(said, score, over, said.startswith(_REFUSALS), self._state()))

    @cached_property
    def _engine(self):
        return _machine().new("scienceworld.runtime.pythonapi.PythonInterface")

    def _call(self, method: str, *args):
        return _machine().call(self._engine, method, *args)

    def _load(self, gold: bool) -> None:
        self._call("load", self.task, self.variation, self.simplifications, gold)
        self._call("reset")

    def _state(self) -> str:
        return f"{self._call('freeActionLook')}\n{self._call('freeActionInventory')}"


@lru_cache
def _machine() -> Jvm:
    from scienceworld.constants import JAR_PATH

    return Jvm(Path(JAR_PATH))


@lru_cache
def _scout() -> Session:
    """A session of nobody's, to ask the engine for what it can tell of a task."""
    return Session(list(TASKS), [], 1)


@lru_cache
def _variations(task: str, held_out: bool) -> tuple[int, ...]:
    scout = _scout()
    scout.task, scout.variation, scout.simplifications = task, 0, ""
    scout._load(gold=False)
    return scout._call("getVariationsTest" if held_out else "getVariationsTrain")


@lru_cache(maxsize=1024)
def _gold(task: str, variation: int, simplifications: str) -> tuple[str, ...]:
    scout = _scout()
    scout.task, scout.variation, scout.simplifications = task, variation, simplifications
    scout._load(gold=True)
    return scout._call("getGoldActionSequence")
