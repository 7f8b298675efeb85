"""TRIAGE: a judge's role for each action shifts the trajectory's advantage by a fixed, bounded amount.

Role-typed credit assignment, arXiv 2606.32017. Its full text is not public to this project: roles, table and sum are
those of a third-party summary, what goes beyond them is marked as this project's. Additive: a regression inside a
success must be able to turn negative. Shape letters: N token positions, S actions, B trajectories.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..advantages import group_advantage
from ..backend import checks_values
from ..reductions import REDUCTIONS, Total
from ..segments import segment_expand, segment_mean, segment_zscore
from ..signals import AdditiveCredit, Signals
from ..spans import Spans
from ..surrogates import PPOClip, Surrogate
from .settings import LARGEST, check_arguments, check_numbers, check_settings

needs = ("reward_B", "role_S")

ROLES = ("decisive progress", "useful exploration", "no-progress infrastructure", "regression")
"""The roles by the number that role_S holds. The judge sees five actions before and after, never the outcome."""

WHITENING_EPS = 1e-8

Table = tuple[float, float, float, float]


def _check_table(name: str, table: Table) -> None:
    numbers = isinstance(table, tuple) and all(isinstance(c, int | float) and abs(c) <= LARGEST for c in table)
    if not numbers or len(table) != len(ROLES):
        raise ValueError(f"{name} is {table!r}, want a tuple of {len(ROLES)} finite numbers, one a role")


@dataclass(frozen=True)
class TriageConfig:
    """TRIAGE's settings; the table is that of arXiv 2606.32017 ("v3").

    lam: size of the shift, in [0, 1]; the paper's value is not known, .5 is this project's. table: shift of each of
    ROLES. failure_table: the one to take where the advantage is negative (None: the same), so that exploration can be
    credited in failures and regression punished in successes. direction_safe: shrinks the shift of a trajectory to at
    most half of its advantage, so that no sign turns. whitening: z-score over the batch's policy tokens at the end, as
    a re-implementation does; off, since it moves the zero point. The last three are this project's options; GRPO's
    settings (unbiased, std_eps, surrogate, reduction) are its defaults. Raises ValueError: a value out of range, a
    table that is not four finite numbers, or an unknown name.
    """

    lam: float = 0.5
    table: Table = (1.0, 0.5, -0.1, -0.5)
    failure_table: Table | None = None
    direction_safe: bool = False
    whitening: bool = False
    unbiased: bool = True
    std_eps: float = 1e-6
    surrogate: Surrogate = PPOClip(0.2, 0.2)
    reduction: str = "sequence_mean"

    def __post_init__(self) -> None:
        check_settings(self)
        check_numbers(self, lam=(0, 1))
        _check_table("table", self.table)
        if self.failure_table is not None:
            _check_table("failure_table", self.failure_table)


Config = TriageConfig


def role_shift(advantage: Tensor, role: Tensor, config: TriageConfig) -> Tensor:
    """Shift of the advantage by the role: lam * c(role), with direction_safe min(lam, |A| / (2 max|c|)) * c(role).

    TRIAGE, arXiv 2606.32017: c = +1, +.5, -.1, -.5. Two tables by the sign of A and direction_safe are this project's.
    advantage [S] real, role [S] int in 0..3. Returns [S] in the dtype of advantage, |shift| <= lam * max|c|.
    """
    success = config.table
    failure = success if config.failure_table is None else config.failure_table
    tables = torch.tensor([success, failure], dtype=advantage.dtype, device=advantage.device)
    bonus = tables[(advantage < 0).long(), role.long()]
    largest = max(map(abs, success + failure))
    if not config.direction_safe or largest == 0:
        return config.lam * bonus
    return (advantage.abs() / (2 * largest)).clamp(max=config.lam) * bonus


def role_projection(delta: Tensor, roles: Tensor) -> Tensor:
    """Table with the least squared error: c(rho) = E[delta | rho], delta = A* - A the residual of an action's credit.

    TRIAGE, arXiv 2606.32017, projection theorem: among all tables that depend on the role alone this one minimises
    E[(delta - c(rho))^2]; a fixed table changes that error by sum over rho of p_rho (c_rho^2 - 2 c_rho E[delta | rho])
    against no table at all, so it helps where this is negative.

    delta [S] real, roles [S] int in 0..3. Returns [4] float32 (float64 for float64), 0 for a role that does not occur.
    Raises ValueError: another shape or dtype, a role out of range.
    """
    if not isinstance(roles, Tensor) or roles.is_floating_point() or roles.dtype == torch.bool or roles.dim() != 1:
        found = f"{[*roles.shape]} {roles.dtype}" if isinstance(roles, Tensor) else type(roles).__name__
        raise ValueError(f"roles is {found}, want [S] int")
    if not isinstance(delta, Tensor) or delta.is_complex() or delta.shape != roles.shape:
        found = f"{[*delta.shape]} {delta.dtype}" if isinstance(delta, Tensor) else type(delta).__name__
        raise ValueError(f"delta is {found}, want a real tensor {[*roles.shape]} like roles")
    outside = (roles < 0) | (roles >= len(ROLES))
    if checks_values(roles) and outside.any():
        at = int(torch.nonzero(outside)[0])
        raise ValueError(f"roles[{at}] is {int(roles[at])}, want 0 <= role < {len(ROLES)}")
    return segment_mean(delta, roles.long(), len(ROLES))


def assign(
    spans: Spans, signals: Signals, config: TriageConfig = TriageConfig(), *, total: Total = None
) -> AdditiveCredit:
    """Credit of every policy token: GRPO's advantage of its trajectory plus the shift of its action's role.

    credit_n = A_i + lam * c(role of n's action) (role_shift), A_i alone in actions that do not face the environment;
    with whitening (credit_n - mean) / (std + 1e-8) over the policy tokens of the batch, population std.
    TRIAGE, arXiv 2606.32017; tokens outside environment-facing actions and the span of the whitening are this project's
    reading. lam = 0 is GRPO bitwise.
    Needs reward_B and role_S; action_mask_S, where given, says which actions face the environment (None: all). total:
    the reduction's count over the whole batch, if this is a piece of it. Returns credit_N [N] float32 (float64 for
    float64 rewards), 0 outside the spans.
    Raises ValueError: a signal missing, of the wrong length or not finite, an unknown role (naming the action).
    """
    check_arguments(spans, signals, config, TriageConfig)
    reward_B, role_S = signals.require(spans, *needs)
    advantage_B = group_advantage(reward_B, spans, unbiased=config.unbiased, eps=config.std_eps)
    advantage_S = advantage_B[spans.trajectory_of_action]
    shift_S = role_shift(advantage_S, role_S, config)
    if signals.action_mask_S is not None:
        shift_S = torch.where(signals.require(spans, "action_mask_S")[0], shift_S, 0)
    credit_N = segment_expand(advantage_S + shift_S, spans.action_of_token)
    if config.whitening:
        credit_N = segment_zscore(credit_N, spans.mask.int() - 1, 1, unbiased=False, eps=WHITENING_EPS)
    return AdditiveCredit(
        credit_N,
        REDUCTIONS[config.reduction](spans, total=total),
        config.surrogate,
        advantage_N=segment_expand(advantage_B, spans.trajectory_of_token),
    )
