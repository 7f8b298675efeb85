"""linear_policy_loss is policy_loss of hidden @ weight.T + bias, and costs what its policy tokens cost."""

import math

import pytest
import reference
import torch
from cases import both, logits_of, targets_of
from linear_cases import ROW, H, V, assert_close, assert_gradients, head_case, leaf, recorded

from crest_ops import CISPO, GSPO, SAPO, PPOClip, Spans, linear_policy_loss, policy_loss, token_mean

pytestmark = pytest.mark.usefixtures("poisoned_memory")
N = 12
SPANS = Spans.from_mask(torch.tensor([[0, 1, 1, 1, 0, 1], [1, 1, 0, 0, 1, 1]]).bool(), group=torch.tensor([0, 0]))
SURROGATES = [
    PPOClip(0.2, 0.28),
    PPOClip(0.1, 0.1, dual=1.2),
    CISPO(0.28),
    CISPO(0.1, low=0.1),
    SAPO(1.0, 1.05),
    GSPO(0.02, 0.03),
    PPOClip(level="action"),
    PPOClip(0.05, 0.05, level="turn"),
    PPOClip(level="action", ratio="sum"),
    CISPO(level="turn"),
    SAPO(level="trajectory"),
]


def batch(dtype=torch.float32):
    """((hidden, weight, bias, targets), per-token arguments) of twelve tokens, two of them masked."""
    hidden, weight, bias, y = head_case(N, dtype=dtype)
    logp = reference.stats(hidden.double() @ weight.double().t() + bias.double(), y)[0].float()
    mask = torch.ones(N, dtype=torch.bool)
    mask[[2, 7]] = False
    return (hidden, weight, bias, y), dict(
        credit=logits_of(N, seed=2, scale=1.0),
        token_weight=logits_of(N, seed=3, scale=1.0).abs() / N,
        old_logp=logp + logits_of(N, seed=4, scale=0.3),
        ref_logp=logp + logits_of(N, seed=5, scale=0.5),
        importance_weight=logits_of(N, seed=6, scale=1.0).abs(),
        mask=mask,
    )  # fmt: skip


def run(case, given, factor=1.0, **arguments):
    """(PolicyLoss, gradients of factor * loss by hidden, weight and bias)."""
    *tensors, y = case
    leaves = [leaf(tensor) for tensor in tensors]
    found = linear_policy_loss(*leaves[:2], y, head_bias=leaves[2], **given, **arguments)
    return found, torch.autograd.grad(factor * found.loss, leaves)


def wanted(case, given, **arguments):
    """The same from logits in float64."""
    *tensors, y = case
    leaves = [leaf(tensor, torch.float64) for tensor in tensors]
    found = policy_loss(leaves[0] @ leaves[1].t() + leaves[2], y, **given, **arguments)
    return found, torch.autograd.grad(found.loss, leaves)


def assert_same(ours, theirs, tolerance=1e-5):
    (found, gradients), (exact, exact_gradients) = ours, theirs
    for name in ("loss", "logp", "entropy", "ratio"):
        assert_close(getattr(found, name), getattr(exact, name), tolerance)
    assert torch.equal(found.clipped, exact.clipped)
    assert found.metrics.keys() == exact.metrics.keys()
    for name, value in exact.metrics.items():
        assert_close(found.metrics[name], value, tolerance)
    assert_gradients(gradients, exact_gradients, tolerance)


@both
def test_against_the_loss_written_out(backend):
    (hidden, weight, bias, y), given = batch()
    leaves = [leaf(tensor, torch.float64) for tensor in (hidden, weight, bias)]
    logp, entropy, _, _ = reference.stats(leaves[0] @ leaves[1].t() + leaves[2], y, temperature=0.8)
    ratio, credit = (logp - given["old_logp"]).exp(), given["credit"]
    surrogate = -torch.minimum(ratio * credit, ratio.clamp(0.8, 1.28) * credit)
    d = given["ref_logp"] - logp
    value = given["importance_weight"] * surrogate + 0.1 * (d.exp() - d - 1) - 0.02 * entropy
    loss = (given["token_weight"] * value)[given["mask"]].sum()
    found, gradients = run(
        (hidden, weight, bias, y), given, kl_coef=0.1, entropy_coef=0.02, temperature=0.8, backend=backend,
        max_chunk_bytes=5 * ROW,
    )  # fmt: skip
    assert found.loss.item() == pytest.approx(loss.item(), abs=1e-5) and found.loss.dtype == torch.float32
    assert_gradients(gradients, torch.autograd.grad(loss, leaves))
    assert not any(t.requires_grad for t in (found.logp, found.entropy, found.ratio, found.clipped))


@pytest.mark.parametrize("surrogate", SURROGATES, ids=str)
@pytest.mark.parametrize("on_policy", [False, True])
def test_every_surrogate_at_every_level(surrogate, on_policy):
    case, given = batch()
    if on_policy:
        given.pop("old_logp")
    arguments = dict(surrogate=surrogate, kl_coef=0.1, entropy_coef=0.02)
    if surrogate.level != "token":
        arguments["spans"] = SPANS
        given["mask"] &= SPANS.mask
    assert_same(run(case, given, **arguments, max_chunk_bytes=5 * ROW), wanted(case, given, **arguments))


@pytest.mark.parametrize("surrogate", [PPOClip(0.1, 0.1, dual=1.2), CISPO(0.1, low=0.1), SAPO(), GSPO(0.02, 0.03)])
def test_surrogates_in_the_kernel(surrogate):
    case, given = batch()
    given["mask"] &= SPANS.mask
    arguments = dict(surrogate=surrogate, kl_coef=0.1, entropy_coef=0.02, spans=SPANS)
    ours = run(case, given, **arguments, backend="triton", max_chunk_bytes=5 * ROW)
    assert_same(ours, wanted(case, given, **arguments))


@both
@pytest.mark.parametrize(("surrogate", "entropy_coef"), [(PPOClip(), 0.02), (PPOClip(), 0.0), (GSPO(0.02, 0.03), 0.02)])
def test_every_transform(backend, surrogate, entropy_coef):
    """Both ways, with a per-token temperature, softcap, scale, padding, an ignored target and a credit of 0."""
    case, given = batch()
    given["credit"][3] = 0.0
    case[3][:] %= V - 11
    case[3][9] = -7
    arguments = dict(
        surrogate=surrogate, spans=SPANS, entropy_coef=entropy_coef, softcap=2.0, logit_scale=0.7, vocab_size=V - 11,
        temperature=torch.linspace(0.5, 2.0, N), ignore_index=-7,
    )  # fmt: skip
    given["mask"] &= SPANS.mask
    ours = run(case, given, **arguments, backend=backend, max_chunk_bytes=5 * ROW)
    assert_same(ours, wanted(case, given, **arguments))
    assert (ours[1][1][V - 11 :] == 0).all() and (ours[1][2][V - 11 :] == 0).all()


def test_float64_and_any_chunk_size():
    """In float64 to the last digits, whatever the chunks."""
    case, given = batch(torch.float64)
    arguments = dict(kl_coef=0.1, entropy_coef=0.02)
    exact = wanted(case, given, **arguments)
    for chunk_rows in (1, 2, 5, 12, 1000):
        assert_same(run(case, given, **arguments, max_chunk_bytes=chunk_rows * 2 * ROW), exact, 1e-12)


def test_tokens_outside_the_spans_count_as_masked():
    """Their rows reach no product; all that is given per token is 0 there, whatever the row holds."""
    case, given = batch()
    given.pop("mask")
    clean = {}
    for surrogate in (PPOClip(), PPOClip(level="turn")):
        with recorded() as work:
            clean[surrogate] = run(case, given, surrogate=surrogate, spans=SPANS)[0]
        assert max(rows for rows in work.rows(H, V)) <= 2 * int(SPANS.mask.sum())
    case[0][~SPANS.mask] = math.nan
    for surrogate, before in clean.items():
        found = run(case, given, surrogate=surrogate, spans=SPANS)[0]
        assert torch.equal(found.loss, before.loss)
        for name in ("logp", "entropy", "ratio"):
            assert (getattr(found, name)[~SPANS.mask] == 0).all()


@both
@pytest.mark.parametrize("surrogate", [PPOClip(), PPOClip(level="trajectory")])
def test_masked_positions_have_no_part_in_anything(backend, surrogate):
    case, given = batch()
    arguments = dict(kl_coef=0.1, entropy_coef=0.1, surrogate=surrogate, spans=SPANS, backend=backend)
    clean, gradients = run(case, given, **arguments)
    dead = ~given["mask"]
    case[0][dead], case[3][dead] = math.nan, 10**6
    for name, garbage in (
        ("credit", math.nan), ("token_weight", math.inf), ("old_logp", -math.inf), ("ref_logp", 1e30),
        ("importance_weight", math.nan),
    ):  # fmt: skip
        given[name][dead] = garbage
    found, again = run(case, given, **arguments)
    assert torch.equal(found.loss, clean.loss) and torch.equal(found.logp, clean.logp)
    assert all(torch.equal(a, g) for a, g in zip(again, gradients, strict=True))
    assert all(torch.equal(found.metrics[name], value) for name, value in clean.metrics.items())


@both
@pytest.mark.parametrize("surrogate", [PPOClip(), GSPO()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [0, 12])
def test_no_wanted_row_gives_zero_with_the_graph_attached(backend, surrogate, dtype, rows):
    (hidden, weight, bias, y), given = batch(dtype)
    given = {name: value[:rows] for name, value in given.items()} | dict(mask=torch.zeros(rows).bool())
    spans = SPANS if rows else Spans.from_mask(torch.zeros(1, 0).bool(), group=torch.tensor([0]))
    found, gradients = run(
        (hidden[:rows] + math.nan, weight, bias, y[:rows]), given, surrogate=surrogate, spans=spans, kl_coef=0.1,
        entropy_coef=0.1, backend=backend,
    )  # fmt: skip
    assert found.loss == 0 and found.loss.requires_grad
    assert [g.shape for g in gradients] == [(rows, H), (V, H), (V,)] and all((g == 0).all() for g in gradients)
    assert all(torch.isfinite(value) for value in found.metrics.values())


@both
def test_rows_without_a_gradient_stay_out_of_the_backward_products(backend):
    """Credit 0, clipped, or excluded: 4 of 10 rows remain; with an entropy term all but the excluded one do."""
    rows, hidden_size, vocabulary = 12, 24, 301
    hidden, weight, bias, y = head_case(rows, vocabulary, hidden_size)
    mask = torch.arange(rows) < 10
    bias[y[9]] = -math.inf
    y[:9] = targets_of(9, high=vocabulary)
    logp = (hidden @ weight.t() + bias).log_softmax(1).gather(1, y[:, None])[:, 0].detach()
    assert torch.isfinite(logp[:9]).all()
    credit, old_logp = torch.ones(rows), torch.where(torch.isfinite(logp), logp, 0)
    credit[[0, 5]] = 0
    old_logp[[1, 2, 6]] -= 1.0  # a ratio of e at credit 1 is clipped
    for entropy_coef, active in ((0.0, 4), (0.1, 9)):
        with recorded() as work:
            leaves = [leaf(hidden), leaf(weight), leaf(bias)]
            linear_policy_loss(
                *leaves[:2], y, credit, token_weight=torch.ones(rows), head_bias=leaves[2], old_logp=old_logp,
                mask=mask, entropy_coef=entropy_coef, backend=backend, max_chunk_bytes=4 * 320 * 4,
            ).loss.backward()  # fmt: skip
        assert work.rows(hidden_size, vocabulary) == (10, active, active)
        assert all(torch.isfinite(tensor.grad).all() for tensor in leaves)
        assert ((leaves[0].grad != 0).any(1).sum()) == active


@both
def test_nothing_has_a_gradient(backend):
    case, given = batch()
    given["credit"] = torch.zeros(N)
    found, gradients = run(
        case, given, temperature=torch.linspace(0.5, 2.0, N), backend=backend, max_chunk_bytes=5 * ROW
    )
    assert found.loss == 0 and all((gradient == 0).all() for gradient in gradients)


def test_no_more_gradients_than_asked_for():
    rows, hidden_size, vocabulary = 4, 64, 301
    hidden, weight, bias, y = head_case(rows, vocabulary, hidden_size)
    given = dict(credit=torch.ones(rows), token_weight=torch.ones(rows))
    _, all_of_them = run((hidden, weight, bias, y), given)
    for needs in ((True, False, False), (False, True, False), (False, False, True), (False, False, False)):
        inputs = [leaf(t) if need else t for t, need in zip((hidden, weight, bias), needs, strict=True)]
        with recorded() as work:
            loss = linear_policy_loss(*inputs[:2], y, head_bias=inputs[2], **given).loss
            if any(needs):
                loss.backward()
        assert loss.requires_grad == any(needs)
        assert all(torch.equal(t.grad, g) for t, g in zip(inputs, all_of_them, strict=True) if t.grad is not None)
        assert sum(size >= weight.numel() * 4 for size in work.new_bytes) == needs[1]  # once, and handed on
        assert work.rows(hidden_size, vocabulary) == (rows, rows * needs[0], rows * needs[1])
    with recorded() as work, torch.no_grad():
        loss = linear_policy_loss(leaf(hidden), leaf(weight), y, **given).loss
    assert not loss.requires_grad and work.rows(hidden_size, vocabulary) == (rows, 0, 0)


@pytest.mark.parametrize("surrogate", [PPOClip(), GSPO(0.02, 0.03)])
def test_graph_contract(surrogate):
    (hidden, weight, bias, y), given = batch()
    leaves = [leaf(hidden), leaf(weight), leaf(bias)]
    loss = linear_policy_loss(
        *leaves[:2], y, head_bias=leaves[2], **given, surrogate=surrogate, spans=SPANS, entropy_coef=0.1
    ).loss
    first = [gradient.clone() for gradient in torch.autograd.grad(loss, leaves, retain_graph=True)]
    for factor in (1.0, 3.0, 0.0, -1.0):
        scaled = torch.autograd.grad(factor * loss, leaves, retain_graph=True)
        assert all(torch.allclose(s, factor * f, atol=1e-7) for s, f in zip(scaled, first, strict=True))
    for times in (1, 2, 3):
        loss.backward(retain_graph=True)
        assert all(torch.allclose(t.grad, times * f, atol=1e-7) for t, f in zip(leaves, first, strict=True))
    with pytest.raises(RuntimeError, match="twice|once_differentiable|does not require grad|no autograd formula"):
        again = torch.autograd.grad(loss, leaves, create_graph=True)
        torch.autograd.grad(sum(gradient.sum() for gradient in again), leaves)
    assert torch.equal(leaves[0], hidden) and torch.equal(leaves[1], weight)


def test_a_tied_head_adds_up():
    _, weight, _, y = head_case(N)
    ids, credit = targets_of(N, high=V, seed=5), logits_of(N, seed=2, scale=1.0)
    table, exact = leaf(weight), leaf(weight, torch.float64)
    linear_policy_loss(torch.tanh(table[ids]), table, y, credit, token_weight=torch.ones(N)).loss.backward()
    logp = (torch.tanh(exact[ids]) @ exact.t()).log_softmax(1).gather(1, y[:, None])[:, 0]
    (-credit.double() * logp).sum().backward()
    assert_close(table.grad, exact.grad)


def test_pieces_with_the_whole_count_add_up():
    """Token means of 12 positions in pieces of 1 + 11 rows, or of 3 x 4, weighted with the whole's count."""
    case, given = batch()
    given["token_weight"], given["mask"] = token_mean(SPANS), SPANS.mask
    _, whole = run(case, given, entropy_coef=0.1)
    for pieces in ([range(1), range(1, 12)], [range(4), range(4, 8), range(8, 12)]):
        found = []
        for piece in pieces:
            rows = list(piece)
            part = {name: value[rows] for name, value in given.items()}
            found.append(run((case[0][rows], *case[1:3], case[3][rows]), part, entropy_coef=0.1)[1])
        assert_close(torch.cat([gradients[0] for gradients in found]), whole[0], 1e-6)
        assert_close(sum(gradients[1] for gradients in found), whole[1], 1e-6)


@both
@pytest.mark.parametrize("surrogate", [PPOClip(), CISPO(level="trajectory")])
def test_excluded_targets_and_support(backend, surrogate):
    """A bias of -inf: as policy_loss has it."""
    case, given = batch()
    case[2][[5, 64, int(case[3][1])]] = -math.inf
    given["mask"] &= SPANS.mask
    arguments = dict(surrogate=surrogate, spans=SPANS, kl_coef=0.1, entropy_coef=0.05)
    ours, theirs = run(case, given, **arguments, backend=backend), wanted(case, given, **arguments)
    assert ours[0].logp[1] == theirs[0].logp[1] == -math.inf and (ours[1][0][1] == 0).all()
    assert ours[0].loss.item() == pytest.approx(theirs[0].loss.item(), rel=1e-5)
    assert torch.allclose(ours[0].entropy.double(), theirs[0].entropy, atol=1e-5)
    assert_gradients(ours[1], theirs[1])


@both
def test_nan_is_seen_in_its_row(backend):
    case, given = batch()
    _, clean = run(case, given, backend=backend)
    case[0][4] = math.nan
    found, gradients = run(case, given, backend=backend)
    others = torch.arange(N) != 4
    assert found.loss.isnan() and found.logp.isnan().sum() == 1 and gradients[0][4].isnan().all()
    assert torch.equal(gradients[0][others], clean[0][others])


@both
def test_two_runs_agree_bit_for_bit(backend):
    case, given = batch(torch.bfloat16)
    (one, gradients), (two, again) = (run(case, given, backend=backend, max_chunk_bytes=3 * ROW) for _ in range(2))
    assert torch.equal(one.loss, two.loss) and torch.equal(one.logp, two.logp)
    assert all(torch.equal(a, g) for a, g in zip(again, gradients, strict=True))


def test_leading_shapes():
    (hidden, weight, bias, y), given = batch()
    flat, gradients = run((hidden, weight, bias, y), given)
    shaped = {name: value.view(3, 4) for name, value in given.items()}
    found, again = run((hidden.view(3, 4, H), weight, bias, y.view(3, 4)), shaped)
    assert torch.equal(found.loss, flat.loss) and found.logp.shape == found.clipped.shape == (3, 4)
    assert torch.equal(again[0].view(N, H), gradients[0]) and torch.equal(again[1], gradients[1])


@both
def test_per_token_arguments_of_stride_0(backend):
    case, _ = batch()
    numbers = dict(credit=-0.7, token_weight=0.5, old_logp=-4.0, ref_logp=-4.5, importance_weight=1.5, temperature=2.0)
    runs = [
        run(case, {name: make(value) for name, value in numbers.items()}, kl_coef=0.1, backend=backend)
        for make in (lambda value: torch.tensor(value).expand(N), lambda value: torch.full((N,), value))
    ]
    (one, gradients), (two, again) = runs
    assert torch.equal(one.loss, two.loss) and all(torch.equal(a, g) for a, g in zip(again, gradients, strict=True))
