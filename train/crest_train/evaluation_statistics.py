"""What an evaluation's sessions say of all sessions: pass@k, bootstrap intervals, the sign test.

A session is what is drawn; its samples, turns and requests are not independent of each other. So every interval and
test here has whole sessions as its units.

Shape letters: S sessions, C columns, W bootstrap draws.
"""

import math
from collections.abc import Callable

import numpy as np

DRAWS = 4000
"""Bootstrap draws of an interval."""


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """Chance that at least one of k samples, drawn from those at hand without replacement, is a success.

    pass@k = 1 - C(n - c, k) / C(n, k), the unbiased estimator of Chen et al. (arXiv 2107.03374, Eq. 1).
    Raises ValueError: k is not in 1..samples, or successes not in 0..samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k: found {k}, wanted 1 to {samples}, the number of samples")
    if not 0 <= successes <= samples:
        raise ValueError(f"successes: found {successes}, wanted 0 to {samples}, the number of samples")
    return 1 - math.comb(samples - successes, k) / math.comb(samples, k)


def bootstrap_interval(
    tables: list[np.ndarray], statistic: Callable[[np.ndarray], np.ndarray], seed: int = 0
) -> tuple[float, float]:
    """95 % percentile interval of a mean over strata, sessions drawn anew with replacement within each stratum.

    tables: per stratum what is known of its sessions, [S,C] float. statistic: sums over sessions [W,C] -> values [W], a
    ratio of sums, say. The bounds are the 2.5 % and 97.5 % quantiles of the DRAWS means of the strata's values.
    """
    generator = np.random.default_rng(seed)
    values_W = np.zeros(DRAWS)
    for table_SC in tables:
        # How often a draw holds each session: S draws with equal chances.
        counts_WS = generator.multinomial(len(table_SC), np.full(len(table_SC), 1 / len(table_SC)), size=DRAWS)
        values_W += statistic(counts_WS @ table_SC) / len(tables)
    low, high = np.quantile(values_W, (0.025, 0.975))
    return float(low), float(high)


def sign_test(wins: int, losses: int) -> float:
    """Two-sided exact p of wins against losses, were both equally likely: 2 P(Binomial(n, 1/2) <= min), at most 1.

    Ties are left out (Dixon and Mood, 1946); 1 where there is neither a win nor a loss.
    """
    n = wins + losses
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(min(wins, losses) + 1)) / 2**n)
