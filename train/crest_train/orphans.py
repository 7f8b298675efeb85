"""Runs that a comparison has started end when it does, even when it was killed and could not tell them to."""

import os
import signal
import threading
import time

PARENT = "CREST_PARENT"
"""The environment variable in which a run finds the process that it is to end with."""


def end_with_parent() -> None:
    """Be told to end (SIGTERM, a checkpoint is kept) within a second of the process that PARENT names, if it does."""
    if PARENT not in os.environ:
        return
    parent = int(os.environ.pop(PARENT))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
