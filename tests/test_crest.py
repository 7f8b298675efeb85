"""CrEST: numbers worked by hand for three turns with tool output between, and the paper's properties."""

import math
from dataclasses import replace

import pytest
import torch
from every_signal import ragged_spans
from hypothesis import given, settings
from hypothesis import strategies as st

from crest_ops.allocation import agreement_weight, crest_modulation, direction_gate, entropy_gate
from crest_ops.methods import METHODS
from crest_ops.methods.crest import CrestConfig, crest_credit
from crest_ops.methods.turn_grpo import TurnGRPOConfig
from crest_ops.signals import Signals
from crest_ops.spans import Spans

CREST, TURN_GRPO = METHODS["crest"], METHODS["turn_grpo"]
NAN, INF = float("nan"), float("inf")

# One group of two rollouts, three turns each; tool output and user requests lie between the actions.
# Rollout 0: turn 0 = actions of 2 and 1 tokens, turn 1 = one action of 2, turn 2 = one of 1.
# Rollout 1: turn 0 = one action of 1 token, turn 1 = one of 2, turn 2 = one of 1.
SPANS = Spans.from_lengths(
    torch.tensor([2, 2, 1, 1, 1, 2, 2, 1, 2, 1, 1, 2, 3, 1]),
    action=torch.tensor([0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1], dtype=torch.bool),
    turn=torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2]),
    trajectory=torch.tensor([0] * 8 + [1] * 6),
    group=torch.tensor([0, 0]),
)
TURN_REWARD = [1.0, 0, 1, 0, 1, 1]  # population z-score with two rollouts: +1, -1, 0 and -1, +1, 0
GAP = [0.4, -0.2, 0.2, -0.4, 0.4, 1.0, -5, 10, 0, 3]
SURPRISAL = [1.0, 3, 1, 3, 1, 3, 2, 2, 2, 2]  # rollout 0: mean 2, std 1; rollout 1: no spread, gate 1/2
# gap / tau = .2 and .1: exp - 1 = .2214027582 and .1051709181; at z = -1 lam_eff = .3 * .7689414214 = .2306824264; at
# z = +1 it is clipped to .3, at z = 0 it is .3; past the clip w - 1 = .28.
CREDIT = [1.0510737255, 1, 1.0242610826, -1.0664208275, -1, 0, -1.084, 1.084, 1, 0]
EXACT = CrestConfig(unbiased=False, std_eps=0.0)


def on_tokens(values, spans=SPANS, outside=NAN, dtype=torch.float64):
    out = torch.full((spans.num_tokens,), outside, dtype=dtype)
    out[spans.mask] = torch.tensor(values, dtype=dtype)
    return out


def signals(dtype=torch.float64, **changes):
    given = {"turn_reward": TURN_REWARD, "gap": GAP, "surprisal": SURPRISAL, **changes}
    return Signals(
        turn_reward_K=torch.tensor(given["turn_reward"], dtype=dtype),
        teacher_gap_N=on_tokens(given["gap"], dtype=dtype),
        surprisal_N=on_tokens(given["surprisal"], dtype=dtype),
    )


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-9), (torch.float32, 1e-6)])
def test_three_turns_by_hand(dtype, atol):
    credit = CREST.assign(SPANS, signals(dtype), EXACT)
    assert credit.credit_N.dtype == dtype
    torch.testing.assert_close(credit.credit_N, on_tokens(CREDIT, outside=0.0, dtype=dtype), rtol=0, atol=atol)
    torch.testing.assert_close(credit.token_weight_N, on_tokens([0.1] * 10, outside=0.0, dtype=torch.float32))
    assert (credit.surrogate.low, credit.surrogate.high) == (0.2, 0.28)


def test_turn_grpo_by_hand():
    credit = TURN_GRPO.assign(SPANS, signals(), TurnGRPOConfig(unbiased=False, std_eps=0.0))
    assert torch.equal(credit.credit_N, on_tokens([1, 1, 1, -1, -1, 0, -1, 1, 1, 0], outside=0.0))
    sample = TURN_GRPO.assign(SPANS, signals(), TurnGRPOConfig(std_eps=0.0)).credit_N
    torch.testing.assert_close(sample, credit.credit_N * 0.5**0.5)


def test_scopes_and_gate_source_by_hand():
    def first_token(**changes):
        config = replace(EXACT, **changes)
        given = signals()
        given = replace(given, surprisal_N=None, entropy_N=given.surprisal_N) if config.gate == "entropy" else given
        return CREST.assign(SPANS, given, config).credit_N[2].item()

    def expected(z):
        return 1 + 0.3 * (1 + 0.5 * (2 / (1 + math.exp(-z)) - 1)) * 0.2214027582

    assert first_token(scope="trajectory") == pytest.approx(expected(-1), abs=1e-9)
    assert first_token(scope="batch") == pytest.approx(expected(-1 / 0.6**0.5), abs=1e-9)  # mean 2, variance 6/10
    assert first_token(scope="turn") == pytest.approx(expected((1 - 5 / 3) / (8 / 9) ** 0.5), abs=1e-9)  # 1, 3, 1
    assert first_token(gate="entropy") == pytest.approx(expected(-1), abs=1e-9)


def test_padded_and_packed_give_the_same_credit():
    mask = torch.zeros(2, 15, dtype=torch.bool)
    turn = torch.full((2, 15), -7)
    position = torch.cat([torch.arange(12), 15 + torch.arange(10)])  # of the packed tokens in the padded batch
    mask.view(-1)[position] = SPANS.mask
    turn.view(-1)[position] = torch.where(SPANS.mask, SPANS.turn_index[SPANS.turn_of_token.long()], -7)
    padded = Spans.from_mask(mask, group=torch.tensor([0, 0]), turn=turn)
    spread = {"teacher_gap_N": on_tokens(GAP, padded), "surprisal_N": on_tokens(SURPRISAL, padded)}
    wide, packed = CREST.assign(padded, replace(signals(), **spread), EXACT), CREST.assign(SPANS, signals(), EXACT)
    assert torch.equal(wide.credit_N[position], packed.credit_N)
    assert torch.equal(wide.token_weight_N[position], packed.token_weight_N)
    assert wide.credit_N.count_nonzero() == packed.credit_N.count_nonzero()


def test_masked_tokens_never_change_anything():
    wanted = CREST.assign(SPANS, signals(), EXACT)
    for outside in (0.0, 1e30, INF, -INF, NAN):
        given = replace(signals(), teacher_gap_N=on_tokens(GAP, outside=outside))
        given = replace(given, surprisal_N=on_tokens(SURPRISAL, outside=outside))
        for scope in ("batch", "trajectory", "turn"):
            found = CREST.assign(SPANS, given, replace(EXACT, scope=scope)).credit_N
            assert torch.equal(found, CREST.assign(SPANS, signals(), replace(EXACT, scope=scope)).credit_N)
            assert torch.equal(found[~SPANS.mask], torch.zeros(12, dtype=torch.float64))
        assert torch.equal(CREST.assign(SPANS, given, EXACT).credit_N, wanted.credit_N)


@st.composite
def batches(draw):
    spans = draw(ragged_spans(shortest_reply=0))

    def vector(n, values):
        return torch.tensor(draw(st.lists(values, min_size=n, max_size=n)), dtype=torch.float64)

    reward = vector(spans.num_turns, st.sampled_from([0.0, 0.5, 1.0]))
    gap = vector(spans.num_tokens, st.floats(-60, 60))
    surprisal = vector(spans.num_tokens, st.floats(0, 20))
    config = CrestConfig(
        lam=draw(st.sampled_from([0.0, 0.3, 1.0])),
        eps=draw(st.sampled_from([0.0, 0.28, 1.0])),
        rho=draw(st.sampled_from([0.0, 0.5, 1.0])),
        tau=draw(st.sampled_from([0.1, 2.0])),
        scope=draw(st.sampled_from(["batch", "trajectory", "turn"])),
    )
    return spans, Signals(turn_reward_K=reward, teacher_gap_N=gap, surprisal_N=surprisal), config


def baseline(spans, given):
    return TURN_GRPO.assign(spans, given).credit_N


@settings(deadline=None, max_examples=40)
@given(batches())
def test_the_teacher_never_turns_shrinks_or_exceeds_the_bound(case):
    """P1 sign, P2 bound (absolute: on the summed change, whatever the gradients), P3 amplify only."""
    spans, given, config = case
    plain, credit = baseline(spans, given), CREST.assign(spans, given, config).credit_N
    assert torch.equal(credit.sign(), plain.sign())
    assert (credit.abs() >= plain.abs()).all()
    assert (credit.abs() <= plain.abs() * (1 + config.lam * config.eps) * (1 + 1e-12)).all()
    gradient_N3 = torch.randn(spans.num_tokens, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    change = ((credit - plain)[:, None] * gradient_N3).sum(0).norm()
    bound = config.lam * config.eps * (plain[:, None] * gradient_N3).norm(dim=1).sum()
    assert change <= bound * (1 + 1e-9) + 1e-12


@settings(deadline=None, max_examples=40)
@given(batches())
def test_without_a_teachers_word_it_is_turn_grpo_bitwise(case):
    spans, given, config = case
    plain = baseline(spans, given)
    assert torch.equal(CREST.assign(spans, given, replace(config, lam=0.0)).credit_N, plain)
    silent = replace(given, teacher_gap_N=torch.zeros(spans.num_tokens, dtype=torch.float64))
    assert torch.equal(CREST.assign(spans, silent, config).credit_N, plain)
    against = replace(given, teacher_gap_N=-plain.sign() * given.teacher_gap_N.abs())
    assert torch.equal(CREST.assign(spans, against, config).credit_N, plain)


@settings(deadline=None, max_examples=40)
@given(batches(), st.floats(1, 3))
def test_monotone_in_the_gap(case, factor):
    spans, given, config = case
    credit = CREST.assign(spans, given, config).credit_N.abs()
    louder = CREST.assign(spans, replace(given, teacher_gap_N=factor * given.teacher_gap_N), config).credit_N.abs()
    assert (louder >= credit).all()


def test_monotone_in_the_surprisal():
    """Raising one token's surprisal raises its own phi, up to the clip at lam."""
    phis = []
    for surprisal in (0.0, 0.5, 1.0, 1.5, 2.0, 5.0):
        given = signals(surprisal=[surprisal, *SURPRISAL[1:]])
        phis.append(CREST.assign(SPANS, given, EXACT).credit_N[2].item())
    assert phis == sorted(phis) and phis[0] < phis[1] < phis[2]
    assert phis[-1] == pytest.approx(1 + 0.3 * 0.2214027582, abs=1e-9)


def test_phi_stays_in_the_papers_interval():
    gap = torch.linspace(-60, 60, 1001, dtype=torch.float64)
    for sign in (-1.0, 0.0, 1.0):
        for gate in (0.0, 0.3, 0.5, 1.0):
            phi = crest_modulation(
                torch.full_like(gap, sign), gap, torch.full_like(gap, gate), lam=0.3, eps=0.28, tau=2.0, rho=0.5
            )
            assert phi.min() >= 1 and phi.max() <= 1.084 + 1e-12
            if sign == 0:
                assert torch.equal(phi, torch.ones_like(phi))
            elif gate >= 0.5:
                assert phi.max().item() == pytest.approx(1.084)


@pytest.mark.parametrize("others", [[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
def test_a_failed_turn_is_negative_whatever_the_others_did(others):
    reward = [others[0], 0.0, others[1], *([1.0] * 3)]
    credit = CREST.assign(SPANS, signals(turn_reward=reward), CrestConfig()).credit_N
    assert (credit[(SPANS.turn_of_token == 1)] < 0).all()


def test_turn_order_does_not_matter():
    """Both rollouts play their turns in another order: each turn keeps its credit (statistics over the trajectory)."""
    order = [2, 0, 1]
    pieces = [[(2, 1), (2,), (1,)], [(1,), (2,), (1,)]]  # action lengths of each turn of each rollout

    def build(turn_order):
        lengths, turns, trajectories, source = [], [], [], []
        base = 0
        for i, turns_of_rollout in enumerate(pieces):
            starts, at = [], base
            for actions in turns_of_rollout:
                starts.append(at)
                at += sum(actions)
            for place, k in enumerate(turn_order):
                lengths += turns_of_rollout[k]
                turns += [place] * len(turns_of_rollout[k])
                trajectories += [i] * len(turns_of_rollout[k])
                source += range(starts[k], starts[k] + sum(turns_of_rollout[k]))
            base = at
        spans = Spans.from_lengths(
            torch.tensor(lengths),
            action=torch.ones(len(lengths), dtype=torch.bool),
            turn=torch.tensor(turns),
            trajectory=torch.tensor(trajectories),
            group=torch.tensor([0, 0]),
        )
        reward = torch.tensor(TURN_REWARD, dtype=torch.float64).view(2, 3)[:, turn_order].flatten()
        values = {
            "teacher_gap_N": torch.tensor(GAP, dtype=torch.float64)[source],
            "surprisal_N": torch.tensor(SURPRISAL, dtype=torch.float64)[source],
        }
        return CREST.assign(spans, Signals(turn_reward_K=reward, **values), EXACT).credit_N, source

    straight, _ = build([0, 1, 2])
    shuffled, source = build(order)
    torch.testing.assert_close(straight, torch.tensor(CREDIT, dtype=torch.float64), rtol=0, atol=1e-9)
    torch.testing.assert_close(shuffled, straight[source], rtol=0, atol=1e-12)


def test_groups_of_one_and_turns_of_one_rollout_get_nothing():
    spans = Spans.from_mask(
        torch.ones(2, 2, dtype=torch.bool), group=torch.tensor([0, 1]), turn=torch.tensor([[0, 1], [0, 1]])
    )
    given = Signals(turn_reward_K=torch.tensor([1.0, 0, 0, 1]), teacher_gap_N=torch.ones(4), surprisal_N=torch.ones(4))
    assert torch.equal(CREST.assign(spans, given, CrestConfig()).credit_N, torch.zeros(4))
    spans = Spans.from_mask(
        torch.ones(2, 2, dtype=torch.bool), group=torch.tensor([0, 0]), turn=torch.tensor([[0, 1], [0, 2]])
    )
    credit = CREST.assign(spans, given, EXACT).credit_N
    assert credit[[1, 3]].tolist() == [0, 0] and credit[0] > 1 and credit[2] == -1


def test_coefficients_are_detached():
    given = Signals(
        turn_reward_K=torch.tensor(TURN_REWARD),
        teacher_gap_N=on_tokens(GAP).requires_grad_(),
        surprisal_N=on_tokens(SURPRISAL).requires_grad_(),
    )
    credit = CREST.assign(SPANS, given, EXACT)
    assert not credit.credit_N.requires_grad and not credit.token_weight_N.requires_grad


def test_the_segment_pass_is_the_method():
    advantage_K = torch.tensor([1.0, -1, 0, -1, 1, 0], dtype=torch.float64)
    credit_N = crest_credit(advantage_K, on_tokens(GAP), on_tokens(SURPRISAL), SPANS, EXACT)
    torch.testing.assert_close(credit_N, on_tokens(CREDIT, outside=0.0), rtol=0, atol=1e-9)


def test_a_mask_leaves_further_tokens_out_of_credit_and_statistics():
    advantage_K = torch.tensor([1.0, -1, 0, -1, 1, 0], dtype=torch.float64)
    mask = torch.ones(SPANS.num_tokens, dtype=torch.bool)
    mask[3] = False  # rollout 0 keeps the surprisals 1, 1, 3, 1, 3: mean 9/5, variance 24/25
    wanted = None
    for outside in (0.0, NAN, INF):
        gap, surprisal = on_tokens(GAP), on_tokens(SURPRISAL)
        gap[3] = surprisal[3] = outside
        found = crest_credit(advantage_K, gap, surprisal, SPANS, EXACT, mask=mask)
        wanted = found if wanted is None else wanted
        assert torch.equal(found, wanted) and found[3] == 0
    z = -0.8 / 0.96**0.5
    lam = 0.3 * (1 + 0.5 * (2 / (1 + math.exp(-z)) - 1))
    assert wanted[2].item() == pytest.approx(1 + lam * 0.2214027582, abs=1e-9)


def test_agreement_weight_literal():
    sign = torch.tensor([1.0, -1, 1, -1, 0, 1, -1, 0, 0])
    gap = torch.tensor([0.2, 0.2, 9, 9, 9, INF, INF, INF, NAN])
    weight = agreement_weight(sign, gap, 2.0, 0.28)
    wanted = torch.tensor([math.exp(0.1), math.exp(-0.1), 1.28, 0.72, 1, 1.28, 0.72, 1, 1])
    torch.testing.assert_close(weight, wanted)
    assert direction_gate(sign, gap).tolist() == [True, False, True, False, False, True, False, False, False]


def test_entropy_gate_literal():
    gate = entropy_gate(on_tokens(SURPRISAL), SPANS, eps=0.0)
    high = 1 / (1 + math.exp(-1))
    wanted = [1 - high, high, 1 - high, high, 1 - high, high, 0.5, 0.5, 0.5, 0.5]
    torch.testing.assert_close(gate, on_tokens(wanted, outside=0.5), rtol=0, atol=1e-9)


def test_bad_settings_are_named():
    for changes, message in (
        ({"lam": -0.1}, "lam is -0.1"),
        ({"lam": NAN}, "lam is nan"),
        ({"lam": INF}, "lam is inf"),
        ({"eps": 1.5}, "eps is 1.5"),
        ({"rho": 2.0}, "rho is 2.0"),
        ({"tau": 0.0}, "tau is 0.0"),
        ({"std_eps": -1.0}, "std_eps is -1.0"),
        ({"gate": "width"}, "gate is 'width', want one of 'surprisal', 'entropy'"),
        ({"scope": "group"}, "scope is 'group'"),
        ({"reduction": "mean"}, "reduction is 'mean', want one of 'token_mean'"),
    ):
        with pytest.raises(ValueError, match=message):
            CrestConfig(**changes)
    zero = torch.zeros(1)
    for call, message in (
        (lambda: agreement_weight(zero, zero, 0.0, 0.2), "tau is 0.0"),
        (lambda: agreement_weight(zero, zero, 1.0, -0.2), "eps is -0.2"),
        (lambda: crest_modulation(zero, zero, zero, lam=-1.0, eps=0.2, tau=1.0, rho=0.5), "lam is -1.0"),
        (lambda: crest_modulation(zero, zero, zero, lam=1.0, eps=0.2, tau=1.0, rho=1.5), "rho is 1.5"),
        (lambda: entropy_gate(on_tokens(GAP), SPANS, scope="word"), "scope is 'word'"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
