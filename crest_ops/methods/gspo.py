"""GSPO: GRPO's credit under one importance ratio for the whole trajectory.

arXiv 2507.18071, Group Sequence Policy Optimization. Shape letters: N token positions.
"""

from dataclasses import dataclass

from ..reductions import Total
from ..signals import Credit, Signals
from ..spans import Spans
from ..surrogates import GSPO, Surrogate
from . import grpo
from .grpo import GRPOConfig
from .settings import check_arguments

needs = grpo.needs


@dataclass(frozen=True)
class GSPOConfig(GRPOConfig):
    """GSPO's settings: GRPOConfig's, with the ratio of surrogates.GSPO (bounds 3e-4 and 4e-4, arXiv 2507.18071, 5.1).

    Raises ValueError: as GRPOConfig.
    """

    surrogate: Surrogate = GSPO()


Config = GSPOConfig


def assign(spans: Spans, signals: Signals, config: GSPOConfig = GSPOConfig(), *, total: Total = None) -> Credit:
    """Credit of every policy token: credit_n = A_i of its trajectory i, as in GRPO; the surrogate makes the difference.

    GSPO, arXiv 2507.18071, eqs. 5-7. The ratio is the trajectory's, over all its actions (the paper has one response).
    total: the reduction's count over the whole batch, if this is a piece of it.
    Needs reward_B. Returns Credit; credit_N [N] float32 (float64 for float64 rewards), 0 outside the spans.
    Raises ValueError: reward_B missing, of the wrong length or not finite.
    """
    check_arguments(spans, signals, config, GSPOConfig)
    return grpo.assign(spans, signals, config, total=total)
