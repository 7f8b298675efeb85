"""A vocabulary head applied to a few rows of hidden states at a time: the three matrix products of the linear ops.

Shape letters: N tokens, H hidden size, V vocabulary (without padded columns), R rows of a chunk, M wanted rows.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

ALIGN = 64  # logits; the distance of rows is a multiple of it, so that each starts at an aligned address
ROWS = 128  # the tile of a matrix product: the rows of a chunk are a multiple of it where there are that many
VOCABULARY_TILE = 8192  # columns of a product that goes through a buffer of its own
MOVED_ROWS = 16  # rows that are moved at a time
MAX_CHUNK_BYTES = 256 << 20
# torch.addmm of narrow operands on CUDA takes a float32 sum from torch 2.10 on (pytorch #167931).
ADDS_TO_WIDE = torch.__version__ >= (2, 10)


def row_bytes(num_columns: int, logits_dtype: torch.dtype) -> int:
    """Bytes from one row of a chunk of logits to the next."""
    return -(-num_columns // ALIGN) * ALIGN * logits_dtype.itemsize


def chunk_rows(num_rows: int, num_columns: int, logits_dtype: torch.dtype, max_chunk_bytes: int) -> int:
    """Rows of a chunk: as many as the budget holds, spread evenly over the chunks that are needed; at least one."""
    most = max(1, max_chunk_bytes // row_bytes(num_columns, logits_dtype))
    most = most // ROWS * ROWS or most
    even = -(-num_rows // max(1, -(-num_rows // most)))
    return max(1, min(most, -(-even // ROWS) * ROWS, num_rows))


def useful_chunk_bytes(max_chunk_bytes: int, hidden_size: int, num_columns: int, logits_dtype: torch.dtype) -> int:
    """The budget, but for at most 4 H rows: reading and writing the weight's sum [V, H] is then a small part of what a
    chunk costs, and more rows would save nothing.
    """
    return min(max_chunk_bytes, max(ROWS, 4 * hidden_size) * row_bytes(num_columns, logits_dtype))


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which a gradient is handed on until backward knows its scale: float16 has not the range for it."""
    return torch.float32 if dtype == torch.float16 else dtype


def default_logits_dtype(compute_dtype: torch.dtype) -> torch.dtype:
    """In which a chunk is kept: the dtype of the operands, but float32 where that is float16 (range, again)."""
    return gradient_dtype(compute_dtype)


class ChunkedHead:
    """logits = hidden @ weight.T + bias for wanted rows of hidden states, a chunk at a time, and its gradient.

    rows [M]: the wanted rows, None for all. Operands are brought to `compute_dtype`; the logits of a chunk, and later
    their gradient, lie in one buffer of `logits_dtype`. Gradients of weight and bias add up in float32 (float64 for
    float64) over the chunks; a single chunk's product is rounded once.
    """

    def __init__(
        self, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, rows: Tensor | None, num_columns: int,
        compute_dtype: torch.dtype, logits_dtype: torch.dtype, max_chunk_bytes: int,
    ):  # fmt: skip
        self.hidden_NH, self.full_weight_VH, self.full_bias_V, self.rows = hidden_NH, weight_VH, bias_V, rows
        self.num_columns = num_columns
        self.weight_VH = weight_VH[:num_columns].to(compute_dtype)
        if 1 not in self.weight_VH.stride():  # once, instead of in every product
            self.weight_VH = self.weight_VH.contiguous()
        self.bias_V = None if bias_V is None else bias_V[:num_columns].to(logits_dtype)
        self.num_rows = len(hidden_NH) if rows is None else len(rows)
        self.size = chunk_rows(self.num_rows, num_columns, logits_dtype, max_chunk_bytes)
        width = row_bytes(num_columns, logits_dtype) // logits_dtype.itemsize
        self.buffer_RV = hidden_NH.new_empty(min(self.size, self.num_rows), width, dtype=logits_dtype)
        self.grad_hidden_NH = self.grad_weight_VH = self.grad_bias_V = None
        self.started = False

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """(the chunk's place among the M wanted rows, the rows' hidden states [R, H])."""
        for start in range(0, self.num_rows, self.size):
            here = slice(start, min(start + self.size, self.num_rows))
            hidden_RH = self.hidden_NH[here] if self.rows is None else self.hidden_NH.index_select(0, self.rows[here])
            yield here, hidden_RH.to(self.weight_VH.dtype)

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """[R, V] in the buffer, unrounded where it is wider than the operands."""
        z_RV = self.buffer_RV[: len(hidden_RH), : self.num_columns]
        if z_RV.dtype == self.weight_VH.dtype:
            torch.mm(hidden_RH, self.weight_VH.t(), out=z_RV)
        elif takes_out_dtype(z_RV):
            torch.mm(hidden_RH, self.weight_VH.t(), out_dtype=z_RV.dtype, out=z_RV)
        else:
            wide_RH = hidden_RH.to(z_RV.dtype)
            for tile in self._tiles():
                torch.mm(wide_RH, self.weight_VH[tile].to(z_RV.dtype).t(), out=z_RV[:, tile])
        return z_RV if self.bias_V is None else z_RV.add_(self.bias_V)

    def want_gradients(self, hidden: bool, weight: bool, bias: bool) -> None:
        """Make room for the gradients that are asked for; none of the others is computed."""
        compute_dtype = self.weight_VH.dtype
        wide = torch.promote_types(compute_dtype, torch.float32)
        alike = compute_dtype == self.full_weight_VH.dtype == self.buffer_RV.dtype
        once = alike and self.size >= self.num_rows
        if hidden:
            dtype = gradient_dtype(self.hidden_NH.dtype)
            self.grad_hidden_NH = torch.zeros(self.hidden_NH.shape, dtype=dtype, device=self.hidden_NH.device)
        if weight:
            self.grad_weight_VH = torch.empty(
                self.full_weight_VH.shape, dtype=compute_dtype if once else wide, device=self.weight_VH.device
            )
            self.grad_weight_VH[self.num_columns :] = 0
        if bias:
            self.grad_bias_V = torch.zeros(self.full_bias_V.shape, dtype=wide, device=self.weight_VH.device)

    def add_gradients(self, place_R: Tensor | slice, hidden_RH: Tensor, dz_RV: Tensor) -> None:
        """Take the gradient of the logits of the wanted rows `place` into the gradients that are asked for."""
        if not len(hidden_RH):
            return
        beta, self.started = float(self.started), True
        if self.grad_weight_VH is not None:
            grad_VH = self.grad_weight_VH[: self.num_columns]
            whole = dz_RV.dtype == grad_VH.dtype
            if takes_out_dtype(dz_RV):
                whole = dz_RV.dtype == hidden_RH.dtype and (ADDS_TO_WIDE or dz_RV.dtype == grad_VH.dtype)
            for tile in [...] if whole else self._tiles():
                add_product(grad_VH[tile], dz_RV[:, tile].t(), hidden_RH, beta)
        if self.grad_bias_V is not None:
            self.grad_bias_V[: self.num_columns] += dz_RV.sum(0, dtype=self.grad_bias_V.dtype)
        if self.grad_hidden_NH is not None:
            self._put_hidden(place_R, self._hidden_gradient(dz_RV))

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(hidden, weight, bias) in the `gradient_dtype` of theirs, None where not asked for."""
        self.release()
        weight_VH, bias_V = self.grad_weight_VH, self.grad_bias_V
        if weight_VH is not None:
            weight_VH = weight_VH if self.started else weight_VH.zero_()
            weight_VH = weight_VH.to(gradient_dtype(self.full_weight_VH.dtype))
        if bias_V is not None:
            bias_V = bias_V.to(gradient_dtype(self.full_bias_V.dtype))
        return self.grad_hidden_NH, weight_VH, bias_V

    def release(self) -> None:
        """Free the chunk, before the sums are rounded."""
        self.buffer_RV.untyped_storage().resize_(0)

    def _hidden_gradient(self, dz_RV: Tensor) -> Tensor:
        if dz_RV.dtype == self.weight_VH.dtype:
            return dz_RV @ self.weight_VH
        grad_RH = dz_RV.new_empty(len(dz_RV), self.weight_VH.shape[1])
        for i, tile in enumerate(self._tiles()):
            add_product(grad_RH, dz_RV[:, tile], self.weight_VH[tile], float(i > 0))
        return grad_RH

    def _put_hidden(self, place_R: Tensor | slice, grad_RH: Tensor) -> None:
        at = place_R if self.rows is None else self.rows[place_R]
        self.grad_hidden_NH[at] = grad_RH.to(self.grad_hidden_NH.dtype)

    def _tiles(self) -> list[slice]:
        return [slice(at, at + VOCABULARY_TILE) for at in range(0, self.num_columns, VOCABULARY_TILE)]


def takes_out_dtype(tensor: Tensor) -> bool:
    """Where this tensor lies, products of narrow operands can be handed out in float32."""
    return tensor.device.type == "cuda" and torch.version.hip is None


def add_product(sum_: Tensor, a: Tensor, b: Tensor, beta: float) -> None:
    """sum_ = beta * sum_ + a @ b, beta 0 or 1; of narrow operands unrounded on CUDA, else rounded to theirs first.

    Where `a` is as wide as the sum and `b` is not, CUDA narrows `a` (for float16 in units of a power of 2 near its
    largest value) and others widen `b`.
    """
    if takes_out_dtype(sum_) and b.dtype != sum_.dtype:
        if b.dtype == torch.float16:
            unit = a.abs().amax().clamp(min=1e-30).log2().floor().exp2()
            product = torch.mm((a / unit).to(b.dtype), b, out_dtype=sum_.dtype).mul_(unit)
        elif beta and ADDS_TO_WIDE:
            torch.addmm(sum_, a.to(b.dtype), b, out_dtype=sum_.dtype, out=sum_)
            return
        else:
            product = torch.mm(a.to(b.dtype), b, out_dtype=sum_.dtype)
    elif a.dtype == sum_.dtype:
        torch.addmm(sum_, a, b.to(a.dtype), beta=beta, out=sum_)
        return
    else:
        product = a @ b
    if beta:
        sum_ += product
    else:
        sum_.copy_(product)


def move_rows_forward(z_RV: Tensor, keep_R: Tensor) -> Tensor:
    """Bring the rows to keep to the front, moving no more of them than are dropped. Returns which row lies where."""
    kept = keep_R.nonzero()[:, 0]
    if len(kept) == len(keep_R):
        return kept
    holes = (~keep_R[: len(kept)]).nonzero()[:, 0]
    late = kept[len(kept) - len(holes) :]
    for some, where in zip(late.split(MOVED_ROWS), holes.split(MOVED_ROWS), strict=True):
        z_RV[where] = z_RV[some]
    order = torch.arange(len(kept), device=kept.device)
    order[holes] = late
    return order
