"""CISPO: GRPO's credit under a clipped importance weight, so that no token loses its gradient.

arXiv 2506.13585, MiniMax-M1. Shape letters: N token positions.
"""

from dataclasses import dataclass

from ..reductions import Total
from ..signals import Credit, Signals
from ..spans import Spans
from ..surrogates import CISPO, Surrogate
from . import grpo
from .grpo import GRPOConfig
from .settings import check_arguments

needs = grpo.needs


@dataclass(frozen=True)
class CISPOConfig(GRPOConfig):
    """CISPO's settings: GRPOConfig's, with surrogates.CISPO and the token mean (arXiv 2506.13585, section 3.1).

    The paper leaves the lower side unbounded and gives no number for the upper one: 1.28 is this project's choice.
    Raises ValueError: as GRPOConfig.
    """

    surrogate: Surrogate = CISPO(0.28)
    reduction: str = "token_mean"


Config = CISPOConfig


def assign(spans: Spans, signals: Signals, config: CISPOConfig = CISPOConfig(), *, total: Total = None) -> Credit:
    """Credit of every policy token: credit_n = A_i of its trajectory i, as in GRPO; the surrogate makes the difference.

    CISPO, arXiv 2506.13585, eqs. 4-5. total: the reduction's count over the whole batch, if this is a piece of it.
    Needs reward_B. Returns Credit; credit_N [N] float32 (float64 for float64 rewards), 0 outside the spans.
    Raises ValueError: reward_B missing, of the wrong length or not finite.
    """
    check_arguments(spans, signals, config, CISPOConfig)
    return grpo.assign(spans, signals, config, total=total)
