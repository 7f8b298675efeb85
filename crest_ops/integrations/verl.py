"""verl 0.9.1: policy losses and advantage estimators under our names, from its log-probs and token-level rewards.

    pip install crest-ops     # found through the entry point verl.plugins, or VERL_USE_EXTERNAL_MODULES=<this module>
    algorithm.adv_estimator=crest_turn_grpo
    actor_rollout_ref.actor.policy_loss.loss_mode=crest_gspo_action

Importing this module registers, where verl is installed: the losses of rollouts.SURROGATES, and crest_<method> for
every method that needs rewards alone. Actions are the runs of response_mask; each is a turn of its own, and its reward
lies on its last token or on the reply to it. What verl cannot do with us, and why:

- hidden states: a policy loss gets log-probs, so linear_policy_loss and its saving of logits are out of reach;
- teacher gaps, gold answers, state keys, roles, ids of user turns: verl passes estimators a fixed list of arguments;
- a method's own reduction and surrogate: they are loss_agg_mode's and loss_mode's, and DAPO's constant groups keep
  their place in the denominator;
- sessions that its trainer splits into several rows: each row is a rollout of its own to an estimator of ours.

Shape letters: B rollouts, T padded response.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..policy_loss import mean_where
from ..reductions import fixed_length, sequence_mean, token_mean
from ..spans import Spans
from ..surrogates import MAX_LOG_RATIO
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

AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


def token_weight(
    spans: Spans,
    loss_agg_mode: str,
    length: int,
    *,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """verl's agg_loss as weights [N]: agg_loss(l) = sum_n w_n * l_n.

    token-mean: w = dp_size / batch_num_tokens;  token-sum: dp_size;  seq-mean-token-sum: dp_size / global_batch_size,
    -norm: by loss_scale_factor as well;  seq-mean-token-mean: dp_size / (global_batch_size * tokens of the row).
    verl 0.9.1, core_algos.agg_loss. Counts that are None are this batch's own, rows without a policy token excluded;
    loss_scale_factor None is `length`, the padded one. Without a policy token all are 0 (verl: NaN).
    Raises ValueError: an unknown mode, dp_size > 1 without the count that the mode divides by.
    """
    if loss_agg_mode not in AGG_MODES:
        raise ValueError(f"loss_agg_mode is {loss_agg_mode!r}, want one of {', '.join(map(repr, AGG_MODES))}")
    if loss_agg_mode == "token-sum":
        return fixed_length(spans, 1.0, total=1 / dp_size)
    tokens = loss_agg_mode == "token-mean"
    name, count = ("batch_num_tokens", batch_num_tokens) if tokens else ("global_batch_size", global_batch_size)
    if count is None and dp_size > 1:
        raise ValueError(f"{name} is None and dp_size {dp_size}, want the count over all {dp_size} ranks")
    if count is None:
        count = spans.mask.sum() if tokens else (spans.trajectory_length > 0).sum()
    count = count or 1  # nothing to train on: all weights are 0
    if tokens:
        return token_mean(spans, total=count / dp_size)
    if loss_agg_mode == "seq-mean-token-mean":
        return sequence_mean(spans, total=count / dp_size)
    norm = loss_agg_mode == "seq-mean-token-sum-norm"
    scale = (length if loss_scale_factor is None else loss_scale_factor) if norm else 1.0
    return fixed_length(spans, scale, total=count / dp_size)


def policy_loss(
    name: str,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **unknown: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, metrics) of verl's policy loss hook: sum over policy tokens of w_n * is_n * surrogate(r_n, A_n).

    name: of rollouts.SURROGATES; its bounds are config's clip_ratio(_low, _high), clip_ratio_c, tau_pos, tau_neg. Equal
    to verl's vanilla, gspo, cispo and sapo, but: every loss_agg_mode holds for all of them (verl's sapo has one), log
    ratios are held at 20 on both sides (verl's gspo: at 10 above). All tensors [B, T]; config: an ActorConfig;
    rollout_is_weights multiply the surrogate. Metrics have verl's names, as 0-d tensors.
    Raises ValueError naming the argument: shapes, no config, values that are not finite at policy tokens, an unknown
    loss_agg_mode, any further argument that is not None.
    """
    refuse_unknown(unknown, name)
    if config is None:
        raise ValueError("config is None, want verl's ActorConfig")
    mask = as_mask("response_mask", response_mask, log_prob.shape)
    spans = action_spans(mask)
    weight_N = token_weight(spans, loss_agg_mode, mask.shape[1], **config.global_batch_info)
    low, high = (config.clip_ratio if x is None else x for x in (config.clip_ratio_low, config.clip_ratio_high))
    taus = getattr(config, "tau_pos", 1.0), getattr(config, "tau_neg", 1.05)  # verl's distillation has no such settings
    surrogate = SURROGATES[name](Bounds(low, high, getattr(config, "clip_ratio_c", 3.0), *taus))
    found = logp_losses(log_prob, old_log_prob, advantages, spans, surrogate, importance_weight=rollout_is_weights)
    loss = (weight_N * found.value.flatten()).sum()
    held = found.clipped & (advantages < 0) & (found.ratio > 1)
    if getattr(surrogate, "dual", None) is None:
        held = torch.zeros_like(held)
    moved = (log_prob.detach() - old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return loss, {
        "actor/pg_clipfrac": mean_where((found.clipped & ~held).float(), mask),
        "actor/pg_clipfrac_lower": mean_where(held.float(), mask),
        "actor/ppo_kl": mean_where(-moved, mask),
    }


def advantage_estimator(method: str, config: Any = None) -> Callable[..., tuple[Tensor, Tensor]]:
    """An estimator for verl.trainer.ppo.core_algos.register_adv_est: credit A_n of every token by a method of METHODS.

    method, config: as METHODS[method].assign takes them, with rewards as its only signals; None: the paper's settings
    (a group of one gives 0; verl's grpo keeps its reward: GRPOConfig(singleton="reward")). The estimator takes
    token_level_rewards, response_mask [B, T], index [B] (verl's uid) and verl's config, of which it heeds
    norm_adv_by_std_in_grpo, and returns (advantages, advantages) [B, T], 0 at masked tokens.
    Raises ValueError: signals that verl cannot give; the estimator: shapes, no index, a config that asks not to divide
    by the std where the method does, any further argument that is not None.
    """
    return partial(_advantages, method, check_method(method, config, "verl"))


def _advantages(method, settings, token_level_rewards, response_mask, index=None, config=None, **unknown):
    refuse_unknown(unknown, f"crest_{method}")
    check_std(getattr(config, "norm_adv_by_std_in_grpo", True), settings, "norm_adv_by_std_in_grpo")
    advantages = assign_advantages(method, settings, token_level_rewards, response_mask, index)
    return advantages, advantages


def register() -> None:
    """Put every loss of SURROGATES and an estimator crest_<method> for every method of rewards alone into verl's
    registries.
    """
    from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss

    for name in SURROGATES:
        register_policy_loss(name)(partial(policy_loss, name))
    for method in given_methods():
        register_adv_est(f"crest_{method}")(advantage_estimator(method))


if installed("verl"):
    register()
