"""ALFWorld's rules: which commands a household admits, what they do, what is replied, when the goal is met.

Those of the planning domain and the text grammar in the `alfworld` 0.4.2 package (alfred.pddl, alfred.twl2), written
out for one agent; tests/alfworld_conformance.py plays both side by side. Slicing is left out: no task needs it. The
package itself is not needed: its engine brings a GPL-2 library and a language model's toolkit, and keeps state in C.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from crest_train.environments.alfworld_households import TREATMENTS, Household, kind_of, openable

NOTHING = "Nothing happens."
HELP = """look: look around your current location
inventory: check your current inventory
go to (receptacle): move to a receptacle
open (receptacle): open a receptacle
close (receptacle): close a receptacle
take (object) from (receptacle): take an object from a receptacle
move (object) to (receptacle): place an object in or on a receptacle
examine (something): examine a receptacle or an object
use (object): use an object
heat (object) with (receptacle): heat an object using a receptacle
clean (object) with (receptacle): clean an object using a receptacle
cool (object) with (receptacle): cool an object using a receptacle"""
_TREATED = {"clean": "clean", "heat": "hot", "cool": "cool"}


@dataclass
class World:
    """The state of a household. at: the receptacle where the agent stands, None in the middle of the room.

    lies_in: object -> receptacle, without the one held. treated: what was done to an object and still holds.
    """

    lies_in: dict[str, str]
    at: str | None = None
    held: str | None = None
    opened: set[str] = field(default_factory=set)
    treated: set[tuple[str, str]] = field(default_factory=set)
    lamp_used: bool = False

    def copy(self) -> "World":
        """One that shares nothing with this one."""
        return World(
            dict(self.lies_in),
            self.at,
            self.held,
            set(self.opened),
            set(self.treated),
            self.lamp_used,
        )

    def key(self) -> tuple:
        """Equal for equal states."""
        objects = tuple(sorted(self.lies_in.items()))
        opened, treated = tuple(sorted(self.opened)), tuple(sorted(self.treated))
        return objects, self.at, self.held, opened, treated, self.lamp_used


def admissible(household: Household, world: World) -> dict[str, Callable[[], str]]:
    """Every command that the state admits -> what carries it out on `world` and gives the reply."""
    at, held = world.at, world.held
    commands: dict[str, Callable[[], str]] = {
        "help": lambda: f"Available commands:\n{HELP}",
        "inventory": lambda: f"You are carrying: a {held}." if held else "You are not carrying anything.",
        "look": lambda: look(household, world),
    }
    for receptacle in household.receptacles:
        if receptacle != at:
            commands[f"go to {receptacle}"] = lambda receptacle=receptacle: _go(world, receptacle)
    if held:
        commands[f"examine {held}"] = lambda: _examine_object(world, held)
    if at is None:
        return commands
    commands[f"examine {at}"] = lambda: _examine_receptacle(world, at)
    if openable(at):
        verb, act = ("close", _close) if at in world.opened else ("open", _open)
        commands[f"{verb} {at}"] = lambda: act(world, at)
    inside = [name for name, place in world.lies_in.items() if place == at]
    accessible = not openable(at) or at in world.opened
    for name in inside if accessible else ():
        if not held and name != household.lamp:
            commands[f"take {name} from {at}"] = lambda name=name: _take(world, name)
    if household.lamp in inside:
        commands[f"use {household.lamp}"] = lambda: _use(household, world)
    if held and accessible and kind_of(at) in household.contains[kind_of(held)]:
        commands[f"move {held} to {at}"] = lambda: _move(world)
    for treatment, station in TREATMENTS.items():
        if held and kind_of(at) == station and treatment in household.treatments[kind_of(held)]:
            commands[f"{treatment} {held} with {at}"] = lambda treatment=treatment: _treat(world, treatment)
    return commands


def play(household: Household, world: World, command: str) -> str:
    """Carry a command out and return the reply; what the state does not admit changes nothing."""
    act = admissible(household, world).get(command.strip())
    return NOTHING if act is None else act()


def look(household: Household, world: World) -> str:
    """What is seen from where the agent stands."""
    if world.at is None:
        room = _listed(household.receptacles)
        return f"You are in the middle of a room. Looking quickly around you, you see {room}."
    return f"You are facing the {world.at}. Next to it, you see nothing."


def won(household: Household, world: World) -> bool:
    """Whether the goal is met."""
    goal = household.goal
    if household.lamp and goal.destination == kind_of(household.lamp):
        looks = world.lamp_used and world.at == world.lies_in[household.lamp]
        return looks and world.held is not None and kind_of(world.held) == goal.kind
    return len(delivered(household, world)) >= goal.count


def delivered(household: Household, world: World) -> list[str]:
    """The objects that are where the goal wants them, treated as it wants: the most that one receptacle holds."""
    goal, found = household.goal, {}
    for name, place in world.lies_in.items():
        treated = goal.treatment is None or (name, _TREATED[goal.treatment]) in world.treated
        if kind_of(name) == goal.kind and kind_of(place) == goal.destination and treated:
            found.setdefault(place, []).append(name)
    return max(found.values(), key=len, default=[])


def solve(household: Household, world: World) -> list[str]:
    """Commands that reach the goal from here, by rule, knowing where everything is."""
    world, commands = world.copy(), []
    while not won(household, world):
        commands.append(_next_command(household, world))
        play(household, world, commands[-1])
    return commands


def _next_command(household: Household, world: World) -> str:
    goal, held, done = household.goal, world.held, delivered(household, world)
    if held is None:
        name = min(name for name in world.lies_in if kind_of(name) == goal.kind and name not in done)
        place = world.lies_in[name]
        return _reach(world, place) or f"take {name} from {place}"
    if kind_of(held) != goal.kind:
        kinds = household.contains[kind_of(held)]
        place = world.at if world.at and kind_of(world.at) in kinds else _first(household, kinds)
        return _reach(world, place) or f"move {held} to {place}"
    if household.lamp and goal.destination == kind_of(household.lamp):
        place = world.lies_in[household.lamp]
        return f"go to {place}" if world.at != place else f"use {household.lamp}"
    if goal.treatment and (held, _TREATED[goal.treatment]) not in world.treated:
        station = _first(household, {TREATMENTS[goal.treatment]})
        return f"go to {station}" if world.at != station else f"{goal.treatment} {held} with {station}"
    place = world.lies_in[done[0]] if done else _first(household, {goal.destination})
    return _reach(world, place) or f"move {held} to {place}"


def _first(household: Household, kinds: Iterable[str]) -> str:
    return next(name for name in household.receptacles if kind_of(name) in kinds)


def _reach(world: World, place: str) -> str | None:
    """What is still to do before objects can be taken from there or put there."""
    if world.at != place:
        return f"go to {place}"
    return f"open {place}" if openable(place) and place not in world.opened else None


def _go(world: World, receptacle: str) -> str:
    world.at = receptacle
    return f"You arrive at {receptacle}. {_examine_receptacle(world, receptacle)}"


def _open(world: World, receptacle: str) -> str:
    world.opened.add(receptacle)
    return f"You open the {receptacle}. {_examine_receptacle(world, receptacle)}"


def _close(world: World, receptacle: str) -> str:
    world.opened.remove(receptacle)
    return f"You close the {receptacle}."


def _take(world: World, name: str) -> str:
    world.held, place = name, world.lies_in.pop(name)
    return f"You pick up the {name} from the {place}."


def _move(world: World) -> str:
    name, world.held = world.held, None
    world.lies_in[name] = world.at
    return f"You move the {name} to the {world.at}."


def _treat(world: World, treatment: str) -> str:
    undone = {"heat": "cool", "cool": "hot"}.get(treatment)
    world.treated.discard((world.held, undone))
    world.treated.add((world.held, _TREATED[treatment]))
    return f"You {treatment} the {world.held} using the {world.at}."


def _use(household: Household, world: World) -> str:
    world.lamp_used = True
    return f"You turn on the {household.lamp}."


def _examine_receptacle(world: World, receptacle: str) -> str:
    inside = _listed(name for name, place in world.lies_in.items() if place == receptacle)
    if not openable(receptacle):
        return f"On the {receptacle}, you see {inside}."
    if receptacle not in world.opened:
        return f"The {receptacle} is closed."
    return f"The {receptacle} is open. In it, you see {inside}."


def _examine_object(world: World, name: str) -> str:
    hot, cool, clean = ((name, state) in world.treated for state in ("hot", "cool", "clean"))
    words = ["hot"] * hot + ["cool" if clean else "cold"] * cool + ["clean"] * clean
    return f"This is a {' and '.join(words)} {name}." if words else f"There's nothing special about {name}."


def _listed(names: Iterable[str]) -> str:
    told = [f"a {name}" for name in names]
    return ", and ".join(part for part in (", ".join(told[:-1]), *told[-1:]) if part) or "nothing"
