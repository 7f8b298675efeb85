"""Sampling: tokens follow the probabilities that are left by the cuts, and both log-probs are told."""

import math

import pytest
import torch
from crest_train.sampling import Sampling, draw


def drawn(probabilities, count=20_000, temperature=1.0, **cuts):
    """So many tokens of one distribution, as (how often each one, what `draw` said)."""
    logits = torch.tensor(probabilities).log() * temperature
    uniform = torch.rand(count, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = draw(logits.expand(count, -1), uniform, temperature, Sampling(**cuts).cuts)
    return torch.bincount(torch.tensor(found.token), minlength=len(probabilities)), found


def same_as(counts, wanted):
    """Whether the counts fit the distribution: 5 standard deviations of a binomial count, never outside the support."""
    wanted, total = torch.tensor(wanted), int(counts.sum())
    return bool(((counts - total * wanted).abs() <= 5 * (total * wanted * (1 - wanted)).sqrt()).all())


def test_sampling_follows_the_probabilities_and_never_leaves_the_support():
    p = [0.0, 0.3, 0.5, 0.0, 0.2, 0.0]
    counts, found = drawn(p, temperature=2.0)
    assert same_as(counts, p)
    assert found.logp[:50] == pytest.approx([math.log(p[token]) for token in found.token[:50]], abs=1e-6)
    assert found.entropy[:50] == pytest.approx([-sum(x * math.log(x) for x in p if x)] * 50, abs=1e-6)
    assert found.sampler_logp == found.logp


@pytest.mark.parametrize(
    ("cuts", "left"),
    [
        ({"top_p": 0.7}, [0.4, 0.3, 0, 0, 0]),  # 0.4 is less than 0.7 - and 0.4 + 0.3 reaches it
        ({"top_p": 0.71}, [0.4, 0.3, 0.15, 0, 0]),
        ({"top_p": 0.01}, [0.4, 0, 0, 0, 0]),
        ({"top_k": 3}, [0.4, 0.3, 0.15, 0, 0]),
        ({"top_k": 50}, [0.4, 0.3, 0.15, 0.1, 0.05]),
        ({"min_p": 0.3}, [0.4, 0.3, 0.15, 0, 0]),  # of the largest: 0.12
        ({"min_p": 0.3, "top_p": 0.5}, [0.4, 0.3, 0, 0, 0]),  # 0.4 / 0.85 is less than a half
    ],
)
def test_cuts_are_sampled_from_renormalised_and_the_whole_log_prob_is_kept(cuts, left):
    p = [0.4, 0.3, 0.15, 0.1, 0.05]
    counts, found = drawn(p, **cuts)
    kept = sum(left)
    assert same_as(counts, [x / kept for x in left])
    for token, logp, sampler_logp in zip(found.token[:50], found.logp, found.sampler_logp, strict=False):
        assert logp == pytest.approx(math.log(p[token]), abs=1e-6)
        assert sampler_logp == pytest.approx(math.log(left[token] / kept), abs=1e-6)
    assert found.entropy[0] == pytest.approx(-sum(x * math.log(x) for x in p), abs=1e-6)
