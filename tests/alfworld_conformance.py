"""The rules of `alfworld` beside the real engine: alfworld 0.4.2 on textworld 1.7.0, in an environment of its own.

Households drawn here are written out as planning problems and played by both, with random admitted commands, commands
that nothing admits and the rule-based solution. After every command the replies, the admitted commands and whether the
goal is met are held against each other. Last run: tests/alfworld_conformance.txt. To run it (heavy: it compiles a
planner and the GPL-2 library jericho):

    pip install 'alfworld==0.4.2' 'textworld[pddl]==1.7.0'
    python tests/alfworld_conformance.py 24
"""

import random
import re
import sys
from importlib.metadata import version

import alfworld.gen.goal_library as goal_library
import textworld
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH
from crest_train.environments import alfworld_rules as rules
from crest_train.environments.alfworld_households import LAMP, TASKS, TREATMENTS, Household, draw_household, kind_of
from crest_train.environments.alfworld_rules import World
from textworld.envs import PddlEnv

ABLE = {"clean": "cleanable", "heat": "heatable", "cool": "coolable"}


def problem(household: Household) -> str:
    """The household as a problem of ALFRED's planning domain, with ALFWorld's own goal."""
    places = {name: f"loc_bar_{n}" for n, name in enumerate(household.receptacles)}
    names = {name: symbol(name) for name in [*household.receptacles, *household.lies_in]}
    kinds = {kind_of(name) for name in household.receptacles} | set(TREATMENTS.values())
    objects = {kind_of(name) for name in household.lies_in} | {"knife", "butterknife"}
    facts = ["(= (total-cost) 0)", "(atLocation agent1 loc_bar_start)"]
    for name, place in places.items():
        facts += [
            f"(receptacleType {names[name]} {kind_of(name)}Type)",
            f"(receptacleAtLocation {names[name]} {place})",
        ]
        facts += [f"(openable {names[name]})"] * rules.openable(name)
    for name, place in household.lies_in.items():
        facts += [f"(objectType {names[name]} {kind_of(name)}Type)", f"(inReceptacle {names[name]} {names[place]})"]
        facts += [f"(objectAtLocation {names[name]} {places[place]})"]
        facts += [f"(toggleable {names[name]})" if name == household.lamp else f"(pickupable {names[name]})"]
        facts += [f"({ABLE[treatment]} {names[name]})" for treatment in household.treatments.get(kind_of(name), ())]
    for kind in objects & set(household.contains):
        facts += [f"(canContain {place}Type {kind}Type)" for place in kinds & household.contains[kind]]
    goal = household.goal
    slots = dict(obj=goal.kind, recep=goal.destination, toggle=LAMP, mrecep="")
    wanted = goal_library.gdict[goal.task]["pddl"].format(**slots).replace(" # ", " - ")
    declared = [
        "agent1 - agent",
        f"loc_bar_start {' '.join(places.values())} - location",
        f"{' '.join(names[name] for name in household.receptacles)} - receptacle",
        f"{' '.join(names[name] for name in household.lies_in)} - object",
        f"{' '.join(f'{kind}Type' for kind in sorted(kinds))} - rtype",
        f"{' '.join(f'{kind}Type' for kind in sorted(objects))} - otype",
    ]
    text = f"(define (problem p) (:domain alfred) (:objects {' '.join(declared)}) (:init {' '.join(facts)}) {wanted}"
    return text + ")" * (text.count("(") - text.count(")"))


def symbol(name: str) -> str:
    """`cabinet 3` as ALFRED writes it; ALFWorld's wrapper numbers the names of a kind anew, the last first."""
    kind, _, number = name.rpartition(" ")
    stem = kind.removesuffix("basin") if kind.endswith("basin") else kind
    return f"{stem}_bar_{99 - int(number):02d}" + ("_basin" if stem != kind else "")


def engine(household: Household) -> tuple[textworld.Environment, textworld.GameState]:
    """ALFWorld's engine, at the household's start."""
    with open(ALFRED_PDDL_PATH) as domain, open(ALFRED_TWL2_PATH) as grammar:
        text = grammar.read().replace("UNKNOWN GOAL", household.text)
        game = {"pddl_domain": domain.read(), "grammar": text, "pddl_problem": problem(household)}
    env = AlfredDemangler(PddlEnv(textworld.EnvInfos(admissible_commands=True, won=True)))
    env.load(game)
    return env, env.reset()


def told(reply: str) -> tuple[str, list[str]]:
    """A reply without the order in which it lists things, which the engine leaves to a hash."""
    things = re.findall(r"\ba (\w+ \d+)", reply)
    return re.sub(r"a \w+ \d+", "a thing", " ".join(reply.split())), sorted(things)


def play(seed: int) -> tuple[int, int]:
    """Number of commands played alike, and of those that were not admitted."""
    rng = random.Random(seed)
    household = draw_household(seed, TASKS, held_out=False)
    env, state = engine(household)
    world = World(dict(household.lies_in))
    opening = f"{rules.look(household, world)} Your task is to: {household.text}."
    assert told(opening) == told(state.feedback.partition("=-")[2]), (opening, state.feedback)
    played = refused = 0
    for number in range(40):
        mine = sorted(rules.admissible(household, world))
        theirs = set(state["admissible_commands"])
        assert set(mine) == theirs, (seed, number, set(mine) - theirs, theirs - set(mine), world)
        assert rules.won(household, world) == bool(state["won"])
        command = rng.choice(mine)
        if number % 5 == 4:
            things = [*household.receptacles, *household.lies_in]
            command = f"{rng.choice(['take', 'move'])} {rng.choice(things)} to {rng.choice(things)}"
        elif number % 2:
            changing = [text for text in mine if not text.startswith(("go", "look", "help", "inventory", "examine"))]
            command = rng.choice(changing or mine)
        played, refused, state = compared(household, world, env, command, played, refused)
    for command in rules.solve(household, world):
        assert not state["won"]
        played, refused, state = compared(household, world, env, command, played, refused)
    assert state["won"] and rules.won(household, world)
    return played, refused


def compared(
    household: Household, world: World, env: textworld.Environment, command: str, played: int, refused: int
) -> tuple[int, int, textworld.GameState]:
    """Play a command in both and compare what is told; the help text is this project's own."""
    state, _, _ = env.step(command)
    reply = rules.play(household, world, command)
    assert command == "help" or told(reply) == told(state.feedback), (command, reply, state.feedback)
    return played + 1, refused + (reply == rules.NOTHING), state


if __name__ == "__main__":
    count = int(sys.argv[1])
    totals = [sum(part) for part in zip(*map(play, range(count)), strict=True)]
    print(f"alfworld {version('alfworld')}, textworld {version('textworld')}: {count} households, {len(TASKS)} tasks")
    print(f"{totals[0]} commands alike in reply, admitted commands and goal; {totals[1]} of them admitted by neither")
