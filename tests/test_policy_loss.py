"""policy_loss against an independent float64 loss, and what must never move it, on both backends."""

import math

import pytest
import reference
import torch

from crest_ops import CISPO, GSPO, PPOClip, Spans, policy_loss, token_mean

pytestmark = pytest.mark.usefixtures("poisoned_memory")
both = pytest.mark.parametrize("backend", ["torch", "triton"])
N, V = 12, 40


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch(dtype=torch.float32):
    """Logits, targets and per-token arguments of twelve tokens, two of them masked."""
    x = (random(N, V, seed=0) * 2).to(dtype)
    y = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(1))
    logp = reference.stats(x, y)[0].float()
    mask = torch.ones(N, dtype=torch.bool)
    mask[[2, 7]] = False
    return x, y, dict(
        credit=random(N, seed=2),
        token_weight=random(N, seed=3).abs() / N,
        old_logp=logp + 0.3 * random(N, seed=4),
        ref_logp=logp + 0.5 * random(N, seed=5),
        importance_weight=random(N, seed=6).abs(),
        mask=mask,
    )  # fmt: skip


def exact_loss(x, y, credit, token_weight, old_logp, ref_logp, importance_weight, mask, kl_coef, entropy_coef):
    """The PPO loss written out in float64, and its gradient."""
    x = x.detach().double().requires_grad_()
    logp, entropy, _, _ = reference.stats(x, y)
    ratio = (logp - old_logp).exp()
    surrogate = -torch.minimum(ratio * credit, ratio.clamp(0.8, 1.28) * credit)
    d = ref_logp - logp
    k3 = d.exp() - d - 1
    value = importance_weight * surrogate + kl_coef * k3 - entropy_coef * entropy
    loss = (token_weight * value)[mask].sum()
    return loss, torch.autograd.grad(loss, x)[0], ratio


@both
@pytest.mark.parametrize("entropy_coef", [0.0, 0.02])
@pytest.mark.parametrize("inplace", [False, True])
def test_loss_and_gradient(backend, entropy_coef, inplace):
    x, y, given = batch()
    loss, gradient, ratio = exact_loss(x, y, **given, kl_coef=0.1, entropy_coef=entropy_coef)
    leaf = x.clone().requires_grad_()
    logits = leaf * 1.0
    version = logits._version
    found = policy_loss(
        logits, y, **given, kl_coef=0.1, entropy_coef=entropy_coef, surrogate=PPOClip(0.2, 0.28), backend=backend,
        inplace=inplace,
    )  # fmt: skip
    assert found.loss.item() == pytest.approx(loss.item(), rel=1e-5)
    (ours,) = torch.autograd.grad(3 * found.loss, leaf, retain_graph=True)
    assert (ours - 3 * gradient).abs().max() < 1e-5
    mask = given["mask"]
    assert torch.allclose(found.ratio[mask].double(), ratio[mask], rtol=1e-5) and (found.ratio[~mask] == 0).all()
    assert torch.equal(found.clipped, mask & _is_clipped(ratio, given["credit"]))
    assert not found.logp.requires_grad and not found.entropy.requires_grad
    if inplace:
        assert logits._version > version
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(found.loss, leaf)
    else:
        assert logits._version == version
        assert torch.equal(torch.autograd.grad(3 * found.loss, leaf)[0], ours)


def _is_clipped(ratio, credit):
    return ((credit > 0) & (ratio > 1.28)) | ((credit < 0) & (ratio < 0.8))


@both
def test_strictly_on_policy_is_the_policy_gradient(backend):
    x, y, given = batch()
    leaf = x.clone().requires_grad_()
    found = policy_loss(leaf, y, given["credit"], token_weight=given["token_weight"], backend=backend)
    assert (found.ratio == 1).all() and not found.clipped.any()
    (ours,) = torch.autograd.grad(found.loss, leaf)
    exact = reference.gradient(x, y, -(given["credit"] * given["token_weight"]), torch.zeros(N))
    assert (ours - exact).abs().max() < 1e-6


@both
def test_masked_positions_have_no_part_in_anything(backend):
    x, y, given = batch()
    arguments = dict(kl_coef=0.1, entropy_coef=0.1, backend=backend)
    leaf = x.clone().requires_grad_()
    clean = policy_loss(leaf, y, **given, **arguments)
    (gradient,) = torch.autograd.grad(clean.loss, leaf)
    dead = ~given["mask"]
    x[dead] = math.nan
    y[dead] = 10**6
    for name, garbage in (
        ("credit", math.nan), ("token_weight", math.inf), ("old_logp", -math.inf), ("ref_logp", 1e30),
        ("importance_weight", math.nan),
    ):  # fmt: skip
        given[name][dead] = garbage
    leaf = x.clone().requires_grad_()
    found = policy_loss(leaf, y, **given, **arguments)
    (again,) = torch.autograd.grad(found.loss, leaf)
    assert torch.equal(found.loss, clean.loss) and torch.equal(again, gradient)
    assert found.metrics.keys() == clean.metrics.keys()
    assert all(torch.equal(found.metrics[name], clean.metrics[name]) for name in clean.metrics)


@both
def test_all_masked_gives_zero_with_the_graph_attached(backend):
    x, y, given = batch()
    leaf = torch.full_like(x, math.nan).requires_grad_()
    found = policy_loss(
        leaf, torch.full_like(y, -100), given["credit"], token_weight=given["token_weight"], backend=backend
    )
    found.loss.backward()
    assert found.loss == 0 and (leaf.grad == 0).all() and all(torch.isfinite(m) for m in found.metrics.values())


def test_pieces_with_the_whole_count_add_up():
    x, y, given = batch()
    leaf = x.clone().requires_grad_()
    policy_loss(leaf, y, **given, kl_coef=0.1, entropy_coef=0.1).loss.backward()
    whole, leaf.grad = leaf.grad, None
    for rows in ([0, 1, 2], [3], [4, 5, 6, 7, 8, 9, 10, 11]):
        piece = {name: value[rows] for name, value in given.items()}
        policy_loss(leaf[rows], y[rows], **piece, kl_coef=0.1, entropy_coef=0.1).loss.backward()
    assert torch.allclose(leaf.grad, whole, atol=1e-7)


@both
@pytest.mark.parametrize("surrogate", [GSPO(), CISPO(), PPOClip(level="turn"), PPOClip(level="action", ratio="sum")])
def test_surrogates_over_spans(backend, surrogate):
    x, y, given = batch()
    spans = Spans.from_mask(torch.tensor([[0, 1, 1, 1, 0, 1], [1, 1, 0, 0, 1, 1]]).bool(), group=torch.tensor([0, 0]))
    arguments = dict(token_weight=given["token_weight"], old_logp=given["old_logp"], spans=spans, backend=backend)
    leaf = x.clone().requires_grad_()
    found = policy_loss(leaf, y, given["credit"], surrogate=surrogate, **arguments)
    (ours,) = torch.autograd.grad(found.loss, leaf)

    exact = x.double().requires_grad_()
    logp = reference.stats(exact, y)[0]
    log_ratio = logp - given["old_logp"].double()
    ids = {
        "token": list(range(12)),
        "action": [-1, 0, 0, 0, -1, 1, 2, 2, -1, -1, 3, 3],
        "turn": [-1, 0, 0, 0, -1, 0, 1, 1, -1, -1, 1, 1],
        "trajectory": [-1, 0, 0, 0, -1, 0, 1, 1, -1, -1, 1, 1],
    }[surrogate.level]  # fmt: skip
    total = 0.0
    for n in torch.nonzero(spans.mask).flatten().tolist():
        members = [m for m in range(12) if ids[m] == ids[n]]
        span = log_ratio[members].mean() if surrogate.ratio == "mean" else log_ratio[members].sum()
        ratio, credit = span.detach().exp() * (logp[n] - logp[n].detach()).exp(), given["credit"][n].double()
        if isinstance(surrogate, CISPO):
            value = -ratio.detach().clamp(0, 1 + surrogate.high) * credit * logp[n]
        else:
            value = -torch.minimum(ratio * credit, ratio.clamp(1 - surrogate.low, 1 + surrogate.high) * credit)
        total = total + given["token_weight"][n].double() * value
    assert found.loss.item() == pytest.approx(total.item(), abs=1e-5)
    assert (ours - torch.autograd.grad(total, exact)[0]).abs().max() < 1e-5
    assert (ours[~spans.mask] == 0).all()


@both
def test_extreme_log_probs_stay_finite(backend):
    x, y, _ = batch()
    x[0, y[0]] = -math.inf
    old = torch.full((N,), -1e4)
    leaf = x.clone().requires_grad_()
    found = policy_loss(
        leaf, y, torch.ones(N), token_weight=torch.ones(N), old_logp=old, ref_logp=torch.full((N,), 120.0), kl_coef=0.1,
        backend=backend,
    )  # fmt: skip
    found.loss.backward()
    assert torch.isfinite(found.loss) and torch.isfinite(leaf.grad).all()
    assert (leaf.grad == 0).all()  # outside the clips at 20 the slope is 0 by definition


@both
@pytest.mark.parametrize("level", ["token", "trajectory"])
@pytest.mark.parametrize("kind", [PPOClip, CISPO])
def test_an_excluded_target_counts_as_minus_20(backend, kind, level):
    """Log-ratios (-20, 0): at trajectory level both tokens have ratio exp(-10), and the healthy one its gradient."""
    z = torch.zeros(2, 5)
    z[0, 0] = -math.inf
    spans = Spans.from_mask(torch.ones(1, 2).bool(), group=torch.tensor([0]))
    old = torch.tensor([-1.0, -math.log(5)])
    leaf = z.clone().requires_grad_()
    found = policy_loss(
        leaf, torch.tensor([0, 1]), torch.ones(2), token_weight=torch.ones(2), old_logp=old, spans=spans,
        surrogate=kind(level=level), backend=backend,
    )  # fmt: skip
    ratio = torch.tensor([-20.0, 0.0]) if level == "token" else torch.tensor([-10.0, -10.0])
    assert torch.allclose(found.ratio, ratio.exp(), rtol=1e-5)
    logp = torch.tensor([-20.0, -math.log(5)]) if kind is CISPO else torch.ones(2)
    assert found.loss.item() == pytest.approx(-(ratio.exp() * logp).sum().item(), rel=1e-5)
    found.loss.backward()
    assert (leaf.grad[0] == 0).all()
    assert leaf.grad[1, 1].item() == pytest.approx(-0.8 * math.exp(ratio[1]), rel=1e-5)


@both
@pytest.mark.parametrize("on_policy", [False, True])
def test_nan_logits_are_seen(backend, on_policy):
    x, y, given = batch()
    x[4] = math.nan
    leaf = x.clone().requires_grad_()
    found = policy_loss(
        leaf, y, given["credit"], token_weight=given["token_weight"], old_logp=None if on_policy else given["old_logp"],
        backend=backend,
    )  # fmt: skip
    found.loss.backward()
    assert found.loss.isnan() and found.metrics["entropy"].isnan() and leaf.grad[4].isnan().all()
    assert torch.isfinite(leaf.grad[[0, 1, 2, 3, 5]]).all()


def test_in_place_compiles():
    torch._dynamo.reset()
    x, y, given = batch()

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def loss(logits, targets, credit, weight):
        return policy_loss(logits * 1.0, targets, credit, token_weight=weight, inplace=True).loss

    leaf, arguments = x.clone().requires_grad_(), (y, given["credit"], given["token_weight"])
    (compiled,) = torch.autograd.grad(loss(leaf, *arguments), leaf)
    eager = policy_loss(leaf, y, given["credit"], token_weight=given["token_weight"])
    assert torch.allclose(compiled, torch.autograd.grad(eager.loss, leaf)[0], atol=1e-7)


@both
def test_low_precision_logits(backend):
    x, y, given = batch(torch.bfloat16)
    loss, gradient, _ = exact_loss(x, y, **given, kl_coef=0.1, entropy_coef=0.01)
    leaf = x.clone().requires_grad_()
    found = policy_loss(leaf, y, **given, kl_coef=0.1, entropy_coef=0.01, backend=backend)
    (ours,) = torch.autograd.grad(found.loss, leaf)
    assert ours.dtype == torch.bfloat16 and found.loss.dtype == torch.float32
    assert found.loss.item() == pytest.approx(loss.item(), rel=1e-5)
    assert ((ours - gradient).abs() <= 1e-6 + gradient.abs() * 2**-8).all()


def test_any_leading_shape():
    x, y, given = batch()
    flat = policy_loss(x, y, **given)
    shaped = policy_loss(x.view(3, 4, V), y.view(3, 4), **{name: value.view(3, 4) for name, value in given.items()})
    assert torch.equal(flat.loss, shaped.loss) and shaped.logp.shape == (3, 4) and shaped.clipped.shape == (3, 4)


def test_metrics():
    x, y, given = batch()
    found = policy_loss(x, y, **given)
    mask = given["mask"]
    logp, entropy, _, _ = reference.stats(x, y)
    log_ratio = (logp - given["old_logp"])[mask]
    assert found.metrics["num_tokens"] == 10
    assert found.metrics["entropy"].item() == pytest.approx(entropy[mask].mean().item(), rel=1e-5)
    assert found.metrics["ratio_mean"].item() == pytest.approx(log_ratio.exp().mean().item(), rel=1e-5)
    assert found.metrics["ratio_max"].item() == pytest.approx(log_ratio.exp().max().item(), rel=1e-5)
    assert found.metrics["approx_kl"].item() == pytest.approx((log_ratio.exp() - log_ratio - 1).mean().item(), rel=1e-4)
    clipped = _is_clipped(log_ratio.exp(), given["credit"][mask])
    assert found.metrics["clip_ratio"].item() == pytest.approx(clipped.double().mean().item())


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (dict(credit=torch.ones(1)), "credit"),
        (dict(credit=torch.ones(N, 1)), "credit"),
        (dict(credit=torch.ones(N, dtype=torch.int64)), "credit"),
        (dict(credit=torch.tensor([1.0] * 11 + [math.nan])), r"credit\[11\] is nan"),
        (dict(token_weight=torch.ones(3)), "token_weight"),
        (dict(token_weight=torch.tensor([math.inf] + [1.0] * 11)), r"token_weight\[0\] is inf"),
        (dict(old_logp=torch.ones(3, 4)), "old_logp"),
        (dict(old_logp=torch.full((N,), -math.inf)), r"old_logp\[0\] is -inf"),
        (dict(kl_coef=0.1, ref_logp=None), "kl_coef"),
        (dict(surrogate=GSPO()), "spans"),
        (dict(spans=Spans.from_mask(torch.ones(1, 5).bool(), group=torch.tensor([0]))), "spans"),
        (dict(mask=torch.ones(N)), "mask"),
        (dict(temperature=0), "temperature"),
        (dict(token_weight=None), "token_weight"),
        (dict(kl_coef=math.nan), "kl_coef"),
        (dict(entropy_coef=math.inf), "entropy_coef"),
        (dict(entropy_coef="1"), "entropy_coef"),
        (dict(surrogate="ppo"), "surrogate"),
        (dict(surrogate=PPOClip), "surrogate"),
        (dict(spans=torch.ones(N)), "spans"),
        (dict(logits=torch.zeros(1, V).expand(N, V), inplace=True), "inplace"),
    ],
)
def test_bad_input_is_named(change, name):
    x, y, given = batch()
    given.pop("mask")
    arguments = dict(logits=x, targets=y, **given) | change
    with pytest.raises(ValueError, match=name):
        policy_loss(**arguments)


def test_with_reductions_of_spans():
    """Two trajectories of 3 and 1 policy tokens at credit 1: the token mean of -ratio is -1 on policy."""
    spans = Spans.from_mask(torch.tensor([[1, 1, 0, 1], [0, 0, 1, 0]]).bool(), group=torch.tensor([0, 0]))
    x, y = random(2, 4, V, seed=0), torch.zeros(2, 4, dtype=torch.int64)
    weight = token_mean(spans).view(2, 4)
    found = policy_loss(x, y, torch.ones(2, 4), token_weight=weight, spans=spans)
    assert found.loss.item() == pytest.approx(-1.0)


@both
def test_tokens_outside_the_spans_are_masked(backend):
    x, y, given = batch()
    given.pop("mask")
    spans = Spans.from_mask(torch.arange(N)[None] < 6, group=torch.tensor([0]))
    x[6:], y[6:] = math.nan, 10**6
    found = policy_loss(x, y, **given, spans=spans, backend=backend)
    assert torch.isfinite(found.loss) and (found.logp[6:] == 0).all() and (found.entropy[6:] == 0).all()
