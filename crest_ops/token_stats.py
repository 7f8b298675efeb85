"""Log-prob, entropy and normaliser of each token, from vocabulary logits, differentiable in log-prob and entropy.

Shape letters: N tokens, V vocabulary, B batch, T rows of a batch entry (N = B * T), R rows of a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .backend import resolve_backend
from .rows import NATURAL, UNWANTED, block_rows, grad_rows, scratch_of, stats_rows
from .vocabulary import as_batch, as_rows, check_vocabulary_arguments, check_writable_in_place

OUTPUTS = ("logp", "entropy", "sum_sq_probs")


@dataclass(frozen=True)
class TokenStats:
    """What `token_stats` gives per token: float32 (float64 for float64 logits), shaped like `targets`.

    logp: log-prob of the target. entropy: entropy of the row, None unless asked for. lse: log-sum-exp of the row's
    scaled logits. sum_sq_probs: sum of squared probabilities, None unless asked for. lse and sum_sq_probs carry no
    gradient.
    """

    logp: Tensor
    entropy: Tensor | None
    lse: Tensor
    sum_sq_probs: Tensor | None = None


def token_stats(
    logits: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    outputs: Sequence[str] = ("logp", "entropy"),
    backend: str = "auto",
) -> TokenStats:
    """Log-prob of the target, entropy and log-sum-exp of every row, in one read of the logits.

    z = cap(logit_scale * logits) / temperature with cap(x) = softcap * tanh(x / softcap);
    lse = log sum_{v < vocab_size} exp z_v,  logp = z_target - lse,  entropy = -sum_v p_v log p_v,  p = exp(z - lse).

    Backward reads the logits once more and writes their gradient:
    d logp / dz_v = 1[v = target] - p_v,  d entropy / dz_v = -p_v (log p_v + entropy). It takes any upstream gradient;
    double backward, forward mode and torch.func raise. torch.compile(fullgraph=True, dynamic=True) makes one graph for
    any number of tokens, but one more for a single token and for none, as torch does.

    logits [..., V]: float16, bfloat16 or float32, any strides with a contiguous last dimension (others are copied
        once); computed in float32. float64 is computed in and returned as float64, by the torch backend (for gradient
        checks). A logit <= -1.2e9 counts as -inf: out of the support, probability and gradient exactly 0. Scaled
        logits z may reach 1.2e9 in size.
    targets [...]: int64 or int32 ids, already shifted. `ignore_index` marks a row that is not wanted.
    mask [...] bool: True = wanted. A row that is not wanted is not read; its outputs and gradient are exactly 0.
    temperature: a number or a tensor [...] (detached), > 0. softcap: > 0 or None. logit_scale: > 0.
    vocab_size: columns from there on are padding: never in the sum, gradient 0. Default V.
    outputs: names of TokenStats that are wanted besides lse, of "logp", "entropy", "sum_sq_probs".
    backend: "auto", "torch" or "triton".

    A target outside the support (its logit is -inf) gives logp = -inf and an all-zero gradient row; a row without
    support gives in addition lse = -inf and entropy = 0. A row holding NaN or +inf gives NaN, in that row only.

    Raises ValueError naming the argument for wrong shapes, dtypes, devices, values, and targets outside [0,
    vocab_size). On a GPU targets and a temperature tensor are checked by device-side asserts, or as ValueError under
    CREST_DEBUG=1.
    """
    check_outputs(outputs)
    logp, entropy, lse, sum_sq_probs = stats_tensors(
        logits, targets, mask, temperature, softcap, logit_scale, vocab_size, ignore_index,
        "entropy" in outputs, "sum_sq_probs" in outputs, False, backend,
    )  # fmt: skip
    return TokenStats(logp, entropy, lse, sum_sq_probs)


def check_outputs(outputs: Sequence[str]) -> None:
    if isinstance(outputs, str) or any(name not in OUTPUTS for name in outputs):
        raise ValueError(f"outputs is {outputs!r}, want a sequence of {', '.join(map(repr, OUTPUTS))}")


def stats_tensors(
    logits, targets, mask, temperature, softcap, logit_scale, vocab_size, ignore_index,
    entropy: bool, sum_sq: bool, inplace: bool, backend: str,
):  # fmt: skip
    """`token_stats` by position, with `inplace`: backward overwrites the logits with their gradient."""
    vocab_size = check_vocabulary_arguments(
        logits, targets, mask, temperature, softcap, logit_scale, vocab_size, ignore_index
    )
    backend = resolve_backend(backend, logits.device, logits.dtype)
    shape = targets.shape
    if inplace:
        check_writable_in_place(logits)
    temperature = as_rows(temperature, logits)
    target_N = torch.ops.crest.wanted_targets(
        targets.reshape(-1), None if mask is None else mask.reshape(-1), temperature, vocab_size, ignore_index
    )
    logp, entropy_N, lse, sum_sq_N, _ = torch.ops.crest.token_stats(
        as_batch(logits), target_N, temperature, vocab_size, float(logit_scale), float(softcap or 0),
        entropy, sum_sq, inplace, backend,
    )  # fmt: skip
    return (
        logp.view(shape),
        entropy_N.view(shape) if entropy else None,
        lse.detach().view(shape),
        sum_sq_N.detach().view(shape) if sum_sq else None,
    )


# --- the plain-torch backend ------------------------------------------------------------------------------------------


def wanted_blocks(target_N: Tensor, num_columns: int, one_batch: bool):
    """The wanted rows, a block at a time; all as one slice, which copies nothing, where one batch entry is whole."""
    rows = (target_N != UNWANTED).nonzero()[:, 0]
    if one_batch and len(rows) == len(target_N) > 1:
        yield slice(0, len(rows))
        return
    for block in rows.split(block_rows(num_columns, target_N.device)):
        yield block if len(block) > 1 else block.repeat(2)


def clear_unwanted(grad_BTV: Tensor, target_N: Tensor, num_columns: int) -> int:
    """Zero the gradient of rows that are not wanted and of padded columns. Returns the rows of a batch entry, T."""
    length = max(1, grad_BTV.shape[1])
    unwanted = (target_N == UNWANTED).nonzero()[:, 0]
    grad_BTV[unwanted // length, unwanted % length] = 0
    grad_BTV[:, :, num_columns:] = 0
    return length


def stats_torch(logits_BTV, target_N, temperature, num_columns, logit_scale, softcap, entropy, sum_sq, power=NATURAL):
    outputs_N = [temperature.new_zeros(len(target_N)) for _ in range(6)]
    scratch = scratch_of(temperature.dtype, len(target_N), num_columns, logits_BTV.device)
    for rows in wanted_blocks(target_N, num_columns, len(logits_BTV) == 1):
        x_RV = _rows_of(logits_BTV, rows)[:, :num_columns]
        temperature_R = temperature[rows] if len(temperature) > 1 else temperature
        found = stats_rows(x_RV, target_N[rows], temperature_R, softcap, logit_scale, entropy, sum_sq, power, scratch)
        for output_N, output_R in zip(outputs_N, found, strict=True):
            output_N[rows] = output_R
    logp, entropy_N, lse, sum_sq_N, max_N, log_sum_N = outputs_N
    return logp, entropy_N, lse, sum_sq_N, torch.stack([max_N, log_sum_N])


def grad_torch(
    grad_BTV, logits_BTV, target_N, temperature, entropy_N, normaliser, grad_logp, grad_entropy, num_columns,
    logit_scale, softcap, power=NATURAL,
):  # fmt: skip
    length = clear_unwanted(grad_BTV, target_N, num_columns)
    scratch = scratch_of(temperature.dtype, len(target_N), num_columns, logits_BTV.device)
    for rows in wanted_blocks(target_N, num_columns, len(logits_BTV) == 1):
        x_RV = _rows_of(logits_BTV, rows)[:, :num_columns]
        whole = isinstance(rows, slice)
        grad_rows(
            grad_BTV[0, :, :num_columns] if whole else x_RV, x_RV, target_N[rows],
            temperature[rows] if len(temperature) > 1 else temperature, softcap, logit_scale, entropy_N[rows],
            normaliser[0, rows], normaliser[1, rows], grad_logp[rows],
            None if grad_entropy is None else grad_entropy[rows], power, scratch,
        )  # fmt: skip
        if not whole:
            grad_BTV[rows // length, rows % length, :num_columns] = x_RV


def _rows_of(logits_BTV: Tensor, rows: Tensor | slice) -> Tensor:
    if isinstance(rows, slice):
        return logits_BTV[0, rows]
    return logits_BTV[rows // logits_BTV.shape[1], rows % logits_BTV.shape[1]]


# --- the ops ----------------------------------------------------------------------------------------------------------


@torch.library.custom_op("crest::token_stats", mutates_args=())
def token_stats_op(
    logits: Tensor, target_N: Tensor, temperature: Tensor, num_columns: int, logit_scale: float, softcap: float,
    entropy: bool, sum_sq: bool, inplace: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """logits [B, T, V] -> (logp, entropy, lse, sum_sq_probs) [N] and the backend's normaliser [2, N], which backward
    reads.
    """
    return run_stats(logits, target_N, temperature, num_columns, logit_scale, softcap, entropy, sum_sq, backend)


@token_stats_op.register_fake
def _(logits, target_N, temperature, num_columns, logit_scale, softcap, entropy, sum_sq, inplace, backend):
    per_token = [temperature.new_empty(target_N.shape) for _ in range(4)]
    return *per_token, temperature.new_empty(2, target_N.shape[0])


def run_stats(
    logits, target_N, temperature, num_columns, logit_scale, softcap, entropy, sum_sq, backend, power=NATURAL
):
    """(logp, entropy, lse, sum_sq_probs, normaliser) of logits [B, T, V]."""
    if backend == "triton":
        from crest_kernels.token_stats import token_stats as stats_triton

        return stats_triton(logits, target_N, temperature, num_columns, logit_scale, softcap, sum_sq)
    return stats_torch(logits, target_N, temperature, num_columns, logit_scale, softcap, entropy, sum_sq, power)


def write_gradient(grad, logits, backend, *arguments, power=NATURAL) -> None:
    """Write the gradient of logits [B, T, V] into grad, which may be the logits."""
    if backend == "triton":
        from crest_kernels.token_stats import token_stats_grad as grad_triton

        grad_triton(grad, logits, *arguments)
    else:
        grad_torch(grad, logits, *arguments, power)


@torch.library.custom_op("crest::token_stats_grad", mutates_args=())
def token_stats_grad_op(
    logits: Tensor, target_N: Tensor, temperature: Tensor, entropy_N: Tensor, normaliser: Tensor, grad_logp: Tensor,
    grad_entropy: Tensor | None, num_columns: int, logit_scale: float, softcap: float, backend: str,
) -> Tensor:  # fmt: skip
    """Gradient of grad_logp . logp + grad_entropy . entropy by the logits, [B, T, V]."""
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    write_gradient(
        grad, logits, backend, target_N, temperature, entropy_N, normaliser, grad_logp, grad_entropy,
        num_columns, logit_scale, softcap,
    )  # fmt: skip
    return grad


@token_stats_grad_op.register_fake
def _(logits, *arguments):
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


@torch.library.custom_op("crest::token_stats_grad_", mutates_args=("logits",))
def token_stats_grad_inplace_op(
    logits: Tensor, target_N: Tensor, temperature: Tensor, entropy_N: Tensor, normaliser: Tensor, grad_logp: Tensor,
    grad_entropy: Tensor | None, num_columns: int, logit_scale: float, softcap: float, backend: str,
) -> None:  # fmt: skip
    """The same, written over the logits."""
    write_gradient(
        logits, logits, backend, target_N, temperature, entropy_N, normaliser, grad_logp, grad_entropy,
        num_columns, logit_scale, softcap,
    )  # fmt: skip


def _save(ctx, inputs, output):
    logits, target_N, temperature, *ctx.scalars, ctx.entropy, _, ctx.inplace, ctx.backend = inputs
    _, entropy_N, _, _, normaliser = output
    ctx.save_for_backward(logits, target_N, temperature, entropy_N, normaliser)


def logits_gradient(ctx, grad_logp: Tensor | None, grad_entropy: Tensor | None) -> Tensor:
    """Gradient by the logits that an op saved, written over them where it is in place."""
    logits, target_N, temperature, entropy_N, normaliser = ctx.saved_tensors
    grad_logp = torch.zeros_like(entropy_N) if grad_logp is None else grad_logp.contiguous()
    grad_entropy = None if grad_entropy is None else grad_entropy.contiguous()
    arguments = (
        logits, target_N, temperature, entropy_N, normaliser, grad_logp, grad_entropy, *ctx.scalars, ctx.backend
    )  # fmt: skip
    if ctx.inplace:
        torch.ops.crest.token_stats_grad_(*arguments)
        return logits
    return torch.ops.crest.token_stats_grad(*arguments)


def _backward(ctx, grad_logp, grad_entropy, *_):
    return logits_gradient(ctx, grad_logp, grad_entropy if ctx.entropy else None), *[None] * 9


token_stats_op.register_autograd(_backward, setup_context=_save)
