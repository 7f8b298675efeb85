"""Returns, temporal differences and K-step means: numbers worked by hand, what telescopes, what is refused."""

import math

import pytest
import torch
from every_signal import batches
from hypothesis import given, settings
from hypothesis import strategies as st

from crest_ops.returns import discounted_return, k_step_credit, log_ratio_td, td_credit, uniform_credit
from crest_ops.spans import Spans

EACH = settings(deadline=None, max_examples=40)


def spans_of(*trajectories):
    """Each trajectory a list of the token counts of its actions; one task each."""
    lengths = [length for actions in trajectories for length in actions]
    return Spans.from_lengths(
        torch.tensor(lengths, dtype=torch.int64),
        action=torch.ones(len(lengths), dtype=torch.bool),
        turn=torch.zeros(len(lengths), dtype=torch.int64),
        trajectory=torch.tensor([i for i, actions in enumerate(trajectories) for _ in actions], dtype=torch.int64),
        group=torch.arange(len(trajectories)),
    )


def close(found, wanted, atol=1e-12):
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=atol)


def floats(*values):
    return torch.tensor(values, dtype=torch.float64)


def of_trajectory(values_S, spans):
    """Sum over each trajectory, added up in float64."""
    return torch.zeros(spans.num_trajectories, dtype=torch.float64).index_add(
        0, spans.trajectory_of_action, values_S.double()
    )


def normal(n, seed, scale=1.0):
    return scale * torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SEED = st.integers(0, 2**31)


def test_discounted_return_starts_anew_in_each_trajectory():
    spans = spans_of([2, 0, 1], [], [3])
    close(discounted_return(floats(1, 2, 3, 4), spans, 0.5), [2.75, 3.5, 3, 4])
    close(discounted_return(floats(1, 2, 3, 4), spans, 0.0), [1, 2, 3, 4])
    close(discounted_return(floats(1, 2, 3, 4), spans, 1.0), [6, 5, 3, 4])
    assert discounted_return(torch.ones(4, dtype=torch.int64), spans, 1.0).dtype == torch.float32


def test_td_credit_by_hand():
    spans = spans_of([1, 2, 1], [5])
    found = td_credit(floats(0, 1, 2, 4), floats(9, 5, 7, 9), floats(3, 1), spans)
    close(found, [0 + 5 - 3, 1 + 7 - 5, 2 - 7, 4 - 1])


def test_reward_of_an_action_without_a_token_goes_to_the_step_before_it_or_to_the_first():
    spans = spans_of([0, 2, 0, 1, 0], [0, 0], [0, 1])
    reward, value = floats(1, 2, 4, 8, 16, 32, 64, 128, 256), floats(*[90] * 3, 7, *[90] * 5)
    close(td_credit(reward, value, floats(3, 5, 6), spans), [0, 7 + 7 - 3, 0, 24 - 7, 0, 0, 0, 0, 384 - 6])
    close(uniform_credit(floats(3, 5, 6), spans), [0, 1.5, 0, 1.5, 0, 0, 0, 0, 6])


@EACH
@given(batches(), SEED, st.sampled_from([0.01, 1.0, 100.0]))
def test_a_trajectory_keeps_its_total_for_any_value_function(case, seed, scale):
    spans, signals = case
    reward, baseline = signals.action_reward_S, normal(spans.num_trajectories, seed)
    has_step_B = spans.trajectory_length > 0
    wanted = torch.where(has_step_B, of_trajectory(reward, spans) - baseline, 0)
    for value in (scale * signals.value_S, normal(spans.num_actions, seed + 1, scale)):
        found = td_credit(reward, value, baseline, spans)
        torch.testing.assert_close(of_trajectory(found, spans), wanted, rtol=0, atol=1e-12)
        assert not found[spans.action_length == 0].any()
    torch.testing.assert_close(of_trajectory(uniform_credit(wanted, spans), spans), wanted, rtol=0, atol=1e-12)


@EACH
@given(batches(dtype=torch.float32), SEED, st.sampled_from([0.01, 1.0, 1e4, 1e8]))
def test_in_float32_the_total_is_off_by_rounding_alone(case, seed, scale):
    """Half an ulp of each credit: 1e-5 where value and reward are of one size, more where the value dwarfs them."""
    spans, signals = case
    value, baseline = scale * signals.value_S, normal(spans.num_trajectories, seed).float()
    found = td_credit(signals.action_reward_S, value, baseline, spans)
    assert found.dtype == torch.float32
    wanted = of_trajectory(signals.action_reward_S, spans) - baseline.double()
    off_B = (of_trajectory(found, spans) - torch.where(spans.trajectory_length > 0, wanted, 0)).abs()
    assert (off_B <= 2.0**-24 * of_trajectory(found.abs(), spans) * (1 + 1e-6)).all()
    if scale <= 1:
        assert off_B.max() < 1e-5


def test_the_first_value_is_replaced_by_the_baseline():
    spans = spans_of([1, 1], [0, 1])
    reward, baseline = floats(1, 2, 3, 4), floats(5, 6)
    found = td_credit(reward, floats(0, 7, 0, 0), baseline, spans)
    assert torch.equal(found, td_credit(reward, floats(1e30, 7, -1e30, 1e30), baseline, spans))


# TRACE's state value.


def test_log_ratio_td_by_hand():
    spans = spans_of([1, 1], [], [1])  # states: 3, 1, 2
    gold = floats(-0.9, -0.4, -1.9, -7, -0.3, -0.7)
    close(log_ratio_td(gold, spans, 0.1), [math.log(2), -math.log(4), -math.log(2)])


@pytest.mark.parametrize(("before", "after", "delta"), [(-5.1187, -1.5712, 1.1806), (-10.6570, -7.1061, 0.4052)])
def test_the_papers_own_numbers(before, after, delta):
    for dtype in (torch.float64, torch.float32):
        found = log_ratio_td(torch.tensor([before, after], dtype=dtype), spans_of([4]), 1e-3)
        assert found.dtype == dtype and round(found.item(), 4) == delta


@EACH
@given(batches())
def test_one_step_credits_telescope_and_have_the_sign_of_the_change(case):
    spans, signals = case
    gold, delta = signals.gold_logp, log_ratio_td(signals.gold_logp, spans, 0.1)
    states = torch.bincount(spans.trajectory_of_action, minlength=spans.num_trajectories) + 1
    last = states.cumsum(0) - 1
    first = last - states + 1
    wanted = ((0.1 - gold[first]) / (0.1 - gold[last])).log()
    torch.testing.assert_close(of_trajectory(delta, spans), wanted, rtol=0, atol=1e-12)
    before = torch.arange(spans.num_actions) + spans.trajectory_of_action
    assert torch.equal(delta > 0, gold[before + 1] > gold[before])
    scaled = log_ratio_td(0.1 - 3 * (0.1 - gold), spans, 0.1)  # d becomes 3 d
    torch.testing.assert_close(scaled, delta, rtol=0, atol=1e-12)


@EACH
@given(st.lists(st.floats(-12, 0), min_size=2, max_size=8), st.integers(0, 9), st.randoms())
def test_repeated_permuted_and_undone_states(states, repeats, random):
    def deltas(gold):
        return log_ratio_td(floats(*gold), spans_of([1] * (len(gold) - 1)), 0.1)

    total = deltas(states).sum().item()
    at = random.randrange(len(states))
    again = deltas(states[:at] + [states[at]] * (repeats + 1) + states[at + 1 :])
    assert torch.equal(again[at : at + repeats], torch.zeros(repeats, dtype=torch.float64))
    assert again.sum().item() == pytest.approx(total, abs=1e-12)
    middle = states[1:-1]
    random.shuffle(middle)
    assert deltas([states[0], *middle, states[-1]]).sum().item() == pytest.approx(total, abs=1e-12)
    assert deltas([*states, *states[-2::-1]]).sum().item() == pytest.approx(0, abs=1e-12)


def test_k_step_credit_by_hand():
    spans = spans_of([1, 0, 2], [], [1])
    delta, outcome = floats(1, 2, 4, 8), floats(1, 5, -3)
    close(k_step_credit(delta, spans, 2, 0.5), [2 / 1.5, 4 / 1.5, 4, 8])
    # The end is in the window of the last two actions: gamma^2 and gamma^1 of the trajectory's outcome, twice.
    filled = [2 / 1.5, 4 / 1.5 + 2 * 0.25, 4 + 2 * 0.5, 8 - 3 * 2 * 0.5]
    close(k_step_credit(delta, spans, 2, 0.5, outcome=outcome), filled)
    close(k_step_credit(delta, spans, 2, 0.0, outcome=outcome), [1, 2, 4, 8])
    close(k_step_credit(delta, spans, 99, 1.0), [7 / 3, 3, 4, 8])
    calls = torch.tensor([True, False, True, False])
    masked = k_step_credit(floats(1, math.nan, 4, math.inf), spans, 2, 0.5, outcome=outcome, mask=calls)
    close(masked, [3 / 1.5 + 2 * 0.25, 0, 4 + 2 * 0.5, 0])


@EACH
@given(batches(), st.integers(1, 5), st.sampled_from([0.0, 0.3, 0.8, 1.0]), st.booleans())
def test_k_step_credit_is_its_definition(case, steps, gamma, masked):
    spans, signals = case
    mask = signals.action_mask_S if masked else None
    found = k_step_credit(signals.value_S, spans, steps, gamma, outcome=signals.reward_B, mask=mask)
    wanted = torch.zeros_like(found)
    for i in range(spans.num_trajectories):
        of_i = spans.trajectory_of_action == i
        place = torch.nonzero(of_i & mask if masked else of_i).flatten().tolist()
        for k in range(len(place)):
            window = range(k, min(k + steps, len(place)))
            weight = sum(gamma ** (u - k) for u in window)
            wanted[place[k]] = sum(gamma ** (u - k) * signals.value_S[place[u]] for u in window) / weight
            if window[-1] == len(place) - 1:
                wanted[place[k]] += 2 * gamma ** (len(place) - k) * signals.reward_B[i]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert torch.equal(k_step_credit(signals.value_S, spans, 1, gamma), signals.value_S)


def test_bad_arguments_are_named():
    spans, two, three = spans_of([1, 1], [1]), torch.zeros(2), torch.zeros(3)
    gold = torch.zeros(5)
    for call, message in (
        (lambda: discounted_return(two, spans, 0.5), r"reward has shape \[2\], want \[S\] = \[3\]"),
        (lambda: discounted_return(three, spans, 1.5), "gamma is 1.5"),
        (lambda: td_credit(two, three, two, spans), r"reward has shape \[2\]"),
        (lambda: td_credit(three, two, two, spans), r"value has shape \[2\]"),
        (lambda: td_credit(three, three, three, spans), r"baseline has shape \[3\], want \[B\] = \[2\]"),
        (lambda: td_credit(three, [0.0] * 3, two, spans), "value is list"),
        (lambda: uniform_credit(three, spans), r"advantage has shape \[3\]"),
        (lambda: log_ratio_td(gold[:4], spans), r"gold_logp has shape \[4\], want \[S\+B\] = \[5\]"),
        (lambda: log_ratio_td(gold, spans, 0.0), "eps is 0.0"),
        (lambda: log_ratio_td(gold, spans, -0.1), "eps is -0.1"),
        (lambda: log_ratio_td(gold, spans, math.nan), "eps is nan"),
        (lambda: log_ratio_td(torch.tensor([0, -1, 0.25, 0, 0]), spans), r"gold_logp\[2\] is 0.25, want a finite"),
        (lambda: log_ratio_td(torch.tensor([0, -1, 0, math.nan, 0]), spans), r"gold_logp\[3\] is nan"),
        (lambda: log_ratio_td(torch.tensor([-math.inf, 0, 0, 0, 0]), spans), r"gold_logp\[0\] is -inf"),
        (lambda: k_step_credit(two, spans, 3, 0.8), r"delta has shape \[2\]"),
        (lambda: k_step_credit(three, spans, 0, 0.8), "steps is 0"),
        (lambda: k_step_credit(three, spans, 1.5, 0.8), "steps is 1.5"),
        (lambda: k_step_credit(three, spans, 3, -0.1), "gamma is -0.1"),
        (lambda: k_step_credit(three, spans, 3, 0.8, outcome=three), r"outcome has shape \[3\]"),
        (lambda: k_step_credit(three, spans, 3, 0.8, mask=two.bool()), r"mask has shape \[2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
