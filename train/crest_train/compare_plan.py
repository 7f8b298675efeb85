"""Which runs a comparison consists of: the configuration that they share, and what each has of its own."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crest_ops import METHODS
from crest_train.config import Config, MethodSection, differences, load_config, tomllib
from crest_train.credit import make_method
from crest_train.environments import make_environment


@dataclass(frozen=True)
class Run:
    """A run of the comparison: the method's label (its name, or that of a table of --options), where and what."""

    label: str
    path: Path
    config: Config

    @property
    def name(self) -> str:
        """What tells it from the others."""
        return f"{self.label}/{self.path.name}"


def plan(
    config: Config, methods: str, output: Path, *, seeds: int, rates: str = "", options: Path | None = None
) -> list[Run]:
    """All runs, seed by seed, so that what is there after a stop is as even as it can be. Raises ValueError."""
    if config.method.options:
        raise ValueError(
            f"method.options: found {', '.join(config.method.options)}; no option holds for every method, "
            "give each method its own table in --options"
        )
    if seeds < 1:
        raise ValueError(f"--seeds: found {seeds}, wanted at least 1")
    swept, common = _numbers(rates, "--rates") or [config.training.rate], config.training.rate
    if common not in swept:
        raise ValueError(f"--rates: found {rates}, without training.rate = {common}, at which all methods are compared")
    runs = [
        Run(
            label,
            output / label / f"rate{rate}-seed{seed}",
            config.model_copy(
                update={
                    "method": method,
                    "training": config.training.model_copy(update={"rate": rate}),
                    "run": config.run.model_copy(update={"seed": seed, "threads": config.run.threads or 1}),
                }
            ),
        )
        for seed in range(config.run.seed, config.run.seed + seeds)
        for rate in swept
        for label, method in entries(methods, config.method, options).items()
    ]
    for run in runs:
        make_method(run.config.method)
    for changed in (config.environment.options, config.held_out_options()):
        make_environment(config.environment.name, changed)
    return runs


def entries(methods: str, shared: MethodSection, options: Path | None = None) -> dict[str, MethodSection]:
    """What [method] is for each label of `methods`: the method with its defaults, or a table of `options`.

    A table of that file is named by its label and has what a run's [method] has: `name` (the label, if left out),
    `session_reward` (if left out, that of `shared`) and a table `options` (if left out, the defaults; for the method of
    `shared`, those there), so that

        [crest.options]
        lam = 1.0

    changes crest, and [my_control] with a `name` of a method adds a row of its own; "all" is all of both. Raises
    ValueError: a label that neither knows or that is given twice, a file or a table that cannot be read, the label of
    one method for another.
    """
    tables = _read_options(options) if options else {}
    known = list(dict.fromkeys([*METHODS, *tables]))
    labels = known if methods == "all" else [label.strip() for label in methods.split(",")]
    for label in labels:
        if label not in known:
            raise ValueError(f"--methods: unknown method {label!r}; known: {', '.join(known)}, or all")
        if labels.count(label) > 1:
            raise ValueError(f"--methods: {label} is there twice")
    found = {}
    for label in labels:
        own = {"options": shared.options} if label == shared.name else {}
        table = {"name": label, "session_reward": shared.session_reward, **own, **tables.get(label, {})}
        try:
            found[label] = load_config(None, {"method": table}).method
            make_method(found[label])
        except ValueError as error:
            raise ValueError(f"{options}: [{label}]: {error}" if label in tables else str(error)) from error
        if label in METHODS and found[label].name != label:
            raise ValueError(f"{options}: [{label}]: name is {found[label].name!r}; give the table a label of its own")
    return found


def _read_options(path: Path) -> dict[str, dict[str, Any]]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: could not be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is no TOML file ({error})") from error
    for label, table in tables.items():
        if not isinstance(table, dict) or not re.fullmatch(r"\w[\w.-]*", label):
            raise ValueError(f"{path}: found {label!r}, wanted tables, named by letters, digits and any of _ . -")
    return tables


def _numbers(given: str, option: str) -> list[float]:
    """The numbers above 0 in a text with commas between. Raises ValueError that names the option."""
    try:
        found = [float(part) for part in given.split(",") if given]
    except ValueError:
        found = [0.0]
    if not all(0 < number < float("inf") for number in found) or len(set(found)) < len(found):
        raise ValueError(f"{option}: found {given!r}, wanted different numbers above 0 with commas between")
    return found


def with_changes(config: Config, changes: list[str]) -> Config:
    """The configuration with each "table.key=value" (value as TOML has it, or a bare text). Raises ValueError."""
    tables = config.model_dump(mode="json")
    for change in changes:
        path, equals, value = change.partition("=")
        *parents, key = path.strip().split(".")
        if not equals or not parents or not all([*parents, key]):
            raise ValueError(f"--set: found {change!r}, wanted table.key=value")
        try:
            read = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            read = value.strip()
        table = tables
        for parent in parents:
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                raise ValueError(f"--set: found {change!r}, but {parent} is a value, no table")
        table[key] = read
    try:
        return load_config(None, tables)
    except ValueError as error:
        raise ValueError(f"--set: {error}") from error


def difference(there: Config, here: Config) -> str | None:
    """The first setting in which two configurations differ, in words; None when they are equal."""
    for key, (one, other) in differences(there, here).items():
        return f"{key} is {one!r} there, {other!r} here"
    return None
