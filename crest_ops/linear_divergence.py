"""How far the policy is from a teacher, straight from the hidden states and heads of both.

Shape letters: N tokens, H hidden size (the teacher's may differ), V vocabulary, R rows of a chunk, M wanted rows.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .backend import debugging, resolve_backend
from .chunks import MAX_CHUNK_BYTES, ChunkedHead, default_logits_dtype, row_bytes
from .debug import compare_rows
from .divergence import TokenDivergence, as_divergence, check_kind, divergence_outputs, write_divergence_gradient
from .divergence_rows import buffers, combine_kls, mixture_rows
from .head_arguments import check_head_arguments
from .linear_call import (
    Call,
    as_given,
    fake_gradients,
    operand_dtype,
    part,
    pick,
    prepare,
    wanted_rows,
)
from .memory import working
from .rows import UNWANTED, blocks
from .shards import add_up, agreed, combine_divergence, reduce_hidden, without_excluded
from .vocabulary import check_savable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def linear_token_divergence(
    hidden: Tensor,
    head_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_head_weight: Tensor,
    targets: Tensor,
    *,
    head_bias: Tensor | None = None,
    teacher_head_bias: Tensor | None = None,
    kind: str = "reverse_kl",
    jsd_weight: float = 0.5,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    backend: str = "auto",
    logits_dtype: torch.dtype | None = None,
    process_group: "ProcessGroup | None" = None,
    reduce_hidden_grad: bool = True,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
) -> TokenDivergence:
    """Divergence of student and teacher over the full vocabulary per token, logits of both a chunk at a time.

    logits = hidden @ head_weight.T + head_bias, teacher_logits likewise; the rest is `token_divergence` of them:
    forward_kl = sum_v q_v (log q_v - log p_v),  reverse_kl = sum_v p_v (log p_v - log q_v),
    jsd = (1 - a) KL(p || m) + a KL(q || m),  m = (1 - a) p + a q,  a = jsd_weight (SDPO, arXiv 2601.20802).

    Rows that are not wanted are left out before the first matrix product. Backward makes each chunk of both logits
    again and takes any upstream gradients; rows whose upstream gradients are all 0 are left out. The gradient of
    head_weight adds up in float32 over the chunks; a head that needs no gradient builds none; the teacher gets none.

    hidden [..., H], head_weight [V, H], head_bias [V] or None, logits_dtype: as in `linear_token_stats`; logits_dtype
        torch.float32 is for both models.
    teacher_hidden [..., H'] of the same tokens, teacher_head_weight [V', H'], teacher_head_bias [V'] or None: H' is
        the teacher's own; V' >= vocab_size, which is V by default and marks the columns that both share.
    targets [...], kind, jsd_weight, mask, temperature, softcap, logit_scale, vocab_size, ignore_index, backend: as in
        `token_divergence`.
    process_group, reduce_hidden_grad: as in `linear_token_stats`; the teacher's head is split at the same columns as
        the student's. The KLs add up from the shards' own; jsd, whose mixture needs the sums of all columns, makes
        both models' logits twice, and is found in torch.
    max_chunk_bytes: memory for the chunks of logits of both models together; at least one row is taken.

    Gives [...] float32 (float64 for float64 operands). Raises ValueError naming the argument, as `token_divergence`
    does, and for a head that is empty, sharded or not a tensor.
    """
    with agreed(process_group):
        jsd_weight = check_kind(kind, jsd_weight)
        call = prepare(
            hidden, head_weight, head_bias, targets, mask, temperature, softcap, logit_scale, vocab_size, ignore_index,
            backend, logits_dtype, max_chunk_bytes, process_group,
        )  # fmt: skip
        _check_teacher_head(call, hidden, teacher_hidden, teacher_head_weight, teacher_head_bias, targets)
        teacher_dtype = operand_dtype(teacher_hidden, teacher_head_weight)
        teacher_logits_dtype = default_logits_dtype(teacher_dtype)
        if logits_dtype is not None:
            teacher_logits_dtype = torch.promote_types(teacher_dtype, logits_dtype)
        widest = torch.promote_types(call.logits_dtype, teacher_logits_dtype)
        call_backend = resolve_backend(backend, hidden.device, widest)
        if call.shard and jsd_weight:
            if backend == "triton":
                raise ValueError("backend is 'triton', want 'torch' (or 'auto') for the jsd of a head split over ranks")
            call_backend = "torch"
    *outputs, _ = torch.ops.crest.linear_token_divergence(
        call.hidden_NH, head_weight, head_bias, teacher_hidden.detach().reshape(-1, teacher_hidden.shape[-1]),
        teacher_head_weight.detach(), None if teacher_head_bias is None else teacher_head_bias.detach(), call.target_N,
        call.temperature, call.num_columns, call.logit_scale, call.softcap, call.compute_dtype, call.logits_dtype,
        teacher_dtype, teacher_logits_dtype, max_chunk_bytes, jsd_weight, call_backend,
        call.shard.name if call.shard else "", reduce_hidden_grad,
    )  # fmt: skip
    if debugging() and not call.shard:
        compare_rows(call, head_weight, head_bias, *outputs[:2])
    return as_divergence(kind, *(output_N.view(targets.shape) for output_N in outputs))


def _check_teacher_head(call: Call, hidden, teacher_hidden, teacher_head_weight, teacher_head_bias, targets) -> None:
    check_head_arguments(teacher_hidden, teacher_head_weight, teacher_head_bias, targets, prefix="teacher_")
    check_savable("teacher_hidden", teacher_hidden)
    check_savable("teacher_head_weight", teacher_head_weight)
    if teacher_hidden.device != hidden.device:
        raise ValueError(f"teacher_hidden is on {teacher_hidden.device}, want {hidden.device}, where hidden is")
    if len(teacher_head_weight) < call.num_columns:
        raise ValueError(
            f"teacher_head_weight is {[*teacher_head_weight.shape]}, want at least {call.num_columns} rows; vocab_size "
            "names the columns that both vocabularies share"
        )


def _chunked_heads(
    hidden_NH, weight_VH, bias_V, teacher_hidden_NH, teacher_weight_VH, teacher_bias_V, rows, num_columns,
    compute_dtype, logits_dtype, teacher_dtype, teacher_logits_dtype, max_chunk_bytes,
) -> tuple[ChunkedHead, ChunkedHead]:  # fmt: skip
    """Both heads, with chunks of the same rows that together fill the budget."""
    student_bytes, teacher_bytes = (row_bytes(num_columns, dtype) for dtype in (logits_dtype, teacher_logits_dtype))
    most = max(1, max_chunk_bytes // (student_bytes + teacher_bytes))
    student = ChunkedHead(
        hidden_NH, weight_VH, bias_V, rows, num_columns, compute_dtype, logits_dtype, most * student_bytes
    )
    teacher = ChunkedHead(
        teacher_hidden_NH, teacher_weight_VH, teacher_bias_V, rows, num_columns, teacher_dtype, teacher_logits_dtype,
        most * teacher_bytes,
    )  # fmt: skip
    return student, teacher


# --- the ops ----------------------------------------------------------------------------------------------------------


@torch.library.custom_op("crest::linear_token_divergence", mutates_args=())
def linear_token_divergence_op(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, teacher_hidden_NH: Tensor, teacher_weight_VH: Tensor,
    teacher_bias_V: Tensor | None, target_N: Tensor, temperature: Tensor, num_columns: int, logit_scale: float,
    softcap: float, compute_dtype: torch.dtype, logits_dtype: torch.dtype, teacher_dtype: torch.dtype,
    teacher_logits_dtype: torch.dtype, max_chunk_bytes: int, jsd_weight: float, backend: str, group: str,
    reduce_hidden_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`divergence_outputs` of all rows: five of [N], and the normaliser [4, N]."""
    rows = wanted_rows(target_N != UNWANTED)
    outputs = temperature.new_zeros(9, len(target_N))
    target_M, temperature_M = pick(target_N, rows), pick(temperature, rows)
    with working(hidden_NH, weight_VH, rows, compute_dtype, logits_dtype, max_chunk_bytes, frozen_head=True):
        student, teacher = _chunked_heads(
            hidden_NH, weight_VH, bias_V, teacher_hidden_NH, teacher_weight_VH, teacher_bias_V, rows, num_columns,
            compute_dtype, logits_dtype, teacher_dtype, teacher_logits_dtype, max_chunk_bytes,
        )  # fmt: skip
        for (here, hidden_RH), (_, teacher_RH) in zip(student.chunks(), teacher.chunks(), strict=True):
            *found, normaliser_R = divergence_outputs(
                backend, student.logits(hidden_RH)[None], teacher.logits(teacher_RH)[None], target_M[here],
                part(temperature_M, here), num_columns, logit_scale, softcap, 0.0 if group else jsd_weight,
            )  # fmt: skip
            outputs[:, here if rows is None else rows[here]] = torch.cat([torch.stack(found), normaliser_R])
        *found, normaliser = *(output.clone() for output in outputs[:5]), outputs[5:].clone()
        if group:
            *found, normaliser = combine_divergence(
                target_N, found, normaliser, temperature, num_columns, logit_scale, softcap, backend, group
            )
            if jsd_weight:
                kls = temperature.new_zeros(2, len(target_N))
                mixture = (softcap, logit_scale, jsd_weight)
                for at, kls_R in _mixture_kls(student, teacher, rows, normaliser, temperature, *mixture):
                    kls[:, at] = kls_R
                found[3:] = kls[0], combine_kls(*add_up(kls, group), jsd_weight)
            normaliser = without_excluded(normaliser, found[0])
    return *found, normaliser


def _mixture_kls(student, teacher, rows, normaliser, temperature, softcap: float, logit_scale: float, weight: float):
    """(place among the N rows, `mixture_rows`) of the wanted rows, a few at a time."""
    scratch = buffers(temperature.dtype, student.size, student.num_columns, temperature.device)
    for (here, hidden_RH), (_, teacher_RH) in zip(student.chunks(), teacher.chunks(), strict=True):
        x_RV, y_RV = student.logits(hidden_RH), teacher.logits(teacher_RH)
        for block in blocks(x_RV):
            at = slice(here.start + block.start, here.start + block.stop)
            at = at if rows is None else rows[at]
            given = temperature if len(temperature) == 1 else temperature[at]
            yield (
                at,
                mixture_rows(x_RV[block], y_RV[block], given, softcap, logit_scale, weight, normaliser[:, at], scratch),
            )


@linear_token_divergence_op.register_fake
def _(hidden_NH, weight_VH, bias_V, teacher_hidden_NH, teacher_weight_VH, teacher_bias_V, target_N, temperature, *_):
    per_token = [temperature.new_empty(target_N.shape) for _ in range(5)]
    return *per_token, temperature.new_empty(4, target_N.shape[0])


@torch.library.custom_op("crest::linear_token_divergence_grad", mutates_args=())
def linear_token_divergence_grad_op(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, teacher_hidden_NH: Tensor, teacher_weight_VH: Tensor,
    teacher_bias_V: Tensor | None, target_N: Tensor, temperature: Tensor, saved: Tensor, grads: Tensor,
    num_columns: int, logit_scale: float, softcap: float, compute_dtype: torch.dtype, logits_dtype: torch.dtype,
    teacher_dtype: torch.dtype, teacher_logits_dtype: torch.dtype, max_chunk_bytes: int, jsd_weight: float,
    backend: str, group: str, reduce_hidden_grad: bool, needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients by the student's hidden, weight and bias; empty where not needed.

    saved [7, N]: entropy, student_kl, divergence, normaliser; grads [4, N] of logp, entropy, student_kl, divergence.
    """
    rows = wanted_rows((grads != 0).any(0) & (target_N != UNWANTED))
    target_M, temperature_M, saved_M, grads_M = (pick(values, rows) for values in (target_N, temperature, saved, grads))
    with working(hidden_NH, weight_VH, rows, compute_dtype, logits_dtype, max_chunk_bytes, not needs[1]):
        student, teacher = _chunked_heads(
            hidden_NH, weight_VH, bias_V, teacher_hidden_NH, teacher_weight_VH, teacher_bias_V, rows, num_columns,
            compute_dtype, logits_dtype, teacher_dtype, teacher_logits_dtype, max_chunk_bytes,
        )  # fmt: skip
        student.want_gradients(*needs)
        for (here, hidden_RH), (_, teacher_RH) in zip(student.chunks(), teacher.chunks(), strict=True):
            z_RV = student.logits(hidden_RH)
            saved_R, grads_R = saved_M[:, here].contiguous(), grads_M[:, here].contiguous()
            write_divergence_gradient(
                backend, z_RV[None], z_RV[None], teacher.logits(teacher_RH)[None], target_M[here],
                part(temperature_M, here), *saved_R[:3], saved_R[3:], *grads_R, num_columns, logit_scale, softcap,
                jsd_weight,
            )  # fmt: skip
            student.add_gradients(here, hidden_RH, z_RV)
        teacher.release()
        found = student.gradients()
    if group and needs[0] and reduce_hidden_grad:
        found = (reduce_hidden(found[0], group), *found[1:])
    return tuple(hidden_NH.new_empty(0) if gradient is None else gradient for gradient in found)


@linear_token_divergence_grad_op.register_fake
def _(hidden_NH, weight_VH, bias_V, *arguments):
    return fake_gradients(hidden_NH, weight_VH, bias_V, arguments[-1])


def _save(ctx, inputs, output):
    *tensors, ctx.scalars = *inputs[:8], inputs[8:]
    _, entropy_N, _, student_kl_N, divergence_N, normaliser = output
    ctx.save_for_backward(*tensors, entropy_N, student_kl_N, divergence_N, normaliser)


def _backward(ctx, grad_logp, grad_entropy, _, grad_student_kl, grad_divergence, *__):
    *tensors, entropy_N, student_kl_N, divergence_N, normaliser = ctx.saved_tensors
    needs = [ctx.needs_input_grad[i] for i in range(3)]
    grads = (grad_logp, grad_entropy, grad_student_kl, grad_divergence)
    grads = torch.stack([torch.zeros_like(entropy_N) if grad is None else grad for grad in grads])
    saved = torch.stack([entropy_N, student_kl_N, divergence_N, *normaliser])
    found = torch.ops.crest.linear_token_divergence_grad(*tensors, saved, grads, *ctx.scalars, needs)
    return *as_given(found, tensors[:3], needs), *[None] * 17


linear_token_divergence_op.register_autograd(_backward, setup_context=_save)
