"""Failures that users of such ops have met, each as its smallest reproduction against every op over a vocabulary.

Where a failure has its test elsewhere too, that stands in the table:

    A numerics                                   elsewhere (beside the one here, where the column says so)
 1  here  leading columns all -inf               test_token_stats_support, test_divergence_support, test_policy_kernel
 2  here  -inf column: 0 * log 0, both ways      test_token_stats_support, test_divergence_support, test_linear
 4  here  log-prob above 0 for odd V             test_token_stats (to 262144), test_policy_kernel, test_linear
 5  here  a softcap revives padded columns       test_token_stats, test_token_stats_support
 6        JSD of rows peaked apart               test_divergence: jsd_is_at_most_..., test_divergence_support
 9  here  k3 overflows                           test_policy_loss: extreme_log_probs, test_policy_kernel: slope_of_k3
10  here  0 * inf from a row that is masked      test_policy_loss, test_linear_policy_loss: masked_positions_...
11  here  temperature applied before the upcast  test_token_stats: outputs_are_float32_and_scaled_...
12  here  results in the dtype of the logits     the same
    B indexing
14  here  offsets past 2^31                      test_token_stats, test_policy_kernel; on a device: bench/gpu.sh
15  here  the same between batch entries         the same
16  here  strided logits                         test_token_stats, test_divergence_contract, test_linear: any_strides
17  here  strided targets, masks, coefficients   test_linear: any_strides
19  here  targets out of range                   bad_input_is_named of the ops over logits
20  here  more rows than a grid dimension holds  test_token_stats
21  here  2-D and 3-D logits                     test_policy_loss: any_leading_shape, test_linear: leading_shapes
    C autograd
22        the entropy's gradient                 gradcheck of every op, test_policy_loss: loss_and_gradient
23        one upstream gradient for all tokens   any_upstream_gradient of every op, test_linear: values_and_gradients
24  here  upstream scale ignored                 graph_contract in test_linear, test_linear_policy_loss
25  here  logits destroyed for the next loss     test_policy_loss: loss_and_gradient
26  here  inputs written and restored            test_token_stats, test_divergence_contract: nothing_is_written
27  here  in-place work breaks the version check -
29  here  scale, cap, temperature not once each  every_factor_of_the_chain_once, test_linear: values_and_gradients
30        a frozen head builds its gradient      test_linear, test_linear_policy_loss: no_more_gradients_than_...
31        the head's gradient adds up in bf16    test_linear_numerics: weight_gradient_over_many_chunks
33  here  log-prob above 0 for certain rows      test_token_stats: stay_in_their_bounds
"""

import importlib
import math

import pytest
import reference
import torch
from cases import both, logits_of, targets_of
from every_op import OPS, coefficients, loss_of, run
from torch.utils.checkpoint import checkpoint

from crest_ops import Spans, crest_policy_loss

pytestmark = pytest.mark.usefixtures("poisoned_memory")
INF = math.inf
every_op = pytest.mark.parametrize("op", OPS)
every_loss = pytest.mark.parametrize("op", ["policy_loss", "crest_policy_loss", "linear_policy_loss"])


# A. numerics


@every_op
@both
def test_a1_leading_columns_out_of_the_support(op, backend):
    bias = torch.full((2600,), -INF)
    bias[[2500, 2599]] = 0
    x = torch.zeros(2, 2600)
    x[0, 2500] = 50.0
    found = run(op, x, torch.tensor([2500, 2599]), bias, backend=backend)
    assert found.logp.tolist() == pytest.approx([0.0, -math.log(2)], abs=1e-6)
    assert found.entropy.tolist() == pytest.approx([0.0, math.log(2)], abs=1e-6)
    gradient = found.gradient()
    assert torch.isfinite(gradient).all() and (gradient[:, bias == -INF] == 0).all() and (gradient[1, 2599] != 0)


@every_op
@both
@pytest.mark.parametrize("temperature", [1.0, 0.01])
def test_a2_an_excluded_column_has_no_part_whatever_the_scale(op, backend, temperature):
    """Also under the loss scale of mixed precision, where -inf times the slope of the entropy would overflow."""
    x, y, bias = logits_of(3, 40, scale=0.1), targets_of(3, high=40), torch.zeros(40)
    bias[5], y[y == 5] = -INF, 6
    found = run(op, x, y, bias, backend=backend, temperature=temperature)
    plain = torch.distributions.Categorical(logits=(x + bias).double() / temperature)
    assert (found.entropy - plain.entropy()).abs().max() < 1e-5
    for factor in (1.0, 65536.0, 1e8):
        gradient = found.gradient(factor)
        assert torch.isfinite(gradient).all() and (gradient[:, 5] == 0).all()


@every_op
@both
@pytest.mark.parametrize("vocabulary", [1, 2, 65, 2049])
def test_a4_c33_log_probs_stay_below_0(op, backend, vocabulary):
    """Also where one column is all but certain, as in fine-tuned policies."""
    x, y = logits_of(4, vocabulary), targets_of(4, high=vocabulary)
    x[torch.arange(4), y] += torch.tensor([0.0, 12.0, 17.0, 40.0])
    found = run(op, x, y, backend=backend)
    assert (found.logp <= 0).all() and (found.entropy >= 0).all()
    assert (found.logp - reference.stats(x, y)[0]).abs().max() < 1e-5


@every_op
@both
def test_a5_padded_columns_stay_out_behind_a_softcap(op, backend):
    """All logits near -100: capped they lie at -30, where a capped -inf would lie too."""
    x, bias = logits_of(2, 70, scale=1.0) - 100, torch.zeros(70)
    bias[65:] = -INF
    y = torch.tensor([0, 64])
    found = run(op, x, y, bias, softcap=30.0, backend=backend)
    logp, entropy, _, _ = reference.stats(x[:, :65], y, softcap=30.0)
    assert (found.logp - logp).abs().max() < 1e-5 and (found.entropy - entropy).abs().max() < 1e-5
    assert (found.gradient()[:, 65:] == 0).all()


@pytest.mark.parametrize("op", ["policy_loss", "linear_policy_loss"])
@both
def test_a9_k3_of_distant_policies_is_finite(op, backend):
    """d = ref_logp - logp beyond 20 counts as 20, with slope 0: the gradient is that of the other terms alone."""
    x, y = logits_of(3, 20), targets_of(3, high=20)
    logp = reference.stats(x, y)[0].float()
    far = dict(ref_logp=logp + torch.tensor([120.0, -120.0, 1e30]), old_logp=logp)
    found = run(op, x, y, **far, kl_coef=0.5, backend=backend)
    without = run(op, x, y, old_logp=logp, backend=backend)
    weight = coefficients((3,))[1]
    k3 = torch.tensor([math.exp(20) - 21, math.exp(-20) + 19, math.exp(20) - 21])
    assert found.loss.item() == pytest.approx(without.loss.item() + 0.5 * (weight * k3).sum().item(), rel=1e-5)
    assert torch.equal(found.gradient(), without.gradient())


@every_loss
@both
@pytest.mark.parametrize("garbage", [math.nan, -INF, -1e4])
def test_a10_no_gradient_comes_through_masked_ratios(op, backend, garbage):
    x, y = logits_of(4, 20), targets_of(4, high=20)
    mask, old_logp = torch.tensor([True, False, True, False]), reference.stats(x, y)[0].float()
    given = dict(zip(("credit", "weight"), coefficients((4,)), strict=True), old_logp=old_logp)
    clean = run(op, x, y, **given, mask=mask, backend=backend)
    given = {name: torch.where(mask, values, garbage) for name, values in given.items()}
    found = run(op, x, y, **given, mask=mask, backend=backend)
    assert torch.equal(found.loss, clean.loss) and torch.equal(found.gradient(), clean.gradient())
    assert (found.gradient()[~mask] == 0).all() and torch.isfinite(found.gradient()).all()
    if math.isfinite(garbage):  # the same where it is not masked: held at a ratio of exp(20), or 0
        live = run(op, x, y, old_logp=torch.full((4,), garbage), backend=backend)
        assert live.loss.isfinite() and torch.isfinite(live.gradient()).all()


@every_op
@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a11_a12_temperature_comes_after_the_upcast_and_results_are_float32(op, backend, dtype):
    x, y = logits_of(4, 300, dtype=dtype), targets_of(4, high=300)
    found = run(op, x, y, temperature=0.7, backend=backend)
    logp, entropy, _, _ = reference.stats(x, y, temperature=0.7)
    assert found.logp.dtype == found.entropy.dtype == found.loss.dtype == torch.float32
    assert (found.logp - logp).abs().max() < 1e-5 and (found.entropy - entropy).abs().max() < 1e-5


# B. indexing, layout, labels


@pytest.fixture
def far_apart():
    """Places [3, 64] bf16 logits with rows 2^30 + 64 logits apart: that fits into 32 bits, twice that does not."""
    torch.use_deterministic_algorithms(False)  # leave the 4 GB between the rows untouched
    stride = (1 << 30) + 64

    def place(rows):
        buffer = torch.empty(2 * stride + 64, dtype=torch.bfloat16)
        view = torch.as_strided(buffer, (3, 64), (stride, 1))
        view.copy_(rows)
        return view

    return place


@pytest.mark.parametrize("op", OPS[:4])
@both
def test_b14_b15_offsets_past_two_to_the_31(op, backend, far_apart):
    """Forward and backward, where the rows, or the batch entries, or those of the teacher, lie so far apart."""
    rows, y = logits_of(3, 64, dtype=torch.bfloat16), targets_of(3, high=64)
    teacher = logits_of(3, 64, dtype=torch.bfloat16, seed=3)
    wanted = run(op, rows, y, teacher=teacher, backend=backend)
    far = far_apart(rows)
    for view in (far, far[:, None], far[None]):
        shape = view.shape[:-1]
        found = run(op, view, y.view(shape), teacher=teacher.view(view.shape), backend=backend)
        assert torch.equal(found.logp.flatten(), wanted.logp)
        assert torch.equal(found.gradient().reshape(3, 64), wanted.gradient())
    if op in ("crest_policy_loss", "token_divergence"):
        found = run(op, teacher, y, teacher=far, backend=backend)
        assert torch.equal(found.gradient(), run(op, teacher, y, teacher=rows, backend=backend).gradient())


@pytest.mark.parametrize("op", OPS[1:3])
@both
def test_b14_in_place_past_two_to_the_31(op, backend, far_apart):
    rows, y = logits_of(3, 64, dtype=torch.bfloat16), targets_of(3, high=64)
    wanted = run(op, rows, y, teacher=rows, backend=backend).gradient()
    far = far_apart(rows)
    run(op, far, y, teacher=rows, inplace=True, backend=backend).gradient()
    assert torch.equal(far, wanted)


@every_op
@both
def test_b16_b17_strides_of_every_argument_are_honoured(op, backend):
    """Logits transposed and columns of a wider buffer; targets and credit cut; mask and temperature transposed."""
    x, y, mask = logits_of(2, 2, 33), targets_of(2, 2, high=33), torch.tensor([[True, True], [False, True]])
    credit, weight = coefficients((2, 2))
    temperature = torch.linspace(0.5, 2, 4).view(2, 2)
    wanted = run(op, x, y, credit=credit, weight=weight, mask=mask, temperature=temperature, backend=backend)
    gradient = wanted.gradient()
    assert (wanted.logp[~mask] == 0).all() and (gradient[~mask] == 0).all() and (wanted.logp[mask] < 0).all()
    cut_y, cut_credit, cut_weight = (torch.cat([t * 0, t], 1)[:, 2:] for t in (y, credit, weight))
    buffer = torch.full((3, 4, 40), 9.0)
    buffer[:2, 1:3, :33] = x
    for view in (x.transpose(0, 1).contiguous().transpose(0, 1), buffer[:2, 1:3, :33]):
        found = run(
            op, view, cut_y, credit=cut_credit, weight=cut_weight, mask=mask.t().contiguous().t(),
            temperature=temperature.t().contiguous().t(), backend=backend,
        )  # fmt: skip
        assert torch.equal(found.logp, wanted.logp) and torch.equal(found.entropy, wanted.entropy)
        assert torch.allclose(found.gradient(), gradient, atol=1e-7)
    columns = x.transpose(1, 2).contiguous().transpose(1, 2)  # the last dimension is not contiguous
    assert torch.equal(run(op, columns, y, mask=mask, temperature=temperature, backend=backend).logp, wanted.logp)


@every_op
@both
def test_b19_targets_outside_the_vocabulary(op, backend):
    x = logits_of(3, 20)
    found = run(op, x, torch.tensor([3, -100, 5]), backend=backend)
    assert found.logp[1] == 0 and found.entropy[1] == 0 and (found.gradient()[1] == 0).all()
    for bad in (-1, -2, 20, 27):
        with pytest.raises(ValueError, match=rf"targets\[1\] is {bad} "):
            run(op, x, torch.tensor([3, bad, 5]), backend=backend)


@pytest.mark.parametrize("op", OPS)
def test_b20_rows_are_counted_along_the_first_dimension_of_the_grid(op, monkeypatch):
    """The second and third hold 65535 at most."""
    grids = []

    def no_work(*arguments, **options):
        for tensor in arguments:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensor.zero_()

    class Recorder:
        def __getitem__(self, grid):
            grids.append(grid)
            return no_work

    for name in ("token_stats", "policy_loss", "divergence", "divergence_grad", "teacher_pair", "crest_segments"):
        module = importlib.import_module(f"crest_kernels.{name}")
        for kernel in [key for key in vars(module) if key.endswith("_kernel")]:
            monkeypatch.setattr(module, kernel, Recorder())
    x, y = torch.zeros(2, 35_000, 3), torch.zeros(2, 35_000, dtype=torch.int64)
    torch.use_deterministic_algorithms(False)
    found = run(op, x, y, backend="triton")
    found.gradient()
    assert grids and all(len(grid) == 1 for grid in grids)


@every_op
@both
def test_b21_rows_are_rows_in_any_leading_shape(op, backend):
    x, y = logits_of(4, 7), targets_of(4, high=7)
    flat = run(op, x, y, backend=backend)
    gradient = flat.gradient()
    for shape in ((2, 2), (1, 4, 1)):
        found = run(op, x.view(*shape, 7), y.view(shape), backend=backend)
        assert found.logp.shape == shape and torch.equal(found.logp.flatten(), flat.logp)
        assert torch.equal(found.gradient().view(4, 7), gradient)


# C. autograd


@every_op
@both
def test_c24_gradients_are_in_proportion_to_what_comes_from_above(op, backend):
    found = run(op, logits_of(4, 30), targets_of(4, high=30), backend=backend)
    one = found.gradient()
    assert one.abs().max() > 1e-3
    for factor in (0.0, -1.0, 3.0, 1e3, 65536.0):
        assert torch.allclose(found.gradient(factor), factor * one, rtol=1e-5, atol=1e-6 * abs(factor))


@every_op
@both
def test_c25_c26_c27_inputs_are_read_alone(op, backend):
    """Two losses on the same logits, one of them twice, and a bystander that autograd would miss if it were written."""
    x, y = logits_of(4, 30), targets_of(4, high=30)
    leaf = x.clone().requires_grad_()
    logits = leaf * 1.0
    other = logits.square().sum()  # saves the logits
    before, version = logits.detach().clone(), logits._version
    _, one = loss_of(op, logits, y, backend=backend)
    _, two = loss_of(op, logits, y, backend=backend, temperature=0.5)
    (together,) = torch.autograd.grad(one + two + other, leaf, retain_graph=True)
    apart = [torch.autograd.grad(loss, leaf, retain_graph=True)[0] for loss in (two, other, one)]
    assert torch.allclose(together, sum(apart), atol=1e-5)
    assert torch.equal(torch.autograd.grad(one, leaf)[0], apart[2])
    assert torch.equal(logits, before) and logits._version == version


@pytest.mark.parametrize("op", OPS[1:3])
@both
def test_c25_in_place_is_seen_by_the_other_loss(op, backend):
    """The second loss raises rather than read a gradient as if it were logits."""
    x, y = logits_of(4, 30), targets_of(4, high=30)
    logits = x.clone().requires_grad_() * 1.0
    other = logits.square().sum()
    _, loss = loss_of(op, logits, y, inplace=True, backend=backend)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


@every_op
@both
def test_c25_recomputed_under_a_checkpoint(op, backend):
    x, y = logits_of(4, 30), targets_of(4, high=30)
    wanted = run(op, x, y, backend=backend).gradient()
    leaf = x.clone().requires_grad_()
    checkpoint(lambda z: loss_of(op, z, y, backend=backend)[1], leaf, use_reentrant=False).backward()
    assert torch.equal(leaf.grad, wanted)


@both
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("per_token", [False, True])
def test_c29_every_factor_of_the_chain_once_in_crest(backend, softcap, per_token):
    x, teacher, y = logits_of(5, 90), logits_of(5, 90, seed=3), targets_of(5, high=77)
    temperature = torch.tensor([0.3, 0.6, 1.0, 1.7, 4.0]) if per_token else 0.6
    transform = dict(temperature=temperature, softcap=softcap, logit_scale=0.7, vocab_size=77)
    weight = coefficients((5,))[1]
    spans = Spans.from_mask(torch.ones(1, 5).bool(), group=torch.tensor([0]))
    leaf = x.clone().requires_grad_()
    found = crest_policy_loss(
        leaf, teacher, y, spans, torch.tensor([2.0]), token_weight=weight, backend=backend,
        **transform,
    )  # fmt: skip
    logp, entropy, _, _ = reference.stats(x, y, **transform)
    teacher_logp = reference.stats(teacher, y, **transform)[0]
    assert (found.logp - logp).abs().max() < 2e-5 and (found.entropy - entropy).abs().max() < 2e-5
    assert found.metrics["gap_mean"].item() == pytest.approx((teacher_logp - logp).mean().item(), abs=1e-5)
    (gradient,) = torch.autograd.grad(found.loss, leaf)
    # On policy the gradient is -weight * credit of each log-prob; the target's column tells the credit.
    one = reference.gradient(x, y, torch.ones(5), torch.zeros(5), **transform)
    factor = gradient.gather(1, y[:, None]) / one.gather(1, y[:, None])
    assert (gradient - factor * one).abs().max() < 1e-5 and (gradient[:, 77:] == 0).all()
    mean_phi = (-factor[:, 0] / weight / 2).mean()
    assert mean_phi.item() == pytest.approx(found.metrics["phi_mean"].item(), rel=1e-4)
