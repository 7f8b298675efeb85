"""`alfworld`: ALFWorld's rules and task types in synthetic households; none of ALFWorld's own games is used.

An action is one command, e.g. `take apple 1 from fridge 1`, in the words that the environment tells; one that the state
does not admit is answered with `Nothing happens.`. The session is one turn. It ends when the goal is met.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from crest_train.environments import FIRST_HELD_OUT_SEED
from crest_train.environments import alfworld_rules as rules
from crest_train.environments.alfworld_households import TASKS, Household, draw_household
from crest_train.environments.alfworld_rules import World
from crest_train.environments.protocol import Role, Step

_READING = ("examine", "go", "help", "inventory", "look")


@dataclass
class _State:
    household: Household
    world: World
    distance: int
    """Commands of the rule-based solution from here."""
    num_actions: int = 0
    made: set[tuple[str, tuple]] = field(default_factory=set)
    """Commands, each with the state that it met."""
    told: set[str] = field(default_factory=set)
    """Replies so far."""

    def copy(self) -> "_State":
        return _State(
            self.household, self.world.copy(), self.distance, self.num_actions, set(self.made), set(self.told)
        )


class Alfworld:
    """ALFWorld rules, synthetic households (see environments/protocol.py): the six task types of ALFWorld.

    `tasks` are the task types that the seeds go through (`alfworld_households.TASKS`; all by default). Seeds from
    FIRST_HELD_OUT_SEED on ask for goals (task type, object, destination) that no smaller seed asks for. `admissible`:
    every observation lists the commands that the state admits. A session that takes `max_actions` actions has failed.

    Turn reward: 1 when the goal is met, which ends the session; 0 when the actions are used up.

    Step.info says by rule:

    - role: `Role` of the action: progress when the rule-based solution from the state is shorter than before,
      regression when it is longer or when the actions are used up; exploration when it is as long and something new was
      told; no progress otherwise.
    - feedback: -1 for `Nothing happens.`, +1 when something was changed, 0 when something was told.
    - error: the reply was `Nothing happens.`.
    - redundant: the command was made before in the same state.
    - state_key: equal for equal states of equal households.
    """

    num_turns = 1

    def __init__(self, tasks: Sequence[str] | None = None, admissible: bool = False, max_actions: int = 50) -> None:
        if tasks is not None and (isinstance(tasks, str) or not tasks or not set(tasks) <= set(TASKS)):
            raise ValueError(f"tasks: found {tasks!r}, wanted a list of {', '.join(TASKS)}")
        if max_actions < 1:
            raise ValueError(f"max_actions: found {max_actions}, wanted at least 1")
        self.tasks = tuple(tasks or TASKS)
        self.admissible = admissible
        self.max_actions = max_actions
        self.system = f"Do the task in the household, one command at a time. The commands:\n{rules.HELP}"
        self._state: _State | None = None

    def reset(self, seed: int) -> str:
        """Start session `seed`: the room and the task."""
        household = draw_household(seed, self.tasks, held_out=seed >= FIRST_HELD_OUT_SEED)
        world = World(dict(household.lies_in))
        self._state = _State(household, world, len(rules.solve(household, world)))
        opening = rules.look(household, world)
        return self._with_commands(f"{opening}\nYour task is to: {household.text}.")

    def gold(self) -> str:
        """Commands that reach the goal from the present state, one a line."""
        state = self._running()
        return "\n".join(rules.solve(state.household, state.world))

    def save(self) -> _State:
        """The exact state of the session, independent of later steps."""
        return self._running().copy()

    def restore(self, state: _State) -> None:
        """Continue from a state that `save` gave."""
        self._state = state.copy()

    def step(self, action: str) -> Step:
        """Play one command. Raises ValueError only when the session is over or not begun."""
        state, command = self._running(), action.strip()
        household, world = state.household, state.world
        before, distance = world.key(), state.distance
        reply = rules.play(household, world, command)
        state.num_actions += 1
        if world.key() != before:
            state.distance = len(rules.solve(household, world))
        gained = distance - state.distance
        failed = reply == rules.NOTHING
        reward = 1.0 if rules.won(household, world) else 0.0 if state.num_actions >= self.max_actions else None
        if reward == 0.0 or gained < 0:
            role = Role.REGRESSION
        elif gained > 0:
            role = Role.PROGRESS
        else:
            role = Role.NO_PROGRESS if failed or reply in state.told else Role.EXPLORATION
        info = {
            "role": role,
            "feedback": -1 if failed else int(not command.startswith(_READING)),
            "error": failed,
            "redundant": (command, before) in state.made,
            "state_key": _digest(household, before),
        }
        state.made.add((command, before))
        state.told.add(reply)
        return Step(observation=self._with_commands(reply), turn_reward=reward, info=info)

    def _with_commands(self, text: str) -> str:
        if not self.admissible:
            return text
        state = self._state
        return f"{text}\nCommands: {', '.join(sorted(rules.admissible(state.household, state.world)))}"

    def _running(self) -> _State:
        state = self._state
        if state is None:
            raise ValueError("no session is running; call reset first")
        if state.num_actions >= self.max_actions or rules.won(state.household, state.world):
            raise ValueError("the session is over; call reset to start another")
        return state


def _digest(household: Household, key: tuple) -> int:
    known = repr((household.text, household.receptacles, sorted(household.lies_in.items()), key))
    return int.from_bytes(hashlib.blake2b(known.encode(), digest_size=8).digest(), "big") >> 1
