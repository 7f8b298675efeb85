"""Dr.GRPO: GRPO without the two biases, the division by the group's spread and the one by the response's length.

arXiv 2503.20783, Understanding R1-Zero-Like Training: A Critical Perspective. Shape letters: N token positions,
B trajectories.
"""

from dataclasses import dataclass
from typing import Literal

from ..advantages import group_advantage
from ..reductions import REDUCTIONS, Total, fixed_length
from ..segments import segment_expand
from ..signals import Credit, Signals
from ..spans import Spans
from ..surrogates import PPOClip, Surrogate
from .settings import LARGEST, SMALLEST, check_arguments, check_numbers, check_settings

needs = ("reward_B",)


@dataclass(frozen=True)
class DrGRPOConfig:
    """Dr.GRPO's settings; defaults of arXiv 2503.20783 (clip .2, constant length).

    length: the constant that stands for the response's length, say the most tokens that a rollout may write. It must
    stay the same through training; its default is this project's choice. singleton: see advantages.group_advantage.
    reduction: "fixed_length" (the paper's) or a name of reductions.REDUCTIONS, which have no use for length.
    Raises ValueError: length <= 0 or infinite, an unknown name.
    """

    length: float = 1024
    singleton: Literal["zero", "reward"] = "zero"
    surrogate: Surrogate = PPOClip(0.2, 0.2)
    reduction: str = "fixed_length"

    def __post_init__(self) -> None:
        check_settings(self, singleton=("zero", "reward"), reduction=("fixed_length", *REDUCTIONS))
        check_numbers(self, length=(SMALLEST, LARGEST))


Config = DrGRPOConfig


def assign(spans: Spans, signals: Signals, config: DrGRPOConfig = DrGRPOConfig(), *, total: Total = None) -> Credit:
    """Credit of every policy token: credit_n = A_i of its trajectory i, A_i = R_i - mean_g R; weight 1 / (B * length).

    Dr.GRPO, arXiv 2503.20783, section 3.2. total: the trajectories of the whole batch, if this is a piece of it (with
    another reduction: its count). Needs reward_B. Returns Credit; credit_N [N] float32 (float64 for float64 rewards),
    0 outside the spans.
    Raises ValueError: reward_B missing, of the wrong length or not finite.
    """
    check_arguments(spans, signals, config, DrGRPOConfig)
    (reward_B,) = signals.require(spans, *needs)
    advantage_B = group_advantage(reward_B, spans, scale="none", singleton=config.singleton)
    if config.reduction == "fixed_length":
        weight_N = fixed_length(spans, config.length, total=total)
    else:
        weight_N = REDUCTIONS[config.reduction](spans, total=total)
    return Credit(segment_expand(advantage_B, spans.trajectory_of_token), weight_N, config.surrogate)
