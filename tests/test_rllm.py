"""The drop-in for rLLM against hand-worked values, with LossContext as recorded, in both of its namings."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_ins import install, near, registrar
from torch import Tensor

from crest_ops.integrations import rllm

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Earlier:
    """rllm/trainer/algorithms/loss.py of rllm-org/rllm, 030b08ce."""

    pi: Tensor
    mu: Tensor
    advantages: Tensor
    action_mask: Tensor
    obs_mask: Tensor
    aggregate: Callable[..., Tensor]
    ref: Tensor | None = None
    params: dict[str, Any] = field(default_factory=dict)
    backend: str = ""


@dataclass
class Later:
    """The same file after its log-probs were renamed."""

    logp_curr: Tensor
    logp_old: Tensor
    advantages: Tensor
    action_mask: Tensor
    obs_mask: Tensor
    aggregate: Callable[..., Tensor]
    logp_ref: Tensor | None = None
    logp_rollout: Tensor | None = None
    params: dict[str, Any] = field(default_factory=dict)
    backend: str = ""


@pytest.fixture
def losses(monkeypatch):
    registry = {}
    install(monkeypatch, "rllm.trainer.algorithms.loss", register_loss=registrar(registry))
    rllm.register()
    return registry


def token_mean(per_token, mask, mode=None):
    """What a backend injects."""
    return (per_token * mask).sum() / mask.sum()


STANDARD = {"eps_clip": 0.2, "eps_clip_high": None, "kl_beta": 0.0}


def context(kind, rows=1, **params):
    """Ratios 1.5, 0.5, -, 4 of each row; 1-D for rows = 0."""
    old = torch.tensor([-1.0, -1.0, 0.0, -2.0]).repeat(rows, 1) if rows else torch.tensor([-1.0, -1.0, 0.0, -2.0])
    logp = (old + torch.tensor([1.5, 0.5, 1.0, 4.0]).log()).requires_grad_()
    advantages = torch.tensor([1.0, 1.0, 0.0, -1.0]).expand_as(old)
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0]).expand_as(old)
    return kind(logp, old, advantages, mask, 1 - mask, token_mean, params=STANDARD | params), logp


@pytest.mark.parametrize("kind", [Earlier, Later])
@pytest.mark.parametrize("rows", [0, 1, 2])
def test_ppo_by_hand(losses, kind, rows):
    ctx, logp = context(kind, rows)
    loss, metrics = losses["crest_ppo"](ctx)
    loss.backward()
    assert loss.item() == near((-1.2 - 0.5 + 4.0) / 3)
    wanted = torch.tensor([0.0, -0.5, 0.0, 4.0]) / 3 / max(rows, 1)
    torch.testing.assert_close(logp.grad, wanted.expand_as(logp))
    assert float(metrics["crest/clip_ratio"]) == near(1 / 3)


def test_settings(losses):
    first, row = 0.75**0.5, 3 ** (1 / 3)
    gates = -2 / (1 + math.exp(-1)) - 2 / (1 + math.exp(1)) + 4 / 1.05 / (1 + math.exp(-3.15))
    for name, params, wanted in (
        ("crest_ppo", {"eps_clip_high": 0.6}, -1.5 - 0.5 + 4.0),
        ("crest_ppo", {"clip_ratio_c": 3.0}, -1.2 - 0.5 + 3.0),
        ("crest_gspo", {}, -1.2 - 1.2 + row),
        ("crest_gspo_action", {}, -first - first + 4.0),
        ("crest_sapo", {"tau_pos": 2.0}, gates),
    ):  # fmt: skip
        loss, _ = losses[name](context(Later, **params)[0])
        assert loss.item() == near(wanted / 3), name


def test_cispo_keeps_every_gradient(losses):
    ctx, logp = context(Later)
    losses["crest_cispo"](ctx)[0].backward()
    torch.testing.assert_close(logp.grad, torch.tensor([[-1.2, -0.8, 0.0, 1.2]]) / 3)


@pytest.mark.parametrize("params", [{"env_loss_coef": 0.05}, {"tau_pos": 1.0}, {"delta": 0.2}])
def test_settings_of_other_losses_are_refused(losses, params):
    with pytest.raises(ValueError, match=next(iter(params))):
        losses["crest_ppo"](context(Earlier, **params)[0])


@pytest.mark.parametrize(
    "params", [{"eps_clip": None}, {"eps_clip": 2.0}, {"eps_clip_high": -0.1}, {"clip_ratio_c": 0.5}]
)
def test_settings_that_the_surrogate_refuses_have_rllms_name(losses, params):
    ((name, value),) = params.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        losses["crest_ppo"](context(Earlier, **params)[0])


def test_settings_that_are_off_are_not(losses):
    losses["crest_gspo"](context(Earlier, env_loss_coef=0.0, delta=None)[0])


def test_the_entry_points_are_declared():
    with open(ROOT / "pyproject.toml", "rb") as file:
        points = tomllib.load(file)["project"]["entry-points"]
    assert points["rllm.losses"] == {"crest_ops": "crest_ops.integrations.rllm"}
    assert points["verl.plugins"] == {"crest_ops": "crest_ops.integrations.verl"}
