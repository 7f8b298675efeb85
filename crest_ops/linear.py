"""Log-prob and entropy of each token straight from hidden states, and what all ops over a vocabulary head share.

Shape letters: N tokens, H hidden size, V vocabulary, R rows of a chunk, M wanted rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .backend import resolve_backend
from .chunks import ChunkedHead, gradient_dtype
from .debug import compare_rows, debugging
from .heads import check_head_arguments
from .memory import working
from .rows import BINARY, UNWANTED
from .shards import Shard, check_group, combine_shards, reduce_hidden, refuse, shard_of
from .token_stats import TokenStats, check_outputs, run_stats, write_gradient
from .vocabulary import as_rows, check_row_arguments

MAX_CHUNK_BYTES = 256 << 20


def linear_token_stats(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    *,
    head_bias: Tensor | None = None,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    outputs: Sequence[str] = ("logp", "entropy"),
    backend: str = "auto",
    logits_dtype: torch.dtype | None = None,
    process_group: ProcessGroup | None = None,
    reduce_hidden_grad: bool = True,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
) -> TokenStats:
    """Log-prob, entropy and log-sum-exp of every token from hidden states and the head, logits a chunk at a time.

    logits = hidden @ head_weight.T + head_bias; the rest is `token_stats` of them: z = cap(logit_scale * logits) /
    temperature, lse = log sum_v exp z_v, logp = z_target - lse, entropy = -sum_v p_v log p_v.

    Rows that are not wanted are left out before the first matrix product. Backward makes each chunk of logits again
    (four matrix products in all) and takes any upstream gradient; rows whose upstream gradient is 0 are left out. The
    gradient of the weight adds up in float32 over the chunks; a head that needs no gradient builds none.

    hidden [..., H], head_weight [V, H], head_bias [V] or None: floating, of any strides and of mixed dtypes: operands
        are brought to the wider dtype, under autocast to autocast's.
    targets [...], mask, temperature, softcap, logit_scale, vocab_size, ignore_index, outputs, backend: as in
        `token_stats`.
    logits_dtype: in which the chunk of logits is kept; None is that of the operands, torch.float32 keeps the logits of
        narrow operands unrounded.
    process_group: head_weight and head_bias are this rank's rows of the head, split in rank order into any sizes;
        targets and vocab_size count the whole vocabulary (vocab_size leaves every rank a column). All ranks call with
        the same other arguments and go backward with the same upstream gradients; each gets the outputs of the whole
        head, bitwise the same, and the gradients of its own rows. reduce_hidden_grad: every rank gets the whole
        gradient of hidden, summed over the ranks once, here; False leaves this rank's part to a caller that sums it
        (sequence parallel). A head that one rank refuses raises ValueError on all.
    max_chunk_bytes: memory for the chunk of logits; at least one row is taken.

    Gives [...] float32 (float64 for float64 operands). Raises ValueError naming the argument, as `token_stats` does,
    and for a head that is empty, sharded or not a tensor.
    """
    check_outputs(outputs)
    call = prepare(
        hidden, head_weight, head_bias, targets, mask, temperature, softcap, logit_scale, vocab_size, ignore_index,
        backend, logits_dtype, max_chunk_bytes, process_group,
    )  # fmt: skip
    entropy = "entropy" in outputs
    logp_N, entropy_N, lse_N, sum_sq_N = token_stats_of(
        call, head_weight, head_bias, entropy, "sum_sq_probs" in outputs, reduce_hidden_grad
    )
    shape = targets.shape
    return TokenStats(
        logp_N.view(shape),
        entropy_N.view(shape) if entropy else None,
        lse_N.detach().view(shape),
        sum_sq_N.detach().view(shape) if "sum_sq_probs" in outputs else None,
    )


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
    """Check the arguments that the linear ops share, before any work."""
    if process_group is not None:
        check_group(process_group)
    try:
        check_head_arguments(hidden, head_weight, head_bias, targets)
        if not isinstance(max_chunk_bytes, int) or max_chunk_bytes < 1:
            raise ValueError(f"max_chunk_bytes is {max_chunk_bytes!r}, want an int > 0")
        compute_dtype = operand_dtype(hidden, head_weight)
        logits_dtype = check_logits_dtype(logits_dtype, compute_dtype)
        backend = resolve_backend(backend, hidden.device, logits_dtype)
    except ValueError:
        refuse(process_group, hidden)
        raise
    width = head_weight.shape[0]
    shard = None if process_group is None else shard_of(process_group, width, hidden.device)
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
    wanted = [compute_dtype] if compute_dtype == torch.float64 else [compute_dtype, torch.float32]
    if logits_dtype is None:
        return compute_dtype
    if logits_dtype not in wanted:
        raise ValueError(
            f"logits_dtype is {logits_dtype}, want None or one of {', '.join(dict.fromkeys(map(str, wanted)))} for "
            f"operands of {compute_dtype}"
        )
    return logits_dtype


def token_stats_of(call: Call, head_weight, head_bias, entropy: bool, sum_sq: bool, reduce_hidden_grad: bool = True):
    """(logp, entropy, lse, sum_sq_probs) [N] of a prepared call, differentiable by logp and entropy."""
    shard = call.shard
    logp_N, entropy_N, lse_N, sum_sq_N, _ = torch.ops.crest.linear_token_stats(
        call.hidden_NH, head_weight, head_bias, call.target_N, call.temperature, *call.scalars, entropy, sum_sq,
        shard.name if shard else "", reduce_hidden_grad,
    )  # fmt: skip
    if debugging() and not shard:
        compare_rows(call, head_weight, head_bias, logp_N, entropy_N if entropy else None)
    return logp_N, entropy_N, lse_N, sum_sq_N


# --- the ops ----------------------------------------------------------------------------------------------------------


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


def unit_of(coefficient_N: Tensor) -> Tensor:
    """A power of 2 near the largest coefficient, a scalar: in its multiples gradients stay in the range of float16."""
    sizes = torch.where(coefficient_N.isfinite(), coefficient_N.abs(), 0)
    return torch.exp2(torch.cat([sizes, sizes.new_full((1,), 1e-30)]).amax().log2().floor())


@torch.library.custom_op("crest::linear_token_stats", mutates_args=())
def linear_token_stats_op(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, target_N: Tensor, temperature: Tensor,
    num_columns: int, logit_scale: float, softcap: float, compute_dtype: torch.dtype, logits_dtype: torch.dtype,
    max_chunk_bytes: int, backend: str, entropy: bool, sum_sq: bool, group: str, reduce_hidden_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(logp, entropy, lse, sum_sq_probs) [N] and the normaliser [2, N] that backward reads."""
    rows = wanted_rows(target_N != UNWANTED)
    outputs_N = [temperature.new_zeros(len(target_N)) for _ in range(4)]
    normaliser = temperature.new_zeros(2, len(target_N))
    target_M, temperature_M = pick(target_N, rows), pick(temperature, rows)
    with working(hidden_NH, weight_VH, max_chunk_bytes, logits_dtype, rows):
        head = ChunkedHead(
            hidden_NH, weight_VH, bias_V, rows, num_columns, compute_dtype, logits_dtype, max_chunk_bytes
        )
        for here, hidden_RH in head.chunks():
            *found, normaliser_R = run_stats(
                head.logits(hidden_RH)[None], target_M[here], part(temperature_M, here), num_columns, logit_scale,
                softcap, entropy, sum_sq, backend, BINARY,
            )  # fmt: skip
            at = here if rows is None else rows[here]
            normaliser[:, at] = normaliser_R
            for output_N, output_R in zip(outputs_N, found, strict=True):
                output_N[at] = output_R
    if group:
        *outputs_N, normaliser = combine_shards(
            target_N, *outputs_N, normaliser, temperature, num_columns, logit_scale, softcap, backend, group
        )
    return *outputs_N, normaliser


@linear_token_stats_op.register_fake
def _(hidden_NH, weight_VH, bias_V, target_N, temperature, *_):
    return *(temperature.new_empty(target_N.shape) for _ in range(4)), temperature.new_empty(2, target_N.shape[0])


@torch.library.custom_op("crest::linear_token_stats_grad", mutates_args=())
def linear_token_stats_grad_op(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, target_N: Tensor, temperature: Tensor,
    entropy_N: Tensor, normaliser: Tensor, grad_logp: Tensor, grad_entropy: Tensor | None,
    num_columns: int, logit_scale: float, softcap: float, compute_dtype: torch.dtype, logits_dtype: torch.dtype,
    max_chunk_bytes: int, backend: str, needs: Sequence[bool], group: str, reduce_hidden_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients by hidden, weight and bias; empty where not needed."""
    active_N = grad_logp != 0 if grad_entropy is None else (grad_logp != 0) | (grad_entropy != 0)
    rows = wanted_rows(active_N & (target_N != UNWANTED))
    target_M, temperature_M, entropy_M, normaliser_M, grad_logp_M, grad_entropy_M = (
        pick(values, rows) for values in (target_N, temperature, entropy_N, normaliser, grad_logp, grad_entropy)
    )
    unit = None
    if torch.float16 in (hidden_NH.dtype, logits_dtype):
        unit = unit_of(grad_logp_M if grad_entropy is None else torch.cat([grad_logp_M, grad_entropy_M]))
        grad_logp_M, grad_entropy_M = grad_logp_M / unit, None if grad_entropy is None else grad_entropy_M / unit
    with working(hidden_NH, weight_VH, max_chunk_bytes, logits_dtype, rows):
        head = ChunkedHead(
            hidden_NH, weight_VH, bias_V, rows, num_columns, compute_dtype, logits_dtype, max_chunk_bytes
        )
        head.want_gradients(*needs)
        for here, hidden_RH in head.chunks():
            z_RV = head.logits(hidden_RH)
            write_gradient(
                z_RV[None], z_RV[None], backend, target_M[here], part(temperature_M, here), entropy_M[here],
                part(normaliser_M, here), grad_logp_M[here], part(grad_entropy_M, here), num_columns, logit_scale,
                softcap, power=BINARY,
            )  # fmt: skip
            head.add_gradients(here, hidden_RH, z_RV)
        found = head.gradients()
    if unit is not None:
        for gradient in found:
            if gradient is not None:
                torch.mul(gradient, unit.view(1), out=gradient)
    if group and needs[0] and reduce_hidden_grad:
        found = (reduce_hidden(found[0], group), *found[1:])
    return tuple(hidden_NH.new_empty(0) if gradient is None else gradient for gradient in found)


@linear_token_stats_grad_op.register_fake
def _(hidden_NH, weight_VH, bias_V, target_N, *arguments):
    return fake_gradients(hidden_NH, weight_VH, bias_V, arguments[-3])


def fake_gradients(hidden_NH, weight_VH, bias_V, needs):
    """What the ops' gradients look like."""
    given = (hidden_NH, weight_VH, bias_V)
    dtypes = (
        hidden_NH.dtype,
        gradient_dtype(weight_VH.dtype),
        None if bias_V is None else gradient_dtype(bias_V.dtype),
    )
    return tuple(
        hidden_NH.new_empty(tensor.shape, dtype=dtype) if need else hidden_NH.new_empty(0)
        for tensor, dtype, need in zip(given, dtypes, needs, strict=True)
    )


def _save(ctx, inputs, output):
    hidden_NH, weight_VH, bias_V, target_N, temperature, *scalars, ctx.entropy, _, group, reduce_hidden_grad = inputs
    ctx.scalars, ctx.shard = scalars, (group, reduce_hidden_grad)
    _, entropy_N, _, _, normaliser = output
    ctx.save_for_backward(hidden_NH, weight_VH, bias_V, target_N, temperature, entropy_N, normaliser)


def _backward(ctx, grad_logp, grad_entropy, *_):
    saved = ctx.saved_tensors  # once: under a checkpoint they are there once
    hidden_NH, weight_VH, bias_V, _, _, entropy_N, _ = saved
    needs = [ctx.needs_input_grad[i] for i in range(3)]
    grad_logp = torch.zeros_like(entropy_N) if grad_logp is None else grad_logp.contiguous()
    grad_entropy = grad_entropy.contiguous() if ctx.entropy and grad_entropy is not None else None
    found = torch.ops.crest.linear_token_stats_grad(*saved, grad_logp, grad_entropy, *ctx.scalars, needs, *ctx.shard)
    given = (hidden_NH, weight_VH, bias_V)
    grads = (g.to(t.dtype) if need else None for g, t, need in zip(found, given, needs, strict=True))
    return *grads, *[None] * 13


linear_token_stats_op.register_autograd(_backward, setup_context=_save)
