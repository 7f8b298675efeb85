"""Our losses and estimators beside verl 0.9.1's own: largest differences of values and gradients, on the CPU.

Run by hand, in an environment of its own (verl is not among the tests' requirements):

    pip install --no-deps verl==0.9.1 tensordict omegaconf hydra-core antlr4-python3-runtime codetiming torchdata ray
    python tests/verl_conformance.py      # beside torch, numpy, pandas, transformers and crest-ops

Prints a line per case and ends with status 1 where a difference is larger than float32 rounding.
"""

import importlib.metadata
import itertools
import sys

import numpy as np
import torch
import verl
from omegaconf import OmegaConf
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
from verl.workers.config import ActorConfig

import crest_ops.integrations.verl as ours
from crest_ops import GRPOConfig

LOSSES = {"crest_ppo": "vanilla", "crest_gspo": "gspo", "crest_cispo": "cispo", "crest_sapo": "sapo"}
TOLERANCE = 2e-6  # gradients: of the largest one; losses: of the sum of the gradients' sizes, since their terms cancel
INFOS = {
    "local": {},
    "global": {"dp_size": 2, "batch_num_tokens": 517, "global_batch_size": 24, "loss_scale_factor": 50},
}


def batch(seed: int, tools: bool):
    """Rollouts of three tasks; with tools, tool output between the actions; the last row has no policy token."""
    rng = torch.Generator().manual_seed(seed)
    B, T = 12, 40
    length_B = torch.randint(5, T + 1, (B,), generator=rng)
    mask = torch.arange(T) < length_B[:, None]
    if tools:
        mask &= torch.rand(B, T // 4, generator=rng).repeat_interleave(4, 1) < 0.6
    mask[-1] = False
    logp = -3 * torch.rand(B, T, generator=rng)
    old = logp + 0.5 * torch.randn(B, T, generator=rng)
    advantages = torch.randn(B, T, generator=rng)
    weights = torch.rand(B, T, generator=rng) * 2
    return mask, logp, old, advantages, weights


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))


def loss_and_gradient(name, mask, logp, old, advantages, weights, mode, info):
    config = ActorConfig(
        strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=4, clip_ratio_low=0.2, clip_ratio_high=0.28,
        clip_ratio_c=1.6, tau_pos=1.0, tau_neg=1.05, global_batch_info=dict(info),
    )  # fmt: skip
    logp = logp.clone().requires_grad_()
    loss, metrics = get_policy_loss_fn(name)(
        old_log_prob=old, log_prob=logp, advantages=advantages, response_mask=mask, loss_agg_mode=mode, config=config,
        rollout_is_weights=weights,
    )  # fmt: skip
    loss.backward()
    return loss.detach(), logp.grad, {key: float(value) for key, value in metrics.items()}


def compare_losses() -> float:
    worst = 0.0
    for name, theirs in LOSSES.items():
        modes = ours.AGG_MODES if theirs != "sapo" else ("seq-mean-token-mean",)  # verl's sapo knows no other
        for mode, (kind, info) in itertools.product(modes, INFOS.items()):
            value = slope = metric = 0.0
            for seed, tools, weighted in itertools.product(range(3), (False, True), (False, True)):
                *tensors, weights = batch(seed, tools)
                arguments = (*tensors, weights if weighted else None, mode, info)
                loss, grad, metrics = loss_and_gradient(name, *arguments)
                wanted, wanted_grad, wanted_metrics = loss_and_gradient(theirs, *arguments)
                value = max(value, float((loss - wanted).abs() / wanted_grad.abs().sum()))
                slope = max(slope, apart(grad, wanted_grad))
                metric = max(metric, *(abs(metrics[key] - wanted_metrics[key]) for key in wanted_metrics))
            print(
                f"{name:12} = {theirs:8} {mode:24} {kind:7} loss {value:.1e} gradient {slope:.1e} metrics {metric:.1e}"
            )
            worst = max(worst, value, slope, metric)
    return worst


def compare_estimators() -> float:
    """crest_grpo and crest_dr_grpo against verl's grpo with and without std; the singleton convention as verl's."""
    worst = 0.0
    for singles, divide in itertools.product((False, True), (True, False)):
        mask, *_ = batch(7, True)
        rewards = torch.zeros(mask.shape)
        rewards[:, -1] = torch.rand(len(mask), generator=torch.Generator().manual_seed(3))
        uids = [f"task {i // 4}" for i in range(len(mask))]
        if singles:
            uids[0] = "alone"
        settings = GRPOConfig(scale="std" if divide else "none", singleton="reward" if singles else "zero")
        arguments = dict(
            token_level_rewards=rewards, response_mask=mask, index=np.array(uids, dtype=object), config=AlgoConfig()
        )
        registered = "crest_grpo" if divide else "crest_dr_grpo"
        estimate = ours.advantage_estimator("grpo", settings) if singles else get_adv_estimator_fn(registered)
        found, returns = estimate(**arguments)
        wanted, _ = get_adv_estimator_fn("grpo")(**arguments, norm_adv_by_std_in_grpo=divide)
        difference = apart(found, wanted)
        name = "grpo(singleton='reward')" if singles else registered
        print(f"{name:24} = grpo, norm_adv_by_std_in_grpo={divide}: advantages {difference:.1e}")
        worst = max(worst, difference, apart(returns, wanted))
    return worst


if __name__ == "__main__":
    versions = {name: importlib.metadata.version(name) for name in ("verl", "torch", "tensordict", "ray")}
    print(OmegaConf.to_yaml(versions).replace("\n", "  "))
    assert verl.__version__ == "0.9.1", verl.__version__
    largest = max(compare_losses(), compare_estimators())
    print(f"largest difference {largest:.1e}, tolerance {TOLERANCE:.0e}")
    sys.exit(largest > TOLERANCE)
