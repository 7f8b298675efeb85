"""Where trainers differ: one trajectory (model, tool, model) by hand for each convention, and their loops as reference.

Shape letters: N token positions, B trajectories.
"""

import math

import pytest
import torch
from every_signal import batches
from hypothesis import given, settings
from hypothesis import strategies as st

from crest_ops.advantages import group_advantage
from crest_ops.reductions import sequence_mean, token_mean
from crest_ops.segments import segment_sum
from crest_ops.spans import Spans
from crest_ops.surrogates import CISPO, GSPO, SAPO, PPOClip
from crest_ops.token_returns import generalised_advantage, reinforce_return

NAN = float("nan")
# A prompt token, an action of two tokens, one tool token, an action of one token, a padding token.
SPANS = Spans.from_mask(torch.tensor([[0, 1, 1, 0, 1, 0]], dtype=torch.bool), group=torch.tensor([0]))


def row(*values):
    return torch.tensor(values, dtype=torch.float64)


# gamma = lam = 1/2, reward 1 on the last token. "carry": the tool token is no step,
#   delta = 1 - .5 = .5, 0 + .5 * .5 - .25 = 0, 0 + .5 * .25 - .5 = -.375;  A = .5, 0 + .125, -.375 + .03125.
# "step": it is one, with value .8 and reward r: delta = r + .25 - .8 there and .5 * .8 - .25 = .15 before it;
#   r = 0: A = .5, -.55 + .125 = -.425 (tool), .15 - .10625, -.375 + .0109375;
#   r = .4: A = .5, -.025 (tool), .15 - .00625, -.375 + .0359375.
@pytest.mark.parametrize(
    ("tool_tokens", "tool_reward", "wanted"),
    [
        ("carry", 0.0, (-0.34375, 0.125, 0.5)),
        ("carry", 0.4, (-0.34375, 0.125, 0.5)),
        ("step", 0.0, (-0.3640625, 0.04375, 0.5)),
        ("step", 0.4, (-0.3390625, 0.14375, 0.5)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_generalised_advantage_over_a_tool_token(tool_tokens, tool_reward, wanted, dtype):
    reward = row(NAN, 0, 0, tool_reward, 1, NAN).to(dtype)
    value = row(NAN, 0.5, 0.25, 0.8, 0.5, NAN).to(dtype)
    found = generalised_advantage(reward, value, SPANS, gamma=0.5, lam=0.5, tool_tokens=tool_tokens)
    first, second, last = wanted
    torch.testing.assert_close(found, row(0, first, second, 0, last, 0).to(dtype), rtol=0, atol=1e-7)


# gamma = 1/2, reward .2 at the end of the first action and 1 at the end of the second.
@pytest.mark.parametrize(("tool_tokens", "wanted"), [("carry", (0.35, 0.7, 1)), ("reset", (0.1, 0.2, 1))])
def test_reinforce_return_over_a_tool_token(tool_tokens, wanted):
    found = reinforce_return(row(NAN, 0, 0.2, 5, 1, NAN), SPANS, 0.5, tool_tokens=tool_tokens)
    first, second, last = wanted
    torch.testing.assert_close(found, row(0, first, second, 0, last, 0), rtol=0, atol=1e-12)


def test_the_outcome_is_the_sum_of_the_token_rewards():
    """All trainers alike: two rollouts with .25 + .75 and 0 + .5, mean .75, sample std sqrt(1/8)."""
    spans = Spans.from_mask(torch.tensor([[1, 1, 0, 1], [0, 1, 0, 1]]).bool(), group=torch.tensor([0, 0]))
    reward_N = row(0, 0.25, NAN, 0.75, NAN, 0, NAN, 0.5)
    reward_B = segment_sum(reward_N, spans.trajectory_of_token, 2)
    assert reward_B.tolist() == [1, 0.5]
    found = group_advantage(reward_B, spans, eps=0.0)
    torch.testing.assert_close(found, row(0.25, -0.25) / math.sqrt(1 / 8), rtol=0, atol=1e-12)
    torch.testing.assert_close(reinforce_return(reward_N, spans, 1.0)[[0, 5]], reward_B)


@pytest.mark.parametrize(("convention", "rows"), [("excluded", 2), ("counted", 3)])
def test_a_fully_masked_sequence(convention, rows):
    """Rows of 2, 0 and 1 policy tokens: a mean over the two that hold any, or over all three."""
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 0]], dtype=torch.bool)
    spans = Spans.from_mask(mask, group=torch.tensor([0, 0, 0]))
    weight = sequence_mean(spans, fully_masked=convention)
    wanted = torch.tensor([1 / 2, 1 / 2, 0, 0, 0, 0, 0, 1, 0]) / rows
    torch.testing.assert_close(weight, wanted)
    pieces = [
        sequence_mean(Spans.from_mask(piece, group=torch.zeros(len(piece)).long()), total=rows, fully_masked=convention)
        for piece in mask.split(2)
    ]
    assert torch.equal(torch.cat(pieces), weight)
    nothing = Spans.from_mask(torch.zeros(2, 2, dtype=torch.bool), group=torch.tensor([0, 0]))
    assert torch.equal(sequence_mean(nothing, fully_masked=convention), torch.zeros(4))


def test_the_two_conventions_of_masked_sequences_agree_without_one_and_the_default_excludes():
    full = Spans.from_mask(torch.tensor([[1, 1], [0, 1]]).bool(), group=torch.tensor([0, 0]))
    assert torch.equal(sequence_mean(full, fully_masked="counted"), sequence_mean(full))
    with pytest.raises(ValueError, match="fully_masked is 'dropped', want 'excluded' or 'counted'"):
        sequence_mean(full, fully_masked="dropped")
    with pytest.raises(ValueError, match="total is 0"):
        sequence_mean(full, fully_masked="counted", total=0)


def test_the_reduction_goes_into_the_loss_or_into_the_advantages_but_once():
    """Ratio 1, advantage 1 of three tokens: the loss is -1; a weight of 1/3 in both places makes it -1/3."""
    log_ratio, advantage, weight = torch.zeros(6), torch.ones(6), token_mean(SPANS)
    surrogate = PPOClip()
    in_loss = (weight * surrogate.evaluate(log_ratio, advantage, SPANS).value).sum()
    in_advantage = surrogate.evaluate(log_ratio, weight * advantage, SPANS).value.sum()
    twice = (weight * surrogate.evaluate(log_ratio, weight * advantage, SPANS).value).sum()
    for found, wanted in ((in_loss, -1), (in_advantage, -1), (twice, -1 / 3)):
        assert found.item() == pytest.approx(wanted)


@pytest.mark.parametrize("surrogate", [PPOClip(), PPOClip(dual=3.0), GSPO(), CISPO(), SAPO()], ids=repr)
def test_either_place_gives_the_same_loss_and_slope(surrogate):
    """Every surrogate is linear in a positive factor of its credit: 1/3 each here."""
    log_ratio, advantage, weight = row(0, 0.5, -0.5, 0, 0.1, 0), row(0, 2, -1, 0, -3, 0), token_mean(SPANS).double()
    outside = surrogate.evaluate(log_ratio, advantage, SPANS)
    inside = surrogate.evaluate(log_ratio, weight * advantage, SPANS)
    torch.testing.assert_close(weight * outside.value, inside.value)
    torch.testing.assert_close(weight * outside.slope, inside.slope)


def spans_by_loop(spans):
    """Per trajectory the positions from its first to its last policy token, and which of them the policy wrote."""
    for i in range(spans.num_trajectories):
        mine = torch.nonzero(spans.trajectory_of_token == i).flatten().tolist()
        if mine:
            yield [(n, bool(spans.mask[n])) for n in range(mine[0], mine[-1] + 1)]


@settings(deadline=None, max_examples=40)
@given(batches(), st.sampled_from([0.0, 0.5, 0.95, 1.0]), st.sampled_from([0.0, 0.7, 1.0]), st.integers(0, 999))
def test_against_the_loops_of_the_trainers(case, gamma, lam, seed):
    spans, _ = case
    generator = torch.Generator().manual_seed(seed)
    reward, value = torch.randn(2, spans.num_tokens, generator=generator, dtype=torch.float64)
    wanted = {name: torch.zeros_like(reward) for name in ("gae carry", "gae step", "return carry", "return reset")}
    for positions in spans_by_loop(spans):
        carried_value = carried = stepped_value = stepped = kept = running = 0.0
        for n, written in reversed(positions):
            if written:
                carried = reward[n] + gamma * carried_value - value[n] + gamma * lam * carried
                carried_value = value[n]
                kept = reward[n] + gamma * kept
            stepped = reward[n] + gamma * stepped_value - value[n] + gamma * lam * stepped
            stepped_value = value[n]
            running = reward[n] + gamma * running
            if written:
                for name, found in zip(wanted, (carried, stepped, kept, running), strict=True):
                    wanted[name][n] = found
            running = running * written
    found = {
        "gae carry": generalised_advantage(reward, value, spans, gamma=gamma, lam=lam, tool_tokens="carry"),
        "gae step": generalised_advantage(reward, value, spans, gamma=gamma, lam=lam, tool_tokens="step"),
        "return carry": reinforce_return(reward, spans, gamma),
        "return reset": reinforce_return(reward, spans, gamma, tool_tokens="reset"),
    }
    for name, values in wanted.items():
        torch.testing.assert_close(found[name], values, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_a_batch_without_policy_tokens_gives_zeros(shape):
    spans = Spans.from_mask(torch.zeros(shape, dtype=torch.bool), group=torch.zeros(shape[0], dtype=torch.int64))
    values = torch.full((shape[0] * shape[1],), NAN)
    for found in (
        generalised_advantage(values, values, spans, gamma=1.0, lam=1.0, tool_tokens="step"),
        reinforce_return(values, spans, 1.0, tool_tokens="reset"),
    ):
        assert torch.equal(found, torch.zeros(shape[0] * shape[1]))


def test_bad_arguments_are_named():
    six = torch.zeros(6)
    with pytest.raises(ValueError, match=r"reward is \[5\] torch.float32, want a real tensor \[6\]"):
        reinforce_return(torch.zeros(5), SPANS, 1.0)
    with pytest.raises(ValueError, match="value is list, want"):
        generalised_advantage(six, [0.0] * 6, SPANS, gamma=1.0, lam=1.0, tool_tokens="carry")
    with pytest.raises(ValueError, match="tool_tokens is 'reset', want 'carry' or 'step'"):
        generalised_advantage(six, six, SPANS, gamma=1.0, lam=1.0, tool_tokens="reset")
    with pytest.raises(ValueError, match="tool_tokens is 'step', want 'carry' or 'reset'"):
        reinforce_return(six, SPANS, 1.0, tool_tokens="step")
    with pytest.raises(ValueError, match="lam is 1.5, want 0 <= lam <= 1"):
        generalised_advantage(six, six, SPANS, gamma=1.0, lam=1.5, tool_tokens="carry")
    with pytest.raises(ValueError, match="gamma is -1"):
        reinforce_return(six, SPANS, -1)
