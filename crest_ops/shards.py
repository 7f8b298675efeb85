"""A vocabulary head whose rows are split over the ranks of a process group, and how ranks refuse together.

Shape letters: N tokens, V vocabulary, W ranks.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .rows import ELSEWHERE, LOWEST, UNWANTED

NO_TARGET = 1.0  # no log-prob: stands for the target's on the ranks that do not hold it
FAR = 1e10  # stands for the log of a sum where every probability is to be 0
REFUSED = -1  # the number that a rank sends which refuses its arguments
MESSAGE = 4  # numbers that ranks exchange at a time, zeros where there are fewer


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


class RefusedElsewhere(ValueError):
    """Another rank of `process_group` refuses its arguments."""

    def __init__(self, rank: int, process_group) -> None:
        super().__init__(f"rank {rank} of process_group refuses its arguments: its error says why")
        self.process_group = process_group


def check_apart(process_group, of_tokens) -> None:
    """Raises ValueError where one group is to hold both parts of the head and parts of the tokens."""
    if process_group is not None and process_group is of_tokens and process_group.size() > 1:
        raise ValueError("process_group is the group of the part of spans: ranks that split the head hold equal tokens")


@contextmanager
def agreed(process_group) -> Iterator[None]:
    """Checks of a call that all ranks of the group make: an error of one is an error of all, none is left waiting.

    Ranks may `exchange` numbers inside. Does nothing for None and a group of one.
    """
    if process_group is not None:
        check_group(process_group)
    if process_group is None or process_group.size() == 1:
        yield
        return
    try:
        yield
    except Exception as error:
        if getattr(error, "process_group", None) is not process_group:  # the others do not know of it
            _gather_numbers(process_group, REFUSED)
        raise
    exchange(process_group)


def exchange(process_group, *numbers: int) -> list[list[int]]:
    """The numbers >= 0 of every rank. Raises RefusedElsewhere where one has left `agreed` with an error."""
    rows = _gather_numbers(process_group, *numbers)
    for rank, row in enumerate(rows):
        if row[0] == REFUSED:
            raise RefusedElsewhere(rank, process_group)
    return rows


@torch.compiler.disable(reason="process_group: ranks compare numbers before they begin; use fullgraph=False")
def _gather_numbers(process_group, *numbers: int) -> list[list[int]]:
    device = dist.distributed_c10d._get_object_coll_device(process_group)
    message = torch.tensor([*numbers, *[0] * (MESSAGE - len(numbers))], device=device)
    return gather(message, process_group).tolist()


def shard_of(process_group, size: int) -> Shard | None:
    """Where this rank's `size` columns lie among those of all ranks; None for a group of one. Called where `agreed`."""
    if process_group is None or process_group.size() == 1:
        return None
    sizes_W = [sizes[0] for sizes in exchange(process_group, size)]
    rank = process_group.rank()
    return Shard(process_group.group_name, sum(sizes_W[:rank]), size, sum(sizes_W[:-1]), sum(sizes_W))


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

    With the share q_w of each shard (`_shares`): lse = top + l, entropy = sum_w q_w (entropy_w - log q_w), sum_sq =
    sum_w q_w^2 sum_sq_w, logp = logp_w + log q_w of the shard that holds the target. Where logp is -inf no shard has a
    gradient: l is FAR.
    """
    units = _units(temperature, logit_scale, softcap, backend)
    max_N, log_sum_N = normaliser
    given = (
        _of_owner(target_N, logp_N), entropy_N, sum_sq_N, max_N,
        torch.where(lse_N == -math.inf, -math.inf, log_sum_N), torch.full_like(logp_N, num_columns),
    )  # fmt: skip
    logp_WN, entropy_WN, sum_sq_WN, max_WN, log_sum_WN, columns_WN = _gather_rows(given, name)
    top_N, log_N, log_q_WN, q_WN = _shares(max_WN, log_sum_WN, units)
    logp_N = _whole_logp(logp_WN, log_q_WN)
    entropy_N = _whole_entropy(entropy_WN, log_q_WN, q_WN, columns_WN)
    sum_sq_N = (q_WN * q_WN * sum_sq_WN).sum(0)
    normaliser = torch.stack([top_N, torch.where(logp_N == -math.inf, FAR, log_N / units[1])])
    found = logp_N, entropy_N, top_N * units[0] + log_N, sum_sq_N
    return *(torch.where(target_N == UNWANTED, 0, values_N) for values_N in found), normaliser


def combine_divergence(
    target_N, outputs, normaliser, temperature, num_columns: int, logit_scale: float, softcap: float, backend: str,
    name: str,
):  # fmt: skip
    """What `divergence_outputs` gives of the KLs, over the whole vocabulary, from each shard's own.

    With the shares p_w of the student's mass and q_w of the teacher's (`_shares`): KL(p || q) = sum_w p_w (KL(p || q)_w
    + log p_w - log q_w), KL(q || p) likewise. The log-sum of a row without support is 0, as in one process.
    """
    units = _units(temperature, logit_scale, softcap, backend)
    logp_N, entropy_N, teacher_logp_N, student_kl_N, divergence_N = outputs
    lowest = LOWEST * (1.0 if softcap else logit_scale) / temperature * (1 - 1e-6)
    max_N, log_sum_N, teacher_max_N, teacher_log_sum_N = normaliser
    given = (
        _of_owner(target_N, logp_N), entropy_N, max_N,
        torch.where(max_N * units[0] <= lowest, -math.inf, log_sum_N), torch.full_like(logp_N, num_columns),
        _of_owner(target_N, teacher_logp_N), teacher_max_N,
        torch.where(teacher_max_N * units[0] <= lowest, -math.inf, teacher_log_sum_N), student_kl_N, divergence_N,
    )  # fmt: skip
    logp_WN, entropy_WN, *student, columns_WN, teacher_logp_WN, max_WN, log_sum_WN, student_kl_WN, divergence_WN = (
        _gather_rows(given, name)
    )
    top_N, log_N, log_p_WN, p_WN = _shares(*student, units)
    teacher_top_N, teacher_log_N, log_q_WN, q_WN = _shares(max_WN, log_sum_WN, units)
    logp_N, teacher_logp_N = _whole_logp(logp_WN, log_p_WN), _whole_logp(teacher_logp_WN, log_q_WN)
    student_kl_N = _whole_kl(student_kl_WN, log_p_WN, p_WN, log_q_WN)
    divergence_N = _whole_kl(divergence_WN, log_q_WN, q_WN, log_p_WN)
    found = logp_N, _whole_entropy(entropy_WN, log_p_WN, p_WN, columns_WN), teacher_logp_N, student_kl_N, divergence_N
    log_sums = (torch.where(log == -math.inf, 0, log / units[1]) for log in (log_N, teacher_log_N))
    normaliser = torch.stack([top_N, next(log_sums), teacher_top_N, next(log_sums)])
    return *(torch.where(target_N == UNWANTED, 0, values_N) for values_N in found), normaliser


def _units(temperature, logit_scale: float, softcap: float, backend: str):
    """What brings the max and the log-sum of a normaliser to nats."""
    return (math.log(2), math.log(2)) if backend == "triton" else ((1.0 if softcap else logit_scale) / temperature, 1.0)


def _of_owner(target_N: Tensor, logp_N: Tensor) -> Tensor:
    return torch.where(target_N == ELSEWHERE, NO_TARGET, logp_N)


def _gather_rows(rows, name: str) -> tuple[Tensor, ...]:
    """[W, N] of each of the rows [N]."""
    return gather(torch.stack(rows), dist.distributed_c10d._resolve_process_group(name)).unbind(1)


def _shares(max_WN: Tensor, log_sum_WN: Tensor, units) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(top, l [N], log q, q [W, N]): the largest max; l_w = max_w - top + log_sum_w, l = log sum_w exp l_w, and shard
    w's share of the probability q_w = exp(l_w - l); 0 and 0 for a shard without support.
    """
    top_N = max_WN.amax(0)
    log_WN = (max_WN - top_N) * units[0] + log_sum_WN * units[1]
    log_N = log_WN.logsumexp(0)
    empty_WN = log_WN == -math.inf
    log_q_WN = torch.where(empty_WN, 0, log_WN - log_N)
    return top_N, log_N, log_q_WN, torch.where(empty_WN, 0, log_q_WN.exp())


def _whole_logp(logp_WN: Tensor, log_q_WN: Tensor) -> Tensor:
    return torch.where(logp_WN == NO_TARGET, 0, logp_WN + log_q_WN).sum(0).clamp(max=0)


def _whole_entropy(entropy_WN: Tensor, log_q_WN: Tensor, q_WN: Tensor, columns_WN: Tensor) -> Tensor:
    return (q_WN * (entropy_WN - log_q_WN)).sum(0).clamp(min=0).minimum(columns_WN.sum(0).log())


def _whole_kl(kl_WN: Tensor, log_p_WN: Tensor, p_WN: Tensor, log_q_WN: Tensor) -> Tensor:
    """sum_w p_w (KL_w + log p_w - log q_w); an infinite part counts whatever its share."""
    part_WN = torch.where(kl_WN == math.inf, math.inf, p_WN * (kl_WN + log_p_WN - log_q_WN))
    return part_WN.sum(0).clamp(min=0)


def without_excluded(normaliser: Tensor, logp_N: Tensor) -> Tensor:
    """The normaliser [4, N] for the gradient: rows whose target is excluded have none, on no shard."""
    log_sum = torch.tensor([False, True, False, True], device=normaliser.device)[:, None]
    return torch.where(log_sum & (logp_N == -math.inf), FAR, normaliser)


def add_up(tensor: Tensor, name: str) -> Tensor:
    """The sum over the ranks, in place."""
    dist.all_reduce(tensor, group=dist.distributed_c10d._resolve_process_group(name))
    return tensor


def reduce_hidden(grad_NH: Tensor, name: str) -> Tensor:
    """The sum over the ranks, added up in float32."""
    wide_NH = grad_NH.to(torch.promote_types(grad_NH.dtype, torch.float32))
    return add_up(wide_NH, name).to(grad_NH.dtype)
