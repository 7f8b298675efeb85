"""What the ops over a vocabulary head share: their checked arguments, the rows they want, their gradients.

Shape letters: N tokens, H hidden size, V vocabulary, M wanted rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .backend import resolve_backend
from .chunks import default_logits_dtype, gradient_dtype, useful_chunk_bytes
from .head_arguments import check_head_arguments
from .shards import Shard, shard_of
from .vocabulary import as_rows, check_row_arguments


@dataclass(frozen=True)
class Call:
    """The checked arguments of an op over a head.

    hidden [N, H], target [N] of this shard's columns (UNWANTED, ELSEWHERE), temperature [1] or [N]. scalars: what every
    custom op below takes, in their order.
    """

    hidden_NH: Tensor
    target_N: Tensor
    temperature: Tensor
    num_columns: int
    logit_scale: float
    softcap: float
    compute_dtype: torch.dtype
    logits_dtype: torch.dtype
    max_chunk_bytes: int
    backend: str
    shard: Shard | None

    @property
    def scalars(self) -> tuple:
        return (
            self.num_columns, self.logit_scale, self.softcap, self.compute_dtype, self.logits_dtype,
            self.max_chunk_bytes, self.backend,
        )  # fmt: skip


def prepare(
    hidden, head_weight, head_bias, targets, mask, temperature, softcap, logit_scale, vocab_size, ignore_index, backend,
    logits_dtype, max_chunk_bytes, process_group=None,
) -> Call:  # fmt: skip
    """Check the arguments that the linear ops share, before any work. With a process_group: called where `agreed`."""
    check_head_arguments(hidden, head_weight, head_bias, targets)
    if type(max_chunk_bytes) is not int or max_chunk_bytes < 1:
        raise ValueError(f"max_chunk_bytes is {max_chunk_bytes!r}, want an int > 0")
    compute_dtype = operand_dtype(hidden, head_weight)
    logits_dtype = check_logits_dtype(logits_dtype, compute_dtype)
    backend = resolve_backend(backend, hidden.device, logits_dtype)
    width = head_weight.shape[0]
    shard = shard_of(process_group, width)
    total = check_row_arguments(
        targets.shape, shard.total if shard else width, hidden.device, targets, mask, temperature, softcap, logit_scale,
        vocab_size, ignore_index,
    )  # fmt: skip
    temperature = as_rows(temperature, hidden.new_empty(0, dtype=logits_dtype))
    target_N = torch.ops.crest.wanted_targets(
        targets.reshape(-1), None if mask is None else mask.reshape(-1), temperature, total, ignore_index
    )
    if shard:
        target_N, total = shard.local(target_N, total)
    max_chunk_bytes = useful_chunk_bytes(max_chunk_bytes, hidden.shape[-1], total, logits_dtype)
    return Call(
        hidden.reshape(-1, hidden.shape[-1]), target_N, temperature, total, float(logit_scale), float(softcap or 0),
        compute_dtype, logits_dtype, max_chunk_bytes, backend, shard,
    )  # fmt: skip


def operand_dtype(hidden: Tensor, head_weight: Tensor) -> torch.dtype:
    """The dtype of the matrix products: the wider of the two, autocast's under autocast (which leaves float64)."""
    dtype = torch.promote_types(hidden.dtype, head_weight.dtype)
    device = hidden.device.type
    if dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return dtype


def check_logits_dtype(logits_dtype, compute_dtype: torch.dtype) -> torch.dtype:
    default = default_logits_dtype(compute_dtype)
    wanted = [default] if default == torch.float64 else [default, torch.float32]
    if logits_dtype is not None and logits_dtype not in wanted:
        raise ValueError(
            f"logits_dtype is {logits_dtype}, want None or one of {', '.join(dict.fromkeys(map(str, wanted)))} for "
            f"operands of {compute_dtype}"
        )
    return logits_dtype or default


def pick(values_N: Tensor | None, rows: Tensor | None) -> Tensor | None:
    """Values of the wanted rows, [M]; a single one stands for all rows."""
    if values_N is None or rows is None or values_N.shape[-1] == 1:
        return values_N
    return values_N[..., rows]


def part(values_M: Tensor | None, here: slice) -> Tensor | None:
    """Values of a chunk's rows; a single one stands for all rows."""
    return values_M if values_M is None or values_M.shape[-1] == 1 else values_M[..., here].contiguous()


def wanted_rows(wanted_N: Tensor) -> Tensor | None:
    """Indices of the wanted rows, None where all are."""
    rows = wanted_N.nonzero()[:, 0]
    return None if len(rows) == len(wanted_N) else rows


def fake_gradients(hidden_NH, weight_VH, bias_V, needs):
    """What the ops' gradients look like."""
    return tuple(
        hidden_NH.new_empty(tensor.shape, dtype=gradient_dtype(tensor.dtype)) if need else hidden_NH.new_empty(0)
        for tensor, need in zip((hidden_NH, weight_VH, bias_V), needs, strict=True)
    )


def as_given(gradients: Sequence[Tensor], given: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
    """Gradients in the dtypes of what they belong to, None where not needed."""
    return [g.to(t.dtype) if need else None for g, t, need in zip(gradients, given, needs, strict=True)]
