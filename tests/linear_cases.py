"""Hidden states, heads and their float64 references, for the tests of the ops over a vocabulary head."""

from contextlib import contextmanager

import pytest
import reference
import torch
from cases import logits_of, targets_of

N, H, V = 7, 16, 101
ROW = 128 * 4  # bytes of a row of V float32 logits in a chunk


def head_case(rows=N, vocabulary=V, hidden_size=H, dtype=torch.float32):
    """(hidden, weight, bias, targets); logits spread by about 2."""
    hidden = logits_of(rows, hidden_size, dtype=dtype, seed=10, scale=1.0)
    weight = logits_of(vocabulary, hidden_size, dtype=dtype, seed=11, scale=2 / hidden_size**0.5)
    return hidden, weight, logits_of(vocabulary, dtype=dtype, seed=12, scale=0.5), targets_of(rows, high=vocabulary)


def leaf(tensor, dtype=None):
    return tensor.detach().to(dtype or tensor.dtype, copy=True).requires_grad_()


def exact_stats(hidden, weight, bias, targets, grad_logp, grad_entropy, **transform):
    """logp, entropy and the gradients by hidden, weight and bias, all in float64; rows with both factors 0 are out."""
    leaves = [leaf(tensor, torch.float64) for tensor in (hidden, weight, bias)]
    logits = leaves[0] @ leaves[1].t() + leaves[2]
    logp, entropy, _, _ = reference.stats(logits, targets, **transform)
    out = (grad_logp == 0) & (grad_entropy == 0)
    total = torch.where(out, 0, grad_logp.double() * logp + grad_entropy.double() * entropy).sum()
    return logp.detach(), entropy.detach(), *torch.autograd.grad(total, leaves)


def assert_close(found, exact, tolerance=1e-5):
    """Within the tolerance, relative to the largest element of what is exact (to 1 where that is smaller)."""
    assert found.shape == exact.shape
    found, exact = found.detach().double(), exact.detach().double()
    error = (found - exact).abs().max() if exact.numel() else 0.0
    assert error <= tolerance * max(1.0, float(exact.abs().max()) if exact.numel() else 0.0)


def assert_gradients(found, exact, tolerance=1e-5):
    assert len(found) == len(exact)
    for ours, wanted in zip(found, exact, strict=True):
        assert_close(ours, wanted, tolerance)


class Work:
    """What a recorded piece of work did: sizes (m, k, n) of its matrix products, bytes of each new tensor."""

    products: list[tuple[int, int, int]]
    new_bytes: list[int]

    def rows(self, hidden_size, vocabulary):
        """Rows that reached the products of the logits, of the hidden gradient and of the weight gradient."""
        h, v = hidden_size, vocabulary
        return (
            sum(m for m, k, n in self.products if (k, n) == (h, v)),
            sum(m for m, k, n in self.products if (k, n) == (v, h)),
            sum(k for m, k, n in self.products if (m, n) == (v, h)),
        )


@contextmanager
def recorded():
    """The operators that run, also inside custom ops and backward."""
    work = Work()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, profile_memory=True
    ) as profile:
        yield work
    events = profile.events()
    pairs = [event.input_shapes[:2] for event in events if event.name == "aten::mm"]
    pairs += [event.input_shapes[1:3] for event in events if event.name == "aten::addmm"]
    work.products = [(*a, b[1]) for a, b in pairs]
    work.new_bytes = [event.self_cpu_memory_usage for event in events]


@pytest.fixture
def debug(monkeypatch):
    monkeypatch.setenv("CREST_DEBUG", "1")
