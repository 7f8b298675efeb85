"""crest_policy_loss equals its parts: the definition of the credit, then policy_loss."""

import math

import pytest
import reference
import torch

from crest_ops import METHODS, CrestConfig, PPOClip, Signals, Spans, crest_policy_loss, policy_loss, turn_advantage

pytestmark = pytest.mark.usefixtures("poisoned_memory")
both = pytest.mark.parametrize("backend", ["torch", "triton"])
V = 37
MASK = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0, 1, 0], [0, 1, 1, 1, 0, 0, 1, 1, 1, 1], [0] * 10]).bool()
TURN = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0, 1, 1, 1, 1], [0] * 10])
SPANS = Spans.from_mask(MASK, turn=TURN, group=torch.tensor([0, 0, 0]))
REWARD = torch.tensor([1.0, 0.0, 0.0, 1.0])


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch():
    x, teacher = random(3, 10, V, seed=0) * 2, random(3, 10, V + 3, seed=1) * 2
    y = torch.randint(0, V, (3, 10), generator=torch.Generator().manual_seed(2))
    old = reference.stats(x, y)[0].float() + 0.3 * random(3, 10, seed=3)
    return x, teacher, y, random(3, 10, seed=4).abs(), old


SURROGATES = [PPOClip(0.2, 0.28), PPOClip(0.1, 0.1, dual=1.5), PPOClip(level="turn")]
SQUARE = [  # every pair of two settings is among them
    (scope, gate, SURROGATES[(i + j + k) % 3], on_policy)
    for i, scope in enumerate(["trajectory", "turn", "batch"])
    for j, gate in enumerate(["surprisal", "entropy"])
    for k, on_policy in enumerate([False, True])
]


@both
@pytest.mark.parametrize(("scope", "gate", "surrogate", "on_policy"), SQUARE)
def test_equals_the_method_and_policy_loss(backend, scope, gate, surrogate, on_policy):
    x, teacher, y, weight, old = batch()
    config = CrestConfig(scope=scope, gate=gate, surrogate=surrogate)
    logp, entropy, _, _ = reference.stats(x, y)
    behaviour = logp if on_policy else old.double()
    gap = reference.stats(teacher, y, vocab_size=V)[0] - behaviour
    signals = Signals(
        turn_reward_K=REWARD.double(), teacher_gap_N=gap.flatten(), surprisal_N=-behaviour.flatten(),
        entropy_N=entropy.flatten(),
    )  # fmt: skip
    credit = METHODS["crest"].assign(SPANS, signals, config).credit_N.view(3, 10)
    old = None if on_policy else old
    leaf = x.clone().requires_grad_()
    parts = policy_loss(leaf, y, credit, token_weight=weight, old_logp=old, surrogate=surrogate, spans=SPANS)
    (expected,) = torch.autograd.grad(parts.loss, leaf)
    advantage = turn_advantage(REWARD, SPANS)
    found = crest_policy_loss(
        leaf, teacher, y, SPANS, advantage, token_weight=weight, old_logp=old, config=config, vocab_size=V,
        backend=backend,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(found.loss, leaf, retain_graph=True)
    assert found.loss.item() == pytest.approx(parts.loss.item(), abs=2e-5)
    assert (gradient - expected).abs().max() < 1e-5 and torch.equal(found.clipped, parts.clipped)
    assert torch.equal(torch.autograd.grad(found.loss, leaf)[0], gradient)
    exact_advantage = turn_advantage(REWARD.double(), SPANS)
    phi = (credit.flatten() / exact_advantage[SPANS.turn_of_token.clamp(min=0).long()])[SPANS.mask]
    assert found.metrics["phi_mean"].item() == pytest.approx(phi.mean().item(), rel=1e-5)
    assert found.metrics["amplified"].item() == pytest.approx((phi > 1 + 1e-9).double().mean().item())


@both
def test_masked_tokens_affect_nothing(backend):
    x, teacher, y, weight, old = batch()
    extra = torch.rand(3, 10, generator=torch.Generator().manual_seed(5)) > 0.3
    arguments = dict(mask=extra, vocab_size=V, backend=backend)
    advantage = turn_advantage(REWARD, SPANS)

    def run():
        leaf = x.clone().requires_grad_()
        found = crest_policy_loss(leaf, teacher, y, SPANS, advantage, token_weight=weight, old_logp=old, **arguments)
        return found, torch.autograd.grad(found.loss, leaf)[0]

    clean, gradient = run()
    dead = ~(extra & MASK)
    x[dead], teacher[dead], weight[dead], old[dead] = math.nan, math.inf, math.nan, -math.inf
    y[dead] = -5
    found, again = run()
    assert torch.equal(found.loss, clean.loss) and torch.equal(again, gradient)
    assert all(torch.equal(found.metrics[name], clean.metrics[name]) for name in clean.metrics)


@both
def test_teacher_equal_to_the_student_and_lam_zero_are_turn_grpo(backend):
    x, teacher, y, weight, _ = batch()
    advantage = turn_advantage(REWARD, SPANS)
    credit = torch.where(SPANS.mask, advantage[SPANS.turn_of_token.clamp(min=0).long()], 0).view(3, 10)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(
        policy_loss(leaf, y, credit, token_weight=weight, spans=SPANS, backend=backend).loss, leaf
    )
    for other, config in ((x.clone(), CrestConfig()), (teacher[..., :V], CrestConfig(lam=0.0))):
        found = crest_policy_loss(leaf, other, y, SPANS, advantage, token_weight=weight, config=config, backend=backend)
        assert torch.equal(torch.autograd.grad(found.loss, leaf)[0], expected)
        assert found.metrics["phi_mean"] == 1 and found.metrics["amplified"] == 0


@both
def test_tokens_that_one_side_excludes(backend):
    x, teacher, y, weight, _ = batch()
    x[0, 1, y[0, 1]] = -math.inf
    teacher[0, 2, y[0, 2]] = -math.inf
    leaf = x.clone().requires_grad_()
    found = crest_policy_loss(
        leaf, teacher, y, SPANS, turn_advantage(REWARD, SPANS), token_weight=weight, vocab_size=V, backend=backend
    )
    found.loss.backward()
    assert torch.isfinite(found.loss) and torch.isfinite(leaf.grad).all() and (leaf.grad[0, 1] == 0).all()


@both
def test_nan_logits_are_seen(backend):
    x, teacher, y, weight, _ = batch()
    x[1, 2] = math.nan
    leaf = x.clone().requires_grad_()
    found = crest_policy_loss(
        leaf, teacher, y, SPANS, turn_advantage(REWARD, SPANS), token_weight=weight, vocab_size=V, backend=backend
    )
    found.loss.backward()
    assert found.loss.isnan() and leaf.grad[1, 2, :V].isnan().all() and torch.isfinite(leaf.grad[0]).all()


@both
def test_inplace_and_teacher_without_gradient(backend):
    x, teacher, y, weight, old = batch()
    leaf = x.clone().requires_grad_()
    teacher.requires_grad_()
    arguments = dict(token_weight=weight, old_logp=old, vocab_size=V, backend=backend)
    advantage = turn_advantage(REWARD, SPANS)
    out = crest_policy_loss(leaf, teacher, y, SPANS, advantage, **arguments)
    (expected,) = torch.autograd.grad(out.loss, leaf)
    logits = leaf * 1.0
    found = crest_policy_loss(logits, teacher, y, SPANS, advantage, inplace=True, **arguments)
    found.loss.backward()
    assert torch.equal(leaf.grad, expected) and teacher.grad is None


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (dict(teacher_logits=torch.zeros(3, 9, V)), "teacher_logits"),
        (dict(teacher_logits=torch.zeros(3, 10, V - 1)), "teacher_logits"),
        (dict(teacher_logits=None), "teacher_logits"),
        (dict(spans=None), "spans"),
        (dict(config=None), "config"),
        (dict(teacher_logits=torch.full((3, 10, V), math.nan)), "teacher_logits"),
        (dict(turn_advantage=torch.zeros(3)), "turn_advantage"),
        (dict(turn_advantage=torch.tensor([0.0, math.nan, 0.0, 0.0])), r"turn_advantage\[1\]"),
        (dict(token_weight=torch.ones(30)), "token_weight"),
        (dict(targets=torch.zeros(3, 9, dtype=torch.int64)), "token_weight|targets"),
    ],
)
def test_bad_input_is_named(change, name):
    x, teacher, y, weight, _ = batch()
    arguments = dict(
        logits=x, teacher_logits=teacher[..., :V], targets=y, spans=SPANS, turn_advantage=torch.zeros(4),
        token_weight=weight,
    ) | change  # fmt: skip
    with pytest.raises(ValueError, match=name):
        crest_policy_loss(**arguments)


@both
def test_opcheck(backend):
    x, teacher, y, _, old = batch()
    target, one = torch.where(SPANS.mask, y.flatten(), -1), torch.ones(1)
    arguments = (x.requires_grad_(), teacher, target, one, V, 1.0, 0.0, False, backend)
    torch.library.opcheck(torch.ops.crest.teacher_pair, arguments)
