"""The log of a run: metrics.jsonl, and the trackers that show it elsewhere while it goes on, through accelerate."""

import importlib.util
import json
import secrets
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from crest_train.config import Config
from crest_train.model import first_line
from crest_train.ranks import is_first
from crest_train.run_folder import RunFolder

TRL_NAMES = {"clipped": "clip_ratio/region_mean"}
"""Keys of metrics.jsonl -> what TRL's trainers call the same; the other keys are equal, or TRL has nothing alike."""

_PROJECT, _STATE = "crest-ops", "trackers.json"


def check_trackers(names: Sequence[str]) -> None:
    """Raise ValueError, with the command that brings it, for a tracker whose package is not installed."""
    for name in names:
        missing = [package for package in ("accelerate", name) if importlib.util.find_spec(package) is None]
        if missing:
            raise ValueError(
                f"run.trackers: {name} needs {' and '.join(missing)}, not installed: pip install {' '.join(missing)}"
            )


def tracked(event: str, values: dict[str, Any]) -> dict[str, float]:
    """A line of metrics.jsonl as trackers get it: numbers alone, by TRL's names, `eval_` before those of an evaluation.

    step_time: what a step took, the sum of its seconds.
    """
    prefix = "eval_" if event == "evaluation" else ""
    if event == "step":
        values = values | {"step_time": sum(value for key, value in values.items() if key.endswith("_seconds"))}
    return {
        prefix + TRL_NAMES.get(key, key): value
        for key, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


class Log:
    """Called with an event, its step and its values: writes them to metrics.jsonl, then tells the trackers.

    To a step's values it adds num_tokens: of all steps so far, the tokens of prompts and those that the policy wrote.
    A resumed run goes on in the same run of each tracker, where its name is kept in trackers.json with the last line
    that each was told: what is made again after a stop is told once. A tracker that fails is said so and left out from
    there on; the run and metrics.jsonl go on.
    """

    def __init__(self, config: Config, folder: RunFolder, console: Console, *, resumed: bool):
        """Start the trackers of the first process. Raises ValueError when one cannot be started."""
        self.folder, self.console = folder, console
        self.num_tokens = max((line.get("num_tokens", 0) for line in folder.metrics()), default=0) if resumed else 0
        self.trackers: dict[str, Any] = {}
        if not (config.run.trackers and is_first()):
            return
        self.state = self._read_state() if resumed else {}
        self.state.setdefault("name", f"{folder.path.resolve().name}-{secrets.token_hex(3)}")
        self.state.setdefault("told", {})
        from accelerate import PartialState

        PartialState()  # which accelerate's trackers ask whether they are in the first process
        for name in dict.fromkeys(config.run.trackers):
            try:
                self.trackers[name] = _started(name, self.state["name"], folder, config)
            except Exception as error:  # whatever the package raises: no account, no network, ...
                raise ValueError(f"run.trackers: {name} could not be started: {first_line(error)}") from error

    def __call__(self, event: str, step: int, **values: Any) -> None:
        """Log a line."""
        if event == "step":
            self.num_tokens += values["prompt_tokens"] + values["sampled_tokens"]
            values["num_tokens"] = self.num_tokens
        self.folder.log(event, step, **values)
        place = [step, event == "evaluation"]
        for name, tracker in list(self.trackers.items()):
            if place <= self.state["told"].get(name, [-1, False]):
                continue
            self._try(name, lambda tracker=tracker: tracker.log(tracked(event, values), step=step))
            self.state["told"][name] = place
        if self.trackers:
            self.folder.write(_STATE, json.dumps(self.state))

    def close(self) -> None:
        """End the trackers' runs, which waits until what they were told is kept."""
        for name, tracker in list(self.trackers.items()):
            self._try(name, tracker.finish)

    def _try(self, name: str, tell: Any) -> None:
        try:
            tell()
        except Exception as error:  # whatever the package raises
            del self.trackers[name]
            words = f"run.trackers: {name} failed and is left out from here on: {first_line(error)}"
            self.console.print(words, soft_wrap=True, highlight=False, markup=False)

    def _read_state(self) -> dict[str, Any]:
        try:
            return json.loads((self.folder.path / _STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # a run that had no trackers until now
            return {}


def _started(name: str, run: str, folder: RunFolder, config: Config) -> Any:
    """A tracker that is ready to be told, and knows the configuration."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    make = LOGGER_TYPE_TO_CLASS[name]
    if name == "tensorboard":
        tracker = make("tensorboard", folder.path)
    elif name == "trackio":
        tracker = make(_PROJECT, name=run, resume="allow")
    else:
        tracker = make(_PROJECT, name=run, id=run, resume="allow", dir=folder.path)
    tracker.start()
    if name != "tensorboard":  # which would show every start as one more run; config.toml lies beside its files
        tracker.store_init_configuration(config.model_dump(mode="json"))
    return tracker
