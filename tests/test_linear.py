"""linear_token_stats: log-prob and entropy from hidden states, against float64 through autograd."""

import math

import pytest
import torch
from cases import both, logits_of, targets_of
from linear_cases import ROW, H, N, V, assert_close, assert_gradients, exact_stats, head_case, leaf, recorded

from crest_ops import linear_token_stats

pytestmark = pytest.mark.usefixtures("poisoned_memory")
TRANSFORMS = {
    "plain": {},
    "softcap": dict(softcap=2.0),
    "scale": dict(logit_scale=0.3),
    "temperature": dict(temperature=0.7),
    "temperature per token": dict(temperature=torch.linspace(0.5, 2.0, N)),
    "padded": dict(vocab_size=V - 11),
    "all": dict(softcap=2.0, logit_scale=0.6, temperature=torch.linspace(0.5, 2.0, N), vocab_size=V - 11),
}
MASK = torch.tensor([True, True, False, True, True, True, True])


def upstream(rows=N):
    """Factors of log-prob and entropy."""
    return logits_of(rows, seed=21, scale=1.0), logits_of(rows, seed=22, scale=1.0)


def run(hidden, weight, bias, targets, grad_logp, grad_entropy, **arguments):
    """(TokenStats, gradients by hidden, weight and bias)."""
    leaves = [leaf(hidden), leaf(weight)] + ([] if bias is None else [leaf(bias)])
    found = linear_token_stats(*leaves[:2], targets, head_bias=None if bias is None else leaves[2], **arguments)
    return found, torch.autograd.grad((grad_logp * found.logp + grad_entropy * found.entropy).sum(), leaves)


@both
@pytest.mark.parametrize("name", TRANSFORMS)
def test_values_and_gradients(backend, name):
    """With a masked row and an ignored one; chunks of three rows."""
    transform, (hidden, weight, bias, y) = TRANSFORMS[name], head_case()
    y %= V - 11
    grad_logp, grad_entropy = upstream()
    grad_logp[[2, 5]] = grad_entropy[[2, 5]] = 0
    logp, entropy, *exact = exact_stats(hidden, weight, bias, y, grad_logp, grad_entropy, **transform)
    y[5] = -100
    found, gradients = run(
        hidden, weight, bias, y, *upstream(), **transform, mask=MASK, backend=backend, max_chunk_bytes=3 * ROW
    )
    live = MASK & (y >= 0)
    assert_close(found.logp, torch.where(live, logp, 0))
    assert_close(found.entropy, torch.where(live, entropy, 0))
    assert_gradients(gradients, exact)
    assert (gradients[0][~live] == 0).all() and (found.logp[~live] == 0).all() and (found.entropy[~live] == 0).all()
    assert (gradients[1][transform.get("vocab_size", V) :] == 0).all()
    assert (gradients[2][transform.get("vocab_size", V) :] == 0).all()
    assert found.logp.dtype == found.entropy.dtype == found.lse.dtype == torch.float32


@both
def test_lse_and_sum_of_squares(backend):
    hidden, weight, bias, y = head_case()
    found = linear_token_stats(
        hidden, weight, y, head_bias=bias, outputs=("logp", "sum_sq_probs"), backend=backend, max_chunk_bytes=3 * ROW
    )
    logits = hidden.double() @ weight.double().t() + bias.double()
    assert found.entropy is None
    assert_close(found.lse, logits.logsumexp(1))
    assert_close(found.sum_sq_probs, logits.softmax(1).square().sum(1))


@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 6, 7, 1000])
def test_any_chunk_size(chunk_rows):
    hidden, weight, bias, y = head_case()
    exact = exact_stats(hidden, weight, bias, y, *upstream())
    found, gradients = run(hidden, weight, bias, y, *upstream(), max_chunk_bytes=chunk_rows * ROW)
    assert_gradients((found.logp, found.entropy, *gradients), exact)


@both
@pytest.mark.parametrize("vocabulary", [1, 2, 63, 65, 1009])
@pytest.mark.parametrize("rows", [1, 5])
def test_odd_vocabularies(backend, vocabulary, rows):
    hidden, weight, bias, y = head_case(rows, vocabulary)
    exact = exact_stats(hidden, weight, bias, y, *upstream(rows))
    found, gradients = run(hidden, weight, bias, y, *upstream(rows), backend=backend, max_chunk_bytes=4 * 2**12)
    assert_gradients((found.logp, found.entropy, *gradients), exact)
    assert (found.logp <= 0).all() and (found.entropy >= 0).all()
    assert (found.entropy <= math.log(vocabulary) + 1e-6).all()


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 3])
def test_no_wanted_row(backend, dtype, rows):
    hidden, weight, bias, y = head_case(rows, dtype=dtype)
    hidden += math.nan
    found, gradients = run(hidden, weight, bias, y, *upstream(rows), mask=torch.zeros(rows).bool(), backend=backend)
    assert found.logp.requires_grad and (found.logp == 0).all() and (found.entropy == 0).all()
    assert [g.shape for g in gradients] == [(rows, H), (V, H), (V,)] and all((g == 0).all() for g in gradients)


def test_leading_shapes():
    hidden, weight, bias, y = head_case(12)
    flat, wanted = run(hidden, weight, bias, y, *upstream(12))
    factors = [factor.view(3, 4) for factor in upstream(12)]
    found, gradients = run(hidden.view(3, 4, H), weight, bias, y.view(3, 4), *factors, temperature=torch.ones(3, 4))
    assert found.logp.shape == found.entropy.shape == found.lse.shape == (3, 4)
    assert torch.equal(found.logp.flatten(), flat.logp) and torch.equal(gradients[0].view(12, H), wanted[0])
    assert torch.equal(gradients[1], wanted[1])
    narrow = linear_token_stats(hidden, weight, y.int(), head_bias=bias)
    assert torch.equal(narrow.logp, flat.logp)
    one = linear_token_stats(hidden[0], weight, y[0], head_bias=bias)
    assert one.logp.shape == () and one.logp.item() == pytest.approx(flat.logp[0].item(), abs=1e-5)


@pytest.mark.parametrize("mask", [None, torch.tensor([[True, False, True], [True, True, False]])])
def test_any_strides(mask):
    """Hidden states transposed, cut, expanded; a weight whose storage is [H, V]; strided targets and biases."""
    _, weight, bias, _ = head_case()
    weight, bias = weight.t().contiguous().t(), torch.stack([bias, bias], 1)[:, 0]
    y = targets_of(3, 2, high=V).t()
    for hidden in (
        logits_of(3, 2, H, scale=1.0).transpose(0, 1),
        logits_of(H, 2, 3, scale=1.0).permute(1, 2, 0),
        logits_of(2, 5, 2 * H, scale=1.0)[:, 1:4, ::2],
        logits_of(H, scale=1.0).expand(2, 3, H),
    ):
        hidden.requires_grad_()
        leaves = (hidden, weight.requires_grad_(), bias.requires_grad_())
        found = linear_token_stats(hidden, weight, y, head_bias=bias, mask=mask, max_chunk_bytes=2 * ROW)
        gradients = torch.autograd.grad((found.logp + found.entropy).sum(), leaves)
        factor = torch.ones(6) if mask is None else mask.flatten().float()
        exact = exact_stats(hidden.reshape(6, H), weight, bias, y.reshape(6), factor, factor)[2:]
        assert_gradients((gradients[0].reshape(6, H), *gradients[1:]), exact)


def test_upstream_gradients_of_stride_0_and_none():
    hidden, weight, bias, y = head_case()
    for factor_logp, factor_entropy in ((1.0, 0.0), (0.0, 1.0), (-2.0, 0.5)):
        leaves = [leaf(hidden), leaf(weight), leaf(bias)]
        found = linear_token_stats(*leaves[:2], y, head_bias=leaves[2])
        total = (factor_logp * found.logp.sum() if factor_logp else 0) + (
            factor_entropy * found.entropy.sum() if factor_entropy else 0
        )
        exact = exact_stats(hidden, weight, bias, y, torch.full((N,), factor_logp), torch.full((N,), factor_entropy))
        assert_gradients(torch.autograd.grad(total, leaves), exact[2:])


def test_graph_contract():
    """Twice the same, in proportion to what comes from above, never written, no second derivative."""
    hidden, weight, bias, y = head_case()
    leaves = [leaf(hidden), leaf(weight), leaf(bias)]
    total = linear_token_stats(*leaves[:2], y, head_bias=leaves[2], max_chunk_bytes=3 * ROW).logp.sum()
    first = torch.autograd.grad(total, leaves, retain_graph=True)
    for factor in (1.0, 3.0, 0.0, -1.0):
        scaled = torch.autograd.grad(factor * total, leaves, retain_graph=True)
        assert all(torch.allclose(s, factor * f, atol=1e-6) for s, f in zip(scaled, first, strict=True))
    again = torch.autograd.grad(total, leaves, create_graph=True)
    assert all(torch.equal(a, f) for a, f in zip(again, first, strict=True))
    assert torch.equal(leaves[0], hidden) and torch.equal(leaves[1], weight)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(sum(gradient.sum() for gradient in again), leaves)


def test_no_more_gradients_than_asked_for():
    rows, hidden_size, vocabulary = 4, 64, 301
    hidden, weight, bias, y = head_case(rows, vocabulary, hidden_size)
    all_of_them = run(hidden, weight, bias, y, torch.ones(rows), torch.zeros(rows))[1]
    head_bytes = weight.numel() * weight.element_size()
    for needs in ((True, False, False), (False, True, False), (False, False, True), (True, False, True)):
        inputs = [leaf(t) if need else t for t, need in zip((hidden, weight, bias), needs, strict=True)]
        with recorded() as work:
            linear_token_stats(*inputs[:2], y, head_bias=inputs[2]).logp.sum().backward()
        assert [t.grad is not None for t in inputs] == list(needs)
        assert all(torch.equal(t.grad, g) for t, g in zip(inputs, all_of_them, strict=True) if t.grad is not None)
        assert sum(size >= head_bytes for size in work.new_bytes) == needs[1]
        assert work.rows(hidden_size, vocabulary) == (2 * rows, rows * needs[0], rows * needs[1])
    with torch.no_grad():
        assert not linear_token_stats(leaf(hidden), leaf(weight), y).logp.requires_grad


def test_a_tied_head_adds_up():
    _, weight, _, y = head_case()
    ids = targets_of(N, high=V, seed=5)
    table, exact = leaf(weight), leaf(weight, torch.float64)
    linear_token_stats(torch.tanh(table[ids]), table, y).logp.sum().backward()
    (torch.tanh(exact[ids]) @ exact.t()).log_softmax(1).gather(1, y[:, None]).sum().backward()
    assert_close(table.grad, exact.grad)


def test_gradcheck():
    hidden, weight, bias, y = head_case(4, 7, 3, torch.float64)
    mask = torch.tensor([True, True, False, True])

    def both_outputs(hidden, weight, bias):
        found = linear_token_stats(
            hidden, weight, y, head_bias=bias, mask=mask, softcap=3.0, logit_scale=0.8,
            temperature=torch.tensor([0.7, 1.0, 2.0, 1.5]), vocab_size=7, max_chunk_bytes=2 * 64 * 8,
        )  # fmt: skip
        return found.logp, found.entropy

    assert torch.autograd.gradcheck(both_outputs, (leaf(hidden), leaf(weight), leaf(bias)))


@both
def test_masked_rows_and_padded_columns_have_no_part(backend):
    """Garbage there changes nothing, bit for bit."""
    hidden, weight, bias, y = head_case()
    temperature, mask = torch.ones(N), MASK.clone()
    arguments = dict(mask=mask, vocab_size=V - 11, backend=backend, max_chunk_bytes=3 * ROW)
    y %= V - 11
    clean, gradients = run(hidden, weight, bias, y, *upstream(), temperature=temperature, **arguments)
    hidden[2], y[2], temperature[2] = math.nan, 10**6, math.nan
    weight[V - 11 :], bias[V - 11 :] = math.inf, math.nan
    found, again = run(hidden, weight, bias, y, *upstream(), temperature=temperature, **arguments)
    assert torch.equal(found.logp, clean.logp) and torch.equal(found.entropy, clean.entropy)
    assert all(torch.equal(a, g) for a, g in zip(again, gradients, strict=True))


def test_rows_that_reach_the_products():
    """Masked rows reach none, rows whose upstream gradient is 0 only the first of the four."""
    rows, hidden_size, vocabulary = 40, 24, 301
    hidden, weight, _, y = head_case(rows, vocabulary, hidden_size)
    mask = torch.arange(rows) % 4 == 0
    weights = (torch.arange(rows) % 8 == 0).float()
    with recorded() as work:
        found = linear_token_stats(leaf(hidden), leaf(weight), y, mask=mask, max_chunk_bytes=3 * 320 * 4)
        (weights * found.logp).sum().backward()
    assert work.rows(hidden_size, vocabulary) == (10 + 5, 5, 5)


@both
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_minus_infinity_is_out_of_the_support(backend, softcap):
    hidden, weight, bias, y = head_case()
    bias[[0, 3, 64]] = -math.inf
    y[:] = torch.tensor([0, 1, 2, 4, 5, 6, 7])  # the first is excluded
    factors = (torch.ones(N), torch.ones(N))
    found, gradients = run(hidden, weight, bias, y, *factors, softcap=softcap, backend=backend)
    keep = torch.isfinite(bias)
    kept_y = torch.cumsum(keep, 0)[y] - 1
    inside = (torch.arange(N) > 0).float()
    logp, entropy, grad_hidden, grad_weight, grad_bias = exact_stats(
        hidden, weight[keep], bias[keep], kept_y.clamp(min=0), inside, inside, softcap=softcap
    )
    assert found.logp[0] == -math.inf and (gradients[0][0] == 0).all()
    assert_close(found.logp[1:], logp[1:])
    assert_close(found.entropy, entropy)
    assert_gradients((gradients[0], gradients[1][keep], gradients[2][keep]), (grad_hidden, grad_weight, grad_bias))
    assert (gradients[1][~keep] == 0).all() and (gradients[2][~keep] == 0).all()


@both
def test_nothing_in_the_support(backend):
    hidden, weight, bias, y = head_case()
    found, gradients = run(
        hidden, weight, torch.full_like(bias, -math.inf), y, torch.ones(N), torch.ones(N), backend=backend
    )
    assert (found.logp == -math.inf).all() and (found.lse == -math.inf).all() and (found.entropy == 0).all()
    assert all((gradient == 0).all() for gradient in gradients)


@both
def test_a_nan_row_stays_in_its_row(backend):
    hidden, weight, bias, y = head_case()
    clean, gradients = run(hidden, weight, bias, y, *upstream(), backend=backend)
    hidden[3] = math.nan
    found, again = run(hidden, weight, bias, y, *upstream(), backend=backend)
    others = torch.arange(N) != 3
    assert found.logp[3].isnan() and found.entropy[3].isnan() and again[0][3].isnan().all()
    assert torch.equal(found.logp[others], clean.logp[others])
    assert torch.equal(found.entropy[others], clean.entropy[others])
    assert torch.equal(again[0][others], gradients[0][others])


@both
def test_two_runs_agree_bit_for_bit(backend):
    case = head_case(dtype=torch.bfloat16)
    runs = [run(*case, *upstream(), backend=backend, max_chunk_bytes=3 * ROW // 2) for _ in range(2)]
    (one, gradients), (two, again) = runs
    assert torch.equal(one.logp, two.logp) and torch.equal(one.entropy, two.entropy)
    assert all(torch.equal(a, g) for a, g in zip(again, gradients, strict=True))
