"""CrEST: the verifier gives each turn its direction and size, a privileged teacher only enlarges it, token by token.

arXiv 2608.13179, Teach the Magnitude, Not the Direction: Verifier-Bounded Credit Assignment for Multi-Turn
Multi-step LLM Agents. Shape letters: N token positions, K turns.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..advantages import turn_advantage
from ..allocation import Scope, crest_modulation, entropy_gate
from ..reductions import REDUCTIONS, Total
from ..segments import segment_expand
from ..signals import MultiplicativeCredit, Signals
from ..spans import Spans
from ..surrogates import PPOClip, Surrogate
from .settings import LARGEST, SMALLEST, check_arguments, check_numbers, check_settings


@dataclass(frozen=True)
class CrestConfig:
    """CrEST's settings; defaults from arXiv 2608.13179.

    lam: largest share of the teacher's weight that is applied. eps: clip of that weight around 1. tau: temperature of
    the gap. rho: how far the uncertainty gate moves lam. gate: where the uncertainty comes from, "surprisal" (the
    paper's formula; signal surprisal_N) or "entropy" (its abstract's word; signal entropy_N).
    This project's choices: scope of the gate's statistics, sample std over the rollouts, std_eps (of both), token mean.
    Raises ValueError: a value out of range or an unknown name.
    """

    lam: float = 0.3
    eps: float = 0.28
    tau: float = 2.0
    rho: float = 0.5
    gate: Literal["surprisal", "entropy"] = "surprisal"
    scope: Scope = "trajectory"
    unbiased: bool = True
    std_eps: float = 1e-6
    surrogate: Surrogate = PPOClip(0.2, 0.28)
    reduction: str = "token_mean"

    def __post_init__(self) -> None:
        check_settings(self, gate=("surprisal", "entropy"), scope=("batch", "trajectory", "turn"))
        check_numbers(self, lam=(0, LARGEST), eps=(0, 1), rho=(0, 1), tau=(SMALLEST, math.inf))

    @property
    def needs(self) -> tuple[str, ...]:
        """The signals that these settings need."""
        return ("turn_reward_K", "teacher_gap_N", f"{self.gate}_N")


Config = CrestConfig
needs = CrestConfig().needs


def crest_credit(
    turn_advantage: Tensor,
    teacher_gap: Tensor,
    uncertainty: Tensor,
    spans: Spans,
    config: CrestConfig,
    *,
    mask: Tensor | None = None,
) -> Tensor:
    """Signed credit of every token: the definition of CrEST's segment pass.

    credit_n = A_k phi_n with k the turn of token n,  phi_n = crest_modulation(sgn(A_k), gap_n, entropy_gate(u)_n).
    CrEST, arXiv 2608.13179, Eqs. 1-10. sgn credit_n = sgn A_k, |A_k| <= |credit_n| <= (1 + lam * eps) |A_k|; with
    lam = 0 or a gap of 0 it is A_k bitwise.

    turn_advantage [K]; teacher_gap [N], teacher minus student log-prob of the realised token; uncertainty [N],
    surprisal or entropy: real, the last two looked at inside the spans only. mask [N] bool: True = trained on; further
    positions to leave out. Returns [N], detached, in the dtype of turn_advantage, 0 outside the spans and the mask.
    Raises ValueError: wrong shapes.
    """
    wanted = {"turn_advantage": spans.num_turns, "teacher_gap": spans.num_tokens, "uncertainty": spans.num_tokens}
    for (name, length), found in zip(wanted.items(), (turn_advantage, teacher_gap, uncertainty), strict=True):
        if [*found.shape] != [length]:
            raise ValueError(f"{name} has shape {[*found.shape]}, want [{length}] to match the spans")
    inside_N = spans.mask if mask is None else spans.mask & mask
    advantage_N = torch.where(inside_N, segment_expand(turn_advantage.detach(), spans.turn_of_token), 0)
    gate_N = entropy_gate(uncertainty.detach(), spans, scope=config.scope, eps=config.std_eps, mask=mask)
    phi_N = crest_modulation(
        advantage_N.sign(),
        teacher_gap.detach(),
        gate_N,
        lam=config.lam,
        eps=config.eps,
        tau=config.tau,
        rho=config.rho,
    )
    return (advantage_N * phi_N).to(advantage_N.dtype)


def assign(
    spans: Spans, signals: Signals, config: CrestConfig = CrestConfig(), *, total: Total = None
) -> MultiplicativeCredit:
    """Credit of every policy token: the advantage of its turn, enlarged where the teacher agrees (crest_credit).

    CrEST, arXiv 2608.13179. The teacher is the policy itself, conditioned on the ground-truth tool calls. Gap and
    surprisal are meant to come from the behaviour policy's log-probs (this project's choice: the credit then stays the
    same through the epochs of a batch; on policy it is the paper's). total: the reduction's count over the whole batch,
    if this is a piece of it.
    Needs turn_reward_K, teacher_gap_N and surprisal_N (entropy_N instead with gate "entropy"). Returns credit_N
    [N] float32 (float64 for float64 rewards), 0 outside the spans.
    Raises ValueError: a signal missing, of the wrong length or not finite.
    """
    check_arguments(spans, signals, config, CrestConfig)
    turn_reward_K, gap_N, uncertainty_N = signals.require(spans, *config.needs)
    advantage_K = turn_advantage(turn_reward_K, spans, unbiased=config.unbiased, eps=config.std_eps)
    credit_N = crest_credit(advantage_K, gap_N, uncertainty_N, spans, config)
    return MultiplicativeCredit(
        credit_N,
        REDUCTIONS[config.reduction](spans, total=total),
        config.surrogate,
        advantage_N=segment_expand(advantage_K, spans.turn_of_token),
    )
