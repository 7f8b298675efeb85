"""Runs on the toy that end by SIGKILL after a given number of Python's and C's function calls, and then go on.

A process of its own: one that has trained cannot fork any more (autograd has threads then), and this one never does.

    python killed.py FOLDER SEED TIMES < TOML files, a line each

For each file it leaves FOLDER/<number>/whole and FOLDER/<number>/<0 .. TIMES-1>, and it prints at what each of these
was killed. The moments are drawn: a stage in turn, then any of its calls.
"""

import json
import os
import random
import signal
import sys
import traceback
from itertools import cycle
from pathlib import Path

import torch
from crest_train import loop
from crest_train.config import load_config
from toy_runs import quiet_train

STAGES = ["read_pretrained", "imitate", "evaluate", "rollout", "gather", "update", "write_checkpoint", "write_whole"]


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
    """Counts the calls of a run, stage by stage, and kills the process at one of a stage's."""

    def __init__(self, stage: str = "", at: int = 0):
        self.stage, self.at, self.inside = stage, at, []
        self.calls = dict.fromkeys([*STAGES, "between"], 0)

    def __call__(self, frame, event, argument):
        if frame.f_code.co_name in STAGES:
            if event == "call":
                self.inside.append(frame.f_code.co_name)
            elif event == "return":
                self.inside.pop()
        stage = self.inside[0] if self.inside else "between"
        self.calls[stage] += 1
        if stage == self.stage and self.calls[stage] == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def counted(config, output: Path, fuse: Fuse, note: Path) -> None:
    """A run under a fuse; what it counted goes into the note."""
    sys.setprofile(fuse)
    quiet_train(config, output)
    sys.setprofile(None)
    note.write_text(json.dumps(fuse.calls))


def main() -> None:
    folder, drawing, times, stages = Path(sys.argv[1]), random.Random(int(sys.argv[2])), int(sys.argv[3]), []
    turns = cycle([*STAGES, "between"])
    for number, path in enumerate(sys.stdin.read().splitlines()):
        config, home = load_config(Path(path)), folder / str(number)
        home.mkdir()
        note = home / "note"
        assert forked(counted, config, home / "whole", Fuse(), note) == 0
        calls = json.loads(note.read_text())
        for place in range(times):
            output = home / str(place)
            stage = next(stage for stage in turns if calls[stage])
            at = drawing.randint(1, 1 + calls[stage] * 9 // 10)  # a later run may make some calls less, of libraries
            assert forked(counted, config, output, Fuse(stage, at), note) == signal.SIGKILL
            stages.append(stage)
            assert forked(quiet_train, config, output) == 0
    print(json.dumps(stages))


if __name__ == "__main__":
    torch.set_num_threads(1)
    loop.draw_curves = lambda lines, path: None  # more than half of so short a run, and nothing goes on from it
    main()
