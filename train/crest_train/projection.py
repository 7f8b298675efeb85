"""Gradients too large to keep, shrunk to a few numbers whose inner products are those of the gradients, on average.

A count sketch (Charikar, Chen and Farach-Colton, ICALP 2002): entry j of a vector is added, with a random sign s(j), to
a random one h(j) of D buckets. Both come from hashing j, so that nothing is stored but the sketch itself.

Shape letters: P entries of all gradients together, D entries of the sketch.
"""

import torch
from torch import Tensor

_CHUNK = 1 << 20
_ODD = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)  # any odd numbers would do; near splitmix64's


def count_sketch(gradients: list[Tensor], width: int, *, seed: int) -> Tensor:
    """Sketch of the vector that the tensors make, read one behind the other.

    y_d = sum over j with h(j) = d of s(j) x_j.  E <y, y'> = <x, x'> over seeds,
    Var <y, y'> = (|x|^2 |x'|^2 + <x, x'>^2 - 2 sum_j x_j^2 x'_j^2) / D.

    gradients: any shapes, real; every tensor has hash functions of its own. width = D. The same seed gives the same
    hash functions: sketches are compared only with those of one seed. Returns [D] float32 on the CPU; takes memory for
    D + 2^20 entries. Raises ValueError: width < 1.
    """
    if width < 1:
        raise ValueError(f"width is {width}, want 1 or more")
    sketch_D = torch.zeros(width, device=gradients[0].device if gradients else "cpu")
    for place, gradient in enumerate(gradients):
        salt = int(_mixed(torch.tensor([seed * 1_000_003 + place]))[0])
        for start, part in enumerate(gradient.detach().flatten().split(_CHUNK)):
            first = start * _CHUNK
            index = torch.arange(first, first + len(part), device=part.device)
            hash_j = _mixed(index ^ salt)
            sign_j = 1 - 2 * (hash_j & 1)
            bucket_j = (hash_j >> 1 & (1 << 62) - 1) % width
            sketch_D.index_add_(0, bucket_j, part.float() * sign_j)
    return sketch_D.cpu()


def _mixed(number: Tensor) -> Tensor:
    """64 bits that look random, from int64 numbers (products wrap around)."""
    number = number * _ODD[0] + _ODD[2]
    for shift, factor in zip((30, 27), _ODD[1:], strict=True):
        number = (number ^ (number >> shift & (1 << 64 - shift) - 1)) * factor
    return number ^ (number >> 31 & (1 << 33) - 1)
