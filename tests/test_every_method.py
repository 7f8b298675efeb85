"""What holds of every method: dtypes, layouts, groups that do not touch each other, families, cost, the loss.

Shape letters: N token positions, S actions, K turns, B trajectories.
"""

import typing
from dataclasses import fields, replace

import pytest
import torch
from every_signal import batches, random_signals
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode

from crest_ops import linear_policy_loss
from crest_ops.methods import METHODS
from crest_ops.signals import AdditiveCredit, Credit, MultiplicativeCredit, Signals
from crest_ops.spans import Spans

EVERY = pytest.mark.parametrize("name", METHODS)


def family(name):
    return typing.get_type_hints(METHODS[name].assign)["return"]


def as_dtype(signals, dtype):
    floating = {
        field.name: value.to(dtype)
        for field in fields(Signals)
        if (value := getattr(signals, field.name)).is_floating_point()
    }
    return replace(signals, **floating)


@EVERY
@settings(deadline=None, max_examples=20)
@given(case=batches())
def test_credit_is_finite_and_stays_inside_the_spans(name, case):
    spans, signals = case
    credit = METHODS[name].assign(spans, signals)
    assert type(credit) is family(name)
    for values in (credit.credit_N, credit.token_weight_N, credit.distill_N):
        if values is not None:
            assert values.shape == (spans.num_tokens,) and not values.requires_grad
            assert torch.isfinite(values).all() and not values[~spans.mask].any()
    assert credit.credit_N.dtype == torch.float64
    single = METHODS[name].assign(spans, as_dtype(signals, torch.float32))
    assert single.credit_N.dtype == single.token_weight_N.dtype == torch.float32
    torch.testing.assert_close(single.credit_N.double(), credit.credit_N, rtol=1e-3, atol=1e-4)


@EVERY
@settings(deadline=None, max_examples=20)
@given(case=batches())
def test_the_family_keeps_its_word(name, case):
    """Multiplicative: the verifier's sign, and 0 where it says 0."""
    credit = METHODS[name].assign(*case)
    if isinstance(credit, MultiplicativeCredit):
        assert (credit.credit_N * credit.advantage_N >= 0).all()
        assert not credit.credit_N[credit.advantage_N == 0].any()
    elif not isinstance(credit, AdditiveCredit):
        assert not hasattr(credit, "advantage_N")


@pytest.mark.parametrize("name", [name for name in METHODS if family(name) is AdditiveCredit])
def test_an_additive_method_can_turn_the_sign_round(name):
    spans = Spans.from_lengths(
        torch.tensor([1, 2] * 24),
        action=torch.tensor([False, True] * 24),
        turn=torch.arange(3).repeat_interleave(2).repeat(8),
        trajectory=torch.arange(8).repeat_interleave(6),
        group=torch.arange(8) // 4,
    )
    found = [METHODS[name].assign(spans, random_signals(spans, seed)) for seed in range(20)]
    assert any((credit.credit_N * credit.advantage_N < 0).any() for credit in found)


@EVERY
@settings(deadline=None, max_examples=20)
@given(case=batches(empty=False))
def test_packed_and_padded_are_the_same(name, case):
    spans, signals = case
    row_N = torch.repeat_interleave(spans.trajectory_of_turn, torch.bincount(spans.turn_of_action, minlength=0))
    lengths = [0] * spans.num_trajectories
    place = []  # of every policy token in the padded batch
    tokens = spans.action_of_token[spans.mask].tolist()
    previous = None
    for action in tokens:
        row = int(row_N[action])
        lengths[row] += 1 + (action != previous)  # a tool token between two actions
        place.append((row, lengths[row] - 1))
        previous = action
    T = max(lengths, default=0) + 1
    at = torch.tensor([row * T + column for row, column in place], dtype=torch.int64)
    mask = torch.zeros(spans.num_trajectories * T, dtype=torch.bool)
    mask[at] = True
    turn = torch.zeros(len(mask), dtype=torch.int64)
    turn[at] = spans.turn_index[spans.turn_of_token[spans.mask].long()]
    padded = Spans.from_mask(mask.view(-1, T), group=spans.group_of_trajectory, turn=turn.view(-1, T))

    def spread(values):
        out = torch.full((len(mask),), torch.nan, dtype=values.dtype)
        out[at] = values[spans.mask]
        return out

    per_token = {
        field.name: spread(getattr(signals, field.name)) for field in fields(Signals) if field.name.endswith("_N")
    }
    packed = METHODS[name].assign(spans, signals)
    found = METHODS[name].assign(padded, replace(signals, **per_token))
    torch.testing.assert_close(found.credit_N[at], packed.credit_N[spans.mask])
    torch.testing.assert_close(found.token_weight_N[at], packed.token_weight_N[spans.mask])
    if packed.distill_N is not None:
        torch.testing.assert_close(found.distill_N[at], packed.distill_N[spans.mask])


@EVERY
@settings(deadline=None, max_examples=20)
@given(case=batches())
def test_groups_do_not_touch_each_other(name, case):
    spans, signals = case
    other = random_signals(spans, 7)
    of_letter = {
        "N": (spans.group_of_trajectory[spans.trajectory_of_token.clamp(min=0).long()] == 0) & spans.mask,
        "S": spans.group_of_trajectory[spans.trajectory_of_action] == 0,
        "K": spans.group_of_turn == 0,
        "B": spans.group_of_trajectory == 0,
    }
    states = torch.bincount(spans.trajectory_of_action, minlength=spans.num_trajectories) + 1
    mine = {"gold_logp": of_letter["B"].repeat_interleave(states)}
    mixed = {
        field.name: torch.where(
            mine.get(field.name, of_letter.get(field.name[-1])),
            getattr(signals, field.name),
            getattr(other, field.name),
        )
        for field in fields(Signals)
    }
    credit, found = (METHODS[name].assign(spans, given).credit_N for given in (signals, replace(signals, **mixed)))
    torch.testing.assert_close(found[of_letter["N"]], credit[of_letter["N"]], rtol=0, atol=1e-12)


@EVERY
def test_a_group_of_one_and_a_batch_without_tokens(name):
    alone = Spans.from_mask(torch.tensor([[False, True, False, True]]), group=torch.tensor([0]))
    credit = METHODS[name].assign(alone, random_signals(alone, 1))
    assert torch.isfinite(credit.credit_N).all()
    nothing = Spans.from_mask(torch.zeros(2, 3, dtype=torch.bool), group=torch.tensor([0, 0]))
    credit = METHODS[name].assign(nothing, random_signals(nothing, 1))
    assert not credit.credit_N.any() and not credit.token_weight_N.any()


@pytest.mark.parametrize("name", ["crest", "dapo", "factor"])
def test_assign_is_one_dynamic_graph(name):
    """With the action mask, which makes FACTOR split its spans, and a constant group, which DAPO leaves out."""
    spans = Spans.from_mask(
        torch.tensor([[0, 1, 1, 0, 1, 1], [0, 1, 0, 1, 1, 0], [0, 1, 1, 0, 0, 0]]).bool(), group=torch.tensor([0, 0, 1])
    )
    signals = random_signals(spans, 3)

    def values(spans, signals):
        credit = METHODS[name].assign(spans, signals)
        return credit.credit_N, credit.token_weight_N

    torch._dynamo.reset()  # one function for all methods: its graphs would count against the recompile limit
    compiled = torch.compile(values, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(spans, signals), values(spans, signals), rtol=0, atol=1e-12)


class _Counter(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@EVERY
def test_no_loop_over_tokens_actions_or_trajectories(name):
    """64 times as many of all three take at most a few more torch calls (scans double their distance)."""

    def calls(num_trajectories, num_actions):
        M = 2 * num_trajectories * num_actions
        spans = Spans.from_lengths(
            torch.full((M,), 3),
            action=torch.tensor([False, True]).repeat(M // 2),
            turn=(torch.arange(num_actions) // 2).repeat_interleave(2).repeat(num_trajectories),
            trajectory=torch.arange(num_trajectories).repeat_interleave(2 * num_actions),
            group=torch.arange(num_trajectories) // 4,
        )
        signals = random_signals(spans, 0)
        with _Counter() as counter:
            METHODS[name].assign(spans, signals)
        return counter.count

    small, large = calls(8, 4), calls(64, 32)
    assert large <= small + 120 and large < 3 * small


@EVERY
def test_every_method_goes_through_the_loss(name):
    spans = Spans.from_mask(
        torch.tensor([[0, 1, 1, 0, 1, 1], [0, 1, 0, 1, 1, 0]]).bool(),
        group=torch.tensor([0, 0]),
        turn=torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1]]),
    )
    credit: Credit = METHODS[name].assign(spans, as_dtype(random_signals(spans, 5), torch.float32))
    g = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(12, 8, generator=g), torch.randn(20, 8, generator=g)
    hidden.requires_grad_()
    loss = linear_policy_loss(
        hidden,
        head,
        torch.randint(0, 20, (12,), generator=g),
        credit.credit_N,
        token_weight=credit.token_weight_N,
        surrogate=credit.surrogate,
        spans=spans,
    ).loss
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(hidden.grad).all()
    assert not hidden.grad[~spans.mask].any() and hidden.grad[credit.credit_N != 0].any()
