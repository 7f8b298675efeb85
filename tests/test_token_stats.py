"""The numerics contract of token_stats, point by point, on both backends (point 4: test_token_stats_support.py)."""

import math

import hypothesis.strategies as st
import pytest
import reference
import torch
from cases import BACKENDS, both, gradient_of, logits_of, targets_of
from hypothesis import given, settings

from crest_ops import token_stats

pytestmark = pytest.mark.usefixtures("poisoned_memory")


# 1. arithmetic in float32


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_outputs_are_float32_and_scaled_after_the_upcast(backend, dtype):
    x, y = logits_of(6, 300, dtype=dtype), targets_of(6, high=300)
    found = token_stats(x, y, temperature=0.7, backend=backend, outputs=("logp", "entropy", "sum_sq_probs"))
    for ours, exact in zip(
        (found.logp, found.entropy, found.lse, found.sum_sq_probs), reference.stats(x, y, temperature=0.7), strict=True
    ):
        assert ours.dtype == torch.float32
        assert (ours - exact).abs().max() < 1e-5


# 2. bounds for every V: 1, primes, the edges of a kernel's step (4 tiles of 128 lanes of 8 or 4), real vocabularies


@both
@pytest.mark.parametrize("vocabulary", [1, 2, 63, 65, 127, 4095, 4096, 4097, 50257, 262144])
def test_logp_and_entropy_stay_in_their_bounds(backend, vocabulary):
    x = logits_of(4, vocabulary, dtype=torch.bfloat16)
    x[1] = 0  # uniform: the entropy's upper bound
    x[2, 0] = 200  # one certain column: its lower bound
    y = targets_of(4, high=vocabulary)
    y[2] = 0
    found = token_stats(x, y, backend=backend)
    assert (found.logp <= 0).all()
    assert (found.entropy >= 0).all() and (found.entropy <= math.log(vocabulary) * (1 + 1e-7)).all()
    assert found.entropy[1] == pytest.approx(math.log(vocabulary), abs=1e-5)
    assert found.logp[2] == pytest.approx(0, abs=1e-6)
    exact = reference.stats(x, y)
    assert (found.logp - exact[0]).abs().max() < 1e-4 and (found.entropy - exact[1]).abs().max() < 1e-4


# 3. shift invariance


@both
@pytest.mark.parametrize("constant", [-5e4, -1000.0, 1000.0, 5e4])
def test_adding_a_constant_to_a_row_changes_nothing(backend, constant):
    # Sixteenths: the shifted logits are exact in float32, so that nothing but our own rounding can move the result.
    x = (logits_of(5, 700) * 16).round() / 16
    y = targets_of(5, high=700)
    grads = torch.ones(5), torch.ones(5)
    one, other = token_stats(x, y, backend=backend), token_stats(x + constant, y, backend=backend)
    assert (one.logp - other.logp).abs().max() < 4e-6
    assert (one.entropy - other.entropy).abs().max() < 4e-6
    difference = gradient_of(x, y, *grads, backend=backend) - gradient_of(x + constant, y, *grads, backend=backend)
    assert difference.abs().max() < 4e-6


# 5. a row's result depends on that row alone


@both
@pytest.mark.parametrize("vocabulary", [1, 65, 5003, 33_001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_bitwise_independent(backend, vocabulary, dtype):
    if backend == "triton" and vocabulary > 6000:
        pytest.skip("the same code path as 5003, minutes in the interpreter")
    x, y = logits_of(6, vocabulary, dtype=dtype), targets_of(6, high=vocabulary)
    weight = logits_of(6, seed=5)
    whole, gradient = token_stats(x, y, backend=backend), gradient_of(x, y, weight, weight, backend=backend)
    again = token_stats(x, y, backend=backend)
    assert torch.equal(whole.logp, again.logp) and torch.equal(whole.entropy, again.entropy)
    for rows in ([0], [4, 1, 3, 5]):
        part = token_stats(x[rows], y[rows], backend=backend)
        for name in ("logp", "entropy", "lse"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[rows]), name
        assert torch.equal(gradient_of(x[rows], y[rows], weight[rows], weight[rows], backend=backend), gradient[rows])


# 6. layout


@both
def test_any_strides(backend):
    base, y = logits_of(2, 4, 40), targets_of(2, 4, high=32)
    padded = torch.zeros(2, 4, 64)
    padded[..., :40] = base
    views = {
        "transposed": base.transpose(0, 1).contiguous().transpose(0, 1),
        "shifted": torch.cat([base, base[:, :1]], 1)[:, :-1],
        "columns of a wider buffer": padded[..., :40],
        "last dimension not contiguous": base.transpose(1, 2).contiguous().transpose(1, 2),
        "four dimensions": base.view(2, 2, 2, 40),
    }
    weight = logits_of(2, 4, seed=5)
    whole, gradient = token_stats(base, y, backend=backend), gradient_of(base, y, weight, weight, backend=backend)
    for name, view in views.items():
        shape = view.shape[:-1]
        found = token_stats(view, y.view(shape), backend=backend)
        assert torch.equal(found.logp.view(2, 4), whole.logp), name
        x = view.detach().requires_grad_()
        part = token_stats(x, y.view(shape), backend=backend)
        (again,) = torch.autograd.grad((weight.view(shape) * (part.logp + part.entropy)).sum(), x)
        assert torch.allclose(again.reshape(2, 4, 40), gradient, atol=1e-6), name
    expanded = token_stats(base[:1, :1].expand(2, 4, 40), y, backend=backend)
    assert torch.equal(expanded.entropy, whole.entropy[0, 0].expand(2, 4))
    strided_targets = torch.stack([y, y], -1)[..., 0]
    assert torch.equal(token_stats(base, strided_targets, backend=backend).logp, whole.logp)


@both
def test_offsets_past_two_to_the_31(backend):
    stride = (1 << 31) + 64
    buffer = torch.empty(0, dtype=torch.bfloat16)
    torch.use_deterministic_algorithms(False)  # leave the 4 GB between the two rows untouched
    buffer = torch.empty(stride + 64, dtype=torch.bfloat16)
    rows = logits_of(2, 64, dtype=torch.bfloat16)
    buffer[:64], buffer[stride:] = rows[0], rows[1]
    y = targets_of(2, high=64)
    expected = token_stats(rows, y, backend=backend).logp
    for shape, strides in (((2, 64), (stride, 1)), ((2, 1, 64), (stride, 64, 1)), ((1, 2, 64), (64, stride, 1))):
        view = torch.as_strided(buffer, shape, strides)
        assert torch.equal(token_stats(view, y.view(shape[:-1]), backend=backend).logp.flatten(), expected)


def test_more_rows_than_a_grid_dimension_holds():
    x, y = logits_of(70_000, 5), targets_of(70_000, high=5)
    assert (token_stats(x, y).logp - reference.stats(x, y)[0]).abs().max() < 1e-5


@both
def test_empty_and_fully_masked(backend):
    found = token_stats(torch.zeros(0, 7), torch.zeros(0, dtype=torch.int64), backend=backend)
    assert found.logp.shape == (0,)
    x = torch.full((3, 7), math.nan, requires_grad=True)
    found = token_stats(x, torch.full((3,), -100), backend=backend)
    (found.logp + found.entropy).sum().backward()
    assert (x.grad == 0).all() and (found.logp == 0).all() and (found.entropy == 0).all() and (found.lse == 0).all()


@both
def test_masked_rows_are_exactly_zero_and_not_looked_at(backend):
    x, y = logits_of(5, 30), targets_of(5, high=30)
    mask = torch.tensor([True, False, True, True, False])
    y[3] = -100
    clean = token_stats(x, y, mask=mask, backend=backend)
    x[[1, 3, 4]] = math.nan
    y[1], y[4] = -1, 1000  # out of range where masked
    found = token_stats(x, y, mask=mask, backend=backend)
    for name in ("logp", "entropy", "lse"):
        assert torch.equal(getattr(found, name), getattr(clean, name))
        assert (getattr(found, name)[[1, 3, 4]] == 0).all()
    gradient = gradient_of(x, y, torch.full((5,), 2.0), torch.ones(5), mask=mask, backend=backend)
    assert (gradient[[1, 3, 4]] == 0).all() and torch.isfinite(gradient).all()


# 7. the autograd contract


@both
def test_inputs_are_not_written_and_the_graph_can_be_kept(backend):
    x, y = logits_of(4, 50).requires_grad_(), targets_of(4, high=50)
    before, version = x.detach().clone(), x._version
    found = token_stats(x, y, backend=backend)
    total = (found.logp * logits_of(4, seed=6) + found.entropy).sum()
    first = torch.autograd.grad(total, x, retain_graph=True)[0]
    second = torch.autograd.grad(total, x)[0]
    assert torch.equal(first, second) and torch.equal(x, before) and x._version == version


@both
def test_double_backward_raises(backend):
    x, y = logits_of(4, 50).requires_grad_(), targets_of(4, high=50)
    (gradient,) = torch.autograd.grad(token_stats(x, y, backend=backend).logp.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.square().sum().backward()


@both
@pytest.mark.parametrize("wanted", ["logp", "entropy", "both"])
def test_any_upstream_gradient(backend, wanted):
    x, y = logits_of(6, 80), targets_of(6, high=80)
    grad_logp = logits_of(6, seed=7) * (wanted != "entropy")
    grad_entropy = logits_of(6, seed=8) * (wanted != "logp")
    leaf = x.clone().requires_grad_()
    found = token_stats(leaf, y, backend=backend)
    outputs = {"logp": [found.logp], "entropy": [found.entropy], "both": [found.logp, found.entropy]}[wanted]
    weights = {"logp": [grad_logp], "entropy": [grad_entropy], "both": [grad_logp, grad_entropy]}[wanted]
    (gradient,) = torch.autograd.grad(outputs, leaf, weights, retain_graph=True)
    assert (gradient - reference.gradient(x, y, grad_logp, grad_entropy)).abs().max() < 1e-5
    for scale in (0.0, -1.0, 1e3):
        (scaled,) = torch.autograd.grad(outputs, leaf, [scale * w for w in weights], retain_graph=True)
        assert torch.allclose(scaled, scale * gradient, rtol=1e-5, atol=1e-6 * max(1.0, abs(scale)))
    (expanded,) = torch.autograd.grad(found.logp, leaf, torch.ones(()).expand(6))  # stride 0
    assert (expanded - reference.gradient(x, y, torch.ones(6), torch.zeros(6))).abs().max() < 1e-5


def test_lse_and_sum_sq_probs_carry_no_gradient():
    x = logits_of(2, 5).requires_grad_()
    found = token_stats(x, targets_of(2, high=5), outputs=("sum_sq_probs",))
    assert not found.lse.requires_grad and not found.sum_sq_probs.requires_grad and found.entropy is None


# 8. nothing is built for logits that need no gradient


@both
def test_no_graph_without_need(backend):
    x, y = logits_of(4, 50), targets_of(4, high=50)
    assert not token_stats(x, y, backend=backend).logp.requires_grad
    with torch.no_grad():
        assert not token_stats(x.requires_grad_(), y, backend=backend).logp.requires_grad


# 9. - 10. temperature, padded columns, cap and scale


@both
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("logit_scale", [1.0, 0.25])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("vocab_size", [None, 77])
def test_every_factor_of_the_chain_once(backend, softcap, logit_scale, per_token, vocab_size):
    x, y = logits_of(5, 90), targets_of(5, high=77)
    temperature = torch.tensor([0.3, 0.6, 1.0, 1.7, 4.0]) if per_token else 0.6
    arguments = dict(temperature=temperature, softcap=softcap, logit_scale=logit_scale, vocab_size=vocab_size)
    found = token_stats(x, y, backend=backend, outputs=("logp", "entropy", "sum_sq_probs"), **arguments)
    for ours, exact in zip(
        (found.logp, found.entropy, found.lse, found.sum_sq_probs), reference.stats(x, y, **arguments), strict=True
    ):
        assert (ours - exact).abs().max() < 2e-5
    grads = logits_of(5, seed=9), logits_of(5, seed=10)
    gradient = gradient_of(x, y, *grads, backend=backend, **arguments)
    assert (gradient - reference.gradient(x, y, *grads, **arguments)).abs().max() < 2e-5
    if vocab_size:
        assert (gradient[:, vocab_size:] == 0).all()


@both
def test_padded_columns_may_hold_anything(backend):
    x, y = logits_of(3, 5000), targets_of(3, high=4200)
    clean = token_stats(x, y, vocab_size=4200, softcap=30.0, backend=backend)
    x[:, 4200:] = math.nan
    found = token_stats(x, y, vocab_size=4200, softcap=30.0, backend=backend)
    assert torch.equal(found.logp, clean.logp) and torch.equal(found.entropy, clean.entropy)
    gradient = gradient_of(x, y, torch.ones(3), torch.ones(3), vocab_size=4200, softcap=30.0, backend=backend)
    assert (gradient[:, 4200:] == 0).all() and torch.isfinite(gradient).all()


# 11. errors


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (dict(logits=torch.zeros(3, 5, dtype=torch.int64)), "logits"),
        (dict(logits=[[0.0]]), "logits"),
        (dict(targets=torch.zeros(4, dtype=torch.int64)), "targets"),
        (dict(targets=torch.zeros(3)), "targets"),
        (dict(targets=torch.zeros(3, 1, dtype=torch.int64)), "targets"),
        (dict(targets=torch.tensor([0, 5, 1])), r"targets\[1\] is 5"),
        (dict(targets=torch.tensor([0, 1, -1])), r"targets\[2\] is -1"),
        (dict(targets=torch.tensor([0, 4, 1]), vocab_size=4), r"targets\[1\] is 4"),
        (dict(mask=torch.ones(3)), "mask"),
        (dict(mask=torch.ones(2, dtype=torch.bool)), "mask"),
        (dict(temperature=0.0), "temperature"),
        (dict(temperature=-1), "temperature"),
        (dict(temperature=math.nan), "temperature"),
        (dict(temperature=torch.tensor([1.0, 0.0, 1.0])), r"temperature\[1\]"),
        (dict(temperature=torch.ones(1)), "temperature"),
        (dict(softcap=0.0), "softcap"),
        (dict(logit_scale=-2.0), "logit_scale"),
        (dict(vocab_size=6), "vocab_size"),
        (dict(vocab_size=0), "vocab_size"),
        (dict(vocab_size=5.0), "vocab_size"),
        (dict(ignore_index=None), "ignore_index"),
        (dict(logits=torch.zeros(3, 0)), "logits"),
        (dict(temperature=torch.full((3,), 1e30)), "temperature"),
        (dict(outputs=("logp", "entrpy")), "outputs"),
        (dict(backend="cuda"), "backend"),
        (dict(logits=torch.zeros(3, 5, dtype=torch.float64), backend="triton"), "backend"),
        (dict(targets=torch.zeros(3, dtype=torch.int64, device="meta")), "targets"),
    ],
)
def test_bad_input_is_named(change, name):
    arguments = dict(logits=torch.zeros(3, 5), targets=torch.zeros(3, dtype=torch.int64)) | change
    logits, targets = arguments.pop("logits"), arguments.pop("targets")
    with pytest.raises(ValueError, match=name):
        token_stats(logits, targets, **arguments)


# 12. accuracy, three ways


@both
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-3), (torch.float16, 1e-4), (torch.float32, 4e-6)])
@pytest.mark.parametrize("shape", [(4, 128), (3, 5001)])
def test_no_worse_than_plain_torch_in_the_same_dtype(backend, dtype, tolerance, shape):
    x, y = logits_of(*shape, dtype=dtype), targets_of(shape[0], high=shape[1])
    grads = logits_of(shape[0], seed=11), logits_of(shape[0], seed=12)
    plain = x.clone().requires_grad_()
    log_p = torch.log_softmax(plain, -1)
    logp, entropy = log_p.gather(1, y[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)
    (plain_gradient,) = torch.autograd.grad((grads[0] * logp + grads[1] * entropy).sum(), plain)
    found, exact = token_stats(x, y, backend=backend), reference.stats(x, y)
    reference.assert_no_worse_than(found.logp, logp.detach(), exact[0], tolerance)
    reference.assert_no_worse_than(found.entropy, entropy.detach(), exact[1], tolerance)
    gradient = gradient_of(x, y, *grads, backend=backend)
    exact_gradient = reference.gradient(x, y, *grads)
    # A low-precision result may be half a unit of its last place off the exact value.
    rounding = torch.finfo(dtype).eps / 2 * exact_gradient.abs()
    reference.assert_no_worse_than(gradient, plain_gradient, exact_gradient, 4e-6 + rounding)


# shapes and combinations


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(0, 5),
    vocabulary=st.integers(1, 300),
    padding=st.integers(0, 9),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    backend=st.sampled_from(BACKENDS),
    data=st.data(),
)
def test_random_shapes(rows, vocabulary, padding, dtype, backend, data):
    x = logits_of(rows, vocabulary + padding, dtype=dtype, seed=data.draw(st.integers(0, 99)))
    y = targets_of(rows, high=vocabulary)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)), dtype=torch.bool)
    found = token_stats(x, y, mask=mask, vocab_size=vocabulary, backend=backend)
    logp, entropy, lse, _ = reference.stats(x, y, vocab_size=vocabulary)
    for ours, exact in ((found.logp, logp), (found.entropy, entropy), (found.lse, lse)):
        assert torch.allclose(ours.double(), torch.where(mask, exact, 0), atol=2e-5)
    grad_logp, grad_entropy = logits_of(rows, seed=13) * mask, logits_of(rows, seed=14) * mask
    gradient = gradient_of(x, y, grad_logp, grad_entropy, mask=mask, vocab_size=vocabulary, backend=backend)
    exact = reference.gradient(x, y, grad_logp, grad_entropy, vocab_size=vocabulary)
    assert torch.allclose(gradient.double(), exact, rtol=0 if dtype == torch.float32 else 1e-2, atol=2e-5)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("per_token", [False, True])
def test_gradcheck_of_the_definition(softcap, per_token):
    x = logits_of(4, 9).double().requires_grad_()
    y = torch.tensor([0, 3, -100, 6])
    temperature = torch.tensor([0.5, 1.0, 2.0, 3.0]) if per_token else 0.6

    def run(logits):
        found = token_stats(logits, y, temperature=temperature, softcap=softcap, logit_scale=1.7, vocab_size=8)
        return found.logp, found.entropy

    assert torch.autograd.gradcheck(run, x)
    assert run(x)[0].dtype == torch.float64


@both
def test_opcheck(backend):
    x, y = logits_of(1, 4, 20).requires_grad_(), torch.tensor([1, -1, 3, 19])
    one, scalars = torch.ones(1), (20, 1.0, 0.0)
    torch.library.opcheck(torch.ops.crest.wanted_targets, (y, y > 0, one, 20, -1))
    for sum_sq in (False, True):
        torch.library.opcheck(torch.ops.crest.token_stats, (x, y, one, *scalars, True, sum_sq, False, backend))
    with torch.no_grad():
        _, entropy, _, _, normaliser = torch.ops.crest.token_stats(x, y, one, *scalars, True, False, False, backend)
        arguments = (y, one, entropy, normaliser, torch.ones(4), torch.ones(4), *scalars, backend)
        torch.library.opcheck(torch.ops.crest.token_stats_grad, (x.detach(), *arguments))
        torch.library.opcheck(torch.ops.crest.token_stats_grad_, (x.detach().clone(), *arguments))
