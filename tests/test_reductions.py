"""Token weights: literal numbers, empty spans, the caller's denominator, split invariance."""

import math
import re

import pytest
import torch

from crest_ops.reductions import action_mean, fixed_length, sequence_mean, token_mean, turn_mean
from crest_ops.spans import Spans

# Trajectory 0: turn 0 with actions of 2 and 1 tokens, turn 1 with an action of 1 and one of no token; trajectory 1: one
# action of 4 tokens; trajectory 2: nothing written.
SPANS = Spans.from_lengths(
    torch.tensor([3, 2, 1, 1, 2, 1, 0, 1, 4, 2]),
    action=torch.tensor([0, 1, 0, 1, 0, 1, 1, 0, 1, 0], dtype=torch.bool),
    turn=torch.tensor([0, 0, 0, 0, 1, 1, 1, 0, 0, 0]),
    trajectory=torch.tensor([0, 0, 0, 0, 0, 0, 0, 1, 1, 2]),
    group=torch.tensor([0, 0, 0]),
)
SHARES = {
    "token": (token_mean, [1 / 8] * 8),
    "action": (action_mean, [1 / 8, 1 / 8, 1 / 4, 1 / 4, 1 / 16, 1 / 16, 1 / 16, 1 / 16]),
    "turn": (turn_mean, [1 / 9, 1 / 9, 1 / 9, 1 / 3, 1 / 12, 1 / 12, 1 / 12, 1 / 12]),
    "sequence": (sequence_mean, [1 / 8] * 8),
    "fixed": (lambda spans, **total: fixed_length(spans, 10, **total), [1 / 30] * 8),
}
COUNTS = {"token": 8, "action": 4, "turn": 3, "sequence": 2, "fixed": 3}


@pytest.mark.parametrize("name", SHARES)
def test_literal_weights(name):
    reduction, wanted = SHARES[name]
    weight = reduction(SPANS)
    assert weight.dtype == torch.float32 and weight.shape == (SPANS.num_tokens,)
    torch.testing.assert_close(weight[SPANS.mask], torch.tensor(wanted))
    assert torch.equal(weight[~SPANS.mask], torch.zeros(9))
    if name != "fixed":
        assert weight.sum().item() == pytest.approx(1)


def test_sequence_mean_differs_from_token_mean_when_lengths_do():
    spans = Spans.from_mask(torch.tensor([[1, 1, 1], [0, 1, 0]], dtype=torch.bool), group=torch.tensor([0, 0]))
    torch.testing.assert_close(sequence_mean(spans), torch.tensor([1 / 6, 1 / 6, 1 / 6, 0, 1 / 2, 0]))


@pytest.mark.parametrize("name", SHARES)
def test_the_total_replaces_the_count(name):
    reduction, wanted = SHARES[name]
    scale = COUNTS[name] / 100
    for total in (100, 100.0, torch.tensor(100)):
        torch.testing.assert_close(reduction(SPANS, total=total)[SPANS.mask], torch.tensor(wanted) * scale)
    for total in (0, -1, math.nan, math.inf, True, "8", [8]):
        with pytest.raises(ValueError, match=re.escape(f"total is {total!r}, want the count of the whole batch")):
            reduction(SPANS, total=total)
    for total in (0, -1.0, math.nan, [8, 8], True):
        with pytest.raises(ValueError, match=r"total is tensor\(.*want the count of the whole batch"):
            reduction(SPANS, total=torch.tensor(total))


@pytest.mark.parametrize("name", SHARES)
def test_pieces_of_a_batch_add_up_to_the_whole(name):
    reduction, _ = SHARES[name]
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(8, 12, generator=generator) < 0.5
    turn = torch.arange(12).div(4, rounding_mode="floor").expand(8, 12)
    whole = Spans.from_mask(mask, group=torch.zeros(8, dtype=torch.int64), turn=turn)
    count = {
        "token": int(mask.sum()),
        "action": whole.num_actions,
        "turn": whole.num_turns,
        "sequence": int(mask.any(1).sum()),
        "fixed": 8,
    }[name]
    for rows in (1, 2, 8):
        pieces = [
            reduction(Spans.from_mask(m, group=torch.zeros(rows, dtype=torch.int64), turn=t), total=count)
            for m, t in zip(mask.split(rows), turn.split(rows), strict=True)
        ]
        assert torch.equal(torch.cat(pieces), reduction(whole))


@pytest.mark.parametrize("name", SHARES)
@pytest.mark.parametrize("shape", [(2, 3), (0, 3)])
def test_an_all_masked_batch_gives_zeros(name, shape):
    group = torch.zeros(shape[0], dtype=torch.int64)
    spans = Spans.from_mask(torch.zeros(shape, dtype=torch.bool), group=group)
    assert torch.equal(SHARES[name][0](spans), torch.zeros(shape[0] * shape[1]))


def test_duplicating_an_actions_length_leaves_its_share_under_action_mean_only():
    def shares(length):
        spans = Spans.from_lengths(
            torch.tensor([length, 1, 3]),
            action=torch.tensor([True, False, True]),
            turn=torch.tensor([0, 0, 0]),
            trajectory=torch.tensor([0, 0, 0]),
            group=torch.tensor([0]),
        )
        first = spans.action_of_token == 0
        return action_mean(spans)[first].sum().item(), token_mean(spans)[first].sum().item()

    assert shares(2) == pytest.approx((1 / 2, 2 / 5))
    assert shares(4) == pytest.approx((1 / 2, 4 / 7))


def test_a_length_without_a_meaning_is_refused():
    for length in (0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"length is {length}, want"):
            fixed_length(SPANS, length)
