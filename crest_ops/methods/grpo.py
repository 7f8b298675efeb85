"""GRPO: every token of a trajectory carries the trajectory's group-relative advantage. arXiv 2402.03300.

Shape letters: N token positions, B trajectories.
"""

from dataclasses import dataclass
from typing import Literal

from ..advantages import group_advantage
from ..reductions import REDUCTIONS, Total
from ..segments import segment_expand
from ..signals import Credit, Signals
from ..spans import Spans
from ..surrogates import PPOClip, Surrogate
from .settings import check_arguments, check_settings

needs = ("reward_B",)


@dataclass(frozen=True)
class GRPOConfig:
    """GRPO's settings; defaults of arXiv 2402.03300 (clip .2, sequence mean of token means), verl (sample std, eps).

    scale, unbiased, std_eps, singleton: see advantages.group_advantage. reduction: a name of reductions.REDUCTIONS.
    Raises ValueError: std_eps < 0 or an unknown name.
    """

    scale: Literal["std", "none"] = "std"
    unbiased: bool = True
    std_eps: float = 1e-6
    singleton: Literal["zero", "reward"] = "zero"
    surrogate: Surrogate = PPOClip(0.2, 0.2)
    reduction: str = "sequence_mean"

    def __post_init__(self) -> None:
        check_settings(self, scale=("std", "none"), singleton=("zero", "reward"))


Config = GRPOConfig


def assign(spans: Spans, signals: Signals, config: GRPOConfig = GRPOConfig(), *, total: Total = None) -> Credit:
    """Credit of every policy token: credit_n = A_i of its trajectory i, A_i = (R_i - mean_g R) / (std_g R + eps).

    GRPO, arXiv 2402.03300, section 4.1.2. total: the reduction's count over the whole batch, if this is a piece of it.
    Needs reward_B. Returns Credit; credit_N [N] float32 (float64 for float64 rewards), 0 outside the spans.
    Raises ValueError: reward_B missing, of the wrong length or not finite.
    """
    check_arguments(spans, signals, config, GRPOConfig)
    (reward_B,) = signals.require(spans, *needs)
    advantage_B = group_advantage(
        reward_B,
        spans,
        scale=config.scale,
        unbiased=config.unbiased,
        eps=config.std_eps,
        singleton=config.singleton,
    )
    credit_N = segment_expand(advantage_B, spans.trajectory_of_token)
    return Credit(credit_N, REDUCTIONS[config.reduction](spans, total=total), config.surrogate)
