"""Turn-segmented GRPO: every token of a turn carries that turn's own advantage; the first level of CrEST alone.

Shape letters: N token positions, K turns.
"""

from dataclasses import dataclass

from ..advantages import turn_advantage
from ..reductions import REDUCTIONS, Total
from ..segments import segment_expand
from ..signals import Credit, Signals
from ..spans import Spans
from ..surrogates import PPOClip, Surrogate
from .settings import check_arguments, check_settings

needs = ("turn_reward_K",)


@dataclass(frozen=True)
class TurnGRPOConfig:
    """Settings of turn-segmented GRPO; defaults from CrEST, arXiv 2608.13179 (clip .2/.28).

    unbiased, std_eps: see advantages.turn_advantage. reduction: a name of reductions.REDUCTIONS (token mean is this
    project's choice). Raises ValueError: std_eps < 0 or an unknown name.
    """

    unbiased: bool = True
    std_eps: float = 1e-6
    surrogate: Surrogate = PPOClip(0.2, 0.28)
    reduction: str = "token_mean"

    def __post_init__(self) -> None:
        check_settings(self)


Config = TurnGRPOConfig


def assign(spans: Spans, signals: Signals, config: TurnGRPOConfig = TurnGRPOConfig(), *, total: Total = None) -> Credit:
    """Credit of every policy token: credit_n = A_k of its turn k, A_k as in advantages.turn_advantage.

    CrEST, arXiv 2608.13179, first level. total: the reduction's count over the whole batch, if this is a piece of it.
    Needs turn_reward_K. Returns Credit; credit_N [N] float32 (float64 for float64 rewards), 0 outside the spans.
    Raises ValueError: turn_reward_K missing, of the wrong length or not finite.
    """
    check_arguments(spans, signals, config, TurnGRPOConfig)
    (turn_reward_K,) = signals.require(spans, *needs)
    advantage_K = turn_advantage(turn_reward_K, spans, unbiased=config.unbiased, eps=config.std_eps)
    credit_N = segment_expand(advantage_K, spans.turn_of_token)
    return Credit(credit_N, REDUCTIONS[config.reduction](spans, total=total), config.surrogate)
