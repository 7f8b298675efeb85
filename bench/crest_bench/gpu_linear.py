"""Checks of the hidden-state ops on a device, against float64 from the same hidden states and weights.

Shape letters: N tokens, V vocabulary, H hidden size.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from crest_bench import gpu_reference as exact
from crest_bench.gpu import Check, Found, Setting
from crest_bench.gpu_checks import JSD_WEIGHT, KINDS, randint, randn, worst

MASKED_EVERY = 3
# (dtype of the operands, logits_dtype or None): tolerance of a log-prob, relative tolerance of a gradient's norm.
PRECISIONS = {
    (torch.float32, None): (3e-5, 3e-5),
    (torch.bfloat16, None): (0.1, 2e-2),
    (torch.bfloat16, torch.float32): (3e-4, 5e-3),
}


@dataclass(frozen=True, eq=False)
class Case:
    """Operands that want gradients, and the float64 leaves beside them."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    mask: Tensor
    exact_hidden: Tensor
    exact_weight: Tensor

    def exact_logits(self) -> Tensor:
        return self.exact_hidden @ self.exact_weight.t()

    def gradients(self, loss: Tensor, exact_loss: Tensor, tolerance: float) -> list[tuple[Tensor, Tensor, float]]:
        """Relative norms of the errors of both gradients, to be compared with 0."""
        found = torch.autograd.grad(loss, (self.hidden, self.weight))
        wanted = torch.autograd.grad(exact_loss, (self.exact_hidden, self.exact_weight))
        return [
            ((a.double() - b).norm() / b.norm(), torch.zeros((), device=b.device, dtype=b.dtype), tolerance)
            for a, b in zip(found, wanted, strict=True)
        ]


def make_case(setting: Setting, dtype: torch.dtype, seed: int = 0) -> Case:
    N, H, V = (12, 16, 203) if setting.tiny else (96, 256, 50257)
    hidden = randn(setting, N, H, seed=seed, scale=1.0, dtype=dtype).requires_grad_()
    weight = randn(setting, V, H, seed=seed + 1, scale=2 / math.sqrt(H), dtype=dtype).requires_grad_()
    mask = torch.arange(N, device=setting.device) % MASKED_EVERY != 0
    leaves = (each.detach().double().requires_grad_() for each in (hidden, weight))
    return Case(hidden, weight, randint(setting, N, high=V), mask, *leaves)


def linear(setting: Setting) -> Iterator[Check]:
    for (dtype, logits_dtype), tolerances in PRECISIONS.items():
        name = str(dtype).removeprefix("torch.") + (", float32 logits" if logits_dtype else "")
        arguments = {"backend": "triton"} | ({} if logits_dtype is None else {"logits_dtype": logits_dtype})
        common = (setting, dtype, arguments, *tolerances)
        yield Check(f"linear_token_stats {name}", partial(_stats, *common, None))
        yield Check(f"linear_token_stats softcap {name}", partial(_stats, *common, 5.0))
        for surrogate in ("PPOClip", "CISPO", "SAPO", "GSPO"):
            yield Check(f"linear_policy_loss {surrogate} {name}", partial(_policy, *common, surrogate))
        for kind in KINDS:
            yield Check(f"linear_token_divergence {kind} {name}", partial(_divergence, *common, kind))


def _stats(setting, dtype, arguments, logp_tolerance, gradient_tolerance, softcap) -> Found:
    from crest_ops import linear_token_stats

    case = make_case(setting, dtype)
    temperature = 0.7 + randn(setting, len(case.mask), seed=7, scale=0.3).abs()
    transform = {"temperature": temperature, "softcap": softcap}
    found = linear_token_stats(case.hidden, case.weight, case.targets, mask=case.mask, **transform, **arguments)
    log_p = exact.log_probs(case.exact_logits(), **transform)
    logp, entropy = (
        torch.where(case.mask, each, 0) for each in (exact.at_targets(log_p, case.targets), exact.entropy(log_p))
    )
    up_logp, up_entropy = (randn(setting, len(case.mask), seed=seed, scale=1.0) for seed in (2, 3))
    return worst(
        (found.logp, logp.detach(), logp_tolerance),
        (found.entropy, entropy.detach(), logp_tolerance),
        *case.gradients(
            (up_logp * found.logp + up_entropy * found.entropy).sum(), (up_logp * logp + up_entropy * entropy).sum(),
            gradient_tolerance,
        ),
    )  # fmt: skip


def _policy(setting, dtype, arguments, logp_tolerance, gradient_tolerance, name) -> Found:
    import crest_ops
    from crest_ops import Spans, linear_policy_loss

    case = make_case(setting, dtype)
    N, device = len(case.mask), setting.device
    surrogate = {"PPOClip": crest_ops.PPOClip(0.2, 0.28), "CISPO": crest_ops.CISPO(0.28), "SAPO": crest_ops.SAPO(),
                 "GSPO": crest_ops.GSPO(0.2, 0.28)}[name]  # fmt: skip
    spans = Spans.from_mask(case.mask.view(2, N // 2), group=torch.zeros(2, dtype=torch.int64, device=device))
    log_p = exact.log_probs(case.exact_logits())
    logp = exact.at_targets(log_p, case.targets)
    old, ref = (logp.detach().float() + randn(setting, N, seed=seed, scale=0.05) for seed in (4, 5))
    # Far from the bounds of the clip, where rounding decides: inside for even tokens, outside for odd ones.
    old = old - torch.arange(N, device=device) % 2 * torch.log(torch.tensor(2.0, device=device)) * (name != "GSPO")
    credit, weight = randn(setting, N, seed=6, scale=1.0), randn(setting, N, seed=8, scale=1.0).abs()
    log_ratio = logp - old.double()
    if name == "GSPO":  # the mean of the trajectory's log-ratios, with the slope of each token's own
        trajectory = torch.arange(N, device=device) // (N // 2)
        mean = torch.stack([log_ratio[(trajectory == i) & case.mask].mean() for i in (0, 1)])[trajectory].detach()
        log_ratio = mean + logp - logp.detach()
    counted = "PPOClip" if name == "GSPO" else name
    value = exact.surrogate_value(counted, logp, logp.detach() - log_ratio.detach(), credit.double())
    value = value + 0.1 * exact.k3(logp, ref.double()) - 0.01 * exact.entropy(log_p)
    loss = torch.where(case.mask, weight * value, 0).sum()
    found = linear_policy_loss(
        case.hidden, case.weight, case.targets, credit, token_weight=weight, old_logp=old, ref_logp=ref, kl_coef=0.1,
        entropy_coef=0.01, surrogate=surrogate, spans=spans, mask=case.mask, **arguments,
    )  # fmt: skip
    size = (weight * credit.abs()).sum().double()
    return worst(
        (found.logp, torch.where(case.mask, logp, 0).detach(), logp_tolerance),
        (found.loss, loss.detach(), logp_tolerance * 2 * size),
        *case.gradients(found.loss, loss, 2 * gradient_tolerance),
    )


def _divergence(setting, dtype, arguments, logp_tolerance, gradient_tolerance, kind) -> Found:
    from crest_ops import linear_token_divergence

    case, teacher = make_case(setting, dtype), make_case(setting, dtype, seed=20)
    found = linear_token_divergence(
        case.hidden, case.weight, teacher.hidden.detach(), teacher.weight.detach(), case.targets, kind=kind,
        jsd_weight=JSD_WEIGHT, mask=case.mask, **arguments,
    )  # fmt: skip
    log_p, log_q = exact.log_probs(case.exact_logits()), exact.log_probs(teacher.exact_logits().detach())
    value = torch.where(case.mask, exact.divergence(log_p, log_q, kind, JSD_WEIGHT), 0)
    upstream = randn(setting, len(case.mask), seed=4, scale=1.0)
    return worst(
        (found.divergence, value.detach(), 2 * logp_tolerance),
        *case.gradients((upstream * found.divergence).sum(), (upstream * value).sum(), 2 * gradient_tolerance),
    )
