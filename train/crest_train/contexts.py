"""What the self-teacher sees beyond the policy, taken from a finished rollout, and the sessions with it written in.

A hint for an action stands in the text shown before it, so that all later actions see it too: one pass scores a
session. Hints of later turns and of other rollouts make it hindsight: never for a policy that acts.

B = sessions, T = token positions, T' = token positions of the hinted sessions.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby

import torch

from crest_train.chat import Chat
from crest_train.config import TeacherSection
from crest_train.sessions import Action, Rollout, Session, padded

SUCCEEDED, FAILED = "ok", "err"
"""How a hindsight skill tells the outcome of a turn."""


@dataclass(frozen=True)
class Part:
    """The actions that a hint is for: all of a turn, or one.

    first: place of the first of them in its session; siblings: the other sessions of the group.
    """

    session: Session
    siblings: list[Session]
    first: int
    actions: list[Action]

    @property
    def turn(self) -> int:
        """Place of the turn in the session."""
        return self.actions[0].turn


Context = Callable[[Part], Iterable[str | None]]
"""The texts of a part's hint, in order; empty and None are left out, and no text is no hint."""


def ground_truth(part: Part) -> Iterable[str | None]:
    """The ground truth of the turn. Raises ValueError when the rollout holds none."""
    if len(part.session.gold) <= part.turn:
        raise ValueError(
            f"rollout: session {part.session.seed} holds no ground truth of turn {part.turn}, which the context "
            "ground_truth needs; wanted a rollout with Sampling(gold=True)"
        )
    return [part.session.gold[part.turn]]


def feedback(part: Part) -> Iterable[str | None]:
    """The replies that judge their action. Raises ValueError when the environment does not say which do."""
    for action in part.actions:
        if action.observation is not None and "feedback" not in action.info:
            raise ValueError(
                f"rollout: Step.info in turn {part.turn} of session {part.session.seed} has no 'feedback', which "
                "the context feedback needs; wanted an environment that gives it (-1, 0 or 1)"
            )
    return [action.observation for action in part.actions if action.info.get("feedback", 0)]


def next_observation(part: Part) -> Iterable[str | None]:
    """The replies, whatever they say."""
    return [action.observation for action in part.actions]


def future_trajectory(part: Part) -> Iterable[str | None]:
    """All actions and replies from the part's first action to the end of its turn.

    Up to the end of the session they told nothing of the turn (`desk`: the gap then pointed away from the outcome).
    """
    ahead = part.session.actions[part.first :]
    return [text for action in ahead if action.turn == part.turn for text in (action.text, action.observation)]


def successful_sibling(part: Part) -> Iterable[str | None]:
    """The actions of the first other rollout of the group that succeeded in the turn (reward 1)."""
    for sibling in part.siblings:
        if sibling.turn_reward[part.turn : part.turn + 1] == [1.0]:
            return _texts_of_turn(sibling, part.turn)
    return []


def hindsight_skill(part: Part) -> Iterable[str | None]:
    """The session's own actions of the turn and whether they succeeded (reward 1): a template in a judge's place."""
    outcome = SUCCEEDED if part.session.turn_reward[part.turn] == 1.0 else FAILED
    return [*_texts_of_turn(part.session, part.turn), outcome]


CONTEXTS: dict[str, Context] = {
    context.__name__: context
    for context in (ground_truth, feedback, next_observation, future_trajectory, successful_sibling, hindsight_skill)
}
"""By the names that `teacher.context` takes."""


def hints(rollout: Rollout, group: torch.Tensor, section: TeacherSection) -> list[list[str | None]]:
    """The hint before each action of each session, None where there is none.

    insert "turn": before the first action of a turn, for all of them. "step": before each action, for it alone.
    "anchor": as "step", with the different hints of all actions that met the same state (rows of one group with equal
    state keys), a line each, as in SERL (arXiv 2605.19447), whose steps with the same state share what was told them;
    joining them as they are is this project's choice.

    group [B] int64: which task each session is a rollout of.
    Raises ValueError when the rollout lacks what the context is taken from.
    """
    groups = group.tolist()
    given = []
    for row, session in enumerate(rollout.sessions):
        siblings = [
            other for at, other in enumerate(rollout.sessions) if groups[at] == groups[row] and other is not session
        ]
        given.append([None] * len(session.actions))
        for first, actions in _parts(session, whole_turns=section.insert == "turn"):
            texts = CONTEXTS[section.context](Part(session, siblings, first, actions))
            given[row][first] = _joined(texts, section)
    return _shared(rollout, groups, given) if section.insert == "anchor" else given


def teacher_stream(
    chat: Chat, rollout: Rollout, hints: list[list[str | None]], section: TeacherSection
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sessions with their hints: ids [B,T'] int64 (prompts left out, 0 behind an end), and position [B,T] int64,
    where each policy token of the rollout stands in them (0 elsewhere).

    A session without hints comes out as it was played.
    """
    position_BT = torch.zeros_like(rollout.ids)
    streams = []
    for row, (session, given) in enumerate(zip(rollout.sessions, hints, strict=True)):
        ids, starts = _hinted(chat, session, given, section.template)
        streams.append(ids)
        for action, start in zip(session.actions, starts, strict=True):
            size = len(action.tokens)
            position_BT[row, action.start : action.start + size] = torch.arange(start, start + size)
    return padded(streams), position_BT


def _parts(session: Session, *, whole_turns: bool) -> list[tuple[int, list[Action]]]:
    """The session's actions in parts, with the place of each part's first: a turn's together, or each alone."""
    numbered = groupby(enumerate(session.actions), key=lambda item: item[1].turn if whole_turns else item[0])
    parts = [list(part) for _, part in numbered]
    return [(part[0][0], [action for _, action in part]) for part in parts]


def _joined(texts: Iterable[str | None], section: TeacherSection) -> str | None:
    texts = [text for text in texts if text]
    if section.context == "ground_truth":
        return texts[0] if texts else None
    return "".join(text + section.end for text in texts).strip() or None


def _shared(rollout: Rollout, groups: list[int], given: list[list[str | None]]) -> list[list[str | None]]:
    """The hints of all actions of an anchor group, a line each, repeated ones left out, for every one of them."""
    keys = [
        [(group, action.state_key) for action in session.actions]
        for group, session in zip(groups, rollout.sessions, strict=True)
    ]
    told: dict[tuple[int, int], dict[str, None]] = {}
    for keys_of_row, hints_of_row in zip(keys, given, strict=True):
        for key, hint in zip(keys_of_row, hints_of_row, strict=True):
            told.setdefault(key, {}).update({} if hint is None else {hint: None})
    return [["\n".join(told[key]) or None for key in keys_of_row] for keys_of_row in keys]


def _texts_of_turn(session: Session, turn: int) -> list[str]:
    return [action.text for action in session.actions if action.turn == turn]


def _hinted(chat: Chat, session: Session, hints: list[str | None], template: str) -> tuple[list[int], list[int]]:
    """Token ids of a session with its hints, up to its last action, and where each action begins in them."""

    def shown(text: str | None, hint: str | None) -> str | None:
        return text if hint is None else template.format(text=text or "", hint=hint)

    ids, starts = [], []
    before = None
    for action, hint in zip(session.actions, hints, strict=True):
        observation = request = None
        if before is None or action.turn != before.turn:
            request = shown(session.requests[action.turn], hint)
            observation = None if before is None else before.observation
        else:
            observation = shown(before.observation, hint)
        if before is None:
            ids += chat.open(session.system, request)[1]
        else:
            ids += [chat.end_token] if before.cut else []
            ids += chat.reply(observation, request)
        starts.append(len(ids))
        ids += action.tokens
        before = action
    return ids, starts
