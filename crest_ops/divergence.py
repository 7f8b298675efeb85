"""How far the policy's distribution of each token is from a teacher's, from the vocabulary logits of both.

p is the student's (the policy's) distribution of a row, q the teacher's.
Shape letters: N tokens, V vocabulary, B batch, T rows of a batch entry (N = B * T), R rows of a block.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .backend import resolve_backend
from .divergence_rows import buffers, divergence_rows, gradient_rows
from .rows import blocks
from .token_stats import clear_unwanted, wanted_blocks
from .vocabulary import as_batch, as_rows, check_savable, check_teacher, check_vocabulary_arguments

KINDS = ("reverse_kl", "forward_kl", "jsd")


@dataclass(frozen=True)
class TokenDivergence:
    """What `token_divergence` gives per token: float32 (float64 for float64 logits), shaped like `targets`.

    logp, entropy: of the student, as in `token_stats`. teacher_logp: log-prob of the target under the teacher, without
    gradient. gap: teacher_logp - logp, 0 where both exclude the target. divergence: of the kind asked for. forward_kl,
    reverse_kl: both of them for these kinds, None for "jsd".
    """

    logp: Tensor
    entropy: Tensor
    teacher_logp: Tensor
    gap: Tensor
    divergence: Tensor
    forward_kl: Tensor | None
    reverse_kl: Tensor | None


def token_divergence(
    logits: Tensor,
    teacher_logits: Tensor,
    targets: Tensor,
    *,
    kind: str = "reverse_kl",
    jsd_weight: float = 0.5,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    backend: str = "auto",
) -> TokenDivergence:
    """Divergence of student and teacher over the full vocabulary, with log-probs and entropy, per token.

    forward_kl = sum_v q_v (log q_v - log p_v),  reverse_kl = sum_v p_v (log p_v - log q_v),
    jsd = (1 - a) KL(p || m) + a KL(q || m),  m = (1 - a) p + a q,  a = jsd_weight (SDPO, arXiv 2601.20802),
    p = softmax of the student's z over the first vocab_size columns, q of the teacher's, z as in `token_stats`, with
    one temperature, softcap and logit_scale for both. No hard cross-entropy is mixed in. The two KLs come from one
    read of both logits; jsd takes two. That jsd refuses a = 0 and 1 (the KLs of SDPO's limits) is this project's
    choice: ask for these kinds.

    Differentiable in logp, entropy, gap, divergence, forward_kl and reverse_kl by the student's logits, with any
    upstream gradients, in one more read of both logits; the teacher gets no gradient. By z_v:
    d reverse_kl = p_v (log p_v - log q_v - reverse_kl),  d forward_kl = p_v - q_v,
    d jsd = (1 - a) p_v (log p_v - log m_v - KL(p || m)). Double backward raises.

    logits, targets, mask, temperature, softcap, logit_scale, vocab_size, ignore_index, backend: as in `token_stats`.
    teacher_logits [..., V'] over the same tokens, V' >= vocab_size, of any floating dtype and strides.
    kind: "reverse_kl", "forward_kl" or "jsd": which one is `divergence`. jsd_weight: the teacher's share of m, in
        (0, 1); not looked at for the other kinds.

    Divergences are >= 0, exactly 0 for equal rows; jsd <= -a log a - (1 - a) log(1 - a). 0 log 0 = 0: a column that
    both exclude has no part. One in the student's support that the teacher excludes makes reverse_kl infinite, the
    other way round forward_kl; an infinite divergence has gradient 0, jsd stays finite. A target outside the student's
    support gives logp = -inf and an all-zero gradient row. A NaN in either row stays in that token. Rows that are not
    wanted are not read; their outputs and gradient are exactly 0.

    Raises ValueError naming the argument, as `token_stats` does, and for teacher_logits, kind and jsd_weight.
    """
    jsd_weight = check_kind(kind, jsd_weight)
    vocab_size = check_vocabulary_arguments(
        logits, targets, mask, temperature, softcap, logit_scale, vocab_size, ignore_index
    )
    check_teacher(teacher_logits, logits, vocab_size)
    check_savable("teacher_logits", teacher_logits)
    dtype = torch.promote_types(logits.dtype, teacher_logits.dtype)
    backend = resolve_backend(backend, logits.device, dtype)
    temperature = as_rows(temperature, logits)
    target_N = torch.ops.crest.wanted_targets(
        targets.reshape(-1), None if mask is None else mask.reshape(-1), temperature, vocab_size, ignore_index
    )
    found = torch.ops.crest.token_divergence(
        as_batch(logits), as_batch(teacher_logits.detach()), target_N, temperature, vocab_size,
        float(logit_scale), float(softcap or 0), jsd_weight, backend,
    )  # fmt: skip
    return as_divergence(kind, *(output_N.view(targets.shape) for output_N in found[:5]))


def check_kind(kind, jsd_weight) -> float:
    """Weight of the teacher in the mixture of a known kind; 0.0 for the KLs."""
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}, want one of {', '.join(map(repr, KINDS))}")
    if kind != "jsd":
        return 0.0
    if not isinstance(jsd_weight, int | float) or not 0 < jsd_weight < 1:
        raise ValueError(
            f"jsd_weight is {jsd_weight!r}, want a number in (0, 1); for the KLs use kind='forward_kl' or 'reverse_kl'"
        )
    return float(jsd_weight)


def as_divergence(kind: str, logp, entropy, teacher_logp, student_kl, divergence) -> TokenDivergence:
    """The op's outputs by their names."""
    teacher_logp = teacher_logp.detach()
    both_out = (teacher_logp == -math.inf) & (logp == -math.inf)
    gap = torch.where(both_out, 0, teacher_logp - logp)
    if kind == "jsd":
        return TokenDivergence(logp, entropy, teacher_logp, gap, divergence, None, None)
    wanted = divergence if kind == "forward_kl" else student_kl
    return TokenDivergence(logp, entropy, teacher_logp, gap, wanted, divergence, student_kl)


# --- forward and gradient of a batch of rows, by backend --------------------------------------------------------------


def divergence_outputs(
    backend: str, logits_BTV: Tensor, teacher_BTV: Tensor, target_N: Tensor, temperature: Tensor, num_columns: int,
    logit_scale: float, softcap: float, jsd_weight: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(logp, entropy, teacher_logp, student_kl, divergence [N], normaliser [4, N], which the gradient reads).

    jsd_weight 0.0: student_kl = KL(p || q), divergence = KL(q || p). Otherwise student_kl = KL(p || m) of the mixture
    m, divergence = the JSD.
    """
    if backend == "triton":
        from crest_kernels.divergence import token_divergence as divergence_triton

        return divergence_triton(
            logits_BTV, teacher_BTV, target_N, temperature, num_columns, logit_scale, softcap, jsd_weight
        )
    outputs = temperature.new_zeros(9, len(target_N))
    scratch = buffers(temperature.dtype, len(target_N), num_columns, target_N.device)
    for rows, _, x_RV, y_RV, temperature_R in _blocks(logits_BTV, teacher_BTV, target_N, temperature, num_columns):
        found = divergence_rows(x_RV, y_RV, target_N[rows], temperature_R, softcap, logit_scale, jsd_weight, scratch)
        outputs[:, rows] = torch.stack(found)
    return *(output.clone() for output in outputs[:5]), outputs[5:].clone()


def write_divergence_gradient(
    backend: str, grad_BTV: Tensor, logits_BTV: Tensor, teacher_BTV: Tensor, target_N: Tensor, temperature: Tensor,
    entropy_N: Tensor, student_kl_N: Tensor, divergence_N: Tensor, normaliser: Tensor, grad_logp_N: Tensor,
    grad_entropy_N: Tensor, grad_student_kl_N: Tensor, grad_divergence_N: Tensor, num_columns: int, logit_scale: float,
    softcap: float, jsd_weight: float,
) -> None:  # fmt: skip
    """Write d/d logits of the outputs times their gradients into `grad`, which may be `logits` itself."""
    if backend == "triton":
        from crest_kernels.divergence_grad import token_divergence_grad as gradient_triton

        gradient_triton(
            grad_BTV, logits_BTV, teacher_BTV, target_N, temperature, entropy_N, student_kl_N, divergence_N, normaliser,
            grad_logp_N, grad_entropy_N, grad_student_kl_N, grad_divergence_N, num_columns, logit_scale, softcap,
            jsd_weight,
        )  # fmt: skip
        return
    clear_unwanted(grad_BTV, target_N, num_columns)
    saved = torch.stack([entropy_N, student_kl_N, divergence_N, *normaliser])
    grads = torch.stack([grad_logp_N, grad_entropy_N, grad_student_kl_N, grad_divergence_N])
    scratch = buffers(temperature.dtype, len(target_N), num_columns, target_N.device)
    for rows, at, x_RV, y_RV, temperature_R in _blocks(logits_BTV, teacher_BTV, target_N, temperature, num_columns):
        found_RV = gradient_rows(
            x_RV, y_RV, target_N[rows], temperature_R, softcap, logit_scale, jsd_weight, saved[:, rows],
            grads[:, rows], scratch,
        )  # fmt: skip
        if isinstance(rows, slice):
            grad_BTV[0, rows, :num_columns] = found_RV
        else:
            grad_BTV[(*at, slice(num_columns))] = found_RV.to(grad_BTV.dtype)


def _blocks(logits_BTV, teacher_BTV, target_N, temperature, num_columns):
    """(rows of N, their place in [B, T], student's logits, teacher's logits, temperatures) of the wanted rows, a few at
    a time.
    """
    length = logits_BTV.shape[1]
    for wanted in wanted_blocks(target_N, num_columns, len(logits_BTV) == 1):
        for rows in blocks(logits_BTV[0, :, :num_columns]) if isinstance(wanted, slice) else [wanted]:
            at = (0, rows) if isinstance(rows, slice) else (rows // length, rows % length)
            temperature_R = temperature[rows] if len(temperature) > 1 else temperature
            yield rows, at, logits_BTV[at][:, :num_columns], teacher_BTV[at][:, :num_columns], temperature_R


# --- the ops ----------------------------------------------------------------------------------------------------------


@torch.library.custom_op("crest::token_divergence", mutates_args=())
def token_divergence_op(
    logits: Tensor, teacher_logits: Tensor, target_N: Tensor, temperature: Tensor, num_columns: int, logit_scale: float,
    softcap: float, jsd_weight: float, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """logits [B, T, V] and teacher_logits [B, T, V'] -> `divergence_outputs`."""
    return divergence_outputs(
        backend, logits, teacher_logits, target_N, temperature, num_columns, logit_scale, softcap, jsd_weight
    )


@token_divergence_op.register_fake
def _(logits, teacher_logits, target_N, temperature, *_):
    per_token = [temperature.new_empty(target_N.shape) for _ in range(5)]
    return *per_token, temperature.new_empty(4, target_N.shape[0])


@torch.library.custom_op("crest::token_divergence_grad", mutates_args=())
def token_divergence_grad_op(
    logits: Tensor, teacher_logits: Tensor, target_N: Tensor, temperature: Tensor, entropy_N: Tensor,
    student_kl_N: Tensor, divergence_N: Tensor, normaliser: Tensor, grad_logp: Tensor, grad_entropy: Tensor,
    grad_student_kl: Tensor, grad_divergence: Tensor, num_columns: int, logit_scale: float, softcap: float,
    jsd_weight: float, backend: str,
) -> Tensor:  # fmt: skip
    """Gradient of the outputs times their gradients by the logits, [B, T, V]."""
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    write_divergence_gradient(
        backend, grad, logits, teacher_logits, target_N, temperature, entropy_N, student_kl_N, divergence_N, normaliser,
        grad_logp, grad_entropy, grad_student_kl, grad_divergence, num_columns, logit_scale, softcap, jsd_weight,
    )  # fmt: skip
    return grad


@token_divergence_grad_op.register_fake
def _(logits, *arguments):
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _save(ctx, inputs, output):
    logits, teacher_logits, target_N, temperature, *ctx.scalars, ctx.backend = inputs
    _, entropy_N, _, student_kl_N, divergence_N, normaliser = output
    ctx.save_for_backward(
        logits, teacher_logits, target_N, temperature, entropy_N, student_kl_N, divergence_N, normaliser
    )


def _backward(ctx, grad_logp, grad_entropy, _, grad_student_kl, grad_divergence, *__):
    saved = ctx.saved_tensors  # once: under a checkpoint they are there once
    like = saved[4]
    grads = (
        torch.zeros_like(like) if grad is None else grad.contiguous()
        for grad in (grad_logp, grad_entropy, grad_student_kl, grad_divergence)
    )  # fmt: skip
    grad = torch.ops.crest.token_divergence_grad(*saved, *grads, *ctx.scalars, ctx.backend)
    return grad, *[None] * 8


token_divergence_op.register_autograd(_backward, setup_context=_save)
