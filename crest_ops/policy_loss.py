"""The credit-weighted policy loss from vocabulary logits: one read of the logits forward, one read and one write
backward.

Shape letters: N tokens (all of `targets`, row by row), V vocabulary.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .backend import checks_values
from .shards import agreed
from .spans import Spans
from .surrogates import MAX_LOG_RATIO, PPOClip, Surrogate, SurrogateValue, check_level, check_surrogate, ranks_of
from .token_stats import stats_tensors
from .vocabulary import FLOAT_DTYPES, check_per_token


@dataclass(frozen=True, eq=False)
class PolicyLoss:
    """What the policy losses give.

    loss: scalar, differentiable. logp, entropy, ratio (of old and new policy), clipped (bool): per token, shaped like
    `targets`, detached, 0 where masked. metrics: scalar tensors over the batch's own unmasked tokens, for logging:
    entropy, ratio_mean, ratio_max, clip_ratio, approx_kl (mean of r - 1 - log r, r = exp(logp - old_logp)), kl (mean k3
    of ref_logp, where given), num_tokens.
    """

    loss: Tensor
    logp: Tensor
    entropy: Tensor
    ratio: Tensor
    clipped: Tensor
    metrics: Mapping[str, Tensor]


def policy_loss(
    logits: Tensor,
    targets: Tensor,
    credit: Tensor,
    *,
    token_weight: Tensor,
    old_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    surrogate: Surrogate = PPOClip(0.2, 0.28),
    importance_weight: Tensor | None = None,
    spans: Spans | None = None,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    backend: str = "auto",
    inplace: bool = False,
) -> PolicyLoss:
    """Credit-weighted surrogate loss of the realised tokens.

    loss = sum_n token_weight_n (importance_weight_n * surrogate(r_n, credit_n) + kl_coef * k3_n - entropy_coef * H_n),
    r = exp(logp - old_logp),  H = entropy,  k3 = exp(d) - d - 1 with d = clip(ref_logp - logp, -20, 20) (0 slope
    outside). PPO: arXiv 1707.06347, eq. 7; k3: GRPO, arXiv 2402.03300, eq. 4. The clips at 20 and all weights as
    arguments are this project's reading: nothing is divided by a count that was not given; see `reductions` for token
    weights.

    logits, mask, temperature, softcap, logit_scale, vocab_size, ignore_index, backend: as in `token_stats`.
    targets [...] ids, already shifted. All per-token arguments have exactly its shape and are detached.
    credit [...]: signed coefficient. token_weight [...]: the reduction. old_logp [...]: behaviour log-prob of the
        target; None means strictly on policy (ratio 1, gradient of log-prob times credit). ref_logp [...]: needed where
        kl_coef is not 0.
    surrogate: of `surrogates`; levels above "token" need spans over the same N positions. Of a part of spans
        (`Spans.part`) all ranks call at such a level, those without a policy token too: one log-ratio a token is
        gathered, and what one rank refuses raises ValueError on all.
    importance_weight [...]: multiplies the surrogate alone (truncated sampler corrections).
    inplace: backward overwrites the logits with their gradient, and bumps their version; a second backward raises.

    Compiled, another kl_coef or entropy_coef of the same type is not compiled anew, but for 0; softcap, logit_scale
    and the surrogate are part of the graph.

    Masked positions have no part in value, gradient or metrics, whatever logits, credit or log-probs hold there.
    A target outside the support (logp = -inf) has gradient 0; its log-prob and log-ratio count as -20 in the value and
    in the mean of its span, its k3 as 0. A NaN in an unmasked row of logits makes the loss and the row's gradient NaN.

    Raises ValueError naming the argument: shapes, dtypes, devices, non-finite values at unmasked positions (on a GPU a
    device-side assert, or ValueError under CREST_DEBUG=1), kl_coef without ref_logp, and whatever `token_stats`
    refuses.
    """
    per_token = {
        "credit": credit,
        "token_weight": token_weight,
        "old_logp": old_logp,
        "ref_logp": ref_logp,
        "importance_weight": importance_weight,
    }
    with agreed(ranks_of(surrogate, spans)):
        check_loss_arguments(logits, targets, per_token, spans)
        check_coefficients(kl_coef, entropy_coef, ref_logp, surrogate, spans)
        live_N = live_positions(targets, mask, ignore_index, spans)
        logp, entropy, _, _ = stats_tensors(
            logits, targets, live_N.view(targets.shape), temperature, softcap, logit_scale, vocab_size, ignore_index,
            True, False, inplace, backend,
        )  # fmt: skip
        given = finite_given(per_token, live_N)
    logp_N, entropy_N = logp.reshape(-1), entropy.reshape(-1)
    found = token_losses(logp_N.detach(), entropy_N.detach(), given, surrogate, spans, live_N, kl_coef, entropy_coef)
    loss = composed_loss(found, given["token_weight"], logp_N, entropy_N, entropy_coef)
    return as_policy_loss(loss, found, logp_N, entropy_N, targets.shape)


class TokenLosses(NamedTuple):
    """Per token [N] the loss before its token weight, the slope of it by logp, ratio and clipped; batch metrics."""

    value: Tensor
    slope: Tensor
    ratio: Tensor
    clipped: Tensor
    metrics: dict[str, Tensor]


def finite_given(per_token: Mapping[str, Tensor | None], live_N: Tensor) -> dict[str, Tensor]:
    """The per-token arguments that were passed, [N], 0 where not live. ValueError for live ones that are not finite."""
    return {
        name: finite_where(name, value.reshape(-1), live_N) for name, value in per_token.items() if value is not None
    }


def token_losses(
    logp_N, entropy_N, given: Mapping[str, Tensor], surrogate, spans: Spans | None, live_N, kl_coef: float,
    entropy_coef: float,
) -> TokenLosses:  # fmt: skip
    """importance_weight * surrogate + kl_coef * k3 - entropy_coef * entropy of every token.

    given: of `finite_given`.
    """
    log_ratio_N = log_ratio(logp_N, given.get("old_logp"))
    found = evaluate_surrogate(surrogate, logp_N, log_ratio_N, given["credit"], spans, live_N)
    value_N, slope_N = found.value, found.slope
    if "importance_weight" in given:
        value_N, slope_N = value_N * given["importance_weight"], slope_N * given["importance_weight"]
    metrics = batch_metrics(found, entropy_N, log_ratio_N, live_N)
    if "ref_logp" in given:
        k3_N, k3_slope_N = k3(logp_N, given["ref_logp"].to(logp_N.dtype), live_N & (logp_N != -torch.inf))
        value_N, slope_N = value_N + kl_coef * k3_N, slope_N + kl_coef * k3_slope_N
        metrics["kl"] = mean_where(k3_N, live_N)
    if entropy_coef:
        value_N = value_N - entropy_coef * entropy_N
    return TokenLosses(value_N, slope_N, found.ratio, found.clipped, metrics)


def composed_loss(found: TokenLosses, token_weight_N, logp_N, entropy_N, entropy_coef: float) -> Tensor:
    """sum token_weight * value, whose gradient goes through the log-probs and entropies that an op gave."""
    weight_N = token_weight_N.to(found.value.dtype)
    loss, slope_N = (weight_N * found.value).sum(), weight_N * found.slope
    if not entropy_coef:
        return with_gradient(loss, logp_N, slope_N, None, None)
    return with_gradient(loss, logp_N, slope_N, entropy_N, -entropy_coef * weight_N)


def as_policy_loss(loss: Tensor, found: TokenLosses, logp_N, entropy_N, shape) -> PolicyLoss:
    """What the losses give, per-token tensors in the shape of targets."""
    logp, entropy = logp_N.detach().view(shape), entropy_N.detach().view(shape)
    return PolicyLoss(loss, logp, entropy, found.ratio.view(shape), found.clipped.view(shape), found.metrics)


def check_loss_arguments(logits, targets, per_token: Mapping[str, Tensor | None], spans: Spans | None) -> None:
    """Per-token arguments have the shape of targets, floating dtype and the device of logits; spans cover the same
    N.
    """
    for name, value in (("logits (or hidden)", logits), ("targets", targets)):
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is {type(value).__name__}, want a tensor")
    for name, value in per_token.items():
        if value is not None or name in ("credit", "token_weight"):
            check_per_token(name, value, targets.shape, FLOAT_DTYPES, logits.device)
    if spans is not None and not isinstance(spans, Spans):
        raise ValueError(f"spans is {type(spans).__name__}, want Spans")
    if spans is not None and spans.num_tokens != targets.numel():
        raise ValueError(f"spans hold {spans.num_tokens} token positions, targets {targets.numel()}: want one N")


def live_positions(targets: Tensor, mask: Tensor | None, ignore_index: int, spans: Spans | None) -> Tensor:
    """[N] bool: positions that take part in the loss."""
    if not isinstance(ignore_index, int):
        raise ValueError(f"ignore_index is {ignore_index!r}, want an int")
    live_N = (targets != ignore_index).reshape(-1)
    if mask is not None:
        check_per_token("mask", mask, targets.shape, (torch.bool,), targets.device)
        live_N = live_N & mask.reshape(-1)
    return live_N if spans is None else live_N & spans.mask


@torch.library.custom_op("crest::finite_where", mutates_args=())
def finite_where(name: str, values: Tensor, live_N: Tensor, or_minus_inf: bool = False) -> Tensor:
    """`values` at live positions, 0 elsewhere, after checking that the live ones are finite (or -inf, if allowed)."""
    bad_N = live_N & ~torch.isfinite(values)
    if or_minus_inf:
        bad_N = bad_N & (values != -torch.inf)
    if checks_values(values):
        if bad_N.any():
            at = int(bad_N.nonzero()[0])
            raise ValueError(
                f"{name}[{at}] is {float(values[at])} (positions counted row by row), want finite values where unmasked"
            )
    else:
        torch._assert_async(~bad_N.any(), f"{name} must be finite where unmasked")
    return torch.where(live_N, values.detach(), 0)


@finite_where.register_fake
def _(name, values, live_N, or_minus_inf=False):
    return torch.empty_like(values)


def log_ratio(new_N: Tensor, old_N: Tensor | None) -> Tensor:
    """logp - old_logp: 0 where there is no old_logp, -20 where the policy excludes the target, NaN where it is NaN."""
    ratio_N = new_N - (new_N if old_N is None else old_N.to(new_N.dtype))
    return torch.where(new_N == -torch.inf, 0.0 if old_N is None else -MAX_LOG_RATIO, ratio_N)


def evaluate_surrogate(surrogate, new_N, log_ratio_N, credit_N, spans: Spans | None, live_N) -> SurrogateValue:
    """The surrogate at live tokens; a target that the policy excludes counts as log-prob -20 and has slope 0."""
    excluded_N = new_N == -torch.inf
    counted_N = torch.where(excluded_N, -MAX_LOG_RATIO, new_N)
    found = surrogate.evaluate(log_ratio_N, credit_N, spans, mask=live_N, logp=counted_N)
    return found._replace(slope=torch.where(excluded_N, 0, found.slope))


def check_coefficients(kl_coef, entropy_coef, ref_logp: Tensor | None, surrogate, spans: Spans | None) -> None:
    """Coefficients are finite numbers, a penalty has its reference, the surrogate is one and has its spans."""
    for name, value in (("kl_coef", kl_coef), ("entropy_coef", entropy_coef)):
        if not isinstance(value, int | float) or not -math.inf < value < math.inf:
            raise ValueError(f"{name} is {value!r}, want a finite number")
    if kl_coef and ref_logp is None:
        raise ValueError(f"kl_coef is {kl_coef}, but ref_logp is None: pass ref_logp, or kl_coef=0")
    check_surrogate(surrogate)
    check_level(surrogate, spans)


def k3(logp_N: Tensor, ref_logp_N: Tensor, live_N: Tensor) -> tuple[Tensor, Tensor]:
    """(exp(d) - d - 1, its slope by logp 1 - exp(d)) of d = clip(ref_logp - logp, -20, 20); slope 0 outside; 0 where
    not live.
    """
    d_N = torch.where(live_N, ref_logp_N - logp_N, 0)
    inside_N = d_N.abs() <= MAX_LOG_RATIO
    d_N = d_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return d_N.expm1() - d_N, torch.where(inside_N, -d_N.expm1(), 0)


def mean_where(values_N: Tensor, live_N: Tensor) -> Tensor:
    return torch.where(live_N, values_N, 0).sum() / live_N.sum().clamp(min=1)


def batch_metrics(found, entropy_N: Tensor, log_ratio_N: Tensor, live_N: Tensor) -> dict[str, Tensor]:
    """Means over the live tokens of this call, as tensors; nothing waits for the device."""
    moved_N = torch.where(live_N, log_ratio_N, 0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "entropy": mean_where(entropy_N, live_N),
        "ratio_mean": mean_where(found.ratio, live_N),
        "ratio_max": torch.cat([found.ratio, found.ratio.new_zeros(1)]).max(),
        "clip_ratio": mean_where(found.clipped.to(entropy_N.dtype), live_N),
        "approx_kl": mean_where(moved_N.expm1() - moved_N, live_N),
        "num_tokens": live_N.sum(),
    }


def with_gradient(loss: Tensor, logp_N, slope_logp_N, entropy_N, slope_entropy_N) -> Tensor:
    """`loss`, with the gradient slope_logp by logp and slope_entropy by entropy."""
    return _WithGradient.apply(loss, logp_N, slope_logp_N, entropy_N, slope_entropy_N)


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss, logp_N, slope_logp_N, entropy_N, slope_entropy_N):
        ctx.save_for_backward(slope_logp_N, slope_entropy_N)
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        slope_logp_N, slope_entropy_N = ctx.saved_tensors
        return None, grad * slope_logp_N, None, None if slope_entropy_N is None else grad * slope_entropy_N, None
