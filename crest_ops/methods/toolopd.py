"""ToolOPD: a skill told in hindsight says which actions are worth distilling, beside GRPO.

Outcome-aware on-policy distillation for long-horizon tool use. Only the abstract is public to this project (no arXiv
id); the formulas are this project's own, with parts of FACTOR, arXiv 2608.07118 (clipped gap, action mean), SDAR, arXiv
2605.15155 (gate), and on-policy distillation with the sampled reverse KL. A plain Credit: GRPO's, and a distillation
term. Shape letters: N token positions, S actions, B trajectories.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..advantages import group_advantage
from ..allocation import direction_gate
from ..reductions import REDUCTIONS, Total
from ..segments import segment_expand, segment_mean
from ..signals import Credit, Signals
from ..spans import Spans
from ..surrogates import PPOClip, Surrogate
from .settings import LARGEST, SMALLEST, check_arguments, check_numbers, check_settings


@dataclass(frozen=True)
class ToolOPDConfig:
    """Settings of ToolOPD; every default is this project's.

    beta: strength of the distillation term. kappa: mean evidence (nats a token) up to which an action is irrelevant.
    clip: bound of a token's evidence. level: credit for each "action" or each "token". bounded: tanh of the credit.
    normalise: mean credit of one in every trajectory that has any. kind: what is distilled, "sampled_reverse_kl" of the
    realised tokens or "reverse_kl" over the full vocabulary. gate: with the sampled kind, only tokens whose teacher
    agrees with the outcome, so that failures discourage. unbiased, std_eps: see advantages.group_advantage. reduction:
    of both terms, the action mean by definition. Raises ValueError: a value out of range, an unknown name, a gate with
    another kind.
    """

    beta: float = 0.1
    kappa: float = 0.1
    clip: float = 3.0
    level: Literal["action", "token"] = "action"
    bounded: bool = False
    normalise: bool = True
    kind: Literal["sampled_reverse_kl", "reverse_kl"] = "sampled_reverse_kl"
    gate: bool = False
    unbiased: bool = True
    std_eps: float = 1e-6
    surrogate: Surrogate = PPOClip(0.2, 0.2)
    reduction: str = "action_mean"

    def __post_init__(self) -> None:
        kinds = ("sampled_reverse_kl", "reverse_kl")
        check_settings(self, level=("action", "token"), kind=kinds)
        check_numbers(self, beta=(0, LARGEST), kappa=(0, LARGEST), clip=(SMALLEST, LARGEST))
        if self.gate and self.kind != "sampled_reverse_kl":
            raise ValueError(f"gate is True and kind is {self.kind!r}, want kind 'sampled_reverse_kl' with a gate")

    @property
    def needs(self) -> tuple[str, ...]:
        """The signals that these settings need."""
        return ("reward_B", "skill_gap_N", *(("teacher_gap_N",) if self.kind == "sampled_reverse_kl" else ()))


Config = ToolOPDConfig
needs = ToolOPDConfig().needs


def skill_credit(advantage: Tensor, skill_gap: Tensor, spans: Spans, config: ToolOPDConfig) -> Tensor:
    """How much each token's action is worth distilling: what the skill says of it, in the outcome's direction.

    c_t = [(1/L_t) * sum over j of e_j - kappa]_+,  e_j = z * clip(delta_j, -d, d),  z = sgn(A_i),
    then c_t / (mean of c over the trajectory's actions) (normalise). Irrelevant actions (|mean e| <= kappa) and
    conflicting ones (mean e < 0) get 0, and so does a trajectory without any credit. Options: tanh(c_t) (bounded), the
    same for each token, [e_j - kappa]_+, divided by the mean over actions of the mean over their tokens (level
    "token"). ToolOPD's abstract in words; the formula is this project's own. Actions without a token do not count.

    advantage [B] real; skill_gap [N] real, teacher log-prob of the realised token with the skill minus without it,
    looked at inside the spans only. Returns [N] >= 0 in the dtype of advantage, 0 outside the spans.
    """
    z_N = segment_expand(advantage.sign(), spans.trajectory_of_token)
    credit_N = torch.where(spans.mask, z_N * skill_gap.clamp(-config.clip, config.clip), 0).to(advantage.dtype)
    if config.level == "action":
        evidence_S = segment_mean(credit_N, spans.action_of_token, spans.num_actions)
        credit_N = segment_expand(evidence_S, spans.action_of_token)
    credit_N = (credit_N - config.kappa).clamp(min=0)
    if config.bounded:
        credit_N = credit_N.tanh()
    if not config.normalise:
        return credit_N
    credit_S = segment_mean(credit_N, spans.action_of_token, spans.num_actions)
    written_S = torch.where(spans.action_length > 0, spans.trajectory_of_action, -1)
    mean_B = segment_mean(credit_S, written_S, spans.num_trajectories)
    mean_N = segment_expand(mean_B, spans.trajectory_of_token)
    return torch.where(mean_N > 0, credit_N / torch.where(mean_N > 0, mean_N, 1), 0)


def assign(spans: Spans, signals: Signals, config: ToolOPDConfig = ToolOPDConfig(), *, total: Total = None) -> Credit:
    """Credit of every policy token: GRPO's, beside a distillation of the actions that the hindsight skill vouches for.

    loss = L_RL + beta * (1/sum_i T_i) * sum over i,t of (1/L_t) * sum over j of c_j * D_j,  c = skill_credit;
    distill_n = beta * token_weight_n * c_n, for the sampled reverse KL times (old - teacher log-prob)_n = -gap_n, so
    that D_n has the slope (old - teacher log-prob)_n * d logp_n; with gate 0 unless sgn(A_i) * gap_n > 0.
    ToolOPD's abstract; the definition is this project's own (see the module), the action mean that of FACTOR, arXiv
    2608.07118. Skill gaps of 0 or beta = 0 leave pure GRPO. total: the reduction's count over the whole batch, if this
    is a piece of it.
    Needs reward_B, skill_gap_N and (unless kind is "reverse_kl") teacher_gap_N, teacher with the skill minus student.
    Returns credit_N and distill_N [N] float32 (float64 for float64 rewards), 0 outside the spans.
    Raises ValueError: a signal missing, of the wrong length or not finite.
    """
    check_arguments(spans, signals, config, ToolOPDConfig)
    reward_B, skill_gap_N, *teacher_gap = signals.require(spans, *config.needs)
    advantage_B = group_advantage(reward_B, spans, unbiased=config.unbiased, eps=config.std_eps)
    credit_N = segment_expand(advantage_B, spans.trajectory_of_token)
    weight_N = REDUCTIONS[config.reduction](spans, total=total)
    distill_N = config.beta * weight_N * skill_credit(advantage_B, skill_gap_N, spans, config)
    if config.kind == "sampled_reverse_kl":
        gap_N = torch.where(spans.mask, teacher_gap[0], 0)
        agrees_N = direction_gate(credit_N, gap_N) if config.gate else spans.mask
        distill_N = torch.where(agrees_N, distill_N * -gap_N, 0).to(credit_N.dtype)
    return Credit(credit_N, weight_N, config.surrogate, distill_N, config.kind)
