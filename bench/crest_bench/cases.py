"""What is measured: heads of real models, shares of policy tokens as in agents' traces, and seeded inputs.

Shape letters: N packed tokens, V vocabulary, H hidden size, R policy tokens.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

ACTION_TOKENS = 64  # mean length of an action
CPU_PRODUCTS = 4e11  # floating-point operations of the three products that a default CPU case may have
CUDA_TOKENS = 16384
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BEYOND_CLIP = 0.04  # of the tokens have a ratio beyond the clip, for about half of which it bites
SHARES = (3.0, 10.0, 30.0, 100.0)  # percent of the tokens that the policy wrote


@dataclass(frozen=True)
class Head:
    """A language-model head. None of HEADS has a bias, a soft cap or padded columns."""

    name: str
    hidden: int
    vocabulary: int

    def default_tokens(self, device: str) -> int:
        """CUDA_TOKENS on a GPU; on a CPU the power of two <= 2048 whose three products stay within CPU_PRODUCTS."""
        if device == "cuda":
            return CUDA_TOKENS
        affordable = CPU_PRODUCTS / (6 * self.hidden * self.vocabulary)
        return min(2048, 1 << max(5, math.floor(math.log2(affordable))))


HEADS = {
    head.name: head
    for head in (
        Head("smollm2-135m", 576, 49152),
        Head("qwen3-0.6b", 1024, 151936),
        Head("qwen3-4b", 2560, 151936),
        Head("qwen3-8b", 4096, 151936),
        Head("llama-3.1-8b", 4096, 128256),
        Head("gemma-3-1b", 1152, 262144),
    )
}


@dataclass(frozen=True)
class Case:
    """`policy_tokens` of `tokens` were written by the policy; dtype: a name of DTYPES, of hidden states and weight."""

    head: Head
    tokens: int
    policy_tokens: int
    dtype: str

    @property
    def share(self) -> float:
        return 100 * self.policy_tokens / self.tokens


def policy_tokens(tokens: int, share: float) -> int:
    """The whole number nearest to `share` percent of the tokens, at least 1."""
    return max(1, round(tokens * share / 100))


@dataclass(frozen=True, eq=False)
class Inputs:
    """hidden [N, H], head_weight [V, H] (both want gradients); targets, mask, credit, token_weight, old_logp: [N].

    token_weight is 1 / R at the R policy tokens. Credits are standard normal, none is 0.
    """

    hidden: Tensor
    head_weight: Tensor
    targets: Tensor
    mask: Tensor
    credit: Tensor
    token_weight: Tensor
    old_logp: Tensor

    def policy_rows(self, count: int) -> "Inputs":
        """The first `count` policy tokens alone, with the same weight."""
        index = self.mask.nonzero()[:count, 0]
        rows = {
            name: getattr(self, name).detach()[index] for name in ("targets", "mask", "credit", "old_logp", "hidden")
        }
        rows["hidden"].requires_grad_()
        return replace(self, **rows, token_weight=torch.full_like(rows["credit"], 1 / index.numel()))


def policy_mask(tokens: int, policy: int, generator: torch.Generator) -> Tensor:
    """[N] bool with exactly `policy` True, in runs of about ACTION_TOKENS between the tools' outputs."""
    actions = max(1, min(policy // ACTION_TOKENS, tokens - policy))
    gaps = _random_parts(tokens - policy, actions, generator)
    runs = _random_parts(policy, actions, generator)
    flags = torch.tensor([False, True]).repeat(actions)
    return flags.repeat_interleave(torch.stack([gaps, runs], 1).flatten())


def _random_parts(total: int, parts: int, generator: torch.Generator) -> Tensor:
    """`parts` whole numbers that sum to `total`, each at least 1 where the total allows it."""
    cuts = torch.randperm(max(total - 1, 0), generator=generator)[: parts - 1].sort().values + 1
    ends = torch.cat([torch.zeros(1, dtype=cuts.dtype), cuts, torch.tensor([total], dtype=cuts.dtype)])
    return ends.diff()


def make_inputs(case: Case, device: str = "cpu", seed: int = 0) -> Inputs:
    """Seeded inputs: logits of unit scale, ratios to the old policy within 10% of 1 but for a few beyond the clip."""
    generator = torch.Generator().manual_seed(seed)
    H, V, N = case.head.hidden, case.head.vocabulary, case.tokens
    dtype = DTYPES[case.dtype]
    hidden = torch.randn(N, H, generator=generator).to(dtype).to(device)
    head_weight = torch.empty(V, H, dtype=dtype)
    for part in head_weight.split(8192):
        part.copy_(torch.randn(part.shape, generator=generator) / math.sqrt(H))
    mask = policy_mask(N, case.policy_tokens, generator)
    targets = torch.randint(0, V, (N,), generator=generator).to(device)
    credit = torch.randn(N, generator=generator).to(device)
    log_ratio = torch.randn(N, generator=generator).clamp(-2, 2) * 0.05
    far = torch.rand(N, generator=generator) < BEYOND_CLIP
    log_ratio = torch.where(far, 0.4 * log_ratio.sign(), log_ratio)  # none near the clip, where rounding would decide
    head_weight, mask = head_weight.to(device), mask.to(device)
    old_logp = torch.zeros(N, device=device)
    old_logp[mask] = _logp(hidden[mask], head_weight, targets[mask]) - log_ratio.to(device)[mask]
    return Inputs(
        hidden.requires_grad_(), head_weight.requires_grad_(), targets, mask, credit,
        mask.float() / case.policy_tokens, old_logp,
    )  # fmt: skip


@torch.no_grad()
def _logp(hidden: Tensor, head_weight: Tensor, targets: Tensor) -> Tensor:
    """[R] float32 log-prob of the targets, a few rows at a time."""
    logp_R = torch.empty(targets.shape, device=hidden.device)
    for start in range(0, targets.numel(), 64):
        part = slice(start, start + 64)
        log_p = (hidden[part] @ head_weight.t()).float().log_softmax(-1)
        logp_R[part] = log_p.gather(-1, targets[part, None])[:, 0]
    return logp_R
