"""What a provider's values and gradients are off by, against float64.

Shape letters: V vocabulary, H hidden size, R policy tokens, C rows of a chunk.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from crest_bench.cases import Inputs
from crest_bench.contract import CROSS_ENTROPY, Output, ppo_loss

CHUNK_ELEMENTS = 1 << 23  # of float64 logits


@dataclass(frozen=True, eq=False)
class Exact:
    """float64: logp, entropy [R], loss, its gradients by the policy's hidden states [R, H] and the weight [V, H]."""

    logp: Tensor
    entropy: Tensor
    loss: Tensor
    hidden_grad: Tensor
    weight_grad: Tensor


@torch.no_grad()
def exact(inputs: Inputs, objective: str) -> Exact:
    """The objective of a provider in float64, a few rows at a time: once for log-probs, once for gradients."""
    at = inputs.mask
    hidden_RH, weight_VH = inputs.hidden[at].double(), inputs.head_weight.double()
    targets_R, old_R, token_weight_R = (
        inputs.targets[at],
        inputs.old_logp[at].double(),
        inputs.token_weight[at].double(),
    )
    credit_R = inputs.credit[at].double()
    chunks = range(0, targets_R.numel(), rows := max(1, CHUNK_ELEMENTS // weight_VH.shape[0]))

    logp_R, entropy_R = torch.empty_like(old_R), torch.empty_like(old_R)
    for start in chunks:
        part = slice(start, start + rows)
        log_p_CV = (hidden_RH[part] @ weight_VH.t()).log_softmax(-1)
        logp_R[part] = log_p_CV.gather(-1, targets_R[part, None])[:, 0]
        entropy_R[part] = -(log_p_CV.exp() * log_p_CV).sum(-1)

    with torch.enable_grad():
        logp = logp_R.clone().requires_grad_()
        loss = -logp.mean() if objective == CROSS_ENTROPY else ppo_loss(logp, credit_R, old_R, token_weight_R)
        (slope_R,) = torch.autograd.grad(loss, logp)

    hidden_grad_RH, weight_grad_VH = torch.empty_like(hidden_RH), torch.zeros_like(weight_VH)
    for start in chunks:
        part = slice(start, start + rows)
        grad_CV = -(hidden_RH[part] @ weight_VH.t()).softmax(-1)
        grad_CV.scatter_add_(-1, targets_R[part, None], torch.ones_like(slope_R[part, None]))
        grad_CV *= slope_R[part, None]
        hidden_grad_RH[part] = grad_CV @ weight_VH
        weight_grad_VH += grad_CV.t() @ hidden_RH[part]
    return Exact(logp_R, entropy_R, loss.detach(), hidden_grad_RH, weight_grad_VH)


def errors(output: Output, gradients: tuple[Tensor, Tensor], inputs: Inputs, wanted: Exact) -> dict[str, float]:
    """Largest absolute error of log-prob and entropy where given; Frobenius error of both gradients over their norm."""
    at = inputs.mask
    found = {}
    for name in ("logp", "entropy"):
        value = getattr(output, name)
        if value is not None:
            rows = value.detach() if value.numel() == wanted.logp.numel() else value.detach()[at]
            found[f"{name}_error"] = float((rows.double() - getattr(wanted, name)).abs().max())
    hidden_grad, weight_grad = gradients
    full = torch.zeros_like(hidden_grad, dtype=torch.float64)
    full[at] = wanted.hidden_grad
    found["hidden_grad_error"] = float((hidden_grad.double() - full).norm() / full.norm())
    found["weight_grad_error"] = float((weight_grad.double() - wanted.weight_grad).norm() / wanted.weight_grad.norm())
    return found
