"""Bytes that the vocabulary kernels read and write per logit, counted from their own loads and stores.

The kernels run in Triton's interpreter, where every access to memory passes through a few functions of its builder.
These note the addresses of the lanes that are not masked, and the addresses are looked up among the tensors of the
launch. What a GPU's caches merge is not seen, but for one thing: a byte that a launch reads again is told apart from
the first read of it. The second read comes from L2 where the rows in flight fit there, which the launcher of
`policy_loss` sees to; elsewhere from memory.

Shape letters: N rows (tokens), V vocabulary.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch
from crest_kernels.divergence import token_divergence
from crest_kernels.divergence_grad import token_divergence_grad
from crest_kernels.policy_loss import policy_loss
from crest_kernels.teacher_pair import teacher_pair
from crest_kernels.token_stats import token_stats, token_stats_grad, token_stats_kernel
from torch import Tensor
from triton.runtime import interpreter

from crest_bench.codegen import VOCABULARY

NUM_ROWS = 2
MASKED_ROWS = (0, 1, 2)  # of NUM_ROWS
DTYPE = torch.bfloat16
OTHER = "other"

# Functions of the interpreter's builder that touch memory: places of pointers and mask in the arguments, reads, writes.
_ACCESSES = {
    "create_masked_load": (0, 1, 1, 0),
    "create_masked_store": (0, 2, 0, 1),
    "create_atomic_rmw": (1, 3, 1, 1),
    "create_atomic_cas": (0, None, 1, 1),
}


class Accesses:
    """How many times each element of one tensor was read and written."""

    def __init__(self, tensor: Tensor):
        if not tensor.is_contiguous():
            raise ValueError(f"tensor has strides {tensor.stride()}, want it contiguous")
        self.begin = tensor.data_ptr()
        self.element_size = tensor.element_size()
        self.reads = np.zeros(tensor.numel(), np.int64)
        self.writes = np.zeros(tensor.numel(), np.int64)

    def note(self, addresses: np.ndarray, reads: int, writes: int) -> np.ndarray:
        """Take the addresses that lie in the tensor; the others are returned."""
        at = (addresses.astype(np.int64) - self.begin) // self.element_size
        inside = (at >= 0) & (at < self.reads.size)
        np.add.at(self.reads, at[inside], reads)
        np.add.at(self.writes, at[inside], writes)
        return addresses[~inside]

    @property
    def read_bytes(self) -> int:
        """First reads alone."""
        return int((self.reads > 0).sum()) * self.element_size

    @property
    def read_again_bytes(self) -> int:
        return int(np.maximum(self.reads - 1, 0).sum()) * self.element_size

    @property
    def written_bytes(self) -> int:
        return int(self.writes.sum()) * self.element_size


@contextmanager
def counted(tensors: Mapping[str, Tensor]) -> Iterator[tuple[dict[str, Accesses], Counter]]:
    """Count what kernels read and write inside the block.

    Gives the accesses by name of tensor, and {"read": bytes, "written": bytes} of all other memory.
    Raises ValueError where Triton is not interpreting.
    """
    if not isinstance(token_stats_kernel, interpreter.InterpretedFunction):
        raise ValueError("Triton is not interpreting; TRITON_INTERPRET=1 must be set before it is imported")
    accesses = {name: Accesses(tensor) for name, tensor in tensors.items()}
    others: Counter = Counter()

    def noting(method, pointers_at, mask_at, reads, writes):
        def note(builder, *arguments, **keywords):
            pointers = arguments[pointers_at]
            mask = True if mask_at is None else arguments[mask_at].data
            left = pointers.data[np.broadcast_to(mask, pointers.data.shape).astype(bool)]
            for one in accesses.values():
                left = one.note(left, reads, writes)
            size = left.size * pointers.get_element_ty().primitive_bitwidth // 8
            others.update(read=reads * size, written=writes * size)
            return method(builder, *arguments, **keywords)

        return note

    builder = interpreter.InterpreterBuilder
    replaced = {name: noting(getattr(builder, name), *how) for name, how in _ACCESSES.items()}
    with mock.patch.multiple(builder, **replaced):
        yield accesses, others


@dataclass(frozen=True)
class Traffic:
    """What one launch moves of one tensor, in bytes per logit (of all N * V, masked rows included).

    read: the first time; read_again: the same bytes once more, in the same launch. times_read, times_written:
    "1 x303870, 2 x2" where 303870 elements are read once and 2 elements, the targets, twice.
    """

    kernel: str
    role: str
    masked_percent: int
    tensor: str
    read: float
    read_again: float
    written: float
    times_read: str
    times_written: str


@dataclass(frozen=True)
class Case:
    """A launch to be counted. make: mask of wanted rows [N] -> (its tensors over the vocabulary, the launch)."""

    kernel: str
    role: str
    make: Callable[[Tensor], tuple[dict[str, Tensor], Callable[[], object]]]


def count(case: Case, masked_rows: int) -> list[Traffic]:
    """One row per tensor over the vocabulary and one for all other memory; the first `masked_rows` rows are masked."""
    tensors, launch = case.make(torch.arange(NUM_ROWS) >= masked_rows)
    with counted(tensors) as (accesses, others):
        launch()
    logits = NUM_ROWS * VOCABULARY
    common = (case.kernel, case.role, 100 * masked_rows // NUM_ROWS)
    rows = [
        Traffic(
            *common, name, found.read_bytes / logits, found.read_again_bytes / logits, found.written_bytes / logits,
            _times(found.reads), _times(found.writes),
        )
        for name, found in accesses.items()
    ]  # fmt: skip
    return rows + [Traffic(*common, OTHER, others["read"] / logits, 0.0, others["written"] / logits, "", "")]


def _times(counts: np.ndarray) -> str:
    return ", ".join(
        f"{times} x{elements}" for times, elements in zip(*np.unique(counts, return_counts=True), strict=True)
    )


def _logits(seed: int) -> Tensor:
    return torch.randn(1, NUM_ROWS, VOCABULARY, generator=torch.Generator().manual_seed(seed)).to(DTYPE)


def _targets(wanted: Tensor) -> Tensor:
    return torch.where(wanted, torch.arange(NUM_ROWS) * 7 + 5, -1)


def _forward(wanted):
    logits = _logits(0)
    return {"logits": logits}, lambda: token_stats(logits, _targets(wanted), torch.ones(1), VOCABULARY, 1.0, 0.0, False)


def _backward(entropy: bool):
    def make(wanted):
        logits, targets, temperature = _logits(0), _targets(wanted), torch.ones(1)
        _, entropy_N, _, _, normaliser = token_stats(logits, targets, temperature, VOCABULARY, 1.0, 0.0, False)
        gradient, upstream = torch.empty_like(logits), torch.ones(NUM_ROWS)
        return {"logits": logits, "gradient": gradient}, lambda: token_stats_grad(
            gradient, logits, targets, temperature, entropy_N, normaliser, upstream, upstream if entropy else None,
            VOCABULARY, 1.0, 0.0,
        )  # fmt: skip

    return make


def _pair(wanted):
    logits, teacher = _logits(0), _logits(1)
    return {"logits": logits, "teacher": teacher}, lambda: teacher_pair(
        logits, teacher, _targets(wanted), torch.ones(1), VOCABULARY, 1.0, 0.0
    )


def _divergence(jsd_weight: float):
    def make(wanted):
        logits, teacher = _logits(0), _logits(1)
        return {"logits": logits, "teacher": teacher}, lambda: token_divergence(
            logits, teacher, _targets(wanted), torch.ones(1), VOCABULARY, 1.0, 0.0, jsd_weight
        )

    return make


def _divergence_backward(jsd_weight: float):
    def make(wanted):
        logits, teacher, targets, temperature = _logits(0), _logits(1), _targets(wanted), torch.ones(1)
        _, entropy_N, _, student_kl_N, divergence_N, normaliser = token_divergence(
            logits, teacher, targets, temperature, VOCABULARY, 1.0, 0.0, jsd_weight
        )
        gradient, upstream = torch.empty_like(logits), torch.ones(NUM_ROWS)
        return {"logits": logits, "teacher": teacher, "gradient": gradient}, lambda: token_divergence_grad(
            gradient, logits, teacher, targets, temperature, entropy_N, student_kl_N, divergence_N, normaliser,
            upstream, upstream, upstream, upstream, VOCABULARY, 1.0, 0.0, jsd_weight,
        )  # fmt: skip

    return make


def _fused(entropy_coef: float):
    """Rows become their gradient in place."""

    def make(wanted):
        logits, ones = _logits(0)[0], torch.ones(NUM_ROWS)
        return {"logits": logits}, lambda: policy_loss(
            logits, _targets(wanted), ones[:1], ones, ones, None, None, None, num_columns=VOCABULARY, logit_scale=1.0,
            softcap=0.0, kl_coef=0.0, entropy_coef=entropy_coef, surrogate=(0, 0.2, 0.28, float("inf")),
        )  # fmt: skip

    return make


CASES = [
    Case("token_stats", "stats", _forward),
    Case("token_stats_grad", "grad", _backward(entropy=False)),
    Case("token_stats_grad_entropy", "grad_entropy", _backward(entropy=True)),
    Case("teacher_pair", "pair", _pair),
    Case("divergence_kl", "pair", _divergence(0.0)),
    Case("divergence_jsd", "pair", _divergence(0.5)),
    Case("divergence_kl_grad", "grad_pair", _divergence_backward(0.0)),
    Case("divergence_jsd_grad", "grad_pair", _divergence_backward(0.5)),
    Case("policy_loss", "fused", _fused(0.0)),
    Case("policy_loss_entropy", "fused_entropy", _fused(0.01)),
]
