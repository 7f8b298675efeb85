"""TRL's loss settings in the terms of this package: surrogate, token weights, and TRL's own metrics of both.

TRL 1.16, `GRPOConfig` and `GRPOTrainer._compute_loss`. Shape letters: B rollouts of a micro-batch, T padded completion
length, N = B * T token positions, read row by row.
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from trl import GRPOConfig
from trl.trainer.utils import nanmax, nanmin

from ..policy_loss import PolicyLoss
from ..reductions import fixed_length, sequence_mean, token_mean
from ..spans import Spans
from ..surrogates import CISPO, SAPO, PPOClip, Surrogate

REPLACED = (
    "loss_type", "epsilon", "epsilon_high", "delta", "importance_sampling_level", "scale_rewards",
    "multi_objective_aggregation", "sapo_temperature_pos", "sapo_temperature_neg", "entropy_coef",
    "use_adaptive_entropy", "top_entropy_quantile", "off_policy_mask_threshold",
)  # fmt: skip
"""Settings of TRL's loss in whose place a method's config stands."""
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LEVELS = {"token": "token", "sequence": "trajectory"}


def fused_surrogate(args: GRPOConfig) -> Surrogate | None:
    """The surrogate that TRL's settings ask for, where surrogate, k3 and token weights are the whole loss; else None.

    loss_type grpo, bnpo, dr_grpo, dapo, luspo: PPOClip(epsilon, epsilon_high, dual=delta), since
    -min(min(r, delta) A, clip(r) A) is the dual clip where delta > 1 + epsilon_high. cispo: TRL's epsilon_high is the
    largest ratio itself, CISPO(epsilon_high - 1). sapo: SAPO of its two temperatures. None, so that TRL's own loss is
    to be taken: vespo (its weight depends on the log-probs of the pass), a KL times the ratio (use_bias_correction_kl
    with a beta), entropy bonus, entropy quantile, off-policy mask, bounds in another order.
    """
    if (
        (args.beta != 0 and args.use_bias_correction_kl)
        or args.entropy_coef != 0
        or args.use_adaptive_entropy
        or args.top_entropy_quantile < 1
        or args.off_policy_mask_threshold is not None
        or args.importance_sampling_level not in LEVELS
    ):
        return None
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    level = LEVELS[args.importance_sampling_level]
    if args.loss_type == "cispo" and high >= 1:
        return CISPO(high - 1, level=level)
    if args.loss_type == "sapo":
        return SAPO(args.sapo_temperature_pos, args.sapo_temperature_neg, level=level)
    in_order = 0 <= args.epsilon <= 1 and high >= 0 and (args.delta is None or args.delta > 1 + high)
    if args.loss_type in CLIPPED and in_order:
        return PPOClip(args.epsilon, high, dual=args.delta, level=level)
    return None


def check_replaced(args: GRPOConfig, credit_method: str, credit_config: Any, *, aux_loss: bool) -> None:
    """Raises ValueError naming what a method's loss would leave unread: a setting of TRL's, the router's loss."""
    if aux_loss:
        raise ValueError(
            f"the model has a router's loss, which credit_method {credit_method!r} does not add: set "
            "args.router_aux_loss_coef=0"
        )
    for field in fields(GRPOConfig):
        found = getattr(args, field.name)
        if field.name in REPLACED and found != field.default:
            raise ValueError(
                f"args.{field.name} is {found!r}, which credit_method {credit_method!r} does not read: leave it at "
                f"{field.default!r} and pass credit_config={type(credit_config).__name__}(...), whose surrogate and "
                "reduction decide the loss"
            )
    if args.beta != 0 and args.use_bias_correction_kl:
        raise ValueError(
            f"args.use_bias_correction_kl is True, want False with beta and credit_method {credit_method!r}: its "
            "penalty is the plain k3"
        )


def loss_weight(
    loss_type: str, spans: Spans, *, max_completion_length: int, accumulation: float, window_tokens: Tensor
) -> Tensor:
    """token_weight [N] of TRL's loss_type for one of `accumulation` micro-batches, each with B rows.

    grpo, sapo: 1 / (B L_i accumulation); bnpo: 1 / (tokens here * accumulation); dr_grpo: 1 / (B
    max_completion_length accumulation); luspo: 1 / (B accumulation); dapo, cispo: 1 / window_tokens, the tokens of an
    optimizer step per process. A row without a policy token counts in B, as in TRL.
    """
    rows = spans.num_trajectories * accumulation
    if loss_type in ("grpo", "sapo"):
        return sequence_mean(spans, total=rows)
    if loss_type == "bnpo":
        return token_mean(spans, total=spans.mask.sum().clamp(min=1) * accumulation)
    if loss_type == "dr_grpo":
        return fixed_length(spans, max_completion_length, total=rows)
    if loss_type == "luspo":
        return fixed_length(spans, 1, total=rows)
    return token_mean(spans, total=window_tokens)


def importance_weight(ratio: Tensor | None, mask: Tensor, level: str) -> Tensor | None:
    """TRL's importance_sampling_ratio [B, 1] or [B, T] as a weight [B, T] of the surrogate.

    mask [B, T] bool. Under one ratio for the trajectory TRL differentiates the mean log-ratio, so that every token
    moves with the row's mean weight: that mean stands at each of its tokens.
    """
    if ratio is None:
        return None
    if level == "trajectory":
        ratio = torch.where(mask, ratio, 0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return ratio.expand(mask.shape)


def loss_metrics(
    found: PolicyLoss, credit: Tensor, mask: Tensor, surrogate: Surrogate, accelerator: Accelerator
) -> Iterator[tuple[str, float]]:
    """TRL's metrics of a loss, over all processes: entropy, kl, clip_ratio/..., cispo_clip_ratio.

    credit, mask [B, T]. Means are over policy tokens; those of a clip at trajectory level over rows.
    """
    of_rows = surrogate.level == "trajectory"
    num_tokens, length_B = mask.sum(), mask.sum(1)
    sums = {"entropy": (found.entropy.sum(), num_tokens)}
    if "kl" in found.metrics:
        sums["kl"] = (found.metrics["kl"] * num_tokens, num_tokens)
    clipped = _clipped(found.ratio, credit, mask, surrogate)
    for name, clipped_BT in clipped.items():
        hit, of = (clipped_BT.any(1), num_tokens.new_tensor(len(mask))) if of_rows else (clipped_BT, num_tokens)
        sums[name] = (hit.sum(), of)
    table = torch.stack([torch.stack([part.float() for part in pair]) for pair in sums.values()])
    total, count = accelerator.reduce(table, reduction="sum").unbind(1)
    yield from zip(sums, (total / count.clamp(min=1)).tolist(), strict=True)
    if isinstance(surrogate, PPOClip):
        for name, extreme, of in (("low_min", nanmin, "low_mean"), ("high_max", nanmax, "high_mean")):
            clipped_BT = clipped[f"clip_ratio/{of}"]
            share_B = clipped_BT.any(1).float() if of_rows else clipped_BT.sum(1) / length_B
            yield f"clip_ratio/{name}", extreme(accelerator.gather(share_B)).item()


def _clipped(ratio: Tensor, credit: Tensor, mask: Tensor, surrogate: Surrogate) -> dict[str, Tensor]:
    """Which tokens [B, T] bool count as clipped, by the name of the metric."""
    if isinstance(surrogate, PPOClip):
        low = mask & (ratio < 1 - surrogate.low) & (credit < 0)
        high = mask & (ratio > 1 + surrogate.high) & (credit > 0)
        hit = {"low": low, "high": high, "region": low | high}
        return {f"clip_ratio/{name}_mean": clipped for name, clipped in hit.items()}
    if isinstance(surrogate, CISPO):
        return {"cispo_clip_ratio": mask & (ratio > 1 + surrogate.high) & (credit > 0)}
    return {}
