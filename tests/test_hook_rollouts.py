"""What the drop-ins of trainers with hooks share: spans of a mask, rewards on tokens, losses on log-probs."""

import math

import pytest
import torch

from crest_ops import CISPO, GSPO, SAPO, PPOClip, policy_loss
from crest_ops.integrations.rollouts import (
    action_places,
    action_spans,
    as_mask,
    assign_advantages,
    logp_losses,
    reward_signals,
)
from crest_ops.methods import METHODS

MASK = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [0, 1, 0, 0, 1]]).bool()


def test_actions_are_runs_of_the_mask_and_turns_of_their_own():
    spans = action_spans(MASK, torch.tensor([0, 0, 0]))
    assert spans.action_of_token.tolist() == [0, 0, -1, 1, -1, -1, -1, -1, -1, -1, -1, 2, -1, -1, 3]
    assert spans.turn_of_action.tolist() == [0, 1, 2, 3]
    assert spans.trajectory_of_turn.tolist() == [0, 0, 2, 2]
    assert spans.turn_index.tolist() == [0, 1, 0, 1]


def test_a_mask_without_columns_or_rows():
    assert action_spans(torch.zeros(2, 0, dtype=torch.bool)).num_actions == 0
    assert action_spans(torch.zeros(0, 3, dtype=torch.bool)).num_trajectories == 0


def test_a_reward_belongs_to_the_action_before_it():
    rewards = torch.tensor([[0.0, 0.5, 0.25, 1.0, 2.0], [0.0, 0.0, 0.0, 0.0, 9.0], [0.0, 0.0, 0.0, -1.0, 4.0]])
    signals = reward_signals(rewards, action_spans(MASK))
    assert signals.reward_B.tolist() == [3.75, 9.0, 3.0]
    assert signals.action_reward_S.tolist() == [0.75, 3.0, -1.0, 4.0]
    assert signals.turn_reward_K.tolist() == [0.75, 3.0, -1.0, 4.0]


def test_a_reward_before_the_first_action_is_refused():
    rewards = torch.zeros(3, 5)
    rewards[2, 0] = 1.0
    with pytest.raises(ValueError, match=r"rewards\[2\].*before"):
        reward_signals(rewards, action_spans(MASK))


@pytest.mark.parametrize("mask", [MASK, MASK.long(), MASK.float()])
def test_masks_of_zeros_and_ones(mask):
    assert torch.equal(as_mask("response_mask", mask, mask.shape), MASK)


@pytest.mark.parametrize(
    "mask, match",
    [(MASK.float() / 2, "0.5"), (MASK[:2], r"\[2, 5\]"), (MASK.tolist(), "list"), (MASK * math.nan, "nan")],
)
def test_other_masks_are_refused(mask, match):
    with pytest.raises(ValueError, match=f"response_mask.*{match}"):
        as_mask("response_mask", mask, MASK.shape)


@pytest.mark.parametrize(
    "change, match",
    [
        ({"index": None}, "index"),
        ({"index": ["a", "b"]}, "index holds 2"),
        ({"index": torch.zeros(3, 1)}, r"index is Tensor \[3, 1\]"),
        ({"index": torch.tensor(0)}, "index is Tensor"),
        ({"index": [["a"], ["a"], ["b"]]}, "index is list"),
        ({"rewards": torch.zeros(3)}, "token_level_rewards"),
        ({"rewards": torch.zeros(3, 5).long()}, "token_level_rewards"),
        ({"rewards": torch.full((3, 5), math.nan)}, r"token_level_rewards\[0\].*finite"),
        ({"mask": MASK[:, :4]}, "response_mask"),
    ],
)
def test_estimators_name_what_is_wrong(change, match):
    arguments = {"rewards": torch.zeros(3, 5), "mask": MASK, "index": ["a", "a", "b"]} | change
    with pytest.raises(ValueError, match=match):
        assign_advantages("turn_grpo", METHODS["turn_grpo"].Config(), **arguments)


def test_equal_uids_of_any_type_are_one_group():
    rewards = torch.zeros(3, 5)
    rewards[0, 1] = 1.0
    for index in (["a", "a", "b"], torch.tensor([7, 7, 2]), [torch.tensor(7), torch.tensor(7), torch.tensor(2)]):
        found = assign_advantages("grpo", METHODS["grpo"].Config(), rewards, torch.ones(3, 5), index)
        assert (found[0] > 0).all() and (found[1] < 0).all() and (found[2] == 0).all(), index


def test_which_action_of_its_row_a_token_belongs_to():
    wanted = [[0, 0, 0, 1, 1], [-1, -1, -1, -1, -1], [-1, 0, 0, 0, 1]]
    assert action_places(MASK).tolist() == wanted


def definition(surrogate, logp, old, credit, mask):
    """The surrogates in float64 and autograd, of [B, T] tensors; spans are rows, or runs of the mask."""
    log_ratio = torch.where(mask, logp - old, 0)
    if surrogate.level != "token":
        ids = torch.arange(len(mask))[:, None].expand(mask.shape)
        if surrogate.level == "action":
            ids = (mask & ~torch.nn.functional.pad(mask[:, :-1], (1, 0))).flatten().cumsum(0).view(mask.shape)
        same = (ids.flatten() == ids.flatten()[:, None]) & mask.flatten()
        mean = (same * log_ratio.detach().flatten()).sum(1) / same.sum(1).clamp(min=1)
        log_ratio = mean.view(mask.shape) + log_ratio - log_ratio.detach()
    ratio = log_ratio.exp()
    if isinstance(surrogate, PPOClip):
        loss = torch.maximum(-ratio * credit, -ratio.clamp(1 - surrogate.low, 1 + surrogate.high) * credit)
        if surrogate.dual is not None:
            loss = torch.where(credit < 0, torch.minimum(loss, -surrogate.dual * credit), loss)
    elif isinstance(surrogate, CISPO):
        loss = -ratio.clamp(1 - surrogate.low, 1 + surrogate.high).detach() * credit * logp
    else:
        tau = torch.where(credit > 0, surrogate.tau_pos, surrogate.tau_neg)
        loss = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * credit
    return torch.where(mask, loss, 0)


SURROGATES = [
    PPOClip(0.2, 0.28),
    PPOClip(0.2, 0.2, dual=1.5),
    GSPO(0.1, 0.1),
    GSPO(0.1, 0.1, level="action"),
    CISPO(0.3, low=0.2),
    SAPO(),
]


def batch(seed):
    rng = torch.Generator().manual_seed(seed)
    mask = torch.rand(4, 12, generator=rng) < 0.6
    mask[1] = False
    logp = -3 * torch.rand(4, 12, generator=rng)
    return mask, logp, logp + 0.5 * torch.randn(4, 12, generator=rng), torch.randn(4, 12, generator=rng)


@pytest.mark.parametrize("surrogate", SURROGATES, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_losses_of_log_probs_are_the_definition(surrogate, seed):
    mask, logp, old, credit = batch(seed)
    weight = torch.rand(4, 12, generator=torch.Generator().manual_seed(9)) + 0.5
    ref = old - 0.3 * credit
    x, y = logp.clone().requires_grad_(), logp.double().requires_grad_()
    found = logp_losses(
        x, old, credit, action_spans(mask), surrogate, importance_weight=weight, ref_logp=ref, kl_coef=0.1
    )
    distance = torch.where(mask, ref.double() - y, 0)
    wanted = weight * definition(surrogate, y, old.double(), credit.double(), mask)
    wanted = wanted + 0.1 * (distance.exp() - distance - 1)
    upstream = torch.randn(4, 12, generator=torch.Generator().manual_seed(4))
    (grad,) = torch.autograd.grad((upstream * found.value).sum(), x)
    (wanted_grad,) = torch.autograd.grad((upstream * wanted).sum(), y)
    torch.testing.assert_close(found.value.double(), wanted, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(grad.double(), wanted_grad, atol=2e-6, rtol=2e-6)


def test_masked_tokens_have_no_part_whatever_they_hold():
    mask, logp, old, credit = batch(3)
    junk = torch.tensor([math.nan, math.inf, -math.inf, -1e4]).repeat(12).view(4, 12)
    results = []
    for tensors in ((logp, old, credit), [torch.where(mask, x, junk) for x in (logp, old, credit)]):
        x = tensors[0].clone().requires_grad_()
        found = logp_losses(x, *tensors[1:], action_spans(mask), GSPO(level="action"))
        found.value.sum().backward()
        results.append((found.value.detach(), x.grad, found.metrics))
    clean, dirty = results
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1], dirty[1]) and clean[2] == dirty[2]
    assert (dirty[1][~mask] == 0).all() and (dirty[0][~mask] == 0).all()


def test_a_batch_without_a_policy_token_has_loss_zero_and_a_gradient():
    x = torch.zeros(2, 3, requires_grad=True)
    found = logp_losses(x, x.detach(), torch.ones(2, 3), action_spans(torch.zeros(2, 3).bool()), PPOClip())
    found.value.sum().backward()
    assert found.value.sum() == 0 and (x.grad == 0).all()


def test_low_precision_log_probs_are_compared_in_float32():
    logp, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.003, -1.996]])
    mask, credit = torch.ones(1, 2).bool(), torch.ones(1, 2)
    found = logp_losses(logp.bfloat16(), old, credit, action_spans(mask), PPOClip())
    torch.testing.assert_close(found.ratio, (logp - old).exp())


def test_the_same_as_the_loss_from_logits():
    rng = torch.Generator().manual_seed(2)
    logits = torch.randn(2, 6, 11, generator=rng, requires_grad=True)
    targets = torch.randint(0, 11, (2, 6), generator=rng)
    mask, credit = torch.rand(2, 6, generator=rng) < 0.7, torch.randn(2, 6, generator=rng)
    spans, weight = action_spans(mask), torch.rand(2, 6, generator=rng)
    logp = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    old = (logp + 0.2 * torch.randn(2, 6, generator=rng)).detach()
    surrogate = GSPO(0.05, 0.05, level="action")
    loss = (weight * logp_losses(logp, old, credit, spans, surrogate).value).sum()
    wanted = policy_loss(
        logits, targets, credit, token_weight=weight, old_logp=old, surrogate=surrogate, spans=spans
    ).loss
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], torch.autograd.grad(wanted, logits)[0])


@pytest.mark.parametrize(
    "change, match",
    [
        ({"old_logp": torch.zeros(2, 4)}, "old_logp"),
        ({"old_logp": torch.tensor([[math.nan, 0.0, 0.0]] * 2)}, "old_logp"),
        ({"advantages": torch.zeros(2)}, "advantages"),
        ({"advantages": torch.full((2, 3), math.inf)}, "advantages"),
        ({"importance_weight": torch.zeros(2, 1)}, "importance_weight"),
        ({"kl_coef": 0.1}, "kl_coef"),
        ({"logp": [0.0]}, "logp"),
    ],
)
def test_losses_name_what_is_wrong(change, match):
    arguments = {"logp": torch.zeros(2, 3), "old_logp": torch.zeros(2, 3), "advantages": torch.zeros(2, 3)} | change
    spans = action_spans(torch.ones(2, 3).bool())
    with pytest.raises(ValueError, match=match):
        logp_losses(**arguments, spans=spans, surrogate=PPOClip())
