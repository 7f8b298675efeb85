"""What the linear ops need at their peak, predicted from their arguments, and the room they work in.

Shape letters: N tokens, H hidden size, V vocabulary, M policy tokens.
"""

from contextlib import contextmanager

import torch
from torch import Tensor

from .chunks import (
    MAX_CHUNK_BYTES,
    MOVED_ROWS,
    VOCABULARY_TILE,
    chunk_rows,
    default_logits_dtype,
    gradient_dtype,
    row_bytes,
    useful_chunk_bytes,
)
from .rows import block_rows

PER_TOKEN_BYTES = 160  # some forty float32 values of a token: arguments, statistics, slopes, metrics
# Machine code and descriptions that oneDNN keeps of narrow products of a new shape; how many rows of a chunk have a
# gradient differs from chunk to chunk.
PRODUCT_CODE_BYTES = 1 << 20
PRODUCTS_KEPT = 1024
# glibc takes blocks up to this size from its heap and keeps, on top of it, twice the largest one that was freed.
HEAP_BLOCK_BYTES = 32 << 20


def estimate_memory(
    num_tokens: int,
    policy_share: float,
    hidden_size: int,
    vocab_size: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype | None = None,
    logits_dtype: torch.dtype | None = None,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
    frozen_head: bool = False,
    device: str | torch.device = "cuda",
) -> int:
    """Peak bytes of `linear_policy_loss(...).loss.backward()` above its inputs, gradients included.

    peak = kept + max(the chunks, rounding, backward), kept being the gradient of hidden and what each token needs.
    The chunks: the chunk of logits, the weight's gradient as it adds up (float32, if there are several chunks), a copy
    of a head of another dtype and the largest of the buffers that come and go (the visit's, rows that are moved, tiles
    of the vocabulary). Rounding: the sum beside what it is rounded to. Backward: the gradients beside their scaled
    copies. On the CPU it counts in addition what oneDNN keeps of narrow products and glibc of widened tiles.
    Arithmetic of this project's own, held against the peak of resident memory of a fresh process: CPU, one thread,
    torch 2.13, glibc (`memory_check` of the benchmarks). Where tiles come and go (narrow operands in several chunks,
    logits_dtype wider than they are, float16) glibc keeps up to half as much again in some runs. On CUDA the same terms
    are added up; that is unmeasured.

    num_tokens: N, all positions. policy_share: the part of them that is trained on, in [0, 1]. hidden_size: H.
    vocab_size: V. dtype of hidden states; weight_dtype: of the head, default the same; compute_dtype: of the products,
    default the wider of the two (under autocast: autocast's). logits_dtype, max_chunk_bytes: as in
    `linear_policy_loss`. frozen_head: it needs no gradient. device: "cpu" or "cuda", with an index or without; on the
    CPU the loss is taken to be differentiated as it is (not scaled). Sizes are of [N, H], [V, H] and [R, V] tensors.

    Raises ValueError for a size below 1, a share outside [0, 1], a dtype that is not floating and another device.
    """
    for name, value in (
        ("num_tokens", num_tokens), ("hidden_size", hidden_size), ("vocab_size", vocab_size),
        ("max_chunk_bytes", max_chunk_bytes),
    ):  # fmt: skip
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}, want an int >= 1")
    if not 0 <= policy_share <= 1:
        raise ValueError(f"policy_share is {policy_share!r}, want 0 <= policy_share <= 1")
    for name, value, default in (
        ("dtype", dtype, dtype), ("weight_dtype", weight_dtype, dtype), ("compute_dtype", compute_dtype, dtype),
        ("logits_dtype", logits_dtype, dtype),
    ):  # fmt: skip
        value = default if value is None else value
        if not isinstance(value, torch.dtype) or not value.is_floating_point:
            raise ValueError(f"{name} is {value!r}, want a floating torch.dtype")
    on_cpu = _device_type(device) == "cpu"
    weight_dtype = weight_dtype or dtype
    compute_dtype = compute_dtype or torch.promote_types(dtype, weight_dtype)
    logits_dtype = logits_dtype or default_logits_dtype(compute_dtype)
    wide = torch.promote_types(compute_dtype, torch.float32)
    num_rows = round(num_tokens * policy_share)
    max_chunk_bytes = useful_chunk_bytes(max_chunk_bytes, hidden_size, vocab_size, logits_dtype)
    size = chunk_rows(num_rows, vocab_size, logits_dtype, max_chunk_bytes)
    rows, num_chunks = min(size, num_rows), -(-num_rows // size)
    hidden_numel = num_tokens * hidden_size
    weight_numel = 0 if frozen_head else vocab_size * hidden_size

    kept = hidden_numel * gradient_dtype(dtype).itemsize + num_tokens * PER_TOKEN_BYTES
    cast = vocab_size * hidden_size * compute_dtype.itemsize if compute_dtype != weight_dtype else 0
    once = compute_dtype == weight_dtype == logits_dtype and num_chunks <= 1
    sum_dtype = compute_dtype if once else wide
    added = weight_numel * sum_dtype.itemsize
    moved = min(rows // 2, MOVED_ROWS) * vocab_size * logits_dtype.itemsize
    passing = [moved]
    if on_cpu:
        tile = min(vocab_size, VOCABULARY_TILE) * hidden_size
        if logits_dtype != compute_dtype:  # a tile of the weight is widened
            widened = tile * logits_dtype.itemsize
            passing.append(3 * widened if widened <= HEAP_BLOCK_BYTES else widened)
        if weight_numel and logits_dtype != sum_dtype:  # a product, and widened in its sum
            passing.append(tile * (logits_dtype.itemsize + sum_dtype.itemsize))
        passing.append(2 * min(rows, block_rows(vocab_size, torch.device("cpu")) + 1) * vocab_size * wide.itemsize)
    operands = rows * hidden_size * (compute_dtype.itemsize + logits_dtype.itemsize)
    chunks = cast + added + rows * row_bytes(vocab_size, logits_dtype) + operands + max(passing)
    code = min(num_chunks, PRODUCTS_KEPT) * PRODUCT_CODE_BYTES if on_cpu and logits_dtype.itemsize == 2 else 0

    sum_type = gradient_dtype(weight_dtype)
    handed = weight_numel * sum_type.itemsize
    rounding = cast + added + (handed if sum_dtype != sum_type else 0)
    scaled = hidden_numel * dtype.itemsize
    if not on_cpu:
        scaled += weight_numel * weight_dtype.itemsize
    elif sum_type != weight_dtype:  # scaled before it is rounded
        scaled += weight_numel * (sum_type.itemsize + weight_dtype.itemsize)
    return kept + code + max(chunks, rounding, handed + scaled)


def _device_type(device: str | torch.device) -> str:
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError):
        kind = None
    if kind not in ("cpu", "cuda") or not isinstance(device, (str, torch.device)):
        raise ValueError(f"device is {device!r}, want 'cpu' or 'cuda'")
    return kind


@contextmanager
def working(
    hidden_NH: Tensor, weight_VH: Tensor, rows: Tensor | None, compute_dtype, logits_dtype, max_chunk_bytes: int,
    frozen_head: bool,
):  # fmt: skip
    """Autocast is off, since operands have their dtype; an out-of-memory error says what was to be expected."""
    num_tokens, hidden_size = hidden_NH.shape
    num_rows = num_tokens if rows is None else len(rows)
    try:
        with torch.autocast(hidden_NH.device.type, enabled=False):
            yield
    except torch.OutOfMemoryError as error:
        expected = estimate_memory(
            max(1, num_tokens), num_rows / max(1, num_tokens), hidden_size, weight_VH.shape[0], dtype=hidden_NH.dtype,
            weight_dtype=weight_VH.dtype, compute_dtype=compute_dtype, logits_dtype=logits_dtype,
            max_chunk_bytes=max_chunk_bytes, frozen_head=frozen_head, device=hidden_NH.device.type,
        )  # fmt: skip
        raise torch.OutOfMemoryError(
            f"{error} crest_ops: {num_rows} of {num_tokens} tokens, H={hidden_size}, V={weight_VH.shape[0]}, "
            f"max_chunk_bytes={max_chunk_bytes} need about {expected / 2**30:.2f} GiB above the inputs, gradients "
            "included (crest_ops.estimate_memory); a smaller max_chunk_bytes needs less"
        ) from error
