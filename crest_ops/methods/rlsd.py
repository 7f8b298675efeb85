"""RLSD: the verifier gives the direction, a privileged teacher's agreement sizes every token. arXiv 2604.03128.

Multiplicative: the teacher never turns the verifier's sign. Shape letters: N token positions, B trajectories.
"""

import math
from dataclasses import dataclass, replace

from torch import Tensor

from ..advantages import group_advantage
from ..allocation import agreement_weight
from ..reductions import REDUCTIONS, Total
from ..segments import segment_expand
from ..signals import MultiplicativeCredit, Signals
from ..spans import Spans
from ..surrogates import PPOClip, Surrogate
from .settings import SMALLEST, check_arguments, check_number, check_numbers, check_settings, decayed

needs = ("reward_B", "teacher_gap_N")


@dataclass(frozen=True)
class RLSDConfig:
    """RLSD's settings; defaults of arXiv 2604.03128 as its authors' code has them.

    lam: share of the teacher's weight, 0.5 at the first step. steps: training steps over which `at` brings it to 0.
    eps_w: clip of the weight around 1. unbiased, std_eps: see advantages.group_advantage (verl's). surrogate,
    reduction: PPO's clip and the token mean of verl. Raises ValueError: a value out of range or an unknown name.
    """

    lam: float = 0.5
    steps: int = 50
    eps_w: float = 0.2
    unbiased: bool = True
    std_eps: float = 1e-6
    surrogate: Surrogate = PPOClip(0.2, 0.2)
    reduction: str = "token_mean"

    def __post_init__(self) -> None:
        check_settings(self)
        check_numbers(self, lam=(0, 1), eps_w=(0, 1), steps=(SMALLEST, math.inf))

    def at(self, step: int) -> "RLSDConfig":
        """The settings of training step k = `step`: lam_k = lam * max(0, 1 - k / steps).

        Raises ValueError: step < 0.
        """
        return replace(self, lam=decayed(self.lam, step, self.steps))


Config = RLSDConfig


def reweighted(advantage: Tensor, gap: Tensor, lam: float, eps: float) -> Tensor:
    """Credit of a token whose teacher agrees with the verified direction more or less than the student.

    A' = A * ((1 - lam) + lam * w) = A * (1 + lam * (w - 1)),  w = clip(exp(sgn(A) * gap), 1 - eps, 1 + eps).
    RLSD, arXiv 2604.03128; SERL, arXiv 2605.19447. Computed in the second form, so that a gap of 0 and lam = 0 give A
    bitwise; A'/A lies in [1 - lam * eps, 1 + lam * eps].

    advantage, gap: tensors of one shape; gap = teacher minus student log-prob of the realised token, not looked at
    where A = 0. Returns that shape, in the dtype of advantage. Raises ValueError: lam or eps outside [0, 1], two
    shapes.
    """
    check_number("lam", lam, 0, 1)
    weight = agreement_weight(advantage.sign(), gap, 1.0, eps)
    return (advantage * (1 + lam * (weight - 1))).to(advantage.dtype)


def assign(
    spans: Spans, signals: Signals, config: RLSDConfig = RLSDConfig(), *, total: Total = None
) -> MultiplicativeCredit:
    """Credit of every policy token: GRPO's advantage of its trajectory, sized by the teacher's agreement.

    credit_n = A_i * ((1 - lam) + lam * w_n),  w_n = clip(exp(sgn(A_i) * gap_n), 1 - eps_w, 1 + eps_w).
    RLSD, arXiv 2604.03128. The gap is meant to come from the behaviour policy's log-probs (this project's choice: the
    credit stays the same through the epochs of a batch; the authors' code takes the live student, on policy the same).
    lam = 0 or a gap of 0 is GRPO bitwise. total: the reduction's count over the whole batch, if this is a piece of it.
    Needs reward_B and teacher_gap_N. Returns credit_N [N] float32 (float64 for float64 rewards), 0 outside the spans.
    Raises ValueError: a signal missing, of the wrong length or not finite.
    """
    check_arguments(spans, signals, config, RLSDConfig)
    reward_B, gap_N = signals.require(spans, *needs)
    advantage_B = group_advantage(reward_B, spans, unbiased=config.unbiased, eps=config.std_eps)
    advantage_N = segment_expand(advantage_B, spans.trajectory_of_token)
    return MultiplicativeCredit(
        reweighted(advantage_N, gap_N, config.lam, config.eps_w),
        REDUCTIONS[config.reduction](spans, total=total),
        config.surrogate,
        advantage_N=advantage_N,
    )
