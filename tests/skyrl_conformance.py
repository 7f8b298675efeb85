"""Our losses and estimators beside SkyRL's own: largest differences of values and gradients, on the CPU.

Run by hand, in an environment of its own (SkyRL is not among the tests' requirements; 0.4.0 asks for Python 3.12):

    pip install --no-deps skyrl==0.3.0 skyrl-gym loguru jaxtyping wadler-lindig cloudpathlib omegaconf ray
    python tests/skyrl_conformance.py      # beside torch, numpy, transformers and crest-ops

Prints a line per case and ends with status 1 where a difference is larger than float32 rounding.
"""

import importlib.metadata
import itertools
import sys
import typing

import numpy as np
import torch
import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # pydantic wants it below Python 3.12; before SkyRL is imported

import cloudpickle  # noqa: E402
from loguru import logger  # noqa: E402
from skyrl.backends.skyrl_train.utils.ppo_utils import (  # noqa: E402
    AdvantageEstimatorRegistry,
    PolicyLossRegistry,
    apply_loss_reduction_to_advantages_minibatch,
    compute_advantages_and_returns,
)
from skyrl.train.config import AlgorithmConfig, OffPolicyCorrectionConfig  # noqa: E402

import crest_ops.integrations.skyrl  # noqa: E402, F401

LOSSES = {
    "crest_ppo": "dual_clip",
    "crest_gspo": "gspo",
    "crest_cispo": "cispo",
    "crest_sapo": "sapo",
}
TOLERANCE = 2e-6  # gradients: of the largest one; losses: of the sum of the gradients' sizes, since their terms cancel
REDUCTIONS = ("token_mean", "sequence_mean", "seq_mean_token_sum_norm")
CORRECTIONS = {
    "none": OffPolicyCorrectionConfig(),
    "tis": OffPolicyCorrectionConfig(tis_ratio_type="token", token_tis_ratio_clip_high=1.2),
    "mask": OffPolicyCorrectionConfig(token_mask_is_threshold_low=0.7, token_mask_is_threshold_high=1.4),
}


def batch(seed: int):
    """Right-aligned rows with tool output between the actions; the last has no trained token."""
    rng = torch.Generator().manual_seed(seed)
    B, T = 12, 40
    mask = torch.arange(T) >= torch.randint(0, T - 5, (B,), generator=rng)[:, None]
    mask &= torch.rand(B, T // 4, generator=rng).repeat_interleave(4, 1) < 0.6
    mask[-1] = False
    logp = -3 * torch.rand(B, T, generator=rng)
    old = logp + 0.5 * torch.randn(B, T, generator=rng)
    rollout = old + 0.3 * torch.randn(B, T, generator=rng)
    return mask.float(), logp, old, rollout, torch.randn(B, T, generator=rng)


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))


def loss_and_gradient(name, theirs, seed, reduction, correction):
    mask, logp, old, rollout, advantages = batch(seed)
    config = AlgorithmConfig(
        policy_loss_type=theirs, loss_reduction=reduction, max_seq_len=64, eps_clip_high=0.28, clip_ratio_c=1.6,
        off_policy_correction=CORRECTIONS[correction],
    )  # fmt: skip
    config.cispo.cispo_eps_clip_low, config.cispo.cispo_eps_clip_high = 0.3, 0.4
    advantages = apply_loss_reduction_to_advantages_minibatch(advantages, mask, reduction, 4, 64)
    logp.requires_grad_()
    loss, metrics = PolicyLossRegistry.get(name)(
        logp, old, advantages, config=config, loss_mask=mask, rollout_logprobs=rollout
    )
    loss.backward()
    return loss.detach(), logp.grad, metrics


def compare_losses() -> float:
    worst = 0.0
    for name, theirs in LOSSES.items():
        for reduction, correction in itertools.product(REDUCTIONS, CORRECTIONS):
            value = slope = 0.0
            for seed in range(4):
                arguments = (theirs, seed, reduction, correction)
                loss, grad, metrics = loss_and_gradient(name, *arguments)
                wanted, wanted_grad, wanted_metrics = loss_and_gradient(theirs, *arguments)
                value = max(value, float((loss - wanted).abs() / wanted_grad.abs().sum()))
                slope = max(slope, apart(grad, wanted_grad))
                assert set(wanted_metrics) - set(metrics) <= {key for key in wanted_metrics if "cispo/" in key}
            print(f"{name:12} = {theirs:9} {reduction:24} {correction:5} loss {value:.1e} gradient {slope:.1e}")
            worst = max(worst, value, slope)
    return worst


def compare_estimators() -> float:
    worst = 0.0
    mask, *_ = batch(5)
    rewards = torch.zeros(mask.shape)
    rewards[:, -1] = torch.rand(len(mask), generator=torch.Generator().manual_seed(3))
    response_mask = (torch.arange(mask.shape[1]) >= 10).long().expand_as(mask)
    for name, divide in (("crest_grpo", True), ("crest_dr_grpo", False)):
        arguments = (rewards, response_mask, np.array([f"task {i // 4}" for i in range(len(mask))]))
        found, _ = compute_advantages_and_returns(*arguments, name, AlgorithmConfig(), grpo_norm_by_std=divide)
        wanted, _ = compute_advantages_and_returns(*arguments, "grpo", AlgorithmConfig(), grpo_norm_by_std=divide)
        print(f"{name:12} = grpo, grpo_norm_by_std={divide}: advantages {apart(found, wanted):.1e}")
        worst = max(worst, apart(found, wanted))
    return worst


if __name__ == "__main__":
    print({name: importlib.metadata.version(name) for name in ("skyrl", "skyrl-gym", "torch", "ray")})
    logger.disable("skyrl")
    for registry in (PolicyLossRegistry, AdvantageEstimatorRegistry):
        for name in registry.list_available():
            if name.startswith("crest_"):  # as SkyRL sends them to its workers
                registry._functions[name] = cloudpickle.loads(cloudpickle.dumps(registry.get(name)))
    largest = max(compare_losses(), compare_estimators())
    print(f"largest difference {largest:.1e}, tolerance {TOLERANCE:.0e}")
    sys.exit(largest > TOLERANCE)
