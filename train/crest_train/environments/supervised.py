"""`supervised`: an environment in a process apart from the trainer's, where it may die or hang: that costs one session.

All sessions of a trainer process share one such process, so that a Java machine, a browser or a large table is held
once. Every call has a deadline. When the process dies or is late it is killed with all that it started; the session
whose call it was ends as failed, and the others are played again, from their seed and actions, in a new process.
"""

import atexit
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from crest_train.environments import make_environment
from crest_train.environments.protocol import Environment, Role, Step

TRIES = 3
"""Fresh processes that are tried for what cannot be answered with a failed turn: a session's begin, a ground truth."""


class ProcessLost(Exception):
    """The process that plays a session died or did not answer in time."""


@dataclass(frozen=True)
class Played:
    """A session, told by its seed and the actions so far."""

    seed: int
    actions: tuple[str, ...] = ()


class Supervised:
    """An environment (see environments/protocol.py) whose sessions another process plays.

    environment: a name of ENVIRONMENTS or "module:Class". timeout: seconds that one call may take, above 0; a reset
    loads the environment's code where the process is new. Further options are the environment's own.

    A session that is lost ends with turn reward 0 and Step.info of an error: `lost` True, `role` regression, `feedback`
    -1, `cause` -1, `redundant` False. `save` gives seed and actions, and `restore` plays them again: as exact as the
    environment is repeatable. An exception of the environment is raised here as a ValueError, not taken for a loss.
    """

    def __init__(self, environment: str, timeout: float = 60.0, **options: Any) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout: found {timeout}, wanted seconds above 0")
        self.name, self.timeout, self._options = environment, timeout, options
        self.system, self.num_turns = "", 0
        self._played: Played | None = None
        self._lost = False
        self._host: _Host | None = None
        self._number = -1

    def __del__(self) -> None:
        if getattr(self, "_host", None) is not None:
            self._host.closed.append(self._number)

    def reset(self, seed: int) -> str:
        """Start session `seed`. Raises ValueError when TRIES processes in a row were lost over it."""
        self._played, self._lost = Played(seed), False
        return self._insist("reset", seed)

    def step(self, action: str) -> Step:
        """Play one action; a lost process ends the session. Raises ValueError when it is over or not begun."""
        self._running()
        try:
            self._replay()
            step = self._host.call(self._number, "step", action)
        except ProcessLost as loss:
            self._lost = True
            return lost_step(loss)
        self._played = Played(self._played.seed, (*self._played.actions, action))
        return step

    def gold(self) -> str:
        """The ground truth of the turn under way. Raises ValueError as `reset` does."""
        self._running()
        return self._insist("gold")

    def save(self) -> Played:
        """The session as its seed and actions."""
        return self._running()

    def restore(self, state: Played) -> None:
        """Play a saved session again, up to where it was saved. Raises ValueError as `reset` does."""
        self._played, self._lost = state, False
        self._insist("reset", state.seed)
        if state.actions:
            self._host.call(self._number, "replay", state.actions)

    def _running(self) -> Played:
        if self._played is None:
            raise ValueError("no session is running; call reset first")
        if self._lost:
            raise ValueError("the session is over, its process was lost; call reset to start another")
        return self._played

    def _insist(self, method: str, *args: Any) -> Any:
        """The answer, in a new process where the last one was lost."""
        for left in reversed(range(TRIES)):
            try:
                if method == "reset":
                    return self._open(*args)
                self._replay()
                return self._host.call(self._number, method, *args)
            except ProcessLost as loss:
                if not left:
                    raise ValueError(f"environment {self.name}: {method} failed in {TRIES} processes: {loss}") from loss

    def _open(self, seed: int) -> str:
        host = _host_of(self.name, self._options, self.timeout)
        if self._host is not host:
            self._host, self._number = host, host.new_number()
        request, self.system, self.num_turns = host.call(self._number, "reset", seed)
        return request

    def _replay(self) -> None:
        """Bring the session into a new process where the one that held it is gone."""
        if not self._host.gone:
            return
        self._open(self._played.seed)
        self._host.call(self._number, "replay", self._played.actions)


def lost_step(loss: ProcessLost) -> Step:
    """What the action that met a lost process is answered with: the session ends and has failed."""
    info = {"lost": True, "error": True, "role": Role.REGRESSION, "feedback": -1, "cause": -1, "redundant": False}
    return Step(f"The environment was lost ({loss}). The session is over.", turn_reward=0.0, info=info)


class _Host:
    """A process that plays sessions by their numbers; `closed` numbers are free for others with the next call."""

    def __init__(self, name: str, options: dict[str, Any], timeout: float):
        self.name, self.timeout = name, timeout
        self.gone, self.closed, self._numbers = False, [], 0
        ours, theirs = socket.socketpair()
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(timeout), int(timeout % 1 * 1e6)))
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve; serve({theirs.fileno()})"],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,  # Ctrl-C is for the trainer; and one signal ends all that it started
            )
        self._connection = Connection(ours.detach())
        atexit.register(self.kill)
        self._ask((name, options))

    def new_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def call(self, number: int, method: str, *args: Any) -> Any:
        closed, self.closed = self.closed, []
        fine, answer = self._ask((closed, number, method, args))
        if not fine:
            raise ValueError(f"environment {self.name}: {method} raised {answer}")
        return answer

    def kill(self) -> None:
        self.gone = True
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self._connection.close()
            atexit.unregister(self.kill)

    def _ask(self, question: tuple) -> Any:
        if self.gone:
            raise ProcessLost("its process is gone")
        try:
            self._connection.send(question)
            return self._connection.recv()
        except BlockingIOError:
            self.kill()
            raise ProcessLost(f"no answer within {self.timeout:g} s") from None
        except (EOFError, OSError):
            self.kill()
            raise ProcessLost("its process died") from None


_hosts: dict[str, _Host] = {}


def _host_of(name: str, options: dict[str, Any], timeout: float) -> _Host:
    key = json.dumps([name, options, timeout], sort_keys=True, default=str)
    if key not in _hosts or _hosts[key].gone:
        _hosts[key] = _Host(name, options, timeout)
    return _hosts[key]


def serve(descriptor: int) -> None:
    """The process's side: answer calls on the socket until the other end is closed or the engine is lost."""
    connection = Connection(descriptor)
    name, options = connection.recv()
    connection.send(None)
    sessions: dict[int, Environment] = {}
    idle: list[Environment] = []
    while True:
        try:
            closed, number, method, args = connection.recv()
        except EOFError:
            return
        idle += [sessions.pop(old) for old in closed if old in sessions]
        try:
            if number not in sessions:
                sessions[number] = idle.pop() if idle else make_environment(name, options)
            answer = (True, _play(sessions[number], method, *args))
        except ProcessLost:
            return
        except Exception as error:  # of a class that is not the trainer's
            answer = (False, f"{type(error).__name__}: {error}")
        connection.send(answer)


def _play(environment: Environment, method: str, *args: Any) -> Any:
    if method == "reset":
        return environment.reset(*args), environment.system, environment.num_turns
    if method == "replay":
        for action in args[0]:
            environment.step(action)
        return None
    return getattr(environment, method)(*args)
