"""The probe's statistics against gradients of known mean and covariance; the sketch keeps inner products."""

import math

import pytest
import torch
from crest_train.probe_statistics import (
    alignment,
    cosines_to_rest,
    gradient_sizes,
    inner_products,
    jackknife_error,
    leave_one_out,
    mean_and_error,
    product_of_means,
    signal_to_noise,
    top_shares,
    total_variance,
)
from crest_train.projection import count_sketch

MEAN = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0], dtype=torch.float64)
SCALE = torch.tensor([2.0, 0.5, 1.0, 3.0, 0.1], dtype=torch.float64)
OTHER_MEAN = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0], dtype=torch.float64)


def draws(repeats, n):
    """Method and reference gradients [repeats, n, 5] whose noise is shared inside a batch."""
    generator = torch.Generator().manual_seed(7)
    noise = torch.randn(repeats, n, 5, generator=generator, dtype=torch.float64)
    own = torch.randn(repeats, n, 5, generator=generator, dtype=torch.float64)
    return MEAN + SCALE * noise, OTHER_MEAN + 2 * noise + own


def within(estimates, wanted, errors=4):
    values = torch.tensor(estimates, dtype=torch.float64)
    error = values.std() / math.sqrt(len(values))
    assert abs(values.mean() - wanted) < errors * error, (values.mean(), error, wanted)
    return error


def test_squared_mean_variance_and_cross_product_are_unbiased():
    """|mean|^2 = 14.25, tr Var = 4 + .25 + 1 + 9 + .01 = 14.26, <mean, other mean> = 1 - 2 + 3 = 2: with 3 batches."""
    x, y = draws(4000, 3)
    own = [inner_products(one, one) for one in x]
    assert within([product_of_means(p) for p in own], 14.25) < 0.3
    assert within([total_variance(p) for p in own], 14.26) < 0.3
    cross = [inner_products(one, other) for one, other in zip(x, y, strict=True)]
    assert within([product_of_means(p) for p in cross], 2.0) < 0.2
    # the products of a batch with itself hold the shared noise: tr Cov = 2 * 6.6 more
    biased = sum(float(p.mean()) for p in cross) / len(cross)
    assert abs(biased - (2.0 + 13.2 / 3)) < 0.5


def test_signal_to_noise_alignment_and_their_errors_with_many_batches():
    x, y = draws(60, 400)
    own, cross, other = (
        [inner_products(*pair) for pair in zip(*both, strict=True)] for both in ((x, x), (x, y), (y, y))
    )
    found = torch.tensor([signal_to_noise(p) for p in own])
    assert abs(found.mean() - 14.25 / 14.26) < 0.03
    wanted = 2 / math.sqrt(14.25 * 4)
    aligned = torch.tensor([alignment(*p) for p in zip(own, cross, other, strict=True)])
    assert abs(aligned.mean() - wanted) < 0.03
    told = [jackknife_error(leave_one_out(signal_to_noise, p)) for p in own[:8]]
    assert abs(sum(told) / len(told) / found.std() - 1) < 0.35


def test_small_case_by_hand():
    """x = (1, 0), (0, 1), (1, 1): pairs 0, 1, 1, mean 2/3; squares 1, 1, 2, mean 4/3; tr Var = 2/3, ratio 1."""
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    p = inner_products(x, x)
    assert product_of_means(p) == pytest.approx(2 / 3)
    assert total_variance(p) == pytest.approx(2 / 3) == pytest.approx(float(x.var(0).sum()))
    assert signal_to_noise(p) == pytest.approx(1)
    assert alignment(p, p, p) == pytest.approx(1)
    # rests (1, 2), (2, 1), (1, 1): cosines 1/sqrt 5, 1/sqrt 5, 1
    assert cosines_to_rest(p, p, p).tolist() == pytest.approx([5**-0.5, 5**-0.5, 1])
    assert leave_one_out(product_of_means, p).tolist() == [1, 1, 0]
    # t = 1, 1, 0: mean 2/3, squares 1/9 + 1/9 + 4/9 = 2/3, times 2/3
    assert jackknife_error(torch.tensor([1.0, 1.0, 0.0])) == pytest.approx(2 / 3)


def test_cosines_are_those_of_the_vectors():
    x, y = (part[0] for part in draws(1, 6))
    found = cosines_to_rest(inner_products(x, x), inner_products(x, y), inner_products(y, y))
    for i in range(6):
        rest = torch.cat([y[:i], y[i + 1 :]]).mean(0)
        assert found[i] == pytest.approx(float(torch.cosine_similarity(x[i], rest, dim=0)))


def test_gradients_of_zero_have_cosine_zero_and_no_ratio():
    zero, y = torch.zeros(3, 5), draws(1, 3)[1][0]
    p = inner_products(zero, zero)
    assert cosines_to_rest(p, inner_products(zero, y), inner_products(y, y)).tolist() == [0, 0, 0]
    assert math.isnan(signal_to_noise(p)) and math.isnan(alignment(p, inner_products(zero, y), inner_products(y, y)))


def test_mean_and_error():
    """1, 2, 6 and a NaN: mean 3, variance (4 + 1 + 9) / 2 = 7, error sqrt(7 / 3)."""
    mean, error = mean_and_error(torch.tensor([1.0, math.nan, 2.0, 6.0]))
    assert (mean, error) == (3, pytest.approx(math.sqrt(7 / 3)))
    assert mean_and_error(torch.tensor([2.0]))[0] == 2 and math.isnan(mean_and_error(torch.tensor([2.0]))[1])
    assert all(map(math.isnan, mean_and_error(torch.tensor([math.nan]))))


def test_gradient_sizes_are_those_of_autograd():
    logits = torch.randn(20, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    target, coefficient = torch.arange(20) % 7, torch.linspace(-1, 1, 20, dtype=torch.float64)
    logp = logits.log_softmax(-1)
    (logp.gather(1, target[:, None])[:, 0] * coefficient).sum().backward()
    logp = logp.detach()
    found = gradient_sizes(coefficient, logp.gather(1, target[:, None])[:, 0], logp.exp().square().sum(1))
    assert torch.allclose(found, logits.grad.norm(dim=1))


def test_top_shares_round_the_number_of_tokens_up():
    """Of 20 tokens 1 % is one, 5 % one, 10 % two: of 1..20, sum 210, they hold 20, 20 and 39."""
    sizes = torch.arange(1.0, 21)[torch.randperm(20, generator=torch.Generator().manual_seed(1))]
    assert top_shares(sizes) == pytest.approx([20 / 210, 20 / 210, 39 / 210])
    assert all(map(math.isnan, top_shares(torch.zeros(5))))


def test_sketch_keeps_inner_products_on_average_with_the_variance_that_is_told():
    generator = torch.Generator().manual_seed(3)
    x, y = ([torch.randn(40, 5, generator=generator), torch.randn(100, generator=generator)] for _ in range(2))
    y = [a + b for a, b in zip(x, y, strict=True)]
    flat_x, flat_y = (torch.cat([part.flatten() for part in one]) for one in (x, y))
    wanted = float(flat_x @ flat_y)
    width, seeds = 64, 2000
    found = torch.tensor([float(count_sketch(x, width, seed=s) @ count_sketch(y, width, seed=s)) for s in range(seeds)])
    variance = flat_x @ flat_x * (flat_y @ flat_y) + wanted**2 - 2 * (flat_x**2 * flat_y**2).sum()
    error = math.sqrt(variance / width / seeds)
    assert abs(found.mean() - wanted) < 4 * error
    assert abs(found.var() / (variance / width) - 1) < 0.2


def test_sketch_is_linear_repeatable_and_of_its_seed():
    x = [torch.randn(30, generator=torch.Generator().manual_seed(4)) for _ in range(2)]
    sketch = count_sketch(x, 16, seed=5)
    assert sketch.shape == (16,) and torch.equal(sketch, count_sketch([t.clone() for t in x], 16, seed=5))
    assert not torch.equal(sketch, count_sketch(x, 16, seed=6))
    assert not torch.equal(count_sketch(x[:1], 16, seed=5), count_sketch([torch.zeros(30), x[0]], 16, seed=5))
    doubled = count_sketch([2 * t for t in x], 16, seed=5)
    assert torch.equal(doubled, 2 * sketch)
    with pytest.raises(ValueError, match="width is 0, want 1 or more"):
        count_sketch(x, 0, seed=5)


def test_sketch_of_more_than_one_chunk_spreads_evenly():
    sketch = count_sketch([torch.ones((1 << 20) + 5000)], 64, seed=0)
    # each bucket is a sum of 16,500 signs: sd 128
    assert sketch.abs().max() < 5 * 128 and 64 < sketch.std() < 256
    assert count_sketch([], 4, seed=0).tolist() == [0, 0, 0, 0]
