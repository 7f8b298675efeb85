"""A vocabulary head whose rows are split over the ranks of a process group.

Shape letters: N tokens, V vocabulary, W ranks.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .rows import ELSEWHERE, UNWANTED

NO_TARGET = 1.0  # no log-prob: stands for the target's on the ranks that do not hold it
LARGEST = 1e30


@dataclass(frozen=True)
class Shard:
    """This rank's columns [start, start + size) of the `total` columns of the whole vocabulary."""

    name: str
    start: int
    size: int
    total: int

    def local(self, target_N: Tensor, vocab_size: int) -> tuple[Tensor, int]:
        """Targets as columns of this shard, ELSEWHERE for those of others; the number of its columns < vocab_size."""
        columns = min(self.size, vocab_size - self.start)
        if columns < 1:
            raise ValueError(
                f"vocab_size is {vocab_size}, which leaves no column to the rank that starts at {self.start}"
            )
        here_N = (target_N >= self.start) & (target_N < self.start + columns)
        elsewhere_N = torch.where(target_N == UNWANTED, UNWANTED, ELSEWHERE)
        return torch.where(here_N, target_N - self.start, elsewhere_N), columns


def shard_of(process_group, size: int, device: torch.device) -> Shard | None:
    """Where this rank's `size` columns lie among those of all ranks; None for a group of one."""
    if not isinstance(process_group, dist.ProcessGroup):
        raise ValueError(f"process_group is {type(process_group).__name__}, want a torch.distributed.ProcessGroup")
    if process_group.size() == 1:
        return None
    sizes_W = gather(torch.tensor([size], device=device), process_group)[:, 0].tolist()
    rank = process_group.rank()
    return Shard(process_group.group_name, sum(sizes_W[:rank]), size, sum(sizes_W))


def gather(tensor: Tensor, process_group) -> Tensor:
    """[W, ...]: the tensor of every rank."""
    parts = [torch.empty_like(tensor) for _ in range(process_group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=process_group)
    return torch.stack(parts)


def combine_shards(target_N, logp_N, entropy_N, lse_N, sum_sq_N, normaliser, backend: str, name: str):
    """Statistics over the whole vocabulary from each shard's own; the same bits on every rank.

    With q = exp(lse_w - lse) the probability of shard w: lse = log sum_w exp lse_w, entropy = sum_w q (entropy_w - log
    q), sum_sq = sum_w q^2 sum_sq_w, logp = logp_w + log q of the shard that holds the target. The normaliser (max, log
    of the sum; base 2 for Triton) keeps the shard's max.
    """
    logp_N = torch.where(target_N == ELSEWHERE, NO_TARGET, logp_N)
    group = dist.distributed_c10d._resolve_process_group(name)
    logp_WN, entropy_WN, lse_WN, sum_sq_WN = gather(torch.stack([logp_N, entropy_N, lse_N, sum_sq_N]), group).unbind(1)
    whole_N = lse_WN.logsumexp(0)
    empty_WN = lse_WN == -math.inf
    log_q_WN = torch.where(empty_WN, 0, lse_WN - whole_N)
    q_WN = torch.where(empty_WN, 0, log_q_WN.exp())
    found = (
        torch.where(logp_WN == NO_TARGET, 0, logp_WN + log_q_WN).sum(0).clamp(max=0),
        (q_WN * (entropy_WN - log_q_WN)).sum(0).clamp(min=0),
        whole_N,
        (q_WN * q_WN * sum_sq_WN).sum(0),
    )
    unit = math.log2(math.e) if backend == "triton" else 1.0
    rest_N = torch.where(lse_N == -math.inf, LARGEST, (whole_N - lse_N) * unit)
    normaliser = torch.stack([normaliser[0], normaliser[1] + rest_N])
    wanted_N = target_N != UNWANTED
    return *(torch.where(wanted_N, values_N, 0) for values_N in found), normaliser


def reduce_hidden(grad_NH: Tensor, name: str) -> Tensor:
    """The sum over the ranks, added up in float32."""
    wide_NH = grad_NH.to(torch.promote_types(grad_NH.dtype, torch.float32))
    dist.all_reduce(wide_NH, group=dist.distributed_c10d._resolve_process_group(name))
    return wide_NH.to(grad_NH.dtype)
