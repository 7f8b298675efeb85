"""SkyRL (skyrl 0.3.0, 0.4.0): policy losses and advantage estimators in its registries, under our names.

    import crest_ops.integrations.skyrl  # in the entry script, before Ray starts: SkyRL sends registered functions on
    trainer.algorithm.policy_loss_type=crest_gspo_action
    trainer.algorithm.advantage_estimator=crest_grpo

Importing this module registers, where SkyRL is installed: the losses of rollouts.SURROGATES, and crest_<method> for
every method that needs the outcome alone. What SkyRL cannot do with us, and why:

- hidden states: a policy loss gets log-probs;
- credit of turns through `advantage_estimator`: the response_mask that an estimator gets has no edges (tool output
  counts as response). In a trainer of your own that overrides compute_advantages_and_returns,
  `advantage_estimator("turn_grpo")(data["rewards"], data["loss_mask"], data.metadata["uids"])` has them;
- a reduction: SkyRL multiplies it into the advantages beforehand, so the loss here is a masked sum;
- step-wise trajectories: one row a step, of which SkyRL shows an estimator the last alone.

Shape letters: B rollouts, T padded response.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from .rollouts import (
    SURROGATES,
    Bounds,
    action_spans,
    as_mask,
    assign_advantages,
    check_method,
    check_std,
    given_methods,
    installed,
    logp_losses,
    refuse_unknown,
)


def policy_loss(
    name: str,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    *,
    rollout_log_probs: Tensor | None = None,
    **unknown: Any,
) -> tuple[Tensor, dict[str, float]]:
    """(loss, metrics) of SkyRL's policy loss hook: masked SUM over tokens of c_n * surrogate(r_n, A_n).

    name: of rollouts.SURROGATES; its bounds are config's eps_clip_low, eps_clip_high and clip_ratio_c (crest_ppo is
    SkyRL's dual_clip; clip_ratio_c = inf makes it regular), sapo.tau_pos, tau_neg, cispo.cispo_eps_clip_low and
    _high. A holds the reduction already. c and further masking are SkyRL's own off-policy correction, as its config
    says, from rollout_logprobs (rollout_log_probs in its documentation: either is taken). All tensors [B, T];
    loss_mask None: every token. The metrics, as numbers, are clip_ratio and those of the correction.
    Equal to SkyRL's dual_clip, regular, gspo, cispo and sapo, but that log ratios are held at 20 on both sides (its
    gspo: at 10 above).
    Raises ValueError naming the argument: shapes, values that are not finite at trained tokens, both names of the
    rollout's log-probs, cispo_anchor other than "old", any further argument that is not None.
    """
    from skyrl.backends.skyrl_train.utils.off_policy_correction_utils import apply_off_policy_correction

    refuse_unknown(unknown, name)
    if rollout_logprobs is not None and rollout_log_probs is not None:
        raise ValueError("rollout_logprobs and rollout_log_probs are both given, want one")
    rollout_logp = rollout_log_probs if rollout_logprobs is None else rollout_logprobs
    loss_mask = log_probs.new_ones(log_probs.shape) if loss_mask is None else loss_mask
    bounds = Bounds(
        config.eps_clip_low, config.eps_clip_high, config.clip_ratio_c, config.sapo.tau_pos, config.sapo.tau_neg
    )
    if name == "crest_cispo":
        if getattr(config.cispo, "cispo_anchor", "old") != "old":
            raise ValueError(f"cispo_anchor is {config.cispo.cispo_anchor!r}, want 'old', or policy_loss_type='cispo'")
        bounds = Bounds(config.cispo.cispo_eps_clip_low, config.cispo.cispo_eps_clip_high)
    spans = action_spans(as_mask("loss_mask", loss_mask, log_probs.shape))
    found = logp_losses(log_probs, old_log_probs, advantages, spans, SURROGATES[name](bounds))
    losses, loss_mask, corrected = apply_off_policy_correction(
        found.value, old_log_probs, rollout_logp, loss_mask, config.off_policy_correction
    )
    metrics = {"clip_ratio": float(found.metrics["clip_ratio"])}  # SkyRL drops metrics that are not Python numbers
    return (losses * loss_mask).sum(), {**metrics, **corrected}


def advantage_estimator(method: str, config: Any = None) -> Callable[..., tuple[Tensor, Tensor]]:
    """An estimator for SkyRL's register_advantage_estimator: credit A_n of every token by a method of METHODS.

    method, config: as METHODS[method].assign takes them, with rewards as its only signals; None: the paper's settings
    (a group of one gives 0; SkyRL's grpo keeps its reward: GRPOConfig(singleton="reward")). The estimator takes
    token_level_rewards and response_mask [B, T], index [B] (SkyRL's uids) and returns (advantages, advantages) [B, T].
    Raises ValueError: signals that SkyRL cannot give; the estimator: shapes, no index, grpo_norm_by_std=False where the
    method divides by the std, gamma or lambd other than 1 (they are GAE's), any further argument that is not None.
    """
    return partial(_advantages, method, check_method(method, config, "SkyRL"))


def _advantages(
    method, settings, token_level_rewards, response_mask, index=None, grpo_norm_by_std=True, gamma=1.0, lambd=1.0,
    config=None, **unknown,
):  # fmt: skip
    refuse_unknown(unknown, f"crest_{method}")
    if gamma != 1 or lambd != 1:
        raise ValueError(f"gamma is {gamma} and lambd {lambd}, want 1: crest_{method} has no use for GAE's settings")
    check_std(grpo_norm_by_std, settings, "grpo_norm_by_std")
    advantages = assign_advantages(method, settings, token_level_rewards, response_mask, index)
    return advantages, advantages


def register() -> None:
    """Put every loss of SURROGATES and an estimator crest_<method> for every method of the outcome alone into SkyRL's
    registries.
    """
    from skyrl.backends.skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry, PolicyLossRegistry

    for name in SURROGATES:
        PolicyLossRegistry.register(name, partial(policy_loss, name))
    for method in given_methods(("reward_B",)):
        AdvantageEstimatorRegistry.register(f"crest_{method}", advantage_estimator(method))


if installed("skyrl"):
    register()
