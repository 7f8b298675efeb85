"""Runs on the toy that end by SIGKILL after a given number of Python's and C's function calls, and then go on.

A process of its own: one that has trained cannot fork any more (autograd has threads then), and this one never does.

    python killed.py FOLDER < scenarios.json

Scenarios: {"config": TOML file, "parts": [where to be killed, as parts of the uninterrupted run's calls]}. It leaves
FOLDER/<number>/whole and FOLDER/<number>/<place of the part>, and prints what each killed run was at.
"""

import json
import os
import signal
import sys
import traceback
from pathlib import Path

import torch
import transformers  # noqa: F401 - once, here
from crest_train import loop
from crest_train.config import load_config
from toy_runs import quiet_train

STAGES = ["write_checkpoint", "evaluate", "imitate", "rollout", "gather", "assign_credit", "update"]


def forked(work, *arguments) -> int:
    """The exit status of a child that does this work."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        work(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


class Fuse:
    """Counts the calls of a run, and kills the process at one of them."""

    def __init__(self, at: int, note: Path):
        self.at, self.note, self.calls = at, note, 0

    def __call__(self, frame, event, argument):
        self.calls += 1
        if self.calls == self.at:
            names = set()
            while frame:
                names.add(frame.f_code.co_name)
                frame = frame.f_back
            self.note.write_text(next((stage for stage in STAGES if stage in names), "other"))
            os.kill(os.getpid(), signal.SIGKILL)


def counted(config, output: Path, note: Path, at: int = 0) -> None:
    """A run under a fuse; the number of its calls, or where it ended, goes into the note."""
    fuse = Fuse(at, note)
    sys.setprofile(fuse)
    quiet_train(config, output)
    sys.setprofile(None)
    note.write_text(str(fuse.calls))


def main() -> None:
    folder, stages = Path(sys.argv[1]), []
    for number, scenario in enumerate(json.load(sys.stdin)):
        config, home = load_config(Path(scenario["config"])), folder / str(number)
        home.mkdir()
        note = home / "note"
        assert forked(counted, config, home / "whole", note) == 0
        calls = int(note.read_text())
        for place, part in enumerate(scenario["parts"]):
            output = home / str(place)
            assert forked(counted, config, output, note, 1 + int(part * calls)) == signal.SIGKILL
            stages.append(note.read_text())
            assert forked(quiet_train, config, output) == 0
    print(json.dumps(stages))


if __name__ == "__main__":
    torch.set_num_threads(1)
    loop.draw_curves = lambda lines, path: None  # more than half of so short a run, and nothing goes on from it
    main()
