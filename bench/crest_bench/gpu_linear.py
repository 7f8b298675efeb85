"""Checks of the hidden-state ops on a device, against float64 from the same hidden states and weights.

Logits come in several chunks, the last one smaller, so that the weight's gradient adds up over them.

Shape letters: N tokens, V vocabulary, H hidden size.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import crest_ops
from crest_bench import gpu_reference as exact
from crest_bench.gpu import Check, Found, Setting
from crest_bench.gpu_checks import JSD_WEIGHT, randint, randn, worst
from crest_ops.chunks import default_logits_dtype, row_bytes

MASKED_EVERY = 3
CHUNKS_OF = 4  # the rows of a chunk are this part of all rows, of which some are masked


@dataclass(frozen=True)
class Precision:
    """dtype: of the matrix products, and of hidden states and weight but under autocast, where these are float32.

    logp: tolerance of a log-prob; gradient: of the error of a gradient, norm over norm; all_checks: or only a few.
    """

    name: str
    dtype: torch.dtype
    logp: float
    gradient: float
    logits_dtype: torch.dtype | None = None
    autocast: bool = False
    all_checks: bool = False


PRECISIONS = (
    Precision("float32", torch.float32, 3e-5, 3e-5),
    Precision("bfloat16", torch.bfloat16, 0.1, 2e-2, all_checks=True),
    Precision("float16", torch.float16, 1.5e-2, 5e-3),
    Precision("bfloat16, float32 logits", torch.bfloat16, 3e-4, 5e-3, logits_dtype=torch.float32),
    Precision("float32 under bfloat16 autocast", torch.bfloat16, 0.1, 2e-2, autocast=True),
)
SURROGATES = {
    "PPOClip": crest_ops.PPOClip(0.2, 0.28),
    "CISPO": crest_ops.CISPO(0.28),
    "SAPO": crest_ops.SAPO(),
    "GSPO": crest_ops.GSPO(0.2, 0.28),
}


@dataclass(frozen=True, eq=False)
class Case:
    """Operands that want gradients, and the float64 leaves beside them."""

    setting: Setting
    precision: Precision
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    mask: Tensor
    exact_hidden: Tensor
    exact_weight: Tensor

    def exact_logits(self) -> Tensor:
        return self.exact_hidden @ self.exact_weight.t()

    def call(self, op: Callable, *arguments, heads: int = 1, chunked: bool = True, **options):
        """op of the case's operands, in chunks of a few rows or in one; heads: whose logits share the memory."""
        dtype = self.precision.logits_dtype or default_logits_dtype(self.precision.dtype)
        if chunked:
            rows = len(self.hidden) // CHUNKS_OF
            options["max_chunk_bytes"] = heads * rows * row_bytes(len(self.weight), dtype)
        with torch.autocast(self.setting.device, torch.bfloat16, enabled=self.precision.autocast):
            return op(
                self.hidden, self.weight, *arguments, mask=self.mask, backend="triton",
                logits_dtype=self.precision.logits_dtype, **options,
            )  # fmt: skip

    def gradients(self, loss: Tensor, exact_loss: Tensor, tolerance: float) -> list[tuple[Tensor, Tensor, float]]:
        """Relative norms of the errors of both gradients, to be compared with 0."""
        found = torch.autograd.grad(loss, (self.hidden, self.weight))
        wanted = torch.autograd.grad(exact_loss, (self.exact_hidden, self.exact_weight))
        return [
            ((a.double() - b).norm() / b.norm(), torch.zeros((), device=b.device, dtype=b.dtype), tolerance)
            for a, b in zip(found, wanted, strict=True)
        ]


def make_case(setting: Setting, precision: Precision, seed: int = 0) -> Case:
    N, H, V = (12, 16, 203) if setting.tiny else (96, 256, 50257)
    hidden = randn(setting, N, H, seed=seed, scale=1.0, dtype=precision.dtype)
    weight = randn(setting, V, H, seed=seed + 1, scale=2 / math.sqrt(H), dtype=precision.dtype)
    if precision.autocast:  # which rounds nothing more
        hidden, weight = hidden.float(), weight.float()
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    mask = torch.arange(N, device=setting.device) % MASKED_EVERY != 0
    leaves = (each.detach().double().requires_grad_() for each in (hidden, weight))
    return Case(setting, precision, hidden, weight, randint(setting, N, high=V), mask, *leaves)


def linear(setting: Setting) -> Iterator[Check]:
    for precision in PRECISIONS:
        name, common = precision.name, (setting, precision)
        yield Check(f"linear_token_stats {name}", partial(_stats, *common, None))
        yield Check(f"linear_policy_loss PPOClip {name}", partial(_policy, *common, "PPOClip"))
        yield Check(f"linear_policy_loss PPOClip, few active, {name}", partial(_policy, *common, "PPOClip", few=True))
        yield Check(f"linear_token_divergence reverse_kl {name}", partial(_divergence, *common, "reverse_kl"))
        if precision.all_checks:
            yield Check(f"linear_token_stats softcap {name}", partial(_stats, *common, 5.0))
            yield Check(
                f"linear_policy_loss PPOClip, one chunk, {name}", partial(_policy, *common, "PPOClip", chunked=False)
            )
            for surrogate in ("CISPO", "SAPO", "GSPO"):
                yield Check(f"linear_policy_loss {surrogate} {name}", partial(_policy, *common, surrogate))
            for kind in ("forward_kl", "jsd"):
                yield Check(f"linear_token_divergence {kind} {name}", partial(_divergence, *common, kind))


def _stats(setting: Setting, precision: Precision, softcap: float | None) -> Found:
    case = make_case(setting, precision)
    temperature = 0.7 + randn(setting, len(case.mask), seed=7, scale=0.3).abs()
    transform = {"temperature": temperature, "softcap": softcap}
    found = case.call(crest_ops.linear_token_stats, case.targets, **transform)
    log_p = exact.log_probs(case.exact_logits(), **transform)
    logp, entropy = (
        torch.where(case.mask, each, 0) for each in (exact.at_targets(log_p, case.targets), exact.entropy(log_p))
    )
    up_logp, up_entropy = (randn(setting, len(case.mask), seed=seed, scale=1.0) for seed in (2, 3))
    return worst(
        (found.logp, logp.detach(), precision.logp),
        (found.entropy, entropy.detach(), precision.logp),
        *case.gradients(
            (up_logp * found.logp + up_entropy * found.entropy).sum(), (up_logp * logp + up_entropy * entropy).sum(),
            precision.gradient,
        ),
    )  # fmt: skip


def _policy(setting: Setting, precision: Precision, name: str, few: bool = False, chunked: bool = True) -> Found:
    """few: without KL and entropy terms and with half of the credits 0; those rows and clipped ones have no gradient,
    and the others of a chunk are moved to its front.
    """
    case = make_case(setting, precision)
    N, device = len(case.mask), setting.device
    spans = crest_ops.Spans.from_mask(case.mask.view(2, N // 2), group=torch.zeros(2, dtype=torch.int64, device=device))
    log_p = exact.log_probs(case.exact_logits())
    logp = exact.at_targets(log_p, case.targets)
    old, ref = (logp.detach().float() + randn(setting, N, seed=seed, scale=0.05) for seed in (4, 5))
    # Far from the bounds of the clip, where rounding decides: inside for even tokens, outside for odd ones.
    old = old - torch.arange(N, device=device) % 2 * torch.log(torch.tensor(2.0, device=device)) * (name != "GSPO")
    credit, weight = randn(setting, N, seed=6, scale=1.0), randn(setting, N, seed=8, scale=1.0).abs()
    kl_coef, entropy_coef = (0.0, 0.0) if few else (0.1, 0.01)
    if few:
        credit = torch.where(torch.arange(N, device=device) % 4 < 2, 0, credit)
    log_ratio = logp - old.double()
    if name == "GSPO":  # the mean of the trajectory's log-ratios, with the slope of each token's own
        trajectory = torch.arange(N, device=device) // (N // 2)
        mean = torch.stack([log_ratio[(trajectory == i) & case.mask].mean() for i in (0, 1)])[trajectory].detach()
        log_ratio = mean + logp - logp.detach()
    counted = "PPOClip" if name == "GSPO" else name
    value = exact.surrogate_value(counted, logp, logp.detach() - log_ratio.detach(), credit.double())
    value = value + kl_coef * exact.k3(logp, ref.double()) - entropy_coef * exact.entropy(log_p)
    loss = torch.where(case.mask, weight * value, 0).sum()
    found = case.call(
        crest_ops.linear_policy_loss, case.targets, credit, token_weight=weight, old_logp=old, ref_logp=ref,
        kl_coef=kl_coef, entropy_coef=entropy_coef, surrogate=SURROGATES[name], spans=spans, chunked=chunked,
    )  # fmt: skip
    size = (weight * credit.abs()).sum().double()
    return worst(
        (found.logp, torch.where(case.mask, logp, 0).detach(), precision.logp),
        (found.loss, loss.detach(), precision.logp * 2 * size),
        *case.gradients(found.loss, loss, 2 * precision.gradient),
    )


def _divergence(setting: Setting, precision: Precision, kind: str) -> Found:
    case, teacher = make_case(setting, precision), make_case(setting, precision, seed=20)
    found = case.call(
        crest_ops.linear_token_divergence, teacher.hidden.detach(), teacher.weight.detach(), case.targets, kind=kind,
        jsd_weight=JSD_WEIGHT, heads=2,
    )  # fmt: skip
    log_p, log_q = exact.log_probs(case.exact_logits()), exact.log_probs(teacher.exact_logits().detach())
    value = torch.where(case.mask, exact.divergence(log_p, log_q, kind, JSD_WEIGHT), 0)
    upstream = randn(setting, len(case.mask), seed=4, scale=1.0)
    return worst(
        (found.divergence, value.detach(), 2 * precision.logp),
        *case.gradients((upstream * found.divergence).sum(), (upstream * value).sum(), 2 * precision.gradient),
    )
