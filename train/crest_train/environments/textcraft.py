"""`textcraft`: things to craft by Minecraft's recipes, several goals a session, one of them a turn.

Needs the package `textcraft` (arXiv 2311.05772): 860 recipes, 419 goals of two to four crafts in a row.
"""

import contextlib
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from crest_train.environments import FIRST_HELD_OUT_SEED
from crest_train.environments.protocol import Role, Step
from crest_train.environments.text_game import MAX_CHARACTERS, key, plain
from crest_train.environments.textcraft_plans import book

DEPTHS = (2, 3, 4)
NUM_DISTRACTORS = 10
"""Recipes listed beside those that can have a part in the goal."""
_SYSTEM = """You craft things. An action is one line:
get AMOUNT ITEM (fetches what no recipe makes)
craft AMOUNT ITEM using AMOUNT ITEM, AMOUNT ITEM (one of the recipes told, in exactly its amounts)
inventory
Where a recipe names a kind (planks), name an item of that kind (oak planks)."""


@dataclass(frozen=True)
class State:
    """A session: its goals and their lists, the turn, its actions so far, what one has and what was seen."""

    requests: tuple[str, ...]
    goals: tuple[str, ...]
    turn: int = 0
    num_actions: int = 0
    inventory: tuple[tuple[str, int], ...] = ()
    seen: frozenset[tuple[int, str]] = frozenset()


class TextCraft:
    """TextCraft (see environments/protocol.py): a turn is a goal, what was got and crafted stays for the next.

    num_turns: goals a session, all different. depths: crafts in a row that a goal may take, of 2, 3 and 4. Four fifths
    of the goals are to train with; held-out seeds (from FIRST_HELD_OUT_SEED on) name goals of the last fifth only.
    A turn's reward is 1 when its goal is crafted in it, and 0 when `max_actions` actions went by without.

    Step.info: `error` (it was refused), `feedback` (-1 refused, +1 got or crafted, 0 inventory), `redundant` (the same
    action was played with the same inventory in the turn), `state_key` (of turn, goal and inventory: the whole state),
    `role`: progress when the plan to the goal is shorter than before, regression when it is longer or the turn failed,
    exploration for a first look at an inventory, no progress otherwise. There is no `cause`: no action fails for
    what an earlier one did wrong.
    """

    system = _SYSTEM

    def __init__(self, num_turns: int = 4, depths: Sequence[int] = DEPTHS, max_actions: int = 50) -> None:
        if isinstance(depths, str) or not depths or not set(depths) <= set(DEPTHS):
            raise ValueError(f"depths: found {depths!r}, wanted a list of 2, 3 and 4")
        if max_actions < 1:
            raise ValueError(f"max_actions: found {max_actions}, wanted at least 1")
        self.num_turns, self.max_actions, self._book = num_turns, max_actions, book()
        goals = list(self._book.depth)
        random.Random(0).shuffle(goals)
        cut = len(goals) * 4 // 5
        self._goals = [[g for g in part if self._book.depth[g] in depths] for part in (goals[:cut], goals[cut:])]
        fewest = min(map(len, self._goals))
        if not 1 <= num_turns <= fewest:
            raise ValueError(f"num_turns: found {num_turns}, wanted 1 to {fewest}, the held-out goals of these depths")
        self._state: State | None = None

    def reset(self, seed: int) -> str:
        """Start session `seed` and return its first goal."""
        drawn = random.Random(seed)
        goals = tuple(drawn.sample(self._goals[seed >= FIRST_HELD_OUT_SEED], self.num_turns))
        self._state = State(tuple(self._request(goal, drawn) for goal in goals), goals)
        return self._state.requests[0]

    def gold(self) -> str:
        """The cheapest plan to the turn's goal from what one has now, an action a line."""
        state = self._running()
        return "\n".join(self._book.plan(state.goals[state.turn], dict(state.inventory)))

    def save(self) -> State:
        """The exact state of the session."""
        return self._running()

    def restore(self, state: State) -> None:
        """Continue from a state that `save` gave."""
        self._state = state

    def step(self, action: str) -> Step:
        """Play one action. Raises ValueError only when the session is over or not begun."""
        state = self._running()
        goal, had = state.goals[state.turn], dict(state.inventory)
        text = plain(action)
        if text is None:
            has, made, said, refused = had, False, f"An action has 1 to {MAX_CHARACTERS} characters.", True
        else:
            has, made, said, refused = self._play(text, goal, had)
        num_actions = state.num_actions + 1
        reward = 1.0 if made else 0.0 if num_actions >= self.max_actions else None
        number = key(f"{state.turn} {goal} {sorted(had.items())}")
        seen = (number, text or "")
        looked = not refused and has == had and seen not in state.seen
        info = {
            "error": refused,
            "feedback": -1 if refused else int(has != had),
            "redundant": seen in state.seen,
            "state_key": number,
            "role": self._role(goal, had, has, reward, looked=looked),
        }
        turn = state.turn + (reward is not None)
        self._state = replace(
            state,
            turn=turn,
            num_actions=0 if reward is not None else num_actions,
            inventory=tuple(has.items()),
            seen=state.seen | {seen},
        )
        request = state.requests[turn] if reward is not None and turn < self.num_turns else None
        return Step(said, reward, request, info)

    def _play(self, text: str, goal: str, had: dict[str, int]) -> tuple[dict[str, int], bool, str, bool]:
        """What one has then, whether the goal was made, the reply, whether it refuses."""
        engine = self._book.engine
        engine.inventory = {f"minecraft:{item.replace(' ', '_')}": amount for item, amount in had.items()}
        engine.goal = f"minecraft:{goal.replace(' ', '_')}"
        with contextlib.redirect_stdout(io.StringIO()):  # the engine prints what it refuses
            said, _, made, _, _ = engine.step(text)
        has = {item.removeprefix("minecraft:").replace("_", " "): amount for item, amount in engine.inventory.items()}
        return has, made, said.replace("minecraft:", "").strip(), not said.startswith(("Got", "Crafted", "Inventory"))

    def _role(self, goal: str, had: dict[str, int], has: dict[str, int], reward: float | None, *, looked: bool) -> Role:
        if reward is not None:
            return Role.PROGRESS if reward else Role.REGRESSION
        if has == had:
            return Role.EXPLORATION if looked else Role.NO_PROGRESS
        before, after = (len(self._book.plan(goal, items)) for items in (had, has))
        if before == after:
            return Role.NO_PROGRESS
        return Role.PROGRESS if after < before else Role.REGRESSION

    def _request(self, goal: str, drawn: random.Random) -> str:
        needed = {recipe.text for recipe in self._book.needed(goal)}
        items = {item for recipe in self._book.needed(goal) for _, item in recipe.inputs}
        others = sorted({recipe.text for recipe in self._book.using(items)} - needed)
        listed = sorted(needed) + drawn.sample(others, min(len(others), NUM_DISTRACTORS))
        drawn.shuffle(listed)
        return "Crafting commands:\n{}\n\nGoal: craft {}.".format("\n".join(listed), goal)

    def _running(self) -> State:
        if self._state is None:
            raise ValueError("no session is running; call reset first")
        if self._state.turn >= self.num_turns:
            raise ValueError("the session is over; call reset to start another")
        return self._state
