"""What independent batches say of a gradient estimator: signal to noise, direction, bias, concentration.

Everything follows from inner products of one-batch gradients x_i (of a method) and y_i (of the reference), i = 1..n:
the product of two different batches is, in expectation, the product of their expected gradients, <E x, E y>; that of a
batch with itself holds the noise too. So means over pairs of different batches (U-statistics) are unbiased.

Shape letters: n batches, D entries of a gradient or its sketch, R tokens that the policy wrote.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

TOP_SHARES = (0.01, 0.05, 0.10)
"""Parts of the tokens whose share of the gradient is told."""


def inner_products(x_nD: Tensor, y_nD: Tensor) -> Tensor:
    """All products <x_i, y_j>, [n, n] float64. x_nD, y_nD [n, D] real."""
    return x_nD.double() @ y_nD.double().T


def product_of_means(products: Tensor) -> float:
    """Unbiased estimate of <E x, E y>: (1 / (n (n-1))) * sum over i != j of <x_i, y_j>. products [n, n]."""
    n = len(products)
    return float(products.sum() - products.trace()) / (n * (n - 1))


def total_variance(products: Tensor) -> float:
    """Unbiased estimate of tr Var(x) = E |x|^2 - |E x|^2. products [n, n]: those of x with itself."""
    return float(products.trace()) / len(products) - product_of_means(products)


def signal_to_noise(products: Tensor) -> float:
    """|E x|^2 / tr Var(x) of the one-batch gradient, both parts unbiased; negative by noise where there is no signal.

    The gradient of n such batches together has n times it. products [n, n]: those of x with itself. NaN where every
    batch has the same gradient.
    """
    variance = total_variance(products)
    return product_of_means(products) / variance if variance > 0 else math.nan


def cosines_to_rest(x_x: Tensor, x_y: Tensor, y_y: Tensor) -> Tensor:
    """Cosine of every x_i with the mean of the y_j of all other batches, [n].

    cos_i = <x_i, Y_i> / (|x_i| |Y_i|), Y_i = sum over j != i of y_j. No batch is compared with itself. A gradient of
    exactly 0 points nowhere: 0. x_x, x_y, y_y [n, n]: the inner products.
    """
    along_n = x_y.sum(1) - x_y.diagonal()
    # |Y_i|^2 from all pairs without i
    rest_n = y_y.sum() - y_y.sum(0) - y_y.sum(1) + y_y.diagonal()
    size_n = (x_x.diagonal() * rest_n.clamp(min=0)).sqrt()
    return torch.where(size_n > 0, along_n / size_n.where(size_n > 0, torch.ones_like(size_n)), 0)


def alignment(x_x: Tensor, x_y: Tensor, y_y: Tensor) -> float:
    """Cosine of the expected gradients: <E x, E y> / sqrt(|E x|^2 |E y|^2), each product from different batches only.

    1 says that x is unbiased up to its length. A ratio of noisy estimates: it can exceed 1, and is NaN where |E x|^2 or
    |E y|^2 is not estimated to be positive. x_x, x_y, y_y [n, n]: the inner products.
    """
    squares = product_of_means(x_x), product_of_means(y_y)
    return product_of_means(x_y) / math.sqrt(squares[0] * squares[1]) if min(squares) > 0 else math.nan


def leave_one_out(statistic: Callable[..., float], *products: Tensor) -> Tensor:
    """The statistic [n] of the inner products without batch i, for every i. products: each [n, n]."""
    n = len(products[0])
    kept = [[j for j in range(n) if j != i] for i in range(n)]
    return torch.tensor([statistic(*(p[rest][:, rest] for p in products)) for rest in kept], dtype=torch.float64)


def jackknife_error(values: Tensor) -> float:
    """Standard error of a statistic: sqrt((n-1)/n * sum of (t_i - mean t)^2). values [n]: t_i of `leave_one_out`."""
    n = len(values)
    return math.sqrt((n - 1) / n * float((values - values.mean()).square().sum()))


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """Mean over the batches and its standard error, std / sqrt(n), NaN left out. values [n]; NaN for fewer than two."""
    values = values[~values.isnan()].double()
    if len(values) < 2:
        return (float(values.mean()) if len(values) else math.nan), math.nan
    return float(values.mean()), float(values.std()) / math.sqrt(len(values))


def gradient_sizes(coefficient: Tensor, logp: Tensor, sum_sq_probs: Tensor) -> Tensor:
    """Size of the gradient that each token leaves at the logits, [R], up to the constant factor 1 / temperature.

    |c_n| |p_n - e_y| = |c_n| sqrt(sum_v p_v^2 - 2 p_y + 1).
    coefficient [R]: token weight times slope of the surrogate. logp, sum_sq_probs [R]: of `linear_token_stats`.
    """
    return coefficient.abs() * (sum_sq_probs - 2 * logp.exp() + 1).clamp(min=0).sqrt()


def top_shares(sizes: Tensor, parts: tuple[float, ...] = TOP_SHARES) -> list[float]:
    """Share of the summed sizes that the largest of them hold, for every part of the tokens (rounded up).

    sizes [R] >= 0. NaN where all are 0.
    """
    total = float(sizes.double().sum())
    if total == 0:
        return [math.nan] * len(parts)
    held = sizes.double().sort(descending=True).values.cumsum(0)
    return [float(held[math.ceil(part * len(sizes)) - 1]) / total for part in parts]
