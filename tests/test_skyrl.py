"""The drop-in for SkyRL against hand-worked values; `skyrl_conformance.py` compares it with SkyRL itself."""

import math
from types import SimpleNamespace

import pytest
import torch
from stand_ins import install, near

from crest_ops.integrations import skyrl

MASK = torch.tensor([[1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]])
OLD = torch.tensor([[-1.0, -1.0, 0.0, -2.0], [0.0, 0.0, 0.0, -1.0]])
NEW = OLD + torch.tensor([[1.5, 0.5, 1.0, 4.0], [1.0, 1.0, 1.0, 1.1]]).log()
ADVANTAGES = torch.tensor([[1.0, 1.0, 9.0, -1.0], [9.0, 9.0, 9.0, 2.0]]) / 4  # the token mean is in them


def correction(loss, old_log_probs, rollout_logprobs, loss_mask, config):
    """As SkyRL's: nothing without rollout log-probs; here the ratio as weight, and the last token of row 0 masked."""
    if rollout_logprobs is None:
        return loss, loss_mask, {}
    kept = loss_mask.clone()
    kept[0, 3] = 0
    return loss * (old_log_probs - rollout_logprobs).exp(), kept, {"is_ratio_mean": 1.0}


@pytest.fixture
def registries(monkeypatch):
    losses, estimators = {}, {}
    root = "skyrl.backends.skyrl_train.utils"
    install(monkeypatch, f"{root}.off_policy_correction_utils", apply_off_policy_correction=correction)
    install(
        monkeypatch,
        f"{root}.ppo_utils",
        PolicyLossRegistry=SimpleNamespace(register=losses.__setitem__),
        AdvantageEstimatorRegistry=SimpleNamespace(register=estimators.__setitem__),
    )
    skyrl.register()
    return losses, estimators


def config(**changes):
    """The fields of AlgorithmConfig that are read."""
    fields = dict(
        eps_clip_low=0.2, eps_clip_high=0.2, clip_ratio_c=3.0, sapo=SimpleNamespace(tau_pos=1.0, tau_neg=1.05),
        cispo=SimpleNamespace(cispo_eps_clip_low=1.0, cispo_eps_clip_high=2.0), off_policy_correction=None,
    )  # fmt: skip
    return SimpleNamespace(**(fields | changes))


def call(losses, name, config=config(), **arguments):  # noqa: B008
    logp = NEW.clone().requires_grad_()
    loss, metrics = losses[name](logp, OLD, ADVANTAGES, config=config, **({"loss_mask": MASK} | arguments))
    loss.backward()
    return float(loss.detach()), logp.grad, metrics


def test_the_loss_is_a_masked_sum(registries):
    loss, grad, metrics = call(registries[0], "crest_ppo")
    assert loss == near((-1.2 - 0.5 + 3.0 - 2.2) / 4)
    torch.testing.assert_close(grad, torch.tensor([[0.0, -0.5, 0.0, 0.0], [0.0, 0.0, 0.0, -2.2]]) / 4)
    assert metrics == near({"clip_ratio": 2 / 4}) and all(isinstance(x, float) for x in metrics.values())


def test_bounds_are_skyrls(registries):
    loss, _, _ = call(registries[0], "crest_ppo", config(clip_ratio_c=math.inf, eps_clip_high=0.6))
    assert loss == near((-1.5 - 0.5 + 4.0 - 2.2) / 4)
    first = 0.75**0.5
    loss, _, _ = call(registries[0], "crest_gspo_action")
    assert loss == near((-first - first + 4.0 - 2.2) / 4)
    _, grad, _ = call(registries[0], "crest_cispo")
    torch.testing.assert_close(grad, torch.tensor([[-1.5, -0.5, 0.0, 3.0], [0.0, 0.0, 0.0, -2.2]]) / 4)


@pytest.mark.parametrize("name", ["rollout_logprobs", "rollout_log_probs"])
def test_the_rollouts_log_probs_under_either_name(registries, name):
    rollout = OLD - math.log(2)
    loss, _, metrics = call(registries[0], "crest_ppo", **{name: rollout})
    assert loss == near(2 * (-1.2 - 0.5 - 2.2) / 4)
    assert metrics["is_ratio_mean"] == 1.0


def test_without_a_mask_every_token_counts(registries):
    advantages = torch.ones(2, 4)
    loss, _ = registries[0]["crest_cispo"](OLD, OLD, advantages, config(), loss_mask=None)
    assert loss.item() == near(float(-OLD.sum()))


@pytest.mark.parametrize(
    "name, settings, arguments, match",
    [
        ("crest_ppo", {}, {"rollout_logprobs": OLD, "rollout_log_probs": OLD}, "rollout_log_probs"),
        ("crest_ppo", {}, {"values": OLD}, "values"),
        ("crest_ppo", {}, {"loss_mask": MASK / 4}, "loss_mask"),
        ("crest_cispo", {"cispo": SimpleNamespace(cispo_anchor="rollout")}, {}, "cispo_anchor"),
    ],
)
def test_losses_name_what_is_wrong(registries, name, settings, arguments, match):
    with pytest.raises(ValueError, match=match):
        call(registries[0], name, config(**settings), **arguments)


def estimate(estimator, **changes):
    """As SkyRL calls: its response mask holds tool output too, on rows that end with the response."""
    arguments = dict(
        token_level_rewards=torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 3.0], [0.0, 0.0, 0.0, 2.0]]),
        response_mask=torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1]]), index=["a", "a", "b"], values=None,
        grpo_norm_by_std=True, gamma=1.0, lambd=1.0, config=config(),
    )  # fmt: skip
    return estimator(**(arguments | changes))[0]


def test_outcomes(registries):
    assert "crest_turn_grpo" not in registries[1]
    found = estimate(registries[1]["crest_dr_grpo"], grpo_norm_by_std=False)
    torch.testing.assert_close(found, torch.tensor([[-1.0] * 4, [0.0, 1.0, 1.0, 1.0], [0.0] * 4]))
    score = 1 / (math.sqrt(2) + 1e-6)
    found = estimate(registries[1]["crest_grpo"])
    torch.testing.assert_close(found, score * torch.tensor([[-1.0] * 4, [0.0, 1.0, 1.0, 1.0], [0.0] * 4]))


def test_turns_where_the_mask_has_edges(registries):
    estimator = skyrl.advantage_estimator("turn_grpo")
    found = estimate(estimator, response_mask=torch.tensor([[1, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1]]).float())
    score = 0.5 / (math.sqrt(0.5) + 1e-6), 1.5 / (math.sqrt(4.5) + 1e-6)
    wanted = torch.tensor([[score[0], 0, -score[1], -score[1]], [0, -score[0], 0, score[1]], [0.0] * 4])
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"values": torch.zeros(3, 4)}, "values"),
        ({"gamma": 0.9}, "gamma"),
        ({"lambd": 0.9}, "lambd"),
        ({"grpo_norm_by_std": False}, "grpo_norm_by_std"),
    ],
)
def test_estimators_name_what_they_cannot_use(registries, changes, match):
    with pytest.raises(ValueError, match=match):
        estimate(registries[1]["crest_grpo"], **changes)
