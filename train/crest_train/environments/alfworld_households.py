"""Households for `alfworld`, drawn from a seed: a room, its furniture, what lies where, and a task of ALFWorld's six.

None of ALFWorld's own games are used. The rooms are of this project's making, in the words of ALFRED's household.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

TASKS = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
"""ALFWorld's names of its task types."""

TREATMENTS = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}
"""What can be done to an object, and the kind of receptacle that does it."""

LAMP = "desklamp"
HELD_OUT_SHARE = 5
"""Every fifth goal of a task type is kept for held-out sessions."""

_OPENABLE = {"cabinet", "drawer", "fridge", "laundryhamper", "microwave", "safe"}

_FURNITURE = {
    "kitchen": "cabinet 3 7, coffeemachine 1 1, countertop 1 3, diningtable 1 1, drawer 2 5, fridge 1 1, "
    "garbagecan 1 1, microwave 1 1, shelf 0 3, sinkbasin 1 1, stoveburner 2 4",
    "bathroom": "bathtubbasin 1 1, cabinet 2 5, countertop 1 1, drawer 0 3, garbagecan 1 1, handtowelholder 1 2, "
    "sinkbasin 1 2, toilet 1 1",
    "bedroom": "armchair 0 1, bed 1 1, desk 1 2, drawer 3 6, dresser 1 1, garbagecan 1 1, laundryhamper 0 1, safe 0 1, "
    "shelf 1 4, sidetable 1 2",
}
"""Kinds of receptacles of a room, each with the fewest and the most that there may be."""

_OBJECTS = {
    "kitchen": """
        apple: countertop diningtable fridge garbagecan microwave sinkbasin: clean heat cool
        bowl: cabinet countertop diningtable fridge microwave shelf sinkbasin: clean cool
        bread: countertop diningtable fridge garbagecan microwave: heat cool
        butterknife: countertop diningtable drawer sinkbasin: clean
        cup: cabinet countertop diningtable fridge microwave shelf sinkbasin: clean heat cool
        dishsponge: cabinet countertop drawer garbagecan shelf sinkbasin: clean
        egg: countertop diningtable fridge garbagecan microwave sinkbasin: clean heat cool
        fork: countertop diningtable drawer sinkbasin: clean
        glassbottle: cabinet countertop diningtable fridge garbagecan shelf:
        kettle: cabinet countertop shelf sinkbasin stoveburner: clean
        knife: countertop diningtable drawer sinkbasin: clean
        ladle: cabinet countertop diningtable drawer sinkbasin: clean
        lettuce: countertop diningtable fridge garbagecan sinkbasin: clean cool
        mug: cabinet coffeemachine countertop diningtable fridge microwave shelf sinkbasin: clean heat cool
        pan: cabinet countertop diningtable fridge sinkbasin stoveburner: clean cool
        peppershaker: cabinet countertop diningtable drawer shelf:
        plate: cabinet countertop diningtable fridge microwave shelf sinkbasin: clean heat cool
        pot: cabinet countertop diningtable fridge sinkbasin stoveburner: clean cool
        potato: countertop diningtable fridge garbagecan microwave sinkbasin: clean heat cool
        saltshaker: cabinet countertop diningtable drawer shelf:
        soapbottle: cabinet countertop drawer garbagecan shelf:
        spatula: countertop diningtable drawer sinkbasin: clean
        spoon: countertop diningtable drawer sinkbasin: clean
        tomato: countertop diningtable fridge garbagecan microwave sinkbasin: clean heat cool
        winebottle: cabinet countertop diningtable fridge garbagecan: cool""",
    "bathroom": """
        candle: bathtubbasin cabinet countertop drawer toilet:
        cloth: bathtubbasin cabinet countertop drawer garbagecan sinkbasin: clean
        handtowel: countertop handtowelholder:
        soapbar: bathtubbasin cabinet countertop drawer garbagecan sinkbasin toilet: clean
        soapbottle: bathtubbasin cabinet countertop drawer garbagecan toilet:
        spraybottle: cabinet countertop drawer garbagecan toilet:
        toiletpaper: cabinet countertop drawer garbagecan toilet:""",
    "bedroom": """
        alarmclock: desk dresser shelf sidetable:
        baseballbat: bed desk sidetable:
        book: armchair bed desk drawer dresser shelf sidetable:
        box: armchair bed desk dresser:
        cd: desk drawer dresser garbagecan safe shelf sidetable:
        cellphone: armchair bed desk drawer dresser safe shelf sidetable:
        creditcard: armchair desk drawer dresser safe shelf sidetable:
        keychain: armchair desk drawer dresser safe shelf sidetable:
        laptop: armchair bed desk dresser:
        mug: desk dresser shelf sidetable:
        pen: desk drawer dresser garbagecan shelf sidetable:
        pencil: desk drawer dresser garbagecan shelf sidetable:
        pillow: armchair bed:
        tissuebox: desk dresser garbagecan shelf sidetable:
        vase: desk dresser safe shelf sidetable:
        watch: desk drawer dresser safe shelf sidetable:""",
}
"""A line per kind of object: the kinds of receptacles that can contain it, and the treatments that it takes."""

_TEXTS = {
    "pick_and_place_simple": ("put a {kind} in {destination}", "put some {kind} on {destination}"),
    "look_at_obj_in_light": ("look at {kind} under the {destination}", "examine the {kind} with the {destination}"),
    "pick_clean_then_place_in_recep": (
        "put a clean {kind} in {destination}",
        "clean some {kind} and put it in {destination}",
    ),
    "pick_heat_then_place_in_recep": (
        "put a hot {kind} in {destination}",
        "heat some {kind} and put it in {destination}",
    ),
    "pick_cool_then_place_in_recep": (
        "put a cool {kind} in {destination}",
        "cool some {kind} and put it in {destination}",
    ),
    "pick_two_obj_and_place": ("put two {kind} in {destination}", "find two {kind} and put them in {destination}"),
}


@dataclass(frozen=True)
class Goal:
    """What the session asks for; `destination` is a kind of receptacle, or the lamp to look under."""

    task: str
    room: str
    kind: str
    destination: str

    @property
    def treatment(self) -> str | None:
        """What has to be done to the object first."""
        return next((name for name in TREATMENTS if self.task.startswith(f"pick_{name}_")), None)

    @property
    def count(self) -> int:
        """How many objects of the kind have to be brought."""
        return 2 if self.task == "pick_two_obj_and_place" else 1


@dataclass(frozen=True)
class Household:
    """A room with its goal. Names end with a number (`cabinet 3`); what stands before it is the kind.

    receptacles: in the order in which the room is told. lies_in: object -> receptacle, at the start. contains: kind of
    object -> kinds of receptacles that can. treatments: kind of object -> what can be done to it. lamp: the desk lamp
    of the room, or None.
    """

    goal: Goal
    text: str
    receptacles: tuple[str, ...]
    lies_in: dict[str, str]
    contains: dict[str, frozenset[str]]
    treatments: dict[str, frozenset[str]]
    lamp: str | None


def kind_of(name: str) -> str:
    """`cabinet 3` is a `cabinet`."""
    return name.rpartition(" ")[0]


def openable(receptacle: str) -> bool:
    """Whether it can be opened and closed; it is closed at the start."""
    return kind_of(receptacle) in _OPENABLE


@lru_cache
def goals(task: str, *, held_out: bool) -> list[Goal]:
    """All goals of a task type in a fixed order; those of held-out sessions are others than those of training."""
    found = []
    for room in _FURNITURE:
        contains, treatments = _objects(room)
        always = {kind for kind, (fewest, _) in _furniture(room).items() if fewest}
        for kind in contains:
            for destination in [LAMP] if task == "look_at_obj_in_light" else sorted(contains[kind]):
                goal = Goal(task, room, kind, destination)
                elsewhere = (contains[kind] & always) - {destination}
                there = room == "bedroom" if destination == LAMP else destination in always
                station = TREATMENTS.get(goal.treatment)
                can = station is None or (goal.treatment in treatments[kind] and station in always - {destination})
                if there and elsewhere and can:
                    found.append(goal)
    return [goal for place, goal in enumerate(found) if (place % HELD_OUT_SHARE == 0) == held_out]


def draw_household(seed: int, tasks: Sequence[str], *, held_out: bool) -> Household:
    """The household that a seed names; consecutive seeds go through the task types."""
    rng = random.Random(seed)
    goal = rng.choice(goals(tasks[seed % len(tasks)], held_out=held_out))
    contains, treatments = _objects(goal.room)
    numbers = {kind: rng.randint(*bounds) for kind, bounds in _furniture(goal.room).items()}
    receptacles = [f"{kind} {n + 1}" for kind, number in numbers.items() for n in range(number)]
    rng.shuffle(receptacles)
    others = [kind for kind in contains if kind != goal.kind]
    drawn = {kind: rng.randint(1, 2) for kind in rng.sample(others, rng.randint(len(others) // 2, len(others)))}
    drawn[goal.kind] = goal.count + rng.randint(0, 1)
    lies_in = {}
    for kind, number in sorted(drawn.items()):
        taken = {goal.destination} if kind == goal.kind else set()
        choices = [name for name in receptacles if kind_of(name) in contains[kind] - taken]
        lies_in |= {f"{kind} {n + 1}": rng.choice(choices) for n in range(number)}
    lamp = None
    if goal.room == "bedroom":
        lamp = f"{LAMP} 1"
        lies_in[lamp] = rng.choice([name for name in receptacles if kind_of(name) in ("desk", "dresser", "sidetable")])
    text = rng.choice(_TEXTS[goal.task]).format(kind=goal.kind, destination=goal.destination)
    return Household(goal, text, tuple(receptacles), lies_in, contains, treatments, lamp)


@lru_cache
def _furniture(room: str) -> dict[str, tuple[int, int]]:
    entries = (entry.split() for entry in _FURNITURE[room].split(","))
    return {kind: (int(fewest), int(most)) for kind, fewest, most in entries}


@lru_cache
def _objects(room: str) -> tuple[dict[str, frozenset[str]], dict[str, frozenset[str]]]:
    contains, treatments = {}, {}
    for line in _OBJECTS[room].split("\n")[1:]:
        kind, places, done = line.strip().split(":")
        contains[kind], treatments[kind] = frozenset(places.split()), frozenset(done.split())
    return contains, treatments
