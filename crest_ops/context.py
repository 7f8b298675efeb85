"""The tokens of a batch split over the ranks of a process group (context parallel), brought together where an op needs
all of them. What is gathered is a number or two per token: no hidden state, no logit.

Shape letters: n tokens of this rank, N of all ranks, W ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from .shards import exchange, gather

DESCRIBED = ("the number of tokens", "num_segments", "the bytes of a value", "whether values require grad")


def token_counts(process_group, values_n: Tensor, num_segments: int | None) -> list[int]:
    """Tokens of every rank. Called where `agreed`; raises ValueError where ranks differ in what all must have alike."""
    needs_grad = torch.is_grad_enabled() and values_n.requires_grad
    rows = exchange(process_group, len(values_n), num_segments or 0, values_n.element_size(), int(needs_grad))
    for what, *found_W in list(zip(DESCRIBED, *rows, strict=True))[1:]:
        for rank, found in enumerate(found_W):
            if found != found_W[0]:
                raise ValueError(f"{what} is {found_W[0]} on rank 0 and {found} on rank {rank}, want one for all ranks")
    return [counts[0] for counts in rows]


def gather_tokens(values_n: Tensor, process_group, counts_W: list[int]) -> Tensor:
    """[N]: the values of all ranks in rank order. In backward the gradients of all ranks are added up."""
    return _Gathered.apply(values_n, process_group, counts_W)


def own_tokens(process_group, counts_W: list[int]) -> slice:
    """Where this rank's tokens lie among those of all ranks."""
    start = sum(counts_W[: process_group.rank()])
    return slice(start, start + counts_W[process_group.rank()])


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values_n, process_group, counts_W):
        ctx.process_group, ctx.here = process_group, own_tokens(process_group, counts_W)
        padded = values_n.new_zeros(max(counts_W))
        padded[: len(values_n)] = values_n
        return torch.cat([part[:n] for part, n in zip(gather(padded, process_group), counts_W, strict=True)])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_N):
        grad_N = grad_N.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad_N, group=ctx.process_group)
        return grad_N[ctx.here], None, None
