"""`bfcl`: the real multi-turn sessions of the Berkeley Function-Calling Leaderboard V3, verified turn by turn.

Eight stateful tool APIs (files, messages, posts, tickets, trading, travel, a vehicle, mathematics), four categories of
200 sessions. Base asks for what can be done. In miss_func a turn needs a tool that is not there, and the next turn
brings it; in miss_param a turn lacks information; long_context buries it in long replies. The benchmark's package has
its API classes and its checks here, not its executor, which evaluates model text and keeps instances in globals.
"""

import copy
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from crest_train.environments import bfcl_calls, bfcl_prompt, bfcl_rules
from crest_train.environments.bfcl_calls import DONE, BadCall, Call
from crest_train.environments.bfcl_data import CATEGORIES, Benchmark, Session, benchmark, session_id
from crest_train.environments.bfcl_rules import Layout
from crest_train.environments.protocol import Step

SPLITS = ("train", "eval")
TOOL_DOCS = ("compact", "json")
NUM_NUMBERS = 100
"""Session numbers in each split; a category numbers its sessions 0 to 199."""
_STRIDE = 37
_MORE_TOOLS = "There are more tools now. Try again with them."


@dataclass
class _State:
    session: Session
    system: str
    instances: dict[str, Any]
    gold_instances: dict[str, Any]
    turn: int = 0
    num_actions: int = 0
    replies: list[str] = field(default_factory=list)
    """Of the whole session: the benchmark lets a reply of an earlier turn count."""
    calls: dict[str, str] = field(default_factory=dict)
    """Calls of the turn and their last replies."""
    gold_replies: list[str] = field(default_factory=list)
    """Of the turn's ground-truth calls."""
    target: Layout = field(default_factory=dict)
    """What the ground truth leaves at the turn's end."""
    found: Layout = field(default_factory=dict)
    """What the actions have left so far."""
    number: int = 0
    """Of actions, over the session."""
    blame: dict[str, int] = field(default_factory=dict)
    """Name of what is not as it should be -> number of the action that left it so."""

    def copy(self) -> "_State":
        shared = (self.session, self.target, self.found)  # never written to
        return copy.deepcopy(self, {id(part): part for part in shared})


class Bfcl:
    """BFCL V3 multi-turn (see environments/protocol.py).

    Action: calls with literal arguments, as `[a(x=1), b()]`, bare, or one a line. `done`, alone or as the last line,
    ends the turn; a message without a call does too. A turn that takes `max_actions` actions without an end is cut off
    and has failed; the session goes on (the benchmark gives up the session).

    Split: CrEST (2.3 of its paper) trains on 100 base sessions and evaluates on 400 others, 100 per category, and does
    not say which. Session n of each category is a variant of base session n, so that here even n are to train, odd n
    to evaluate: no evaluated session has a trained variant. `session_ids` are the chosen categories' sessions that need
    no other APIs than `apis` (all by default), in a fixed order that mixes them; seeds run through it and wrap around.

    Turn reward: 1 when the turn's end finds every API in the state that the ground truth leaves it in, and every
    ground-truth reply of the turn among the replies so far, by the benchmark's own `state_checker` and
    `response_checker`; at least one call is needed. A turn whose ground truth is empty (what it needs is missing) earns
    1 when no call was made. State carries over: what an earlier turn did wrong fails later ones until it is mended.

    `excluded` and not yet revealed tools are left out of the docs; as in the benchmark, a call of one still runs.

    Step.info, all by rule (bfcl_rules): `error` (a call failed or could not be read), `feedback` (-1 after an error, +1
    when all calls worked, 0 without calls), `redundant` (every call was already made in this turn with the same reply),
    `role` (`bfcl_rules.Role`; the ground truth's state at the turn's end is what progress is measured against), `cause`
    (number, from 0, of the earlier action that left what a failed call's text names other than the ground truth has it,
    or -1), `state_key` (equal for actions of one turn that found the same state).
    """

    def __init__(
        self,
        split: str = "train",
        categories: Sequence[str] | None = None,
        apis: Sequence[str] | None = None,
        tool_docs: str = "compact",
        max_actions: int = 20,
    ) -> None:
        if split not in SPLITS:
            raise ValueError(f"split: found {split!r}, wanted one of {', '.join(SPLITS)}")
        if categories is None:
            categories = ("base",) if split == "train" else CATEGORIES
        if isinstance(categories, str) or not categories or not set(categories) <= set(CATEGORIES):
            raise ValueError(f"categories: found {categories!r}, wanted a list of {', '.join(CATEGORIES)}")
        if tool_docs not in TOOL_DOCS:
            raise ValueError(f"tool_docs: found {tool_docs!r}, wanted one of {', '.join(TOOL_DOCS)}")
        if max_actions < 1:
            raise ValueError(f"max_actions: found {max_actions}, wanted at least 1")
        self.tool_docs = tool_docs
        self.max_actions = max_actions
        self._benchmark: Benchmark = benchmark()
        known = set(self._benchmark.docs)
        if apis is not None and (isinstance(apis, str) or not set(apis) <= known):
            raise ValueError(f"apis: found {apis!r}, wanted a list of {', '.join(sorted(known))}")
        self.session_ids = self._choose(split, categories, known if apis is None else set(apis))
        self._state: _State | None = None

    @property
    def system(self) -> str:
        """The task and the docs of the session's tools; empty before reset."""
        return self._state.system if self._state else ""

    @property
    def num_turns(self) -> int:
        """Number of user turns of the session; 0 before reset."""
        return len(self._state.session.gold) if self._state else 0

    @property
    def category(self) -> str:
        """Category of the session; empty before reset."""
        return self._state.session.category if self._state else ""

    def session_of(self, seed: int) -> str:
        """The benchmark's id of the session that a seed names."""
        return self.session_ids[seed % len(self.session_ids)]

    def reset(self, seed: int) -> str:
        """Start session `session_of(seed)` and return its first request."""
        return self.begin(self.session_of(seed))

    def begin(self, id: str) -> str:
        """Start the session with the benchmark's id, whatever the split, and return its first request."""
        if id not in self._benchmark.sessions:
            raise ValueError(f"id: found {id!r}, wanted one like 'multi_turn_base_0'")
        session = self._benchmark.sessions[id]
        hidden = session.excluded.union(*session.revealed.values())
        docs = [doc for doc in self._docs(session) if doc["name"] not in hidden]
        system = bfcl_prompt.system_prompt(docs, self.tool_docs)
        self._state = _State(session, system, self._new_instances(session), self._new_instances(session))
        self._state.found = bfcl_rules.layout(self._state.instances)
        self._play_gold()
        return self._request()

    def gold(self) -> str:
        """The ground-truth calls of the turn, one a line, then `done`: to play line by line, or as one action."""
        return "\n".join([*(call.text for call in self._gold_calls()), DONE])

    def save(self) -> _State:
        """The exact state of the session, independent of later steps."""
        return self._begun().copy()

    def restore(self, state: _State) -> None:
        """Continue from a state that `save` gave."""
        self._state = state.copy()

    def step(self, action: str) -> Step:
        """Play one action. Raises ValueError only when the session is over or not begun."""
        state = self._running()
        state.num_actions += 1
        calls, failures, ends_turn, observation = [], [], False, None
        info = {"error": True, "feedback": -1, "redundant": False}
        try:
            calls, ends_turn = bfcl_calls.parse(action)
        except BadCall as error:
            observation = str(error)
        else:
            observation, info, failures = self._run(calls)
        reward = None
        if ends_turn:
            reward = float(self._verify())
        elif state.num_actions >= self.max_actions:
            reward = 0.0
        info |= self._judge(calls, failures, reward, reads=not info["error"] and not info["redundant"])
        request = self._next_request() if reward is not None else None
        return Step(observation=observation, turn_reward=reward, request=request, info=info)

    def _choose(self, split: str, categories: Sequence[str], apis: Set[str]) -> tuple[str, ...]:
        numbers = [2 * (place * _STRIDE % NUM_NUMBERS) + SPLITS.index(split) for place in range(NUM_NUMBERS)]
        ids = [session_id(category, number) for number in numbers for category in categories]
        chosen = tuple(id for id in ids if apis.issuperset(self._benchmark.sessions[id].api_names))
        if not chosen:
            raise ValueError(f"apis: found {sorted(apis)}, which no session can be played with; wanted more of them")
        return chosen

    def _run(self, calls: Sequence[Call]) -> tuple[str | None, dict[str, Any], list[tuple[Call, str]]]:
        """The replies as one text, what they say of the action, and the calls that failed with their replies."""
        state = self._state
        results = [bfcl_calls.run(call, state.instances) for call in calls]
        made = {call.text: result.text for call, result in zip(calls, results, strict=True)}
        failures = [(call, result.text) for call, result in zip(calls, results, strict=True) if result.failed]
        redundant = bool(made) and made.items() <= state.calls.items()
        state.calls |= made
        state.replies += [result.text for result in results]
        # Lone surrogates, which a literal such as '\ud800' holds, are no text that a tokenizer takes.
        observation = (
            "\n".join(result.text for result in results).encode(errors="replace").decode() if results else None
        )
        feedback = (-1 if failures else 1) if results else 0
        return observation, {"error": bool(failures), "feedback": feedback, "redundant": redundant}, failures

    def _judge(
        self, calls: Sequence[Call], failures: Sequence[tuple[Call, str]], reward: float | None, *, reads: bool
    ) -> dict[str, Any]:
        """Role, cause and state_key of the action just played; also keeps the books of what is to blame for what."""
        state, before = self._state, self._state.found
        if calls:
            state.found = bfcl_rules.layout(state.instances)
        said = {
            "role": bfcl_rules.role(before, state.found, state.target, reads=reads and bool(calls), reward=reward),
            "cause": bfcl_rules.cause(state.blame, [text for _, text in failures]),
            "state_key": bfcl_rules.state_key(state.turn, before),
        }
        state.blame = bfcl_rules.blamed(
            state.blame,
            state.number,
            before,
            state.found,
            state.target,
            failed_calls=[call.text for call, _ in failures],
            turn_failed=reward == 0,
        )
        state.number += 1
        return said

    def _play_gold(self) -> None:
        """Play the turn's ground truth on its own instances."""
        state = self._state
        state.gold_replies = [bfcl_calls.run(call, state.gold_instances).text for call in self._gold_calls()]
        state.target = bfcl_rules.layout(state.gold_instances)

    def _verify(self) -> bool:
        """Whether the turn may end as it is."""
        state = self._state
        if not state.gold_replies or not state.calls:
            return bool(state.gold_replies) == bool(state.calls)
        try:
            return self._benchmark.same_state(state.instances, state.gold_instances) and self._benchmark.covers(
                state.replies, state.gold_replies, state.turn
            )
        except RecursionError:
            return False  # a folder copied into itself is endless, and no ground truth holds one

    def _gold_calls(self) -> list[Call]:
        state = self._running()
        return [call for text in state.session.gold[state.turn] for call in bfcl_calls.parse(text)[0]]

    def _next_request(self) -> str | None:
        state = self._state
        state.turn += 1
        state.num_actions = 0
        state.calls = {}
        if state.turn >= self.num_turns:
            return None
        self._play_gold()
        return self._request()

    def _request(self) -> str:
        state = self._state
        request = state.session.requests[state.turn]
        if request is not None:
            return request
        names = state.session.revealed[state.turn]
        docs = [doc for doc in self._docs(state.session) if doc["name"] in names]
        return f"{bfcl_prompt.tool_docs(docs, self.tool_docs)}\n{_MORE_TOOLS}"

    def _docs(self, session: Session) -> list[bfcl_prompt.Doc]:
        return [doc for api in session.api_names for doc in self._benchmark.docs[api]]

    def _new_instances(self, session: Session) -> dict[str, Any]:
        long_context = session.category == "long_context"
        instances = {
            api: self._benchmark.new_instance(api, copy.deepcopy(session.initial_config.get(api, {})), long_context)
            for api in session.api_names
        }
        return copy.deepcopy(instances)  # some classes put mutable constants of their module into the state

    def _begun(self) -> _State:
        if self._state is None:
            raise ValueError("no session is running; call reset first")
        return self._state

    def _running(self) -> _State:
        if self._begun().turn >= self.num_turns:
            raise ValueError("the session is over; call reset to start another")
        return self._state
