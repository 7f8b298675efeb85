"""The signals that a method asks for, gathered from a finished rollout: by rule, from the policy, from scorers.

What the environment says of an action is in its `info` (see environments/protocol.py); only what is asked for is looked
at. An action that the model's context cut off was never played: it counts as an error of its own and a regression, its
turn having failed with it, without feedback.

B = sessions, T = token positions, N = B*T, S = actions of all sessions, K = turns that hold an action.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from crest_ops import Credit, Signals, Spans
from crest_ops.methods.abc import clue_score
from crest_train.chat import Chat
from crest_train.config import Config
from crest_train.credit import action_reward, needs_of, rows_with_signal, session_reward
from crest_train.environments import make_environment
from crest_train.environments.protocol import Role
from crest_train.environments.protocol_checks import checked_gold, checked_opening, checked_step
from crest_train.gold import gold_logp
from crest_train.sessions import Action, Rollout
from crest_train.teacher import Teacher, teacher_gap, teacher_states
from crest_train.value import StateValue


@dataclass(frozen=True)
class Scorers:
    """What scores a rollout: the policy (its own teacher), a frozen reference of it, a value of states.

    chat, reference, value: None where no signal that is asked for needs it.
    """

    model: PreTrainedModel
    chat: Chat | None
    reference: PreTrainedModel | None = None
    value: StateValue | None = None


@dataclass(frozen=True)
class _Fact:
    """A key of Step.info: the words for what fits, whether a value does, and what an action that was cut off has."""

    key: str
    wanted: str
    fits: Callable[[Any], bool]
    of_cut: int


def _whole(low: int, high: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


_ROLE = _Fact("role", "a crest_train.environments.protocol.Role, 0 to 3", _whole(0, 3), Role.REGRESSION)
_FACTS = {
    "feedback_S": _Fact("feedback", "-1, 0 or 1", _whole(-1, 1), 0),
    "role_S": _ROLE,
    "clue_score_S": _ROLE,
    "error_S": _Fact("error", "True or False", lambda value: isinstance(value, bool), True),
    "cause_S": _Fact("cause", "the number of an earlier action of the session, or -1", _whole(-1, float("inf")), -1),
}
"""The signals that are read from Step.info."""


def check_environment(config: Config) -> None:
    """Play one action in the environment and see that it says what the method, or its teacher, needs to know.

    Raises ValueError naming the method, the signal, the key of Step.info, what was found and what was wanted; a ground
    truth that is no text.
    """
    needs = needs_of(config.method)
    gold = reads_gold(config)
    facts = [(signal, _FACTS[signal]) for signal in needs if signal in _FACTS]
    if "teacher_gap_N" in needs and "skill_gap_N" not in needs and config.teacher.context == "feedback":
        facts.append(("the teacher's context feedback", _FACTS["feedback_S"]))
    if not facts and not gold and "state_key_S" not in needs:
        return
    environment = make_environment(config.environment.name, config.environment.options)
    checked_opening(environment, 0)
    if gold:
        checked_gold(environment, 0, 0)
    info = checked_step(environment, 0, "", 0, environment.num_turns).info
    for signal, fact in facts:
        _check(info, signal, fact, config, "in the first turn of session 0")


def reads_gold(config: Config) -> bool:
    """Whether the ground truth of the sampled sessions is looked at: by the reference, or by the self-teacher."""
    asked = needs_of(config.method)
    by_teacher = "teacher_gap_N" in asked and "skill_gap_N" not in asked and config.teacher.context == "ground_truth"
    return by_teacher or "gold_logp" in asked


def gather(
    needs: tuple[str, ...], batch: Rollout, group: torch.Tensor, spans: Spans, config: Config, scorers: Scorers
) -> Signals:
    """The signals that `needs` names, and no others; spans and group [B] as in `credit.spans_of`.

    teacher_gap_N: of the context that config.teacher names; where skill_gap_N is asked for with it, both are that of
    the context hindsight_skill (the teacher without the skill being the policy itself). Tokens of groups whose rollouts
    all fared alike have gap 0 without a pass, unless value_S is asked for: a potential gives credit there too.
    Raises ValueError: a signal that is not known, an environment or scorers that do not give it.
    """
    kind = config.method.session_reward
    options = {
        "temperature": config.rollout.temperature,
        "tokens_per_micro_batch": config.training.tokens_per_micro_batch,
    }
    skill = config.teacher.model_copy(update={"context": "hindsight_skill"})

    def gap(section) -> torch.Tensor:
        rows = list(range(len(batch.sessions))) if "value_S" in needs else rows_with_signal(batch, group)
        _want(scorers.chat, "the teacher's gap", "chat")
        return teacher_gap(scorers.model, scorers.chat, batch, group, rows, section, **options).flatten()

    def gold() -> torch.Tensor:
        reference, chat = _want(scorers.reference, "gold_logp", "reference"), _want(scorers.chat, "gold_logp", "chat")
        return gold_logp(reference, chat, batch, group, **options)

    makers: dict[str, Callable[[], torch.Tensor]] = {
        "reward_B": lambda: session_reward(batch, kind),
        "turn_reward_K": lambda: batch.turn_reward[spans.trajectory_of_turn, spans.turn_index],
        "action_reward_S": lambda: action_reward(batch, kind),
        "value_S": lambda: _want(scorers.value, "value_S", "value").estimate(batch, spans),
        "surprisal_N": lambda: -batch.old_logp.flatten(),
        "entropy_N": lambda: batch.entropy.flatten(),
        "gold_logp": gold,
        "feedback_S": lambda: torch.tensor(_said(batch, "feedback_S", config), dtype=torch.int64),
        "role_S": lambda: torch.tensor(_said(batch, "role_S", config), dtype=torch.int64),
        "clue_score_S": lambda: clue_scores(torch.tensor(_said(batch, "clue_score_S", config), dtype=torch.int64)),
        "error_S": lambda: torch.tensor(_said(batch, "error_S", config), dtype=torch.bool),
        "cause_S": lambda: _causes(batch, config),
        "state_key_S": lambda: torch.tensor([action.state_key for action in _actions(batch)], dtype=torch.int64),
        "action_mask_S": lambda: torch.ones(spans.num_actions, dtype=torch.bool),
    }
    if unknown := sorted(set(needs) - set(makers) - {"teacher_gap_N", "skill_gap_N"}):
        raise ValueError(f"method.name: needs {', '.join(unknown)}, which the trainer does not gather")
    found = {name: makers[name]() for name in needs if name in makers}
    if "skill_gap_N" in needs:
        found |= dict.fromkeys({"skill_gap_N", "teacher_gap_N"} & set(needs), gap(skill))
    elif "teacher_gap_N" in needs:
        found["teacher_gap_N"] = gap(config.teacher)
    return Signals(**found)


def teacher_of(credit: Credit, batch: Rollout, group: torch.Tensor, config: Config, scorers: Scorers) -> Teacher | None:
    """The teacher's distributions where the credit distils them over the whole vocabulary; None where it does not.

    A method that reads the skill's gap has the context hindsight_skill for its teacher.
    """
    if credit.distill_N is None or credit.distill_kind == "sampled_reverse_kl":
        return None
    section = config.teacher
    if "skill_gap_N" in needs_of(config.method):
        section = section.model_copy(update={"context": "hindsight_skill"})
    rows = (credit.distill_N.view_as(batch.policy) != 0).any(1).nonzero().flatten().tolist()
    chat, tokens = _want(scorers.chat, "distillation", "chat"), config.training.tokens_per_micro_batch
    return teacher_states(scorers.model, chat, batch, group, rows, section, tokens_per_micro_batch=tokens)


def clue_scores(role_S: torch.Tensor) -> torch.Tensor:
    """ABC's step scores [S] by rule: progress and useful exploration are a clue found, regression is one discarded.

    This project's reading of crest_ops.methods.abc.clue_score for environments with roles and without a judge.
    """
    found_S = (role_S == Role.PROGRESS) | (role_S == Role.EXPLORATION)
    return clue_score(found_S, torch.zeros_like(found_S), role_S == Role.REGRESSION)


def _actions(batch: Rollout) -> list[Action]:
    return [action for session in batch.sessions for action in session.actions]


def _said(batch: Rollout, signal: str, config: Config) -> list[int]:
    """What the environment said of every action."""
    fact, values = _FACTS[signal], []
    for session in batch.sessions:
        for number, action in enumerate(session.actions):
            if session.cut and action is session.actions[-1] and not action.info:
                values.append(int(fact.of_cut))
                continue
            _check(action.info, signal, fact, config, f"for action {number} of session {session.seed}")
            values.append(int(action.info[fact.key]))
    return values


def _check(info: dict[str, Any], signal: str, fact: _Fact, config: Config, where: str) -> None:
    if fact.key not in info or not fact.fits(info[fact.key]):
        found = repr(info[fact.key]) if fact.key in info else "no such key"
        raise ValueError(
            f"method.name: {config.method.name} needs {signal}, which is read from Step.info[{fact.key!r}]; "
            f"environment {config.environment.name} gave {found} {where}; wanted {fact.wanted}"
        )


def _causes(batch: Rollout, config: Config) -> torch.Tensor:
    """Causes [S] int64 counted over the batch, in place of over the session."""
    counted, before, causes = iter(_said(batch, "cause_S", config)), 0, []
    for session in batch.sessions:
        for number in range(len(session.actions)):
            cause = next(counted)
            if cause >= number:
                raise ValueError(
                    f"environment {config.environment.name}: Step.info['cause'] of action {number} of session "
                    f"{session.seed} is {cause}; wanted {_FACTS['cause_S'].wanted}"
                )
            causes.append(cause if cause < 0 else before + cause)
        before += len(session.actions)
    return torch.tensor(causes, dtype=torch.int64)


def _want(scorer: Any, signal: str, name: str) -> Any:
    if scorer is None:
        raise ValueError(f"scorers.{name} is None, want one, which {signal} needs")
    return scorer
