"""TRIAGE: numbers by hand, the bound, the options, the projection theorem on synthetic data."""

from dataclasses import replace
from fractions import Fraction
from typing import get_type_hints

import pytest
import torch
from every_signal import batches
from hypothesis import given, settings
from hypothesis import strategies as st

from crest_ops.methods import grpo, triage
from crest_ops.methods.triage import ROLES, TriageConfig, role_projection
from crest_ops.signals import AdditiveCredit, Signals
from crest_ops.spans import Spans

# One group of two rollouts with advantages +1 and -1; each two actions, of 2 and 1 tokens, tool output before each.
SPANS = Spans.from_lengths(
    torch.tensor([1, 2, 1, 1, 1, 2, 1, 1]),
    action=torch.tensor([0, 1, 0, 1, 0, 1, 0, 1], dtype=torch.bool),
    turn=torch.zeros(8, dtype=torch.int64),
    trajectory=torch.tensor([0] * 4 + [1] * 4),
    group=torch.tensor([0, 0]),
)
SIGNALS = Signals(reward_B=torch.tensor([1.0, 0], dtype=torch.float64), role_S=torch.tensor([0, 3, 1, 2]))
EXACT = TriageConfig(unbiased=False, std_eps=0.0)
TABLE = (1.0, 0.5, -0.1, -0.5)


def close(found, wanted):
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=found.dtype), rtol=0, atol=1e-12)


def credit(config=EXACT, **changes):
    return triage.assign(SPANS, replace(SIGNALS, **changes), config).credit_N


def test_by_hand():
    found = triage.assign(SPANS, SIGNALS, EXACT)
    close(found.credit_N, [0, 1.5, 1.5, 0, 0.75, 0, -0.75, -0.75, 0, -1.05])
    close(found.advantage_N, [0, 1, 1, 0, 1, 0, -1, -1, 0, -1])
    assert EXACT.lam == 0.5 and EXACT.table == TABLE and len(ROLES) == 4
    assert get_type_hints(triage.assign)["return"] is type(found) is AdditiveCredit
    torch.testing.assert_close(found.token_weight_N[[1, 4, 6, 9]], torch.full((4,), 1 / 6))


def test_actions_that_do_not_face_the_environment_keep_the_advantage():
    found = credit(action_mask_S=torch.tensor([True, False, False, True]))
    close(found, [0, 1.5, 1.5, 0, 1, 0, -1, -1, 0, -1.05])


def test_a_table_for_failures_by_hand():
    """Progress counts in successes, exploration in failures, a regression in successes only."""
    config = replace(EXACT, lam=1.0, table=(0.5, 0.0, 0.0, -0.75), failure_table=(0.0, 0.25, -0.5, 0.0))
    close(credit(config), [0, 1.5, 1.5, 0, 0.25, 0, -0.75, -0.75, 0, -1.5])
    level = torch.tensor([1.0, 1.0], dtype=torch.float64)  # advantages of 0 take the first table
    close(credit(config, reward_B=level), [0, 0.5, 0.5, 0, -0.75, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_table_is_looked_up_exactly(dtype):
    """With an advantage of 0 and lam = 1 the credit is the table."""
    table = (0.1, 0.7, -0.3, -1 / 3)
    found = credit(replace(EXACT, lam=1.0, table=table), reward_B=torch.tensor([0.1, 0.1], dtype=dtype))
    assert found.dtype == dtype
    wanted = torch.tensor([table[0], table[3], table[1], table[2]], dtype=dtype)
    assert torch.equal(found[[1, 4, 6, 9]], wanted)


TABLES = st.tuples(*[st.floats(-2, 2)] * 4)
CONFIGS = st.builds(
    TriageConfig, lam=st.floats(0, 1), table=TABLES, failure_table=st.none() | TABLES, direction_safe=st.booleans()
)


@settings(deadline=None, max_examples=40)
@given(batches(), CONFIGS)
def test_the_shift_is_bounded_and_equal_for_equal_roles(case, config):
    spans, signals = case
    found = triage.assign(spans, signals, config)
    plain = grpo.assign(spans, signals).credit_N
    assert torch.equal(found.advantage_N, plain)
    largest = max(map(abs, config.table + (config.failure_table or config.table)))
    assert ((found.credit_N - plain).abs() <= config.lam * largest + 1e-12).all()
    same = replace(signals, role_S=torch.full_like(signals.role_S, 2), action_mask_S=None)
    shift = (triage.assign(spans, same, replace(config, failure_table=None, direction_safe=False)).credit_N - plain)[
        spans.mask
    ]
    torch.testing.assert_close(shift, torch.full_like(shift, config.lam * config.table[2]), rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=40)
@given(batches(), TABLES)
def test_without_a_shift_it_is_grpo_bitwise(case, table):
    spans, signals = case
    base = grpo.assign(spans, signals)
    for config in (TriageConfig(lam=0.0, table=table), TriageConfig(table=(0.0,) * 4, direction_safe=True)):
        found = triage.assign(spans, signals, config)
        assert torch.equal(found.credit_N, base.credit_N) and torch.equal(found.token_weight_N, base.token_weight_N)
        assert found.surrogate == base.surrogate


def test_exploration_softens_a_failure_and_a_regression_a_success():
    roles = torch.tensor([3, 3, 1, 1])
    found, plain = credit(role_S=roles), credit(replace(EXACT, lam=0.0))
    assert (found[[1, 2, 4]] < plain[[1, 2, 4]]).all() and (found[[6, 7, 9]] > plain[[6, 7, 9]]).all()


# Nine rollouts of ten succeed, or fail: the advantage of the nine is 1/3 and -1/3.
TEN = Spans.from_mask(torch.ones(10, 1, dtype=torch.bool), group=torch.zeros(10, dtype=torch.int64))
NINE = torch.tensor([1.0] * 9 + [0.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("reward", "role", "plain", "turned"), [(NINE, 3, 1 / 3, -1 / 6), (1 - NINE, 1, -1 / 3, 1 / 6)]
)
def test_a_role_can_turn_the_sign_round_unless_it_is_told_not_to(reward, role, plain, turned):
    """A regression in a success becomes negative, an exploration in a failure positive."""
    given_ = Signals(reward_B=reward, role_S=torch.full((10,), role))
    config = replace(EXACT, lam=1.0)
    found = triage.assign(TEN, given_, config)
    assert found.advantage_N[0].item() == pytest.approx(plain) and found.credit_N[0].item() == pytest.approx(turned)
    safe = triage.assign(TEN, given_, replace(config, direction_safe=True)).credit_N
    # lam shrinks to |A| / (2 * 1): the shift is half of the table's entry times |A|.
    assert safe[0].item() == pytest.approx(plain + TABLE[role] / 6)


@settings(deadline=None, max_examples=40)
@given(batches(), CONFIGS)
def test_direction_safe_turns_no_sign(case, config):
    spans, signals = case
    found = triage.assign(spans, signals, replace(config, direction_safe=True))
    plain = found.advantage_N
    assert torch.equal(found.credit_N.sign(), plain.sign())
    assert (found.credit_N.abs() >= plain.abs() / 2 - 1e-12).all()
    assert (found.credit_N.abs() <= plain.abs() * 1.5 + 1e-12).all()


def test_direction_safe_leaves_small_shifts_alone():
    config = replace(EXACT, lam=0.25)
    assert torch.equal(credit(replace(config, direction_safe=True)), credit(config))


@settings(deadline=None, max_examples=40)
@given(batches())
def test_whitening_gives_the_batch_mean_zero_and_std_one(case):
    spans, signals = case
    plain = triage.assign(spans, signals).credit_N[spans.mask]
    white = triage.assign(spans, signals, TriageConfig(whitening=True)).credit_N
    assert not white[~spans.mask].any()
    white = white[spans.mask]
    if len(plain) == 0 or plain.max() - plain.min() < 1e-6:
        assert white.abs().sum() < 1e-6
        return
    wanted = (plain - plain.mean()) / (plain.std(unbiased=False) + 1e-8)
    torch.testing.assert_close(white, wanted, rtol=1e-9, atol=1e-9)


ACTIONS = st.lists(st.tuples(st.integers(-8, 8), st.integers(0, 3)), min_size=1, max_size=30)


def squared_error(actions, table):
    return sum((Fraction(d) - table[r]) ** 2 for d, r in actions) / len(actions)


@settings(deadline=None, max_examples=50)
@given(ACTIONS, st.tuples(*[st.integers(-8, 8)] * 4))
def test_projection_theorem(actions, table):
    """E[delta | rho] minimises the squared error, and a fixed table changes it by sum p (c^2 - 2 c E[delta | rho])."""
    delta, roles = (torch.tensor(column) for column in zip(*actions, strict=True))
    found = role_projection(delta.double(), roles)
    members = [[Fraction(d) for d, r in actions if r == role] for role in range(4)]
    exact = [sum(ds) / len(ds) if ds else Fraction(0) for ds in members]
    torch.testing.assert_close(found, torch.tensor([float(e) for e in exact], dtype=torch.float64), rtol=1e-15, atol=0)
    assert squared_error(actions, exact) <= squared_error(actions, table)
    share = [Fraction(len(ds), len(actions)) for ds in members]
    change = sum(p * (c * c - 2 * c * e) for p, c, e in zip(share, table, exact, strict=True))
    assert squared_error(actions, table) - squared_error(actions, [0] * 4) == change


def test_a_fixed_table_helps_only_where_the_theorem_says_so():
    """Four actions, residuals 2, 0 (role 0) and -1, -3 (role 3): means 1 and -2, error 14/4 without a table."""
    delta, roles = torch.tensor([2.0, 0, -1, -3]), torch.tensor([0, 0, 3, 3])
    assert role_projection(delta, roles).tolist() == [1, 0, 0, -2]
    actions = list(zip(delta.int().tolist(), roles.tolist(), strict=True))
    assert squared_error(actions, [1, 0, 0, -2]) == 1
    helps, hurts = [Fraction(1), 0, 0, Fraction(-1, 2)], [Fraction(3), 0, 0, Fraction(1, 2)]
    # (1 - 2)/2 + (1/4 - 2)/2 = -11/8 and (9 - 6)/2 + (1/4 + 2)/2 = 21/8
    assert squared_error(actions, helps) - Fraction(14, 4) == Fraction(-11, 8)
    assert squared_error(actions, hurts) - Fraction(14, 4) == Fraction(21, 8)


def test_bad_roles_are_named():
    with pytest.raises(ValueError, match=r"signal role_S\[2\] is 4, want a value in \[0, 3\]"):
        credit(role_S=torch.tensor([0, 1, 4, 2]))
    with pytest.raises(ValueError, match="signal role_S has dtype torch.float32, want int"):
        credit(role_S=torch.zeros(4))
    zeros = torch.zeros(3)
    for roles, message in (
        (torch.tensor([0, 4, 1]), r"roles\[1\] is 4, want 0 <= role < 4"),
        (torch.tensor([0, 1, -1]), r"roles\[2\] is -1"),
        (torch.zeros(3), r"roles is \[3\] torch.float32, want \[S\] int"),
        (torch.tensor([0, 1]), r"delta is \[3\] torch.float32, want a real tensor \[2\]"),
        ([0, 1, 2], "roles is list"),
    ):
        with pytest.raises(ValueError, match=message):
            role_projection(zeros, roles)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lam": 1.5}, "lam is 1.5, want a number with 0 <= lam <= 1"),
        ({"table": (1.0, 0.5, -0.1)}, r"table is \(1.0, 0.5, -0.1\), want a tuple of 4"),
        ({"table": [1.0, 0.5, -0.1, -0.5]}, r"table is \[1.0"),
        ({"failure_table": (1.0, 0.5, -0.1, float("inf"))}, "failure_table is"),
        ({"failure_table": ()}, r"failure_table is \(\)"),
        ({"whitening": 2}, "whitening is 2"),
        ({"direction_safe": None}, "direction_safe is None"),
        ({"reduction": "median"}, "reduction is 'median'"),
    ],
)
def test_bad_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        TriageConfig(**changes)
