"""TRACE: each tool call is credited with how much nearer it brought the policy's reference to the gold answer.

arXiv 2607.13988, TRACE: Turn-level Reward Assignment via Credit Estimation for Long-Horizon Agents (other papers bear
the same short name). Formulas from summaries that agree and from the paper's appendix numbers.
Shape letters: N token positions, S actions, B trajectories.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..advantages import group_advantage
from ..reductions import REDUCTIONS, Total
from ..returns import k_step_credit, log_ratio_td
from ..segments import segment_expand
from ..signals import AdditiveCredit, Signals
from ..spans import Spans
from ..surrogates import PPOClip, Surrogate
from .settings import LARGEST, SMALLEST, check_arguments, check_counts, check_numbers, check_settings


@dataclass(frozen=True)
class TraceConfig:
    """TRACE's settings; defaults of arXiv 2607.13988, from summaries.

    alpha_out, alpha_turn: weight of the outcome's advantage, of the turn's credit. eps: added to the distance to the
    gold answer. steps, gamma: see returns.k_step_credit.
    This project's choices: std_eps of the outcome's population std (0 where it has no spread), clip .2, token mean, and
    which actions are the final answer, which is no tool call and gets no turn credit: answer "last", the last action of
    each trajectory; "none", every action is a tool call; "action_mask", those that action_mask_S leaves out.
    Raises ValueError: a value out of range or an unknown name.
    """

    alpha_out: float = 1.0
    alpha_turn: float = 0.2
    eps: float = 0.1
    steps: int = 3
    gamma: float = 0.8
    answer: Literal["last", "none", "action_mask"] = "last"
    std_eps: float = 1e-6
    surrogate: Surrogate = PPOClip(0.2, 0.2)
    reduction: str = "token_mean"

    def __post_init__(self) -> None:
        check_settings(self, answer=("last", "none", "action_mask"))
        finite = (0, LARGEST)
        check_numbers(self, alpha_out=finite, alpha_turn=finite, gamma=(0, 1))
        check_counts(self, "steps")
        check_numbers(self, eps=(SMALLEST, LARGEST))

    @property
    def needs(self) -> tuple[str, ...]:
        """The signals that these settings need."""
        return ("reward_B", "gold_logp", *(("action_mask_S",) if self.answer == "action_mask" else ()))


Config = TraceConfig
needs = TraceConfig().needs


def assign(
    spans: Spans, signals: Signals, config: TraceConfig = TraceConfig(), *, total: Total = None
) -> AdditiveCredit:
    """Credit of every policy token: alpha_out * A_i + alpha_turn * c_k in tool call k, alpha_out * A_i in the answer.

    TRACE, arXiv 2607.13988: A_i = (R_i - mean_g R) / (std_g R + std_eps), population std; c = k_step_credit of
    delta = log_ratio_td, with A_i as the outcome. c is not normalised over the group; the turn's credit can turn the
    sign of A_i round. advantage_N is alpha_out * A_i. gold_logp comes from a frozen reference. The paper's extra rule
    for answer tokens is not public and left out. total: the reduction's count over the whole batch, if this is a piece.

    Needs reward_B, gold_logp [S+B] and, with answer "action_mask", action_mask_S. Returns credit_N [N] float32 (float64
    for float64 rewards), 0 outside the spans.
    Raises ValueError: a signal missing, of the wrong length or not finite, a gold log-prob above 0.
    """
    check_arguments(spans, signals, config, TraceConfig)
    reward_B, gold_logp, *mask = signals.require(spans, *config.needs)
    outcome_B = group_advantage(reward_B, spans, unbiased=False, eps=config.std_eps)
    delta_S = log_ratio_td(gold_logp, spans, config.eps)
    call_S = mask[0] if mask else _calls(spans, config.answer)
    turn_S = k_step_credit(delta_S, spans, config.steps, config.gamma, outcome=outcome_B, mask=call_S)
    advantage_N = config.alpha_out * segment_expand(outcome_B, spans.trajectory_of_token)
    credit_N = advantage_N + config.alpha_turn * segment_expand(turn_S, spans.action_of_token)
    return AdditiveCredit(
        credit_N.to(outcome_B.dtype),
        REDUCTIONS[config.reduction](spans, total=total),
        config.surrogate,
        advantage_N=advantage_N,
    )


def _calls(spans: Spans, answer: str) -> Tensor | None:
    """[S] bool: the actions that are tool calls; None: all."""
    if answer == "none":
        return None
    trajectory_S = spans.trajectory_of_action
    return trajectory_S.diff(append=trajectory_S.new_full((1,), spans.num_trajectories)) == 0
