"""prime-rl: a custom loss of one sequence's log-probs.

    [trainer.loss]
    type = "custom"
    import_path = "crest_ops.integrations.prime_rl.policy_loss"
    kwargs = { surrogate = "gspo", level = "action", low = 3e-4, high = 4e-4 }

The recorded signature is prime-rl's of 2026-08-21 (559b44772; src/prime_rl/trainer/rl/loss.py, docs/training.md):
fn(inputs: LossInputs, **kwargs) -> LossOutputs, 1-D tensors of one sequence. prime-rl is on no package index; this
module was checked against that signature, not against the package. What prime-rl cannot do with us, and why:

- hidden states: the hook gets log-probs; its chunked head is its own;
- credit: advantages come per token from an algorithm class inside prime-rl, for which there is no import path;
- a reduction: it divides by the global count itself, so the loss here is a sum;
- packed sequences in one call (some versions): [1, T] is refused; in [T] their actions would stay apart, but not their
  trajectories.

Shape letters: T tokens of the sequence.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ..surrogates import CISPO, GSPO, SAPO, PPOClip
from ..vocabulary import FLOAT_DTYPES, check_per_token
from .rollouts import action_spans, as_mask, logp_losses, refuse_unknown

SURROGATES = {"ppo": PPOClip, "gspo": GSPO, "cispo": CISPO, "sapo": SAPO}


def policy_loss(inputs: Any, surrogate: str = "ppo", kl_coef: float = 0.0, **settings: Any) -> Any:
    """LossOutputs of one sequence: loss = sum over loss_mask of w_t * (surrogate(r_t, A_t) + kl_coef * k3_t).

    r = exp(trainer_logprobs - inference_logprobs); w = loss_weights, 1 where None; A = advantages; k3 of ref_logprobs,
    which are not read where kl_coef is 0. surrogate: "ppo", "gspo", "cispo" or "sapo"; settings: the fields of that
    class of crest_ops.surrogates (level = "action" averages the ratio per action). inputs: LossInputs, tensors [T].
    Metrics are 0-d tensors over this sequence: clip_ratio, ratio_mean, ratio_max, approx_kl, kl.
    Raises ValueError naming the argument: an unknown surrogate or setting, shapes, values that are not finite at
    trained tokens, kl_coef without ref_logprobs, any further field of inputs that is not None.
    """
    from prime_rl.trainer.rl.loss import LossOutputs

    known = ("trainer_logprobs", "inference_logprobs", "ref_logprobs", "advantages", "loss_mask", "loss_weights")
    refuse_unknown({k: v for k, v in vars(inputs).items() if k not in known}, "policy_loss")
    if surrogate not in SURROGATES:
        raise ValueError(f"surrogate is {surrogate!r}, want one of {', '.join(map(repr, SURROGATES))}")
    fields = [field.name for field in dataclasses.fields(SURROGATES[surrogate])]
    for name in settings:
        if name not in fields:
            raise ValueError(f"{name} is no setting of {surrogate!r}, want one of {', '.join(fields)}")
    logp = inputs.trainer_logprobs
    if not isinstance(logp, Tensor) or logp.dim() != 1:
        shape = [*logp.shape] if isinstance(logp, Tensor) else type(logp).__name__
        raise ValueError(f"trainer_logprobs is {shape}, want a tensor [T] of one sequence")
    mask = as_mask("loss_mask", inputs.loss_mask, logp.shape)
    found = logp_losses(
        logp,
        inputs.inference_logprobs,
        inputs.advantages,
        action_spans(mask[None]),
        SURROGATES[surrogate](**settings),
        ref_logp=inputs.ref_logprobs,
        kl_coef=kl_coef,
    )
    value = found.value
    if inputs.loss_weights is not None:
        check_per_token("loss_weights", inputs.loss_weights, mask.shape, FLOAT_DTYPES, mask.device)
        value = value * torch.where(mask, inputs.loss_weights, 0)
    metrics = {name: metric for name, metric in found.metrics.items() if name != "num_tokens"}
    return LossOutputs(loss=value.sum(), metrics=metrics)
