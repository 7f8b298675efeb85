"""SERL: hindsight feedback reweights the tokens of actions and leaves all others to GRPO.

arXiv 2605.19447, What and When to Distill: Selective Hindsight Distillation for Multi-Turn Agents. Multiplicative: the
feedback never turns the verifier's sign. Shape letters: N token positions, S actions, B trajectories.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from ..advantages import group_advantage
from ..reductions import REDUCTIONS, Total
from ..segments import segment_expand
from ..signals import MultiplicativeCredit, Signals
from ..spans import Spans
from ..surrogates import PPOClip, Surrogate
from .rlsd import reweighted
from .settings import SMALLEST, check_arguments, check_numbers, check_settings, decayed

needs = ("reward_B", "teacher_gap_N")

FeedbackSource = Literal["feedback", "next_observation", "future_trajectory", "successful_sibling", "hindsight_skill"]
"""What the teacher is shown, as a teacher context is called here; in the paper's words, in this order: immediate
feedback, next observation, future trajectory, successful trajectory, current trajectory (judged as a whole)."""
FEEDBACK_SOURCES: tuple[FeedbackSource, ...] = get_args(FeedbackSource)

Granularity = Literal["step", "anchor"]
"""Where it is shown: before each action with that action's own feedback ("step"), or with one feedback that all actions
in the same state of the task group share ("anchor")."""
GRANULARITIES: tuple[Granularity, ...] = get_args(Granularity)


@dataclass(frozen=True)
class SERLConfig:
    """SERL's settings; defaults of arXiv 2605.19447.

    alpha: share of the teacher's weight, 0.5 at the first step. steps: training steps over which `at` brings it to 0.
    eps_w: clip of the weight around 1. kl: adds the paper's auxiliary KL(teacher || policy) on action tokens, with
    coefficient alpha (off, as in the authors' code). unbiased, std_eps: see advantages.group_advantage. surrogate,
    reduction: PPO's clip and the token mean. Raises ValueError: a value out of range or an unknown name.
    """

    alpha: float = 0.5
    steps: int = 50
    eps_w: float = 0.2
    kl: bool = False
    unbiased: bool = True
    std_eps: float = 1e-6
    surrogate: Surrogate = PPOClip(0.2, 0.2)
    reduction: str = "token_mean"

    def __post_init__(self) -> None:
        check_settings(self)
        check_numbers(self, alpha=(0, 1), eps_w=(0, 1), steps=(SMALLEST, math.inf))

    def at(self, step: int) -> "SERLConfig":
        """The settings of training step k = `step`: alpha_k = alpha * max(0, 1 - k / steps).

        Raises ValueError: step < 0.
        """
        return replace(self, alpha=decayed(self.alpha, step, self.steps))


Config = SERLConfig


def assign(
    spans: Spans, signals: Signals, config: SERLConfig = SERLConfig(), *, total: Total = None
) -> MultiplicativeCredit:
    """Credit of every policy token: GRPO's advantage, on action tokens sized by the teacher's agreement.

    credit_n = A_i * ((1 - alpha) + alpha * w_n) where n lies in an environment-facing action, else A_i;
    w_n = clip(exp(sgn(A_i) * gap_n), 1 - eps_w, 1 + eps_w), the exponent clamped to +-20.
    SERL, arXiv 2605.19447, reweighting; its teacher is a copy of the policy, synced every 10 updates, that is shown a
    FeedbackSource. With kl the loss gains alpha * token_weight_n * KL(teacher || policy)_n on action tokens (Eq. 14
    with lambda_k = alpha_k, as FACTOR's code cites it); that it is reduced like the policy loss, so that the pieces of
    a batch add up, and a gap from the behaviour policy's log-probs instead of the live student's are this project's
    choices. The mean of an action's credit is not conserved. alpha = 0 or a gap of 0 is GRPO bitwise.

    Needs reward_B and teacher_gap_N; action_mask_S, where given, says which actions face the environment (None: all).
    total: the reduction's count over the whole batch, if this is a piece of it. Returns credit_N [N] float32 (float64
    for float64 rewards), 0 outside the spans, and with kl distill_N of kind "forward_kl".
    Raises ValueError: a signal missing, of the wrong length or not finite.
    """
    check_arguments(spans, signals, config, SERLConfig)
    reward_B, gap_N = signals.require(spans, *needs)
    facing_N = spans.mask
    if signals.action_mask_S is not None:
        facing_N = segment_expand(signals.require(spans, "action_mask_S")[0], spans.action_of_token, fill=False)
    advantage_B = group_advantage(reward_B, spans, unbiased=config.unbiased, eps=config.std_eps)
    advantage_N = segment_expand(advantage_B, spans.trajectory_of_token)
    weight_N = REDUCTIONS[config.reduction](spans, total=total)
    return MultiplicativeCredit(
        torch.where(facing_N, reweighted(advantage_N, gap_N, config.alpha, config.eps_w), advantage_N),
        weight_N,
        config.surrogate,
        torch.where(facing_N, config.alpha * weight_N, 0) if config.kl else None,
        "forward_kl" if config.kl else None,
        advantage_N=advantage_N,
    )
