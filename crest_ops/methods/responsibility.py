"""Responsibility: an action that failed because of an earlier error passes most of its blame back to that error.

After the title of "Of Errors and Echoes: Responsibility-Aware Credit Assignment for Tool-Use Agents"; nothing else of
that paper is public to this project, so every formula here is this project's own. An *error* is an action that failed
by itself, an *echo* one whose failure an earlier action caused. Additive: the root of echoes can turn negative.
Shape letters: N token positions, S actions, K turns, B trajectories.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..advantages import group_advantage, turn_advantage
from ..backend import checks_values
from ..reductions import REDUCTIONS, Total
from ..segments import segment_expand, segment_sum
from ..signals import AdditiveCredit, Signals
from ..spans import Spans
from ..surrogates import PPOClip, Surrogate
from .settings import check_arguments, check_numbers, check_settings


@dataclass(frozen=True)
class ResponsibilityConfig:
    """Settings of responsibility; every default is this project's.

    base: where an action's credit comes from before it is moved, "turn": advantages.turn_advantage of its turn (signal
    turn_reward_K); "group": GRPO's advantage of its trajectory (signal reward_B). For the credit of another method use
    `redistribute`. kappa: share of its blame that an echo keeps. unbiased, std_eps: of the advantage. reduction: the
    action mean of FACTOR, arXiv 2608.07118. Raises ValueError: a value out of range or an unknown name.
    """

    base: Literal["turn", "group"] = "turn"
    kappa: float = 0.3
    unbiased: bool = True
    std_eps: float = 1e-6
    surrogate: Surrogate = PPOClip(0.2, 0.2)
    reduction: str = "action_mean"

    def __post_init__(self) -> None:
        check_settings(self, base=("turn", "group"))
        check_numbers(self, kappa=(0, 1))

    @property
    def needs(self) -> tuple[str, ...]:
        """The signals that these settings need."""
        return ("turn_reward_K" if self.base == "turn" else "reward_B", "error_S", "cause_S")


Config = ResponsibilityConfig
needs = ResponsibilityConfig().needs


def cause_root(error: Tensor, cause: Tensor) -> Tensor:
    """Action at which the chain of causes of each action ends: root(t) = root(cause_t) if t is an echo, else t.

    An echo is an error with a cause (this project's definition). Every step follows chains of twice the length, so S
    actions take log2(S) steps. error [S] bool; cause [S] int, an earlier action or -1. Returns [S] int64.
    """
    root = torch.where(error & (cause >= 0), cause.long(), torch.arange(cause.shape[0], device=cause.device))
    reach = 1
    while reach < cause.shape[0]:
        root, reach = root[root], 2 * reach
    return root


def redistribute(action_credit: Tensor, error: Tensor, cause: Tensor, spans: Spans, kappa: float) -> Tensor:
    """Credit of each action after echoes have passed their blame on to the error that caused them.

    For an echo t with A_t < 0:  A'_t = kappa * A_t,  A'_root(t) += (1 - kappa) * A_t  (cause_root); all else stays.
    This project's own formula. The sum over a trajectory is conserved; a chain of echoes of any length lands on one
    root; positive credit stays where it is; kappa = 1 or no echo gives A bitwise.

    action_credit [S] real, signed, from any method, of the actions of spans; error [S] bool: the action failed; cause
    [S] int: index in 0..S-1 of the earlier action of the trajectory that made it fail, -1 for none; kappa in [0, 1].
    Returns [S] float32 (float64 for float64), detached.
    Raises ValueError naming the action: a cause that is no earlier action of the trajectory (so no cycle either).
    Raises ValueError: a credit that is not finite, another shape or dtype, kappa outside [0, 1].
    """
    if not isinstance(kappa, int | float) or not 0 <= kappa <= 1:
        raise ValueError(f"kappa is {kappa!r}, want 0 <= kappa <= 1")
    if not isinstance(action_credit, Tensor) or [*action_credit.shape] != [spans.num_actions]:
        found = [*action_credit.shape] if isinstance(action_credit, Tensor) else type(action_credit).__name__
        raise ValueError(f"action_credit is {found}, want [{spans.num_actions}] to match the spans")
    if action_credit.is_complex() or (checks_values(action_credit) and not torch.isfinite(action_credit).all()):
        raise ValueError("action_credit is complex, infinite or NaN somewhere, want finite real numbers")
    error_S, cause_S = Signals(error_S=error, cause_S=cause).require(spans, "error_S", "cause_S")
    credit_S = action_credit.detach()
    credit_S = credit_S if credit_S.dtype == torch.float64 else credit_S.float()
    moves_S = error_S & (cause_S >= 0) & (credit_S < 0)
    kept_S = torch.where(moves_S, kappa * credit_S, credit_S)
    root_S = torch.where(moves_S, cause_root(error_S, cause_S), -1)
    return kept_S + segment_sum(credit_S - kept_S, root_S, spans.num_actions)


def assign(
    spans: Spans, signals: Signals, config: ResponsibilityConfig = ResponsibilityConfig(), *, total: Total = None
) -> AdditiveCredit:
    """Credit of every policy token: that of its action, after echoes have passed their blame on (redistribute).

    credit_n = A'_t with t the action of token n, uniform inside the action; A_t = the advantage of t's turn or, with
    base "group", of its trajectory. This project's reading of a title (see the module); the action mean over which it
    is reduced is FACTOR's, arXiv 2608.07118. total: the reduction's count over the whole batch, if this is a piece.
    Needs turn_reward_K (reward_B with base "group"), error_S and cause_S. Returns credit_N [N] float32 (float64 for
    float64 rewards), 0 outside the spans.
    Raises ValueError: a signal missing, of the wrong length or not finite, a cause that is no earlier action of the
    same trajectory.
    """
    check_arguments(spans, signals, config, ResponsibilityConfig)
    reward, error_S, cause_S = signals.require(spans, *config.needs)
    if config.base == "turn":
        advantage_K = turn_advantage(reward, spans, unbiased=config.unbiased, eps=config.std_eps)
        advantage_S = advantage_K[spans.turn_of_action]
    else:
        advantage_B = group_advantage(reward, spans, unbiased=config.unbiased, eps=config.std_eps)
        advantage_S = advantage_B[spans.trajectory_of_action]
    credit_S = redistribute(advantage_S, error_S, cause_S, spans, config.kappa)
    return AdditiveCredit(
        segment_expand(credit_S, spans.action_of_token),
        REDUCTIONS[config.reduction](spans, total=total),
        config.surrogate,
        advantage_N=segment_expand(advantage_S, spans.action_of_token),
    )
