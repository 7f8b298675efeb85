"""Log-prob and entropy of each token straight from hidden states.

Shape letters: N tokens, H hidden size, V vocabulary, R rows of a chunk, M wanted rows.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .backend import debugging
from .chunks import MAX_CHUNK_BYTES, ChunkedHead
from .debug import compare_rows
from .linear_call import Call, as_given, fake_gradients, part, pick, prepare, wanted_rows
from .memory import working
from .rows import BINARY, UNWANTED
from .shards import agreed, combine_shards, reduce_hidden
from .token_stats import TokenStats, check_outputs, run_stats, write_gradient

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
    process_group: "ProcessGroup | None" = None,
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
    logits_dtype: in which the chunk of logits is kept; torch.float32 keeps the logits of narrow operands unrounded.
        None is the dtype of the operands, float32 where that is float16, whose range gradients leave.
    process_group: head_weight and head_bias are this rank's rows of the head, split in rank order into any sizes;
        targets and vocab_size count the whole vocabulary (vocab_size leaves every rank a column). All ranks call with
        the same other arguments and go backward with the same upstream gradients; each gets the outputs of the whole
        head, bitwise the same, and the gradients of its own rows. reduce_hidden_grad: every rank gets the whole
        gradient of hidden, summed over the ranks once, here; False leaves this rank's part to a caller that sums it
        (sequence parallel). What one rank refuses raises ValueError on all. Each call gathers the sizes of the shards
        and whether all ranks agree, and never inside the loop over chunks, whose number may differ from rank to rank;
        torch.compile(fullgraph=True) does not go over it.
    max_chunk_bytes: memory for the chunk of logits; at least one row is taken, and at most 4 H. Every chunk reads and
        writes the weight's gradient [V, H] as it adds up: a few rows at a time are slow.

    Gives [...] float32 (float64 for float64 operands). Raises ValueError naming the argument, as `token_stats` does,
    and for a head that is empty, sharded or not a tensor.
    """
    with agreed(process_group):
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
    with working(hidden_NH, weight_VH, rows, compute_dtype, logits_dtype, max_chunk_bytes, frozen_head=True):
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
    with working(hidden_NH, weight_VH, rows, compute_dtype, logits_dtype, max_chunk_bytes, not needs[1]):
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
    if group and needs[0] and reduce_hidden_grad:
        found = (reduce_hidden(found[0], group), *found[1:])
    return tuple(hidden_NH.new_empty(0) if gradient is None else gradient for gradient in found)


@linear_token_stats_grad_op.register_fake
def _(hidden_NH, weight_VH, bias_V, target_N, *arguments):
    return fake_gradients(hidden_NH, weight_VH, bias_V, arguments[-3])


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
    return *as_given(found, (hidden_NH, weight_VH, bias_V), needs), *[None] * 13


linear_token_stats_op.register_autograd(_backward, setup_context=_save)
