"""`desk`: K user turns over a small shared world of files, each turn verified by comparing the world and the answer.

An action is one call, e.g. `mv f3 d1`; a turn ends with `done`, or with `answer o2` where an owner was asked for. What
no call is, names no file, or would overwrite one, is answered with `err syntax`, `err nofile` or `err exists`.
"""

import random

from crest_train.environments.desk_rules import State, judge
from crest_train.environments.desk_sessions import draw_session, solve
from crest_train.environments.desk_world import FILES, call, ends_turn, parse
from crest_train.environments.protocol import Step


class Desk:
    """The built-in environment (see environments/protocol.py): ten kinds of request, a vocabulary of under 100 words.

    `coupled` in [0, 1] is the share of turns asked to depend on the turn before (the first turn and turns after a
    delete cannot, so that fewer do); their right outcome does not follow the errors made before. A turn that takes
    `max_actions` actions without an end has failed.

    Step.info says by rule, without a judge model:

    - role: `Role` of the action: progress when fewer files differ from the turn's right outcome than before, or when it
      ends the turn well; exploration when it reads for the first time what the right calls read; regression when more
      files differ, or when the turn ends in failure; no progress otherwise.
    - feedback: -1 when the reply is an error, +1 when it is `ok`, 0 when nothing or a file is told.
    - error: the reply is an error, a file was written wrong, or the turn ended in failure.
    - cause: number (from 0, counted over the session) of the earlier action whose error made this one an error, or -1.
    - redundant: it read once more in the turn what has not changed since, or wrote what was there already.
    """

    system = ""

    def __init__(self, num_turns: int = 8, coupled: float = 0.3, max_actions: int = 6, num_files: int = 6) -> None:
        if num_turns < 1:
            raise ValueError(f"num_turns is {num_turns}; wanted at least 1")
        if not 0.0 <= coupled <= 1.0:
            raise ValueError(f"coupled is {coupled}; wanted a share in [0, 1]")
        if max_actions < 5:
            raise ValueError(f"max_actions is {max_actions}; wanted at least 5, the calls that a swap takes")
        if not 4 <= num_files <= len(FILES) - 4:
            raise ValueError(f"num_files is {num_files}; wanted 4 to {len(FILES) - 4}")
        self.num_turns = num_turns
        self.coupled = coupled
        self.max_actions = max_actions
        self.num_files = num_files
        self._state: State | None = None

    def reset(self, seed: int) -> str:
        """Start session `seed`; of two lengths, the shorter session is the beginning of the longer."""
        session = draw_session(
            random.Random(seed), num_turns=self.num_turns, coupled=self.coupled, num_files=self.num_files
        )
        self._state = State(session, dict(session.world))
        return self._begin_turn()

    def gold(self) -> str:
        """The right calls of the turn; what was drawn for it where earlier errors left none that could work."""
        state = self._running()
        solution = state.solution or state.turn.solution
        return " ".join(f"{right} ;" for right in solution.calls)

    def save(self) -> State:
        """The exact state of the session, independent of later steps."""
        return self._running().copy()

    def restore(self, state: State) -> None:
        """Continue from a state that `save` gave."""
        self._state = state.copy()

    def step(self, action: str) -> Step:
        """Play one action, given without its `;`. Raises ValueError only when the session is over or not begun."""
        state = self._running()
        words = parse(action)
        before = dict(state.world)
        reply = None
        if words is None:
            reply = "err syntax"
        elif not ends_turn(words):
            reply = call(state.world, words)
        state.num_actions_in_turn += 1
        reward = None
        if reply is None or state.num_actions_in_turn >= self.max_actions:
            reward = float(self._succeeded(words))
        info = judge(state, words, reply, before, reward)
        state.num_actions += 1
        request = self._begin_turn() if reward is not None else None
        return Step(observation=reply, turn_reward=reward, request=request, info=info)

    def _running(self) -> State:
        if self._state is None:
            raise ValueError("no session is running; call reset first")
        if self._state.turn_index >= self.num_turns:
            raise ValueError("the session is over; call reset to start another")
        return self._state

    def _begin_turn(self) -> str | None:
        """Go on to the next turn, fix its right outcome on the world as it is now, and return its request."""
        state = self._state
        state.turn_index += 1
        if state.turn_index >= len(state.session.turns):
            return None
        turn = state.turn
        reachable = solve(turn.request, state.world)
        if turn.coupled:
            state.solution = turn.solution
            right_entries = {name: turn.solution.world.get(name) for name in turn.solution.written}
            merged = {**state.world, **right_entries}
            state.expected = {name: entry for name, entry in merged.items() if entry is not None}
        else:
            state.solution = reachable
            state.expected = reachable.world if reachable is not None else None
        misled = reachable is None or reachable.calls != state.solution.calls
        blamed = [state.blame[name] for name in turn.request.arguments if name in state.blame]
        state.inherited = blamed[0] if misled and blamed else -1
        state.num_actions_in_turn = 0
        state.read = set()
        return turn.request.text

    def _succeeded(self, words: tuple[str, ...] | None) -> bool:
        state = self._state
        if state.expected is None or words is None or not ends_turn(words):
            return False
        answer = words[1] if words[0] == "answer" else None
        return state.world == state.expected and answer == state.solution.answer
