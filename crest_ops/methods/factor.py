"""FACTOR: temporal differences say how much credit each action gets, a hindsight teacher where inside it it goes.

arXiv 2608.07118, How Much, Then Where: Credit-Conserving Action-to-Token Allocation for Multi-Turn Agent Reinforcement
Learning; details from its authors' repository. Shape letters: N token positions, S actions, B trajectories.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..advantages import leave_one_out_advantage
from ..allocation import softmax_allocation
from ..reductions import REDUCTIONS, Total, token_mean
from ..returns import td_credit, uniform_credit
from ..segments import segment_center, segment_expand, segment_std, segment_sum
from ..signals import MultiplicativeCredit, Signals
from ..spans import Spans
from ..surrogates import PPOClip, Surrogate
from .settings import LARGEST, SMALLEST, check_arguments, check_numbers, check_settings, decayed

Preset = Literal["leave_one_out", "zscore", "raw"]


@dataclass(frozen=True)
class FactorConfig:
    """FACTOR's settings; defaults from arXiv 2608.07118 and its repository. `at(step)` is its schedule.

    eta: share of an action's credit that the teacher allocates. tau: temperature of the gap. clip: bound of the gap.
    potential: "value" (signal value_S), or "uniform": each action has the same share and value_S is not needed.
    advantage: see shaped_reward. lam_kl: weight of the forward KL from the teacher on action tokens (0: no such term;
    1 in the paper). warmup, decay_steps: training steps, used by `at`. reduction of the action tokens: a name of
    reductions.REDUCTIONS. Raises ValueError: a value out of range or an unknown name.
    """

    eta: float = 0.7
    tau: float = 1.0
    clip: float = 3.0
    potential: Literal["value", "uniform"] = "value"
    advantage: Preset = "leave_one_out"
    lam_kl: float = 0.0
    warmup: int = 10
    decay_steps: int = 50
    surrogate: Surrogate = PPOClip(0.2, 0.2)
    reduction: str = "action_mean"

    def __post_init__(self) -> None:
        check_settings(self, potential=("value", "uniform"), advantage=("leave_one_out", "zscore", "raw"))
        positive = (SMALLEST, math.inf)
        check_numbers(self, eta=(0, 1), tau=positive, clip=positive, lam_kl=(0, LARGEST))
        check_numbers(self, warmup=(0, math.inf), decay_steps=(1, math.inf))

    @property
    def needs(self) -> tuple[str, ...]:
        """The signals that these settings need; the teacher only where it has a weight."""
        value = ("value_S",) if self.potential == "value" else ()
        gap = ("teacher_gap_N",) if self.eta > 0 or self.lam_kl > 0 else ()
        return ("action_reward_S", *value, *gap)

    def at(self, step: int) -> "FactorConfig":
        """The settings of a training step, counted from 1: eta_k = eta * max(1 - k / decay_steps, 0), lam_kl likewise.

        Up to `warmup` the potential is uniform and eta 0; lam_kl decays from the first step on.
        Raises ValueError: step < 0.
        """
        eta, lam_kl = (decayed(value, step, self.decay_steps) for value in (self.eta, self.lam_kl))
        if step <= self.warmup:
            return replace(self, eta=0.0, potential="uniform", lam_kl=lam_kl)
        return replace(self, eta=eta, lam_kl=lam_kl)


Config = FactorConfig
needs = FactorConfig().needs


class FactorTotal(NamedTuple):
    """Counts of the whole batch, for a piece of it: every mean that FACTOR's loss may hold has its own.

    reduction: what config.reduction counts over the actions that action_mask_S keeps (non-empty actions by default).
    action_tokens: tokens of those actions. other_tokens: policy tokens of the other actions.
    """

    reduction: Total
    action_tokens: Total
    other_tokens: Total


def shaped_reward(reward: Tensor, spans: Spans, preset: Preset) -> tuple[Tensor, Tensor]:
    """Rewards r of the actions and baseline b of the trajectories, so that A_i = sum_t r_t - b_i is the advantage.

    With G_i = sum_t reward_t, by preset:
    "leave_one_out" (ALFWorld): r = reward, b_i = (1/(G-1)) * sum over j != i of G_j; a group of one has b = G_i, A = 0.
    "zscore" (WebShop): A_i = (G_i - mu) / (sigma + 1e-8) with the group's population sigma, b = 0; r = A = 0 where
        sigma < 1e-6.
    "raw" (ScienceWorld): r = reward, b = 0.
    FACTOR, arXiv 2608.07118, repository. This project's reading of "zscore" where rewards come before the last action:
    r_t = reward_t / (sigma + 1e-8), less mu / (sigma + 1e-8) at the last action, where WebShop's only reward lies.

    reward [S] real. Returns float64 [S] and [B].
    """
    group_B, B = spans.group_of_trajectory, spans.num_trajectories
    reward_S, trajectory_S = reward.double(), spans.trajectory_of_action
    return_B = segment_sum(reward_S, trajectory_S, B)
    if preset == "leave_one_out":
        return reward_S, return_B - leave_one_out_advantage(return_B, spans)
    if preset == "raw":
        return reward_S, torch.zeros_like(return_B)
    sigma_B = segment_expand(segment_std(return_B, group_B, B, unbiased=False), group_B)
    scale_B = torch.where(sigma_B < 1e-6, 0, 1 / (sigma_B + 1e-8))
    mean_B = return_B - segment_center(return_B, group_B, B)
    last_S = trajectory_S.diff(append=trajectory_S.new_full((1,), B)) != 0
    return (reward_S - torch.where(last_S, mean_B[trajectory_S], 0)) * scale_B[trajectory_S], torch.zeros_like(return_B)


def assign(
    spans: Spans, signals: Signals, config: FactorConfig = FactorConfig(), *, total: Total | FactorTotal = None
) -> MultiplicativeCredit:
    """Credit of every policy token: C_{t,j} = omega_{t,j} A*_t, A* = td_credit, omega = softmax_allocation.

    FACTOR, arXiv 2608.07118. The mean of C over an action is A*_t, the sum of A* over a trajectory its advantage A_i,
    for any potential and any teacher. loss = action mean of the clipped surrogate with C + lam_kl * token mean of
    KL(teacher || policy) over the same tokens. With action_mask_S, an action that it leaves out (a thought) is
    no step of td_credit: its tokens carry A_i, reduced by their own token mean ("token_mean": one mean for all).
    Actions without a token are never counted; where their reward goes: td_credit. The gap is meant to come from the
    behaviour policy's log-probs. advantage_N is A*_t (A_i on the other tokens): the teacher never turns its sign, but
    the potential, as in any temporal difference, can give an action another sign than A_i.
    total: the reduction's count over the whole batch, if this is a piece of it; a FactorTotal with lam_kl > 0, and with
    action_mask_S unless the reduction is the token mean.

    Needs action_reward_S, value_S (not with potential "uniform"), teacher_gap_N (not with eta = lam_kl = 0); takes
    action_mask_S. Returns credit_N [N] float32 (float64 for float64 rewards), 0 outside the spans.
    Raises ValueError: a signal missing, of the wrong length or not finite; total of the wrong kind.
    """
    check_arguments(spans, signals, config, FactorConfig)
    given = dict(zip(config.needs, signals.require(spans, *config.needs), strict=True))
    acting, others = spans, None
    if signals.action_mask_S is not None:
        acting, others = _split(spans, *signals.require(spans, "action_mask_S"))
    weight_N, distill_N = _token_weights(spans, acting, others, config, total)
    action_credit_S, advantage_B = _action_credit(acting, given, config)
    credit_N = advantage_N = segment_expand(action_credit_S, acting.action_of_token)
    if config.eta > 0:
        omega_N = softmax_allocation(
            action_credit_S.sign(), given["teacher_gap_N"], acting, eta=config.eta, tau=config.tau, clip=config.clip
        )
        credit_N = (advantage_N * omega_N).to(advantage_N.dtype)
    if others is not None:
        other_N = segment_expand(advantage_B, others.trajectory_of_token)
        credit_N, advantage_N = credit_N + other_N, advantage_N + other_N
    kind = None if distill_N is None else "forward_kl"
    return MultiplicativeCredit(credit_N, weight_N, config.surrogate, distill_N, kind, advantage_N=advantage_N)


def _action_credit(acting: Spans, given: dict[str, Tensor], config: FactorConfig) -> tuple[Tensor, Tensor]:
    """A*_t [S] and A_i [B], in the dtype of the credit."""
    reward = given["action_reward_S"]
    dtype = torch.float64 if reward.dtype == torch.float64 else torch.float32
    reward_S, baseline_B = shaped_reward(reward, acting, config.advantage)
    advantage_B = segment_sum(reward_S, acting.trajectory_of_action, acting.num_trajectories) - baseline_B
    if config.potential == "value":
        action_credit_S = td_credit(reward_S, given["value_S"], baseline_B, acting)
    else:
        action_credit_S = uniform_credit(advantage_B, acting)
    return action_credit_S.to(dtype), advantage_B.to(dtype)


def _split(spans: Spans, action_mask_S: Tensor) -> tuple[Spans, Spans]:
    """The spans with the tokens of the actions in the mask alone, and with those of the others alone."""
    kept_N = segment_expand(action_mask_S, spans.action_of_token)
    return tuple(
        replace(spans, action_of_token=torch.where(of_N, spans.action_of_token, -1)) for of_N in (kept_N, ~kept_N)
    )


def _token_weights(
    spans: Spans, acting: Spans, others: Spans | None, config: FactorConfig, total: Total | FactorTotal
) -> tuple[Tensor, Tensor | None]:
    """token_weight_N and distill_N."""
    one_mean = others is None or config.reduction == "token_mean"
    if not isinstance(total, FactorTotal):
        if total is not None and (config.lam_kl > 0 or not one_mean):
            raise ValueError(f"total is {total}, want a FactorTotal: this loss holds more than one mean")
        total = FactorTotal(total, None, None)
    weight_N = REDUCTIONS[config.reduction](spans if one_mean else acting, total=total.reduction)
    if not one_mean:
        weight_N = weight_N + token_mean(others, total=total.other_tokens)
    if config.lam_kl == 0:
        return weight_N, None
    return weight_N, config.lam_kl * token_mean(acting, total=total.action_tokens)
