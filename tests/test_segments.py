"""Segment ops against loops over the members in float64, on ragged, empty and length-1 segments."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crest_ops import segments
from crest_ops.segments import (
    segment_center,
    segment_difference,
    segment_discounted_sum,
    segment_expand,
    segment_mean,
    segment_softmax,
    segment_std,
    segment_sum,
    segment_zscore,
)

NAN, INF = float("nan"), float("inf")
# Segment 0: three members with an outside value and a foreign one between; 1: empty; 2: two members; 3: one member.
IDS = torch.tensor([0, -1, 0, 2, 0, 2, 3])
VALUES = torch.tensor([1.0, NAN, 2.0, 3.0, 6.0, 5.0, 7.0])
K = 4


def test_literal_values():
    def expect(result, *numbers):
        torch.testing.assert_close(result, torch.tensor(numbers, dtype=torch.float32), rtol=1e-6, atol=1e-6)

    expect(segment_sum(VALUES, IDS, K), 9, 0, 8, 7)
    expect(segment_mean(VALUES, IDS, K), 3, 0, 4, 7)
    expect(segment_center(VALUES, IDS, K), -2, 0, -1, -1, 3, 1, 0)
    expect(segment_std(VALUES, IDS, K, unbiased=True), 7**0.5, 0, 2**0.5, 0)
    expect(segment_std(VALUES, IDS, K, unbiased=False), (14 / 3) ** 0.5, 0, 1, 0)
    expect(segment_zscore(VALUES, IDS, K, unbiased=False, eps=1.0)[3:6], -1 / 2, 3 / ((14 / 3) ** 0.5 + 1), 1 / 2)
    expect(segment_softmax(VALUES, IDS, K)[3:], 1 / (1 + math.e**2), 1 / (1 + math.e**-4 + math.e**-5), 0.880797, 1)
    expect(segment_discounted_sum(VALUES, IDS, 0.5), 1 + 1 + 1.5, 0, 2 + 3, 3 + 2.5, 6, 5, 7)
    expect(segment_difference(VALUES, IDS, K), 1, 0, 4, 2, -6, -5, -7)
    first, last = torch.tensor([10.0, 20, 30, 40]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    expect(segment_difference(VALUES, IDS, K, first=first, last=last), -8, 0, 4, -25, -5.9, -4.7, -39.6)
    expect(segment_expand(torch.tensor([1.0, 2, 3, 4]), IDS, fill=9), 1, 9, 1, 3, 1, 3, 4)


def loop(values, ids, num):
    """The members of each segment in order, as lists of (position, value)."""
    return [[(n, values[n]) for n in range(len(ids)) if ids[n] == k] for k in range(num)]


ragged = st.integers(0, 5).flatmap(
    lambda num: st.tuples(
        st.just(num),
        st.lists(st.tuples(st.integers(-1, num - 1), st.floats(-100, 100, width=32)), max_size=24),
    )
)


@settings(deadline=None)
@given(ragged)
def test_ragged_segments_match_loops_in_float64(case):
    num, pairs = case
    ids, values = [k for k, _ in pairs], [x for _, x in pairs]
    result_n = {name: [0.0] * len(ids) for name in ("center", "zscore", "softmax", "scan", "difference")}
    total, mean, std = [], [], []
    for members in loop(values, ids, num):
        xs = [x for _, x in members]
        total.append(sum(xs))
        mean.append(sum(xs) / len(xs) if xs else 0.0)
        std.append(math.sqrt(sum((x - mean[-1]) ** 2 for x in xs) / len(xs)) if xs else 0.0)
        scale = sum(math.exp(x - max(xs)) for x in xs)
        ahead = 0.0
        following = [*xs, 0.0][1:]
        for (n, x), after in reversed(list(zip(members, following, strict=True))):
            ahead = x + 0.7 * ahead
            result_n["scan"][n] = ahead
            result_n["difference"][n] = after - x
            result_n["center"][n] = x - mean[-1]
            result_n["zscore"][n] = (x - mean[-1]) / (std[-1] + 0.1)
            result_n["softmax"][n] = math.exp(x - max(xs)) / scale
    for dtype, atol in ((torch.float64, 1e-9), (torch.float32, 1e-3)):
        x, i = torch.tensor(values, dtype=dtype), torch.tensor(ids, dtype=torch.int32)
        found = {
            "total": segment_sum(x, i, num),
            "mean": segment_mean(x, i, num),
            "std": segment_std(x, i, num, unbiased=False),
            "center": segment_center(x, i, num),
            "zscore": segment_zscore(x, i, num, unbiased=False, eps=0.1),
            "softmax": segment_softmax(x, i, num),
            "scan": segment_discounted_sum(x, i, 0.7),
            "difference": segment_difference(x, i, num),
        }
        for name, wanted in {"total": total, "mean": mean, "std": std, **result_n}.items():
            assert found[name].dtype == dtype
            torch.testing.assert_close(found[name].double(), torch.tensor(wanted).double(), rtol=1e-5, atol=atol)


OPS = {
    "sum": lambda x, ids: segment_sum(x, ids, K),
    "mean": lambda x, ids: segment_mean(x, ids, K),
    "center": lambda x, ids: segment_center(x, ids, K),
    "std": lambda x, ids: segment_std(x, ids, K, unbiased=True),
    "zscore": lambda x, ids: segment_zscore(x, ids, K, unbiased=True, eps=0.1),
    "softmax": lambda x, ids: segment_softmax(x, ids, K),
    "scan": lambda x, ids: segment_discounted_sum(x, ids, 0.7),
    "difference": lambda x, ids: segment_difference(x, ids, K),
    "sum without atomics": lambda x, ids: segments._sum_without_atomics(torch.where(ids < 0, 0, x), ids, K),
}


@pytest.mark.parametrize("name", OPS)
def test_gradients(name):
    x = torch.tensor([0.3, 1.0, -0.5, 2.0, 0.7, 1.1, 0.2], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: OPS[name](x, IDS), x)


def test_gradients_of_expand_and_of_the_boundaries():
    x, first, last = (torch.rand(n, dtype=torch.float64, requires_grad=True) for n in (7, K, K))
    assert torch.autograd.gradcheck(lambda v: segment_expand(v, IDS), first)
    assert torch.autograd.gradcheck(
        lambda x, first, last: segment_difference(x, IDS, K, first=first, last=last), (x, first, last)
    )


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("poison", [NAN, INF, -INF, 1e30])
def test_outside_values_are_never_used(name, poison):
    """Neither value nor gradient changes by a bit with what stands outside, and a NaN inside stays in its segment."""
    clean = torch.tensor([0.3, 0.0, -0.5, 2.0, 0.7, 1.1, 0.2])
    outcomes = []
    for outside in (0.0, poison):
        x = clean.clone()
        x[1] = outside
        x.requires_grad_()
        y = OPS[name](x, IDS)
        (gradient,) = torch.autograd.grad((y * torch.arange(1.0, len(y) + 1)).sum(), x)
        outcomes.append((y.detach(), gradient))
        assert gradient[1] == 0
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    assert torch.equal(outcomes[0][1], outcomes[1][1])
    for position, segment in ((4, 0), (3, 2), (6, 3)):
        broken = clean.clone()
        broken[position] = poison
        y = OPS[name](broken, IDS)
        untouched = (torch.arange(K) if len(y) == K else IDS) != segment
        assert torch.equal(y[untouched], outcomes[0][0][untouched])


def test_equal_members_are_exact_zeros_in_every_dtype():
    ids = torch.tensor([0, 0, 0, 1, 2, 2, 2])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.tensor([0.1, 0.1, 0.1, 0.3, 1e6, 1e6, 1e6], dtype=dtype)
        assert torch.equal(segment_center(x, ids, 3), torch.zeros(7, dtype=segment_center(x, ids, 3).dtype))
        for unbiased in (False, True):
            z = segment_zscore(x, ids, 3, unbiased=unbiased, eps=0.0)
            assert torch.equal(z, torch.zeros_like(z))
    x = torch.full((7,), 0.1, requires_grad=True)
    (gradient,) = torch.autograd.grad(segment_zscore(x, ids, 3, unbiased=True, eps=0.0).sum(), x)
    assert torch.isfinite(gradient).all()


def test_zscore_does_not_change_with_a_common_offset():
    x = torch.tensor([0.0, 0.25, 1.0, 0.5])
    ids = torch.zeros(4, dtype=torch.int64)
    plain = segment_zscore(x, ids, 1, unbiased=True, eps=1e-6)
    assert torch.equal(segment_zscore(x + 1024, ids, 1, unbiased=True, eps=1e-6), plain)


def test_softmax_with_members_of_minus_infinity():
    ids = torch.tensor([0, 0, 1, 1])
    y = segment_softmax(torch.tensor([-INF, 3.0, -INF, -INF]), ids, 2)
    assert y.tolist() == [0, 1, 0, 0]
    assert segment_softmax(torch.tensor([1e4, -1e4, 88.0, 90.0]), ids, 2).sum().item() == pytest.approx(2)


def test_long_spans_stay_exact_in_float32():
    n = 100_000
    ids = torch.zeros(n, dtype=torch.int32)
    assert torch.equal(segment_discounted_sum(torch.ones(n), ids, 1.0), torch.arange(n, 0, -1.0))
    x = torch.randn(n, generator=torch.Generator().manual_seed(0)) + 3
    wanted, ahead = torch.empty(n, dtype=torch.float64), 0.0
    for at, value in zip(range(n - 1, -1, -1), reversed(x.tolist()), strict=True):
        ahead = value + 0.999 * ahead
        wanted[at] = ahead
    torch.testing.assert_close(segment_discounted_sum(x, ids, 0.999).double(), wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(segment_sum(x, ids, 1).double(), x.double().sum(0, keepdim=True), rtol=1e-7, atol=0)
    spikes = torch.full((n,), 1e-4)
    spikes[0] = 1e4
    assert segment_sum(spikes, ids, 1).item() == pytest.approx(1e4 + (n - 1) * 1e-4, rel=1e-7)


def test_scan_with_gamma_zero_and_one():
    assert torch.equal(segment_discounted_sum(VALUES, IDS, 0.0), torch.tensor([1.0, 0, 2, 3, 6, 5, 7]))
    assert segment_discounted_sum(VALUES, IDS, 1.0).tolist() == [9, 0, 8, 8, 6, 5, 7]


def test_difference_telescopes():
    ids = torch.tensor([0, 1, 0, -1, 1, 0, 1, 3])
    values = torch.rand(8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    first, last = torch.tensor([0.5, 0.25, 9.0, 2.0]), torch.tensor([1.0, -1.0, 9.0, 7.0])
    total = segment_sum(segment_difference(values, ids, 4, first=first, last=last), ids, 4)
    torch.testing.assert_close(total, torch.tensor([0.5, -1.25, 0.0, 5.0], dtype=torch.float64))


def test_sum_without_atomics_is_the_sum():
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(-1, 50, (5000,), generator=generator)
    values = torch.where(ids < 0, 0, torch.randn(5000, generator=generator))
    found = segments._sum_without_atomics(values, ids, 50)
    torch.testing.assert_close(found, segment_sum(values, ids, 50), rtol=1e-6, atol=1e-6)
    assert torch.equal(found, segments._sum_without_atomics(values, ids, 50))


def test_empty_inputs():
    none, no_ids = torch.empty(0), torch.empty(0, dtype=torch.int64)
    assert segment_sum(none, no_ids, 2).tolist() == [0, 0]
    assert segment_zscore(none, no_ids, 2, unbiased=True, eps=0.0).shape == (0,)
    assert segment_discounted_sum(none, no_ids, 0.9).shape == segment_difference(none, no_ids, 0).shape == (0,)
    outside = torch.tensor([-1, -1])
    assert segment_softmax(torch.ones(2), outside, 0).tolist() == [0, 0]
    assert segment_sum(torch.ones(2), outside, 0).shape == (0,)


def test_one_dynamic_graph_without_breaks():
    def every(x, ids, num):
        return [
            segment_sum(x, ids, num),
            segment_zscore(x, ids, num, unbiased=True, eps=1e-6),
            segment_softmax(x, ids, num),
            segment_difference(x, ids, num),
            segment_discounted_sum(x, ids, 0.9),
        ]

    compiled = torch.compile(every, fullgraph=True, dynamic=True, backend="aot_eager")
    for n, num in ((7, 4), (30, 5)):
        x, ids = torch.randn(n), torch.arange(n) % (num + 1) - 1
        for found, wanted in zip(compiled(x, ids, num), every(x, ids, num), strict=True):
            torch.testing.assert_close(found, wanted)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"values has shape \[2\] and ids \[3\]"):
        segment_sum(torch.ones(2), torch.zeros(3, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match="ids has dtype torch.float32"):
        segment_sum(torch.ones(2), torch.zeros(2), 1)
    with pytest.raises(ValueError, match="gamma is 1.5"):
        segment_discounted_sum(VALUES, IDS, 1.5)
    with pytest.raises(ValueError, match="eps is -1"):
        segment_zscore(VALUES, IDS, K, unbiased=True, eps=-1)
    with pytest.raises(ValueError, match=r"first has shape \[2\], want \[4\]"):
        segment_difference(VALUES, IDS, K, first=torch.ones(2))


@pytest.mark.parametrize(
    ("ids", "num", "named"),
    [
        ([0, 1, 2], 2, r"ids\[2\] is 2, want -1 <= id < 2"),
        ([0, -7, 1], 2, r"ids\[1\] is -7"),
        ([0, 1, 9], 2, r"ids\[2\] is 9"),
        ([0, 1, 1], -1, "num_segments is -1"),
        ([0, 1, 1], 2.0, "num_segments is 2.0"),
    ],
)
def test_ids_outside_the_segments_are_refused(ids, num, named):
    values, ids = torch.tensor([1.0, 2.0, 3.0]), torch.tensor(ids)
    for op in (segment_sum, segment_mean, segment_center, segment_softmax, segment_difference):
        with pytest.raises(ValueError, match=named):
            op(values, ids, num)
    with pytest.raises(ValueError, match=named):
        segment_zscore(values, ids, num, unbiased=True, eps=0.0)
