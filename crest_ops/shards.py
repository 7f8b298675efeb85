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
FAR = 1e10  # stands for the log of a sum where every probability is to be 0
REFUSED = 0  # the number of columns of a rank that refuses its arguments


@dataclass(frozen=True)
class Shard:
    """This rank's columns [start, start + size) of the `total` columns of the whole vocabulary.

    last: where those of the last rank start.
    """

    name: str
    start: int
    size: int
    last: int
    total: int

    def local(self, target_N: Tensor, vocab_size: int) -> tuple[Tensor, int]:
        """Targets as columns of this shard, ELSEWHERE for those of others; the number of its columns < vocab_size."""
        if vocab_size <= self.last:
            raise ValueError(
                f"vocab_size is {vocab_size}, want > {self.last}, where the columns of the last rank start"
            )
        columns = min(self.size, vocab_size - self.start)
        here_N = (target_N >= self.start) & (target_N < self.start + columns)
        elsewhere_N = torch.where(target_N == UNWANTED, UNWANTED, ELSEWHERE)
        return torch.where(here_N, target_N - self.start, elsewhere_N), columns


def check_group(process_group) -> None:
    if not isinstance(process_group, dist.ProcessGroup):
        raise ValueError(f"process_group is {type(process_group).__name__}, want a torch.distributed.ProcessGroup")


def shard_of(process_group, size: int, device: torch.device) -> Shard | None:
    """Where this rank's `size` columns lie among those of all ranks; None for a group of one.

    Raises ValueError where another rank has refused its arguments.
    """
    if process_group.size() == 1:
        return None
    sizes_W = gather(torch.tensor([size], device=device), process_group)[:, 0].tolist()
    if REFUSED in sizes_W:
        raise ValueError(f"rank {sizes_W.index(REFUSED)} of process_group refuses its arguments: its error says why")
    rank = process_group.rank()
    return Shard(process_group.group_name, sum(sizes_W[:rank]), size, sum(sizes_W[:-1]), sum(sizes_W))


def refuse(process_group, hidden) -> None:
    """Tell the ranks that wait in `shard_of`, so that they raise too."""
    if process_group is not None and process_group.size() > 1 and isinstance(hidden, Tensor):
        gather(torch.tensor([REFUSED], device=hidden.device), process_group)


def gather(tensor: Tensor, process_group) -> Tensor:
    """[W, ...]: the tensor of every rank."""
    parts = [torch.empty_like(tensor) for _ in range(process_group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=process_group)
    return torch.stack(parts)


def combine_shards(
    target_N, logp_N, entropy_N, lse_N, sum_sq_N, normaliser, temperature, num_columns: int, logit_scale: float,
    softcap: float, backend: str, name: str,
):  # fmt: skip
    """Statistics and normaliser over the whole vocabulary from each shard's own; the same bits on every rank.

    With top the largest max and l_w = max_w - top + log_sum_w, the probability of shard w is q_w = exp(l_w - l), l =
    log sum_w exp l_w: lse = top + l, entropy = sum_w q_w (entropy_w - log q_w), sum_sq = sum_w q_w^2 sum_sq_w, logp =
    logp_w + log q_w of the shard that holds the target. Where logp is -inf no shard has a gradient: l is FAR.
    """
    scale = (1.0 if softcap else logit_scale) / temperature
    max_unit, sum_unit = (math.log(2), math.log(2)) if backend == "triton" else (scale, 1.0)  # to nats
    max_N, log_sum_N = normaliser
    given = (
        torch.where(target_N == ELSEWHERE, NO_TARGET, logp_N), entropy_N, sum_sq_N, max_N,
        torch.where(lse_N == -math.inf, -math.inf, log_sum_N), torch.full_like(logp_N, num_columns),
    )  # fmt: skip
    group = dist.distributed_c10d._resolve_process_group(name)
    logp_WN, entropy_WN, sum_sq_WN, max_WN, log_sum_WN, columns_WN = gather(torch.stack(given), group).unbind(1)
    top_N = max_WN.amax(0)
    log_WN = (max_WN - top_N) * max_unit + log_sum_WN * sum_unit
    log_N = log_WN.logsumexp(0)
    empty_WN = log_WN == -math.inf
    log_q_WN = torch.where(empty_WN, 0, log_WN - log_N)
    q_WN = torch.where(empty_WN, 0, log_q_WN.exp())
    logp_N = torch.where(logp_WN == NO_TARGET, 0, logp_WN + log_q_WN).sum(0).clamp(max=0)
    entropy_N = (q_WN * (entropy_WN - log_q_WN)).sum(0).clamp(min=0).minimum(columns_WN.sum(0).log())
    sum_sq_N = (q_WN * q_WN * sum_sq_WN).sum(0)
    normaliser = torch.stack([top_N, torch.where(logp_N == -math.inf, FAR, log_N / sum_unit)])
    found = logp_N, entropy_N, top_N * max_unit + log_N, sum_sq_N
    return *(torch.where(target_N == UNWANTED, 0, values_N) for values_N in found), normaliser


def reduce_hidden(grad_NH: Tensor, name: str) -> Tensor:
    """The sum over the ranks, added up in float32."""
    wide_NH = grad_NH.to(torch.promote_types(grad_NH.dtype, torch.float32))
    dist.all_reduce(wide_NH, group=dist.distributed_c10d._resolve_process_group(name))
    return wide_NH.to(grad_NH.dtype)
