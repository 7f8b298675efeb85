"""An environment that dies, hangs or raises when it is told to, for tests of what a lost process costs."""

import os
import time

from crest_train.environments.protocol import Step


class Fragile:
    """Three actions a session; the last one earns the share of them that were "a"."""

    system, num_turns = "say a", 1

    def __init__(self, kind: str = "") -> None:
        self.kind = kind

    def reset(self, seed):
        self.seed, self.said = seed, []
        return f"session {seed}"

    def step(self, action):
        if action == "die":
            os._exit(1)
        if action == "hang":
            time.sleep(60)
        if action == "raise":
            raise KeyError("its own")
        self.said.append(action)
        over = len(self.said) == 3
        info = {"error": action != "a", "pid": os.getpid()}
        return Step(f"{self.seed}: {' '.join(self.said)}", self.said.count("a") / 3 if over else None, info=info)

    def gold(self):
        return "a\na\na"
