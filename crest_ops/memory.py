"""What the linear ops need at their peak, predicted from their arguments, and the room they work in.

Shape letters: N tokens, H hidden size, V vocabulary, M policy tokens.
"""

from contextlib import contextmanager

import torch
from torch import Tensor

from .chunks import MAX_CHUNK_BYTES, VOCABULARY_TILE, chunk_rows, gradient_dtype, row_bytes
from .rows import block_rows

PER_TOKEN_BYTES = 160  # some forty float32 values of a token: arguments, statistics, slopes, metrics


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
    device: str = "cuda",
) -> int:
    """Peak bytes of `linear_policy_loss(...).loss.backward()` above its inputs, gradients included.

    peak = max(during the chunks, where the weight's gradient is rounded, in backward); during the chunks it is the
    chunk of logits + the weight's gradient as it adds up (float32, if there are several chunks) + the gradient of
    hidden + a working set. Arithmetic of this project's own; measured within 15% (see the README).

    num_tokens: N, all positions. policy_share: the part of them that is trained on, in [0, 1]. hidden_size: H.
    vocab_size: V. dtype of hidden states; weight_dtype: of the head, default the same; compute_dtype: of the products,
    default the wider of the two (under autocast: autocast's). logits_dtype, max_chunk_bytes: as in
    `linear_policy_loss`. frozen_head: it needs no gradient. device: "cpu" or "cuda"; on the CPU the loss is taken to be
    differentiated as it is (not scaled). Sizes are of [N, H], [V, H] and [R, V] tensors.

    Raises ValueError for a size below 1 or a share outside [0, 1].
    """
    for name, value in (
        ("num_tokens", num_tokens), ("hidden_size", hidden_size), ("vocab_size", vocab_size),
        ("max_chunk_bytes", max_chunk_bytes),
    ):  # fmt: skip
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}, want an int >= 1")
    if not 0 <= policy_share <= 1:
        raise ValueError(f"policy_share is {policy_share!r}, want 0 <= policy_share <= 1")
    weight_dtype = weight_dtype or dtype
    compute_dtype = compute_dtype or torch.promote_types(dtype, weight_dtype)
    logits_dtype = logits_dtype or compute_dtype
    wide = torch.promote_types(compute_dtype, torch.float32)
    num_rows = round(num_tokens * policy_share)
    size = chunk_rows(num_rows, vocab_size, logits_dtype, max_chunk_bytes)
    rows = min(size, num_rows)
    alike = compute_dtype == weight_dtype == logits_dtype != torch.float16
    weight_numel = 0 if frozen_head else vocab_size * hidden_size

    kept = num_tokens * (hidden_size * dtype.itemsize + PER_TOKEN_BYTES)
    cast = vocab_size * hidden_size * compute_dtype.itemsize if compute_dtype != weight_dtype else 0
    sum_dtype = compute_dtype if alike and size >= num_rows else wide
    added = weight_numel * sum_dtype.itemsize
    handed = weight_numel * gradient_dtype(weight_dtype).itemsize
    chunk = rows * row_bytes(vocab_size, logits_dtype) + rows * hidden_size * 2 * compute_dtype.itemsize
    if device == "cpu":
        chunk += 2 * min(rows, block_rows(vocab_size, torch.device("cpu"))) * vocab_size * wide.itemsize
        tiled = sum_dtype != logits_dtype and not frozen_head
        chunk += VOCABULARY_TILE * hidden_size * compute_dtype.itemsize if tiled else 0
    rounding = added + handed if sum_dtype != gradient_dtype(weight_dtype) else added
    scaled = weight_numel * weight_dtype.itemsize + num_tokens * hidden_size * dtype.itemsize
    backward = handed + (scaled if device != "cpu" or gradient_dtype(weight_dtype) != weight_dtype else 0)
    return kept + max(cast + added + chunk, cast + rounding, backward)


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
