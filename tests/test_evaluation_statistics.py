"""pass@k, bootstrap intervals and the sign test against enumeration, closed forms and coverage."""

from itertools import combinations, product
from math import sqrt

import numpy as np
import pytest
from crest_train import evaluation_statistics
from crest_train.evaluation_statistics import bootstrap_interval, pass_at_k, sign_test


@pytest.mark.parametrize("samples", [1, 2, 5, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_success(samples):
    for successes in range(samples + 1):
        outcomes = [1] * successes + [0] * (samples - successes)
        for k in range(1, samples + 1):
            subsets = list(combinations(outcomes, k))
            wanted = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(samples, successes, k) == pytest.approx(wanted, abs=1e-12)


def test_pass_at_k_is_unbiased():
    """Over all outcomes of 4 independent samples with chance p, its mean is 1 - (1 - p)^k."""
    p = 0.3
    for k in (1, 2, 3, 4):
        mean = sum(
            p ** sum(outcomes) * (1 - p) ** (4 - sum(outcomes)) * pass_at_k(4, sum(outcomes), k)
            for outcomes in product((0, 1), repeat=4)
        )
        assert mean == pytest.approx(1 - (1 - p) ** k)


@pytest.mark.parametrize(
    ("arguments", "words"), [((4, 1, 0), "k: found 0"), ((4, 1, 5), "k: found 5"), ((4, 5, 1), "s")]
)
def test_pass_at_k_refuses_what_is_no_count(arguments, words):
    with pytest.raises(ValueError, match=words):
        pass_at_k(*arguments)


def mean(sums):
    return sums[..., 0] / sums[..., 1]


def table(values):
    return np.stack([values, np.ones(len(values))], 1)


def test_interval_of_a_mean_is_that_of_the_normal_limit():
    values = np.arange(400) % 2
    low, high = bootstrap_interval([table(values)], mean)
    half = 1.96 * 0.5 / sqrt(400)
    assert low == pytest.approx(0.5 - half, abs=0.005) and high == pytest.approx(0.5 + half, abs=0.005)


def test_sessions_are_drawn_within_their_stratum():
    """Two strata without spread of their own leave none, however far apart; a mean over both weighs them equally."""
    low, high = bootstrap_interval([table(np.zeros(10)), table(np.ones(30))], mean)
    assert low == high == 0.5
    values = np.arange(400) % 2
    low, high = bootstrap_interval([table(values), table(np.zeros(5))], mean)
    half = 1.96 * 0.5 / sqrt(400) / 2
    assert (low, high) == pytest.approx((0.25 - half, 0.25 + half), abs=0.004)


def test_intervals_of_a_ratio_cover_it_about_95_times_in_100(monkeypatch):
    """Turn success of sessions with 1 to 4 turns that succeed together: sessions, not turns, are independent."""
    monkeypatch.setattr(evaluation_statistics, "DRAWS", 400)
    generator = np.random.default_rng(1)
    inside, trials = 0, 200
    for trial in range(trials):
        turns = generator.integers(1, 5, 60)
        done = turns * (generator.random(60) < 0.4)
        low, high = bootstrap_interval([np.stack([done, turns], 1)], mean, seed=trial)
        inside += low <= 0.4 <= high
    assert 0.89 <= inside / trials <= 0.98  # sd of the share: 0.015; with turns as the units: 0.68


@pytest.mark.parametrize("wins", range(5))
@pytest.mark.parametrize("losses", range(5))
def test_sign_test_counts_outcomes_at_least_as_uneven(wins, losses):
    n = wins + losses
    uneven = [abs(2 * sum(signs) - n) >= abs(wins - losses) for signs in product((0, 1), repeat=n)]
    assert sign_test(wins, losses) == pytest.approx(sum(uneven) / 2**n)
