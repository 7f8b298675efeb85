"""rLLM: policy losses under our names, found through the entry point group rllm.losses.

    pip install crest-ops
    algorithm.loss_fn=crest_gspo_action

The recorded signature is rllm/trainer/algorithms/loss.py of rllm-org/rllm (030b08ce, with ctx.pi, ctx.mu; the later
one has ctx.logp_curr, ctx.logp_old: both are taken): fn(ctx: LossContext) -> (scalar, metrics). rLLM is on no package
index; this module was checked against that signature, not against the package. What rLLM cannot do with us, and why:

- hidden states: ctx holds log-probs;
- credit of actions: its advantage estimators see one reward a trajectory, and steps, not our Spans; advantages per
  token that a workflow computed with METHODS reach the loss where use_precomputed_advantage is set;
- a reduction: ctx.aggregate is rLLM's (GSPO's paper wants algorithm.loss_agg_mode="seq-mean-token-mean").

Shape letters: B rollouts, T tokens of a padded response; on tinker and fireworks T tokens of one sequence.
"""

from functools import partial
from typing import Any

from torch import Tensor

from .rollouts import SURROGATES, Bounds, action_spans, as_mask, installed, logp_losses

STANDARD = ("eps_clip", "eps_clip_high", "kl_beta")  # that rLLM passes to every loss; kl_beta is the backend's to apply
SETTINGS = {"crest_ppo": ("clip_ratio_c",), "crest_sapo": ("tau_pos", "tau_neg")}


def policy_loss(name: str, ctx: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, metrics) of rLLM's loss hook: ctx.aggregate of surrogate(r_n, A_n), r = exp(logp - behaviour logp).

    name: of rollouts.SURROGATES; its bounds are ctx.params' eps_clip, eps_clip_high (None: eps_clip) and what
    algorithm.loss_params adds: clip_ratio_c for crest_ppo (absent: no dual clip), tau_pos, tau_neg for crest_sapo.
    ctx: LossContext, tensors [B, T] or [T]. obs_mask, reference and rollout log-probs are other losses' and not read,
    nor is kl_beta. Metrics are 0-d tensors: crest/clip_ratio, ratio_mean, ratio_max, approx_kl.
    Raises ValueError naming the argument: shapes, values that are not finite at action tokens, a loss_params entry
    that the loss does not know and that is neither None nor 0, a setting that the surrogate refuses (eps_clip None).
    """
    known = (*STANDARD, *SETTINGS.get(name, ()))
    for key, value in ctx.params.items():
        if key not in known and value not in (None, 0, False):
            raise ValueError(f"loss_params has {key}={value!r}, which {name} does not know: want {', '.join(known)}")
    logp, old_logp = (ctx.logp_curr, ctx.logp_old) if hasattr(ctx, "logp_curr") else (ctx.pi, ctx.mu)
    low = ctx.params.get("eps_clip", 0.2)
    high = ctx.params.get("eps_clip_high")
    settings = {"dual": ctx.params.get("clip_ratio_c")} | {
        key: ctx.params[key] for key in SETTINGS["crest_sapo"] if ctx.params.get(key) is not None
    }
    try:
        surrogate = SURROGATES[name](Bounds(low, low if high is None else high, **settings))
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{key}={ctx.params[key]!r}" for key in known if key in ctx.params)
        raise ValueError(f"{name} was given {given}: {error}") from error
    mask = as_mask("action_mask", ctx.action_mask, logp.shape)
    spans = action_spans(mask if mask.dim() == 2 else mask[None])
    found = logp_losses(logp, old_logp, ctx.advantages, spans, surrogate)
    metrics = {f"crest/{key}": found.metrics[key] for key in ("clip_ratio", "ratio_mean", "ratio_max", "approx_kl")}
    return ctx.aggregate(found.value, ctx.action_mask), metrics


def register() -> None:
    """Put every loss of SURROGATES into rLLM's registry."""
    from rllm.trainer.algorithms.loss import register_loss

    for name in SURROGATES:
        register_loss(name)(partial(policy_loss, name))


if installed("rllm"):
    register()
