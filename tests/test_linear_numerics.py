"""The linear ops in narrow dtypes: rounding beside plain torch, mixed dtypes, autocast, float16; in checkpoints."""

import pytest
import reference
import torch
from cases import both, logits_of
from linear_cases import ROW, H, N, V, assert_close, exact_stats, head_case, leaf
from torch.utils.checkpoint import checkpoint

from crest_ops import chunks, linear_policy_loss, linear_token_stats

pytestmark = pytest.mark.usefixtures("poisoned_memory", "small_tiles")
TWO = torch.tensor([1.0, -0.5] * 128)


@pytest.fixture
def small_tiles(monkeypatch):
    """Products that go through a buffer take the vocabulary in several pieces."""
    monkeypatch.setattr(chunks, "VOCABULARY_TILE", 32)


def relative(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


def loss_of(hidden, weight, y, credit, **arguments):
    return linear_policy_loss(hidden, weight, y, credit, token_weight=torch.ones(len(y)), **arguments)


def stats_loss_of(hidden, weight, y, credit, **arguments):
    """The same, the composable way."""
    return -(credit * linear_token_stats(hidden, weight, y, **arguments).logp).sum()


def one_shot_loss_of(*case, **arguments):
    return loss_of(*case, **arguments).loss


each_way = pytest.mark.parametrize("loss", [one_shot_loss_of, stats_loss_of])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("entropy", [0.0, 0.3])
def test_no_worse_than_plain_torch(dtype, entropy):
    """Log-prob, entropy and both gradients, beside hidden @ weight.T, a log-softmax in float32, and autograd."""
    rows = 64
    hidden, weight, _, y = head_case(rows, 501, 32, dtype)
    factor, entropy_factor = TWO[:rows], torch.full((rows,), entropy)
    exact = exact_stats(hidden, weight, torch.zeros(501), y, factor, entropy_factor)[:4]

    plain_leaves = [leaf(hidden), leaf(weight)]
    log_p = (plain_leaves[0] @ plain_leaves[1].t()).float().log_softmax(1)
    logp, plain_entropy = log_p.gather(1, y[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)
    plain = torch.autograd.grad((factor * logp + entropy_factor * plain_entropy).sum(), plain_leaves)

    for chunk_rows in (1000, 5):
        leaves = [leaf(hidden), leaf(weight)]
        found = linear_token_stats(*leaves, y, max_chunk_bytes=chunk_rows * 512 * 2)
        ours = torch.autograd.grad((factor * found.logp + entropy_factor * found.entropy).sum(), leaves)
        reference.assert_no_worse_than(found.logp, logp, exact[0], 2e-6)
        reference.assert_no_worse_than(found.entropy, plain_entropy, exact[1], 2e-6)
        # On the CPU each chunk's product is rounded to the operands' dtype, half of eps at most, before it is added.
        more = torch.finfo(dtype).eps / 8 if chunk_rows < rows else 0.01 * torch.finfo(dtype).eps
        for mine, theirs, wanted in zip(ours, plain, exact[2:], strict=True):
            assert mine.dtype == dtype and relative(mine, wanted) <= relative(theirs, wanted) + more


@both
def test_weight_gradient_over_many_chunks(backend):
    """64 chunks of one row: its error is that of one product and does not grow."""
    rows = 64 if backend == "torch" else 8
    hidden, weight, _, y = head_case(rows, V, H, torch.bfloat16)
    exact = exact_stats(hidden, weight, torch.zeros(V), y, -TWO[:rows], torch.zeros(rows))[3]
    errors = {}
    for num_chunks in (1, rows):
        for loss in (one_shot_loss_of, stats_loss_of):
            head = leaf(weight)
            loss(hidden, head, y, TWO[:rows], backend=backend, max_chunk_bytes=rows // num_chunks * ROW // 2).backward()
            errors[num_chunks, loss] = relative(head.grad, exact)
    assert max(errors.values()) < 1e-2
    assert all(errors[rows, loss] < 1.5 * errors[1, loss] for loss in (one_shot_loss_of, stats_loss_of))


@pytest.mark.parametrize(
    ("hidden_dtype", "weight_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.float64),
    ],
)
@each_way
def test_mixed_dtypes_compute_in_the_wider(hidden_dtype, weight_dtype, loss):
    hidden, weight, bias, y = head_case()
    hidden, weight, bias = hidden.to(hidden_dtype), weight.to(weight_dtype), bias.half()
    leaves = [leaf(hidden), leaf(weight), leaf(bias)]
    found = loss(leaves[0], leaves[1], y, TWO[:N], head_bias=leaves[2], max_chunk_bytes=3 * ROW)
    gradients = torch.autograd.grad(found, leaves)
    exact = exact_stats(hidden, weight, bias, y, -TWO[:N], torch.zeros(N))[2:]
    assert found.dtype == (torch.float64 if weight_dtype == torch.float64 else torch.float32)
    for ours, wanted, given in zip(gradients, exact, leaves, strict=True):
        assert ours.dtype == given.dtype
        assert_close(ours, wanted, 1e-5 + torch.finfo(given.dtype).eps)


@both
@each_way
def test_autocast(backend, loss):
    """Operands are rounded to bfloat16, gradients come in the parameters' float32."""
    hidden, weight, _, y = head_case()
    narrow = [t.bfloat16() for t in (hidden, weight)]
    wanted = loss(*narrow, y, TWO[:N], backend=backend)
    leaves = [leaf(hidden), leaf(weight)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = loss(*leaves, y, TWO[:N], backend=backend)
        kept = loss(*(t.double() for t in leaves), y, TWO[:N])
    assert torch.equal(found, wanted) and found.dtype == torch.float32
    assert kept.dtype == torch.float64
    gradients = torch.autograd.grad(found, leaves)
    exact = exact_stats(*narrow, torch.zeros(V), y, -TWO[:N], torch.zeros(N))[2:4]
    for ours, wanted in zip(gradients, exact, strict=True):
        assert ours.dtype == torch.float32 and relative(ours, wanted) < 1e-2


@each_way
def test_backward_inside_autocast(loss):
    """What was computed in float32 is differentiated in float32."""
    hidden, weight, _, y = head_case()
    leaves = [leaf(hidden), leaf(weight)]
    found = loss(*leaves, y, TWO[:N])
    outside = torch.autograd.grad(found, leaves, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.autograd.grad(found, leaves)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


@both
@each_way
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_that_are_not_rounded(backend, loss, dtype):
    hidden, weight, bias, y = head_case(dtype=dtype)
    arguments = dict(logits_dtype=torch.float32, backend=backend, max_chunk_bytes=3 * ROW)
    logp, entropy, *exact = exact_stats(hidden, weight, bias, y, -TWO[:N], torch.zeros(N))
    found = linear_token_stats(hidden, weight, y, head_bias=bias, **arguments)
    assert_close(found.logp, logp)
    assert_close(found.entropy, entropy)
    assert_close(loss_of(hidden, weight, y, TWO[:N], head_bias=bias, **arguments).logp, logp)
    leaves = [leaf(hidden), leaf(weight), leaf(bias)]
    gradients = torch.autograd.grad(loss(leaves[0], leaves[1], y, TWO[:N], head_bias=leaves[2], **arguments), leaves)
    for ours, wanted in zip(gradients, exact, strict=True):
        assert_close(ours, wanted, torch.finfo(dtype).eps)


@both
@each_way
@pytest.mark.parametrize(
    ("weight_dtype", "logits_dtype"),
    [(torch.float16, None), (torch.float16, torch.float32), (torch.float32, None)],
)
def test_float16_keeps_gradients_of_small_coefficients(backend, loss, weight_dtype, logits_dtype):
    """A credit of 1e-9 below a loss scale of 65536: the gradient is rounded, not lost."""
    hidden, weight, _, y = head_case(dtype=torch.float16)
    weight = weight.to(weight_dtype)
    credit = TWO[:N] * 1e-9
    leaves = [leaf(hidden), leaf(weight)]
    found = loss(*leaves, y, credit, backend=backend, logits_dtype=logits_dtype, max_chunk_bytes=3 * ROW)
    gradients = torch.autograd.grad(65536 * found, leaves)
    exact = exact_stats(hidden, weight, torch.zeros(V), y, -65536 * credit, torch.zeros(N))[2:4]
    for ours, wanted in zip(gradients, exact, strict=True):
        allowed = 2**-9 * wanted.abs().max() + (2**-25 if ours.dtype == torch.float16 else 0)
        assert (ours.double() - wanted).abs().max() <= allowed


def test_float16_with_garbage_from_above():
    hidden, weight, _, y = head_case(dtype=torch.float16)
    mask, factor = torch.arange(N) > 2, torch.ones(N)
    factor[:3] = torch.tensor([1e30, float("nan"), float("inf")])
    leaves = [leaf(hidden), leaf(weight)]
    logp = linear_token_stats(*leaves, y, mask=mask).logp
    gradients = torch.autograd.grad((factor * logp).sum(), leaves, retain_graph=True)
    exact = exact_stats(hidden, weight, torch.zeros(V), y, mask.float(), torch.zeros(N))[2:4]
    assert (gradients[0][:3] == 0).all()
    for ours, wanted in zip(gradients, exact, strict=True):
        assert relative(ours, wanted) < 2e-3
    factor[6] = float("nan")  # a wanted row: NaN there, and nowhere else
    again = torch.autograd.grad((factor * logp).sum(), leaves[0])[0]
    assert again[6].isnan().all() and torch.equal(again[:6], gradients[0][:6])


@both
@each_way
@pytest.mark.parametrize("coefficient", [1e-9, 1e6])
def test_float16_logits_of_float32_parameters(backend, loss, coefficient):
    """Under autocast, coefficients that float16 has no place for: the gradients are as exact as at coefficient 1."""
    hidden, weight, _, y = head_case()
    leaves = [leaf(hidden), leaf(weight)]
    with torch.autocast("cpu", dtype=torch.float16):
        found = loss(*leaves, y, coefficient * TWO[:N], backend=backend, max_chunk_bytes=3 * ROW // 2)
    gradients = torch.autograd.grad(found, leaves)
    exact = exact_stats(hidden.half(), weight.half(), torch.zeros(V), y, -coefficient * TWO[:N], torch.zeros(N))[2:4]
    for ours, wanted in zip(gradients, exact, strict=True):
        assert ours.dtype == torch.float32 and relative(ours, wanted) < 2e-3


@each_way
def test_float16_with_an_upstream_that_overflowed(loss):
    """As a GradScaler meets it: infinite gradients, which it sees, and no error."""
    hidden, weight, _, y = head_case(dtype=torch.float16)
    leaves = [leaf(hidden), leaf(weight)]
    gradients = torch.autograd.grad(float("inf") * loss(*leaves, y, TWO[:N]), leaves)
    assert all(not torch.isfinite(g).all() for g in gradients)


@both
def test_large_logits(backend):
    """A constant of 1e4 on every logit changes log-prob and entropy by no more than the logits' own rounding."""
    hidden, weight, _, y = head_case()
    hidden[:, 0], weight[:, 0] = 100.0, 0.0
    plain = linear_token_stats(hidden, weight, y, backend=backend)
    weight[:, 0] = 100.0
    found = linear_token_stats(hidden, weight, y, backend=backend)
    assert (found.logp - plain.logp).abs().max() < 4e-3 and (found.entropy - plain.entropy).abs().max() < 4e-3
    assert (found.logp <= 0).all()


@each_way
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inside_an_activation_checkpoint(loss, use_reentrant):
    hidden, weight, _, y = head_case()
    results = []
    for call in (loss, lambda *case: checkpoint(loss, *case, use_reentrant=use_reentrant)):
        leaves = [leaf(hidden), leaf(weight)]
        call(*leaves, y, TWO[:N]).backward()
        results.append([tensor.grad for tensor in leaves])
    assert all(torch.equal(ours, plain) for ours, plain in zip(*results, strict=True))


def test_rows_of_a_chunk_do_not_depend_on_each_other():
    hidden, weight, _, y = head_case(6)
    one = linear_token_stats(hidden, weight, y, max_chunk_bytes=2 * ROW)
    hidden[1::2] = logits_of(3, H, seed=9, scale=50.0)
    two = linear_token_stats(hidden, weight, y, max_chunk_bytes=2 * ROW)
    assert torch.equal(one.logp[::2], two.logp[::2]) and torch.equal(one.entropy[::2], two.entropy[::2])
