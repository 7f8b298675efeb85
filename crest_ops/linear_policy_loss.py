"""The credit-weighted policy loss straight from hidden states: each chunk of logits becomes its own gradient in place.

Shape letters: N tokens, H hidden size, V vocabulary, R rows of a chunk, M wanted rows.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .backend import debugging
from .chunks import MAX_CHUNK_BYTES, ChunkedHead, move_rows_forward
from .debug import compare_rows
from .linear import token_stats_of
from .linear_call import fake_gradients, part, pick, prepare, wanted_rows
from .memory import working
from .policy_loss import (
    PolicyLoss,
    as_policy_loss,
    check_coefficients,
    check_loss_arguments,
    composed_loss,
    finite_given,
    live_positions,
    token_losses,
)
from .rows import BINARY, UNWANTED
from .shards import agreed, check_apart
from .spans import Spans
from .surrogates import PPOClip, Surrogate, as_numbers, from_numbers, ranks_of
from .token_stats import run_stats, write_gradient

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def linear_policy_loss(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    credit: Tensor,
    *,
    token_weight: Tensor,
    head_bias: Tensor | None = None,
    old_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    surrogate: Surrogate = PPOClip(0.2, 0.28),
    importance_weight: Tensor | None = None,
    spans: Spans | None = None,
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
) -> PolicyLoss:
    """Credit-weighted surrogate loss of the realised tokens, from hidden states and the vocabulary head.

    loss = sum_n token_weight_n (importance_weight_n * surrogate(r_n, credit_n) + kl_coef * k3_n - entropy_coef * H_n)
    of the logits hidden @ head_weight.T + head_bias: `policy_loss` has the terms and their sources (PPO, arXiv
    1707.06347; k3, arXiv 2402.03300). One shot, this project's own: credit and token_weight are known, so each chunk
    of logits is overwritten with its gradient in the visit that finds its statistics, and its two products are taken
    at once: three matrix products instead of four, and nothing of size [N, V] is kept. The gradients wait for
    backward, which scales them; they cost nothing where no input needs one.

    Rows that are masked are left out before the first product, rows whose gradient is 0 (credit 0, clipped) before the
    other two. A surrogate whose ratio spans an action, turn or trajectory off policy, and a head split over a
    process_group, go the composable way: the log-probs of all rows first, each chunk made again in backward.

    hidden [..., H], head_weight [V, H], head_bias [V], logits_dtype, process_group, reduce_hidden_grad,
        max_chunk_bytes: as in `linear_token_stats`.
    targets, credit, token_weight, old_logp, ref_logp, kl_coef, entropy_coef, surrogate, importance_weight, spans, mask,
        temperature, softcap, logit_scale, vocab_size, ignore_index, backend: as in `policy_loss`; per-token ones are
        [...] like targets.

    Values, metrics and edge cases are those of `policy_loss`. A second backward gives the same gradient (retain_graph;
    on the CPU it raises where the first one's gradient of the weight was changed in place), double backward raises.
    Raises ValueError naming the argument, as `policy_loss` and `linear_token_stats` do.
    """
    per_token = {
        "credit": credit,
        "token_weight": token_weight,
        "old_logp": old_logp,
        "ref_logp": ref_logp,
        "importance_weight": importance_weight,
    }
    check_apart(process_group, getattr(spans, "process_group", None))
    with agreed(process_group), agreed(ranks_of(surrogate, spans)):
        check_loss_arguments(hidden, targets, per_token, spans)
        check_coefficients(kl_coef, entropy_coef, ref_logp, surrogate, spans)
        live_N = live_positions(targets, mask, ignore_index, spans)
        call = prepare(
            hidden, head_weight, head_bias, targets, live_N.view(targets.shape), temperature, softcap, logit_scale,
            vocab_size, ignore_index, backend, logits_dtype, max_chunk_bytes, process_group,
        )  # fmt: skip
        given = finite_given(per_token, live_N)
    one_shot = call.shard is None and (surrogate.level == "token" or old_logp is None)
    if one_shot:
        needs = [
            torch.is_grad_enabled() and tensor is not None and tensor.requires_grad
            for tensor in (hidden, head_weight, head_bias)
        ]
        per_row = [None if name not in given else given[name].to(call.temperature.dtype) for name in per_token]
        logp_N, entropy_N, *gradients = torch.ops.crest.linear_policy_loss(
            call.hidden_NH.detach(), head_weight.detach(), None if head_bias is None else head_bias.detach(),
            call.target_N, call.temperature, *per_row, *as_numbers(surrogate),
            as_coefficient(kl_coef), as_coefficient(entropy_coef), *call.scalars, needs,
        )  # fmt: skip
        if debugging():
            compare_rows(call, head_weight, head_bias, logp_N, entropy_N)
    else:
        logp_N, entropy_N, _, _ = token_stats_of(call, head_weight, head_bias, True, False, reduce_hidden_grad)
    found = token_losses(logp_N.detach(), entropy_N.detach(), given, surrogate, spans, live_N, kl_coef, entropy_coef)
    if one_shot:
        loss = (given["token_weight"].to(found.value.dtype) * found.value).sum()
        inputs = (hidden, head_weight, head_bias)
        roots = [tensor.narrow(-1, 0, 0).clone() for tensor, need in zip(inputs, needs, strict=True) if need]
        loss = _Scaled.apply(loss, *inputs, *gradients, *roots)
    else:
        loss = composed_loss(found, given["token_weight"], logp_N, entropy_N, entropy_coef)
    return as_policy_loss(loss, found, logp_N, entropy_N, targets.shape)


class _Scaled(torch.autograd.Function):
    """The loss, whose gradients by hidden, weight and bias are there already and wait to be scaled.

    roots: nothing of each input that has a gradient, but of its graph.
    """

    @staticmethod
    def forward(ctx, loss, hidden, weight, bias, grad_hidden, grad_weight, grad_bias, *roots):
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.roots = roots
        ctx.like = [None if t is None else (t.shape, t.dtype) for t in (hidden, weight, bias)]
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        with torch.no_grad():
            found = [
                _scale(gradient, grad, like[1], keep=i > 0) if ctx.needs_input_grad[i + 1] else None
                for i, (gradient, like) in enumerate(zip(ctx.saved_tensors, ctx.like, strict=True))
            ]
            if found[0] is not None:
                found[0] = found[0].view(ctx.like[0][0])
        if torch.is_grad_enabled():  # create_graph: the gradients depend on the inputs in ways that are not followed
            found = [None if g is None else _Last.apply(g, grad, *ctx.roots) for g in found]
        return None, *found, *[None] * (3 + len(ctx.roots))


class _Last(torch.autograd.Function):
    """A gradient that cannot be differentiated by what it depends on."""

    @staticmethod
    def forward(ctx, gradient, *depends_on):
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("linear_policy_loss cannot be differentiated twice: its gradient is found in forward")


def _scale(gradient: Tensor, scale: Tensor, dtype: torch.dtype, keep: bool) -> Tensor:
    """gradient * scale, rounded once. keep: the gradient itself may be handed on: autograd copies it where it is still
    used (a view it would take as it is).

    A scale of narrow dtype would be rounded before it is multiplied, hence the three ways.
    """
    if torch.compiler.is_compiling():
        return (gradient.to(scale.dtype) * scale).to(dtype)
    if gradient.device.type == "cpu":
        number = float(scale)
        return gradient if keep and number == 1 and gradient.dtype == dtype else (gradient * number).to(dtype)
    return torch.mul(gradient, scale.view(1), out=torch.empty_like(gradient, dtype=dtype))


# --- the op -----------------------------------------------------------------------------------------------------------


def as_coefficient(value: float) -> Tensor:
    """A number of the loss as a tensor on the CPU: a graph takes another one without being compiled anew."""
    return torch.ones((), dtype=torch.float64) * value


@torch.library.custom_op("crest::linear_policy_loss", mutates_args=())
def linear_policy_loss_op(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, target_N: Tensor, temperature: Tensor, credit: Tensor,
    token_weight: Tensor, old_logp: Tensor | None, ref_logp: Tensor | None, importance_weight: Tensor | None,
    kind: int, a: float, b: float, c: float, kl_coef: Tensor, entropy_coef: Tensor, num_columns: int,
    logit_scale: float, softcap: float, compute_dtype: torch.dtype, logits_dtype: torch.dtype, max_chunk_bytes: int,
    backend: str, needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(logp, entropy) [N], and the loss's gradients by hidden, weight and bias."""
    rows = wanted_rows(target_N != UNWANTED)
    logp_N, entropy_N = (temperature.new_zeros(len(target_N)) for _ in range(2))
    target_M, temperature_M, *per_row = (
        pick(values, rows)
        for values in (target_N, temperature, credit, token_weight, old_logp, ref_logp, importance_weight)
    )
    shape = dict(num_columns=num_columns, logit_scale=logit_scale, softcap=softcap)
    terms = dict(kl_coef=float(kl_coef), entropy_coef=float(entropy_coef), surrogate=(kind, a, b, c))
    with working(hidden_NH, weight_VH, rows, compute_dtype, logits_dtype, max_chunk_bytes, not needs[1]):
        head = ChunkedHead(
            hidden_NH, weight_VH, bias_V, rows, num_columns, compute_dtype, logits_dtype, max_chunk_bytes
        )
        head.want_gradients(*needs)
        for here, hidden_RH in head.chunks():
            z_RV = head.logits(hidden_RH)
            arguments = (target_M[here], part(temperature_M, here), *(part(values, here) for values in per_row))
            if any(needs):
                visit = visit_triton if backend == "triton" else visit_torch
                logp_R, entropy_R, order = visit(z_RV, *arguments, **shape, **terms)
                place_R = order + here.start
                head.add_gradients(place_R, hidden_RH[order], z_RV[: len(order)])
            else:
                logp_R, entropy_R, *_ = run_stats(
                    z_RV[None], *arguments[:2], num_columns, logit_scale, softcap, True, False, backend, BINARY
                )
            at = here if rows is None else rows[here]
            logp_N[at], entropy_N[at] = logp_R, entropy_R
        gradients = head.gradients()
    return logp_N, entropy_N, *(hidden_NH.new_empty(0) if g is None else g for g in gradients)


@linear_policy_loss_op.register_fake
def _(hidden_NH, weight_VH, bias_V, target_N, temperature, *arguments):
    per_token = (temperature.new_empty(target_N.shape) for _ in range(2))
    return *per_token, *fake_gradients(hidden_NH, weight_VH, bias_V, arguments[-1])


def visit_triton(z_RV, *arguments, **options) -> tuple[Tensor, Tensor, Tensor]:
    """One launch: the logits become their gradient; the rows that have one are then brought to the front."""
    from crest_kernels.policy_loss import policy_loss

    logp_R, entropy_R, active_R = policy_loss(z_RV, *arguments, **options)
    return logp_R, entropy_R, move_rows_forward(z_RV, active_R)


def visit_torch(
    z_RV, target_R, temperature, credit, token_weight, old_logp, ref_logp, importance_weight,
    *, num_columns, logit_scale, softcap, kl_coef, entropy_coef, surrogate,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(logp, entropy, which row lies where) of a chunk; the rows that have a gradient lie in front and hold it."""
    columns = (num_columns, logit_scale, softcap)
    logp_R, entropy_R, _, _, normaliser = run_stats(
        z_RV[None], target_R, temperature, *columns, True, False, "torch", BINARY
    )
    given = {"credit": credit, "old_logp": old_logp, "ref_logp": ref_logp, "importance_weight": importance_weight}
    given = {name: value for name, value in given.items() if value is not None}
    live_R = torch.ones_like(target_R, dtype=torch.bool)
    found = token_losses(logp_R, entropy_R, given, from_numbers(*surrogate), None, live_R, kl_coef, entropy_coef)
    grad_logp_R, grad_entropy_R = token_weight * found.slope, -entropy_coef * token_weight
    active_R = (logp_R != -torch.inf) & ((grad_logp_R != 0) | (grad_entropy_R != 0))
    order = move_rows_forward(z_RV, active_R)
    if len(order):
        z_1AV = z_RV[None, : len(order)]
        write_gradient(
            z_1AV, z_1AV, "torch", target_R[order], temperature if len(temperature) == 1 else temperature[order],
            entropy_R[order], normaliser[:, order], grad_logp_R[order],
            grad_entropy_R[order] if entropy_coef else None, *columns, power=BINARY,
        )  # fmt: skip
    return logp_R, entropy_R, order
