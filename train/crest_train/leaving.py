"""SIGTERM and Ctrl-C: a step that has changed anything is finished, any other is given up, and the run leaves."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from crest_train.ranks import gathered, size


class Leaving:
    """What the run does when it is told to end; made by `leaving`.

    A process alone leaves where it is, but for a block that is `unbroken`; a second signal ends it there too. One of
    several waits for a place where all of them are (such a block's begin or end), and a second signal, which torchrun
    sends after the terminal's own, changes nothing.

    whole: no such block was left before its end, so that what the run has learned is that of a finished step.
    """

    def __init__(self) -> None:
        self.signal, self.whole = 0, True

    @property
    def exit_code(self) -> int:
        """What a shell expects: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + (self.signal or signal.SIGINT)

    @contextmanager
    def unbroken(self) -> Iterator[None]:
        """The block runs to its end, and a signal that comes meanwhile raises KeyboardInterrupt there."""
        self._raise_together()
        self.whole = False
        yield
        self.whole = True
        self._raise_together()

    @contextmanager
    def keeping(self, keep: Callable[[], None]) -> Iterator[None]:
        """When the block is left early by a signal, keep what has been learned if that is whole."""
        try:
            yield
        except KeyboardInterrupt:
            if self.whole:
                keep()
            raise

    def _raise_together(self) -> None:
        self.signal = max(gathered(self.signal))
        if self.signal:
            raise KeyboardInterrupt

    def _hear(self, number: int, frame: FrameType | None) -> None:
        again, self.signal = self.signal, number
        if size() == 1 and (again or self.whole):
            raise KeyboardInterrupt


@contextmanager
def leaving() -> Iterator[Leaving]:
    """Hear SIGINT and SIGTERM until the block ends; in a thread, which cannot, Ctrl-C is the main thread's."""
    found = Leaving()
    if threading.current_thread() is not threading.main_thread():
        yield found
        return
    before = {number: signal.signal(number, found._hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
