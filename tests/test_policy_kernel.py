"""The fused kernel of the policy loss: a row of logits becomes the gradient of its loss, in place."""

import importlib
import math

import pytest
import reference
import torch
from cases import logits_of, targets_of
from crest_kernels.policy_loss import policy_loss

from crest_ops import CISPO, SAPO, PPOClip

module = importlib.import_module("crest_kernels.policy_loss")  # the package's own name for it is the function
pytestmark = pytest.mark.usefixtures("poisoned_memory")
SURROGATES = {
    "clip": (PPOClip(0.2, 0.28), (0, 0.2, 0.28, math.inf)),
    "dual clip": (PPOClip(0.1, 0.3, dual=1.5), (0, 0.1, 0.3, 1.5)),
    "cispo": (CISPO(0.28), (1, 1.0, 0.28, 0.0)),
    "cispo with a lower bound": (CISPO(0.28, low=0.3), (1, 0.3, 0.28, 0.0)),
    "sapo": (SAPO(1.0, 1.05), (2, 1.0, 1.05, 0.0)),
}
each_surrogate = pytest.mark.parametrize("name", SURROGATES)
ON_POLICY = (0, 0.2, 0.28, math.inf)


def run(logits, targets, surrogate=ON_POLICY, **changes):
    """(logp, entropy, active, gradient) of the kernel; the logits stay as they are."""
    rows = len(targets)
    arguments = dict(
        temperature=torch.ones(1), credit=torch.ones(rows), weight=torch.ones(rows), old_logp=None, ref_logp=None,
        importance_weight=None, num_columns=logits.shape[1], logit_scale=1.0, softcap=0.0, kl_coef=0.0,
        entropy_coef=0.0,
    )  # fmt: skip
    arguments |= changes
    out = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype)  # a clone would drop the row stride
    out.copy_(logits)
    return *policy_loss(out, targets, surrogate=surrogate, **arguments), out


def loss_per_row(surrogate, log_ratio, logp, credit):
    """Token-level surrogates as losses in their papers' form, for autograd; credit has no gradient."""
    r = log_ratio.clamp(-20, 20).exp()
    if isinstance(surrogate, PPOClip):
        value = -torch.minimum(r * credit, r.clamp(1 - surrogate.low, 1 + surrogate.high) * credit)
        if surrogate.dual is not None:
            value = torch.where(credit < 0, torch.minimum(value, -surrogate.dual * credit), value)
        return value
    if isinstance(surrogate, CISPO):
        low = 0.0 if surrogate.low is None else 1 - surrogate.low
        return -r.clamp(low, 1 + surrogate.high).detach() * credit * logp
    tau = torch.where(credit > 0, surrogate.tau_pos, surrogate.tau_neg)
    return -(4 / tau) * torch.sigmoid(tau * (r - 1)) * credit


def exact_gradient(logits, targets, surrogate, credit, weight, changes, **transform):
    """The loss's gradient in float64, by autograd."""
    x = logits.detach().double().requires_grad_()
    logp, entropy, _, _ = reference.stats(x, targets, **transform)
    old = changes.get("old_logp")
    log_ratio = logp - (logp.detach() if old is None else old.double())
    value = loss_per_row(surrogate, log_ratio, logp, credit.double())
    if changes.get("importance_weight") is not None:
        value = value * changes["importance_weight"].double()
    if changes.get("ref_logp") is not None:
        d = (changes["ref_logp"].double() - logp).clamp(-20, 20)
        value = value + changes["kl_coef"] * (d.exp() - d - 1)
    value = value - changes.get("entropy_coef", 0.0) * entropy
    return torch.autograd.grad((weight.double() * value).sum(), x)[0]


def case(rows=4, vocabulary=301, dtype=torch.float32):
    x, y = logits_of(rows, vocabulary, dtype=dtype), targets_of(rows, high=vocabulary)
    return x, y, logits_of(rows, seed=3), logits_of(rows, seed=4).abs()


def near(x, y, seed, spread=0.4, **transform):
    """Log-probs of another policy, near those of the logits."""
    return (reference.stats(x, y, **transform)[0] + spread * logits_of(len(y), seed=seed, scale=1.0)).float()


@each_surrogate
@pytest.mark.parametrize("extras", ["nothing", "old", "ref", "importance", "entropy", "all"])
def test_the_gradient_is_that_of_the_loss(name, extras):
    surrogate, numbers = SURROGATES[name]
    x, y, credit, weight = case()
    every = {
        "old": dict(old_logp=near(x, y, 5)),
        "ref": dict(ref_logp=near(x, y, 6), kl_coef=0.3),
        "importance": dict(importance_weight=logits_of(4, seed=7).abs()),
        "entropy": dict(entropy_coef=0.2),
        "nothing": {},
    }
    changes = {k: v for part in every.values() for k, v in part.items()} if extras == "all" else every[extras]
    logp, entropy, active, gradient = run(x, y, numbers, credit=credit, weight=weight, **changes)
    exact = exact_gradient(x, y, surrogate, credit, weight, changes)
    assert ((gradient - exact).abs() < 5e-6 * (1 + exact.abs().amax(1, keepdim=True))).all()
    assert torch.equal(active, (exact != 0).any(1))
    exact_logp, exact_entropy, _, _ = reference.stats(x, y)
    assert (logp - exact_logp).abs().max() < 1e-5 and (entropy - exact_entropy).abs().max() < 1e-5


@pytest.mark.parametrize("entropy_coef", [0.0, -0.3])
@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("vocab_size", [None, 250])
def test_every_factor_of_the_chain_once(entropy_coef, softcap, per_row, vocab_size):
    x, y, credit, weight = case()
    y = y % 250
    temperature = torch.linspace(0.4, 3, 4) if per_row else 0.6
    transform = dict(temperature=temperature, softcap=softcap or None, logit_scale=0.7, vocab_size=vocab_size)
    changes = dict(old_logp=near(x, y, 5, **transform), entropy_coef=entropy_coef)
    exact = exact_gradient(x, y, PPOClip(0.2, 0.28), credit, weight, changes, **transform)
    if vocab_size:
        x[:, vocab_size:] = math.nan
    as_tensor = temperature if per_row else torch.full((1,), temperature)
    logp, entropy, _, gradient = run(
        x, y, credit=credit, weight=weight, temperature=as_tensor, softcap=softcap, logit_scale=0.7,
        num_columns=vocab_size or 301, **changes,
    )  # fmt: skip
    largest = exact.nan_to_num(0).abs().amax(1, keepdim=True)
    assert ((gradient - exact.nan_to_num(0)).abs() < 5e-6 * (1 + largest)).all()
    assert vocab_size is None or (gradient[:, vocab_size:] == 0).all()
    exact_logp, exact_entropy, _, _ = reference.stats(x, y, **transform)
    assert (logp - exact_logp).abs().max() < 1e-5 and (entropy - exact_entropy).abs().max() < 1e-5


@pytest.mark.parametrize("vocabulary", [1, 2, 31, 1023, 4097, 8200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_width_no_worse_than_plain_torch_in_the_same_dtype(vocabulary, dtype):
    x, y, credit, weight = case(3, vocabulary, dtype)
    changes = dict(entropy_coef=0.1)
    exact = exact_gradient(x, y, PPOClip(), credit, weight, changes)
    plain = x.clone().requires_grad_()
    log_p = torch.log_softmax(plain, -1)
    logp, entropy = log_p.gather(1, y[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)
    (plain_gradient,) = torch.autograd.grad((weight * (-credit * logp - 0.1 * entropy)).sum(), plain)
    _, _, _, gradient = run(x, y, credit=credit, weight=weight, **changes)
    # A low-precision result may be half a unit of its last place off the exact value.
    rounding = torch.finfo(dtype).eps / 2 * exact.abs()
    tiny = torch.finfo(dtype).smallest_normal if dtype == torch.float16 else 0  # flushed, as plain torch may not
    reference.assert_no_worse_than(gradient, plain_gradient, exact, 4e-6 + tiny + rounding)


@each_surrogate
def test_the_slope_is_that_of_crest_ops(name):
    """The gradient by the target's logit is slope (1 - p) = slope / 2 where two columns are equally likely."""
    surrogate, numbers = SURROGATES[name]
    log_ratio = torch.cat([logits_of(18, scale=0.5), torch.tensor([0.0, 0.2, -25.0, 25.0, 19.9, -19.9])])
    credit = logits_of(24, seed=1)
    credit[::7] = 0
    x, y = torch.zeros(24, 2), torch.zeros(24, dtype=torch.int64)
    logp, _, active, gradient = run(x, y, numbers, credit=credit, old_logp=-math.log(2) - log_ratio)
    found = surrogate.evaluate(logp - (-math.log(2) - log_ratio), credit)
    assert torch.allclose(2 * gradient[:, 0], found.slope, rtol=2e-5, atol=1e-7)
    assert torch.equal(active, found.slope != 0)


def test_the_slope_of_k3_near_and_far():
    d = torch.tensor([1e-6, -1e-4, 0.01, 0.49, -0.49, 0.51, -0.51, 3.0, -3.0, 20.0, 20.1, -20.1, 60.0])
    x, y = torch.zeros(13, 2), torch.zeros(13, dtype=torch.int64)
    logp = torch.tensor(0.5).log().double()
    ref_logp = (logp + d).float()
    _, _, active, gradient = run(x, y, credit=torch.zeros(13), ref_logp=ref_logp, kl_coef=0.5)
    exact = -0.5 * torch.expm1(ref_logp.double() - logp)
    inside = torch.tensor([True] * 10 + [False] * 3)
    inside[9] = abs(ref_logp[9] - logp.float()) <= 20
    assert torch.equal(active, inside)
    assert torch.allclose(2 * gradient[:, 0].double(), torch.where(inside, exact, 0), rtol=2e-6, atol=1e-7)


def test_rows_that_are_not_active():
    x, y = logits_of(6, 40), targets_of(6, high=40)
    logp = reference.stats(x, y)[0].float()
    # credit 0; clipped above; the same with negative credit, free; weight 0; importance 0; plain
    credit = torch.tensor([0.0, 1.0, -1.0, 1.0, 1.0, 1.0])
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    importance = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1.0])
    old = logp - torch.tensor([0.0, 0.5, 0.5, 0.0, 0.0, 0.0])
    arguments = dict(credit=credit, weight=weight, old_logp=old, importance_weight=importance)
    _, _, active, gradient = run(x, y, **arguments)
    assert active.dtype == torch.bool and active.tolist() == [False, False, True, False, False, True]
    assert torch.equal((gradient != 0).any(1), active)
    _, _, active, gradient = run(x, y, **arguments, entropy_coef=0.1)
    assert active.tolist() == [True, True, True, False, True, True]
    assert torch.equal((gradient != 0).any(1), active)


def test_minus_inf_and_a_target_outside_the_support():
    x, y = logits_of(5, 9000), torch.tensor([8500, 8500, 3, 8999, 3])
    x[0, :8400] = -math.inf  # whole leading blocks
    x[1] = -math.inf
    x[2, 3] = -math.inf
    x[3, :8999] = -math.inf
    logp, entropy, active, gradient = run(x, y, entropy_coef=0.3, old_logp=torch.full((5,), -2.0))
    assert active.tolist() == [True, False, False, True, True]
    assert logp[1] == logp[2] == -math.inf and entropy[1] == 0
    assert (gradient[1:3] == 0).all() and (gradient[x == -math.inf] == 0).all()
    assert logp[3] == 0 and entropy[3] == 0 and gradient[3].abs().max() < 1e-7  # one column: certain
    exact = exact_gradient(
        x[[0, 4]], y[[0, 4]], PPOClip(), torch.ones(2), torch.ones(2),
        dict(entropy_coef=0.3, old_logp=torch.full((2,), -2.0)),
    )  # fmt: skip
    assert torch.isfinite(gradient).all() and (gradient[[0, 4]] - exact).abs().max() < 1e-5


@each_surrogate
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("off_policy", [False, True])
def test_a_nan_row_stays_in_its_row_and_reaches_the_gradient(name, bad, off_policy):
    x, y, credit, weight = case(3, 600)
    changes = dict(credit=credit, weight=weight, old_logp=near(x, y, 5) if off_policy else None)
    clean = run(x, y, SURROGATES[name][1], **changes)
    x[1, 77] = bad
    found = run(x, y, SURROGATES[name][1], **changes)
    for ours, before in zip(found, clean, strict=True):
        assert torch.equal(ours[[0, 2]], before[[0, 2]])
    logp, entropy, active, gradient = found
    assert logp[1].isnan() and entropy[1].isnan() and active[1] and gradient[1].isnan().any()


def test_unwanted_rows_are_not_looked_at():
    x, y, credit, weight = case(6, 700)
    clean = run(x, y, credit=credit, weight=weight, entropy_coef=0.1)
    unwanted = torch.tensor([False, True, False, False, True, False])
    y[1], y[4] = -1, -2
    for tensor in (x, credit, weight):
        tensor[unwanted] = math.nan
    found = run(x, y, credit=credit, weight=weight, entropy_coef=0.1)
    for ours, before in zip(found, clean, strict=True):
        assert torch.equal(ours[~unwanted], before[~unwanted])
        assert (ours[unwanted] == 0).all()


def test_rows_of_a_wider_buffer_leave_the_rest_alone():
    x, y, credit, weight = case(5, 333, torch.bfloat16)
    clean = run(x, y, credit=credit, weight=weight)
    y_unwanted = y.clone()
    y_unwanted[3] = -1
    buffer = torch.full((5, 400), 7.0, dtype=torch.bfloat16)
    view = buffer[:, 8:341]
    view.copy_(x)
    found = policy_loss(
        view, y_unwanted, torch.ones(1), credit, weight, None, None, None, num_columns=333, logit_scale=1.0,
        softcap=0.0, kl_coef=0.0, entropy_coef=0.0, surrogate=ON_POLICY,
    )  # fmt: skip
    assert torch.equal(view[[0, 1, 2, 4]], clean[3][[0, 1, 2, 4]]) and (view[3] == 0).all()
    assert torch.equal(found[0][:3], clean[0][:3])
    assert (buffer[:, :8] == 7).all() and (buffer[:, 341:] == 7).all()


def test_offsets_past_two_to_the_31():
    stride = (1 << 31) + 64
    torch.use_deterministic_algorithms(False)  # leave the 4 GB between the two rows untouched
    buffer = torch.empty(stride + 64, dtype=torch.bfloat16)
    x, y = logits_of(2, 64, dtype=torch.bfloat16), targets_of(2, high=64)
    view = torch.as_strided(buffer, (2, 64), (stride, 1))
    view.copy_(x)
    policy_loss(
        view, y, torch.ones(1), torch.ones(2), torch.ones(2), None, None, None, num_columns=64, logit_scale=1.0,
        softcap=0.0, kl_coef=0.0, entropy_coef=0.0, surrogate=ON_POLICY,
    )  # fmt: skip
    assert torch.equal(view, run(x, y)[3])


@pytest.mark.parametrize("vocabulary", [1, 65, 5003])
def test_bitwise_whatever_the_programs_and_the_neighbours(vocabulary, monkeypatch):
    x, y, credit, weight = case(6, vocabulary, torch.bfloat16)
    arguments = dict(credit=credit, weight=weight, old_logp=near(x, y, 5), entropy_coef=0.1)
    whole = run(x, y, **arguments)
    for programs in (1, 5):
        monkeypatch.setattr(module, "launch_options", lambda *_, programs=programs: (programs, 128))
        for ours, before in zip(run(x, y, **arguments), whole, strict=True):
            assert torch.equal(ours, before)
    for rows in ([5], [4, 0, 3]):
        part = {k: v[rows] if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        for ours, before in zip(run(x[rows], y[rows], **part), whole, strict=True):
            assert torch.equal(ours, before[rows])


def test_no_rows():
    logp, entropy, active, _ = run(torch.zeros(0, 7), torch.zeros(0, dtype=torch.int64))
    assert logp.shape == entropy.shape == active.shape == (0,) and active.dtype == torch.bool


@pytest.mark.parametrize(
    ("l2_bytes", "multiprocessors", "width", "element_size", "rows", "lanes"),
    [
        # H200, half of 50 MB: 132 rows of 304 KB are 40 MB, more than that; still one each
        (50 << 20, 132, 151936, 2, 1, 512),
        (50 << 20, 132, 49152, 2, 2, 256),  # 98 KB: 264 rows take 26.0 MB of 26.2
        (50 << 20, 132, 32000, 2, 2, 256),  # 3.1 fit, of which 2 are taken
        (50 << 20, 132, 1000, 2, 8, 128),
        (126 << 20, 148, 151936, 2, 1, 512),
        (4 << 20, 304, 151936, 4, 1, 512),
    ],
)
def test_rows_in_flight_fit_into_half_of_the_cache(
    l2_bytes, multiprocessors, width, element_size, rows, lanes, monkeypatch
):
    class Properties:
        L2_cache_size = l2_bytes
        multi_processor_count = multiprocessors

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(module, "INTERPRETED", module.tl.constexpr(False))
    found = module.launch_options(width, element_size, torch.device("cuda"))
    assert found == (rows * multiprocessors, lanes)
