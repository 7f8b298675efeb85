"""What a provider of a policy loss from hidden states takes, gives, and says about itself.

Every provider takes the same `Inputs`, packed tokens with a mask, and gives a loss whose gradients by `hidden` and
`head_weight` are then asked for.

Shape letters: N packed tokens, V vocabulary, R policy tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from crest_bench.cases import Inputs
from crest_bench.environment import installed_version

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
PPO, CROSS_ENTROPY, PRODUCTS = "ppo", "cross-entropy", "products"


@dataclass(frozen=True, eq=False)
class Output:
    """loss: scalar. logp, entropy: [N] or [R], None where the provider gives none."""

    loss: Tensor
    logp: Tensor | None = None
    entropy: Tensor | None = None


@dataclass(frozen=True)
class Provider:
    """What one provider computes, as it says itself.

    load: imports what is needed (ImportError, AttributeError where it is missing) and gives the function to measure.
    package: the distribution it comes from. objective: PPO with a credit per token; CROSS_ENTROPY, the mean
    negative log-prob without ratio and credit; PRODUCTS, nothing but the matrix products. entropy: the value is given;
    entropy_gradient: and differentiable. full_logits: something of size [R, V] is kept. cuda_only: it has no CPU path.
    """

    name: str
    load: Callable[[], Callable[[Inputs], Output]]
    package: str
    objective: str = PPO
    entropy: bool = False
    entropy_gradient: bool = False
    full_logits: bool = False
    cuda_only: bool = False

    def missing(self, device: str) -> str | None:
        """Why the provider cannot be measured on this machine, or None."""
        if self.cuda_only and device != "cuda":
            return "needs a GPU"
        if not (found := installed_version(self.package)):
            return f"{self.package} is not installed"
        try:
            self.load()
        except (ImportError, AttributeError) as error:
            return f"{self.package} {found}: {error}"
        return None


def logp_and_entropy(log_p: Tensor, targets: Tensor, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    """(logp, entropy) of log_p [..., V], the way a trainer writes it down."""
    with torch.set_grad_enabled(entropy_gradient):
        entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, targets[..., None])[..., 0], entropy


def ppo_loss(logp_R: Tensor, credit_R: Tensor, old_logp_R: Tensor, weight_R: Tensor) -> Tensor:
    """sum_n weight_n max(-r_n credit_n, -clip(r_n, 1 - low, 1 + high) credit_n), r = exp(logp - old_logp)."""
    ratio_R = (logp_R - old_logp_R).exp()
    clipped_R = ratio_R.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    return (weight_R * torch.maximum(-ratio_R * credit_R, -clipped_R * credit_R)).sum()


def loss_of_rows(logp_R: Tensor, inputs: Inputs) -> Tensor:
    """`ppo_loss` of the policy rows."""
    at = inputs.mask
    return ppo_loss(logp_R, inputs.credit[at], inputs.old_logp[at], inputs.token_weight[at])
