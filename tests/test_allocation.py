"""Softmax allocation inside an action: numbers worked by hand, and P2, P3, P6, P7, P8 of FACTOR for any teacher."""

import math

import pytest
import torch
from every_signal import batches
from hypothesis import given, settings
from hypothesis import strategies as st

from crest_ops.allocation import softmax_allocation
from crest_ops.segments import segment_mean
from crest_ops.spans import Spans

NAN, INF = float("nan"), float("inf")
PAPER = {"eta": 0.7, "tau": 1.0, "clip": 3.0}
# Actions of 2, 0, 1 and 3 tokens between tool output.
SPANS = Spans.from_lengths(
    torch.tensor([2, 2, 0, 1, 1, 1, 3]),
    action=torch.tensor([False, True, True, False, True, False, True]),
    turn=torch.zeros(7, dtype=torch.int64),
    trajectory=torch.tensor([0, 0, 0, 0, 0, 1, 1]),
    group=torch.tensor([0, 0]),
)
INSIDE = [2, 3, 5, 7, 8, 9]
EACH = settings(deadline=None, max_examples=40)


def on_tokens(*values, outside=NAN):
    out = torch.full((10,), outside, dtype=torch.float64)
    out[INSIDE] = torch.tensor(values, dtype=torch.float64)
    return out


def signs(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_by_hand():
    log2 = math.log(2)  # softmax of (0, log 2) is 1/3, 2/3; of (0, 0, log 2) it is 1/4, 1/4, 1/2
    gap = on_tokens(0, log2, 5, 0, 0, -log2)
    found = softmax_allocation(signs(1, 1, 1, -1), gap, SPANS, **PAPER)
    wanted = [0.3 + 0.7 * 2 / 3, 0.3 + 0.7 * 4 / 3, 1, 0.3 + 0.7 * 0.75, 0.3 + 0.7 * 0.75, 0.3 + 0.7 * 1.5]
    torch.testing.assert_close(found, on_tokens(*wanted, outside=0), rtol=0, atol=1e-12)
    half = softmax_allocation(signs(1, 1, 1, -1), gap / 2, SPANS, eta=0.7, tau=0.5, clip=3.0)
    torch.testing.assert_close(half, found, rtol=0, atol=1e-12)
    clipped = softmax_allocation(signs(1, 1, 1, -1), on_tokens(0, 99, 5, 0, 0, -99), SPANS, eta=1.0, tau=1.0, clip=log2)
    torch.testing.assert_close(clipped, on_tokens(2 / 3, 4 / 3, 1, 0.75, 0.75, 1.5, outside=0), rtol=0, atol=1e-12)


def test_without_a_direction_or_a_share_the_weight_is_one_bitwise():
    ones = on_tokens(*[1] * 6, outside=0)
    wild = on_tokens(1, -2, 3, -4, 5, -6)
    assert torch.equal(softmax_allocation(signs(0, 0, 0, 0), wild * NAN, SPANS, **PAPER), ones)
    assert torch.equal(softmax_allocation(signs(1, 1, -1, -1), wild, SPANS, eta=0.0, tau=1.0, clip=3.0), ones)
    one_token = softmax_allocation(signs(1, 1, -1, -1), wild, SPANS, **PAPER)[5]
    assert one_token == 1


def knobs(draw):
    return {
        "eta": draw(st.sampled_from([0.0, 0.3, 0.7, 1.0])),
        "tau": draw(st.sampled_from([0.3, 1.0, 4.0])),
        "clip": draw(st.sampled_from([0.5, 3.0, INF])),
    }


@st.composite
def cases(draw):
    spans, signals = draw(batches())
    scale = draw(st.sampled_from([0.1, 1.0, 10.0]))
    return spans, signals.action_reward_S, scale * signals.teacher_gap_N, knobs(draw)


@EACH
@given(cases())
def test_mean_one_and_never_below_its_floor(case):
    """P2, P3."""
    spans, sign, gap, knob = case
    omega = softmax_allocation(sign, gap, spans, **knob)
    mean = segment_mean(omega, spans.action_of_token, spans.num_actions)
    torch.testing.assert_close(mean, (spans.action_length > 0).double(), rtol=0, atol=1e-12)
    assert (omega[spans.mask] >= 1 - knob["eta"] - 1e-15).all() and not omega[~spans.mask].any()
    if knob["eta"] < 1 or knob["clip"] < INF:
        assert (omega[spans.mask] > 0).all()
    for i in range(spans.num_actions):
        of_action = omega[spans.action_of_token == i]
        if len(of_action) and knob["eta"] == 1:
            assert of_action.max() <= of_action.min() * math.exp(min(2 * knob["clip"] / knob["tau"], 700)) * (1 + 1e-12)


@EACH
@given(cases(), st.integers(0, 1000), st.floats(0, 5))
def test_monotone_in_the_gap(case, at, raised):
    """P6: raising one token's gap never lowers its weight where the action is good, never raises it where it is bad."""
    spans, sign, gap, knob = case
    places = torch.nonzero(spans.mask).flatten()
    if len(places) == 0:
        return
    n = places[at % len(places)]
    louder = gap.clone()
    louder[n] += raised
    change = softmax_allocation(sign, louder, spans, **knob)[n] - softmax_allocation(sign, gap, spans, **knob)[n]
    assert change * sign[spans.action_of_token[n].long()] >= -1e-14


@EACH
@given(cases(), st.floats(-2, 2))
def test_a_constant_gap_says_nothing_and_a_shift_changes_nothing_before_the_clip(case, shift):
    """P7, P8."""
    spans, sign, gap, knob = case
    constant = torch.where(spans.mask, 10 * shift, NAN).double()
    omega = softmax_allocation(sign, constant, spans, **knob)
    torch.testing.assert_close(omega, spans.mask.double(), rtol=0, atol=1e-14)
    free = {**knob, "clip": INF}
    shifted, plain = (softmax_allocation(sign, g, spans, **free) for g in (gap + shift, gap))
    torch.testing.assert_close(shifted, plain, rtol=0, atol=1e-10)


def test_a_shift_past_the_clip_does_change_the_weights():
    sign, gap = signs(1, 1, 1, 1), on_tokens(0, 1, 0, 0, 1, 2)
    plain = softmax_allocation(sign, gap, SPANS, **PAPER)
    torch.testing.assert_close(softmax_allocation(sign, gap + 1, SPANS, **PAPER), plain, rtol=0, atol=1e-14)
    assert not torch.allclose(softmax_allocation(sign, gap + 2.5, SPANS, **PAPER), plain, atol=1e-3)


def test_bad_arguments_are_named():
    sign, gap = signs(1, 1, 1, 1), on_tokens(*[0] * 6)
    for changes, message in (
        ({"eta": -0.1}, "eta is -0.1"),
        ({"eta": 1.1}, "eta is 1.1"),
        ({"tau": 0.0}, "tau is 0.0"),
        ({"tau": NAN}, "tau is nan"),
        ({"clip": 0.0}, "clip is 0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            softmax_allocation(sign, gap, SPANS, **{**PAPER, **changes})
    with pytest.raises(ValueError, match=r"sign has shape \[10\], want \[4\]"):
        softmax_allocation(gap, gap, SPANS, **PAPER)
    with pytest.raises(ValueError, match=r"gap has shape \[4\], want \[10\]"):
        softmax_allocation(sign, sign, SPANS, **PAPER)
