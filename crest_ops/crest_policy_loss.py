"""CrEST from student and teacher logits to the loss: one read of both forward, one read and one write of the student's
backward.

Shape letters: N tokens (all of `targets`, row by row), K turns, V vocabulary.
"""

import torch
from torch import Tensor

from .backend import resolve_backend
from .methods.crest import CrestConfig, crest_credit
from .policy_loss import (
    PolicyLoss,
    batch_metrics,
    check_loss_arguments,
    evaluate_surrogate,
    finite_where,
    live_positions,
    log_ratio,
    mean_where,
    with_gradient,
)
from .segments import segment_expand
from .spans import Spans, check_whole
from .surrogates import PPOClip, SurrogateValue
from .token_stats import logits_gradient, stats_torch
from .vocabulary import (
    FLOAT_DTYPES,
    as_batch,
    as_rows,
    check_per_token,
    check_teacher,
    check_vocabulary_arguments,
    check_writable_in_place,
)


def crest_policy_loss(
    logits: Tensor,
    teacher_logits: Tensor,
    targets: Tensor,
    spans: Spans,
    turn_advantage: Tensor,
    *,
    token_weight: Tensor,
    old_logp: Tensor | None = None,
    config: CrestConfig = CrestConfig(),
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    backend: str = "auto",
    inplace: bool = False,
) -> PolicyLoss:
    """CrEST's policy loss, from the logits of the policy and of its privileged self.

    loss = sum_n token_weight_n * surrogate(r_n, A_k(n) phi_n),  phi = crest_modulation(sgn A, gap, entropy_gate(u)),
    gap = teacher_logp - old_logp,  u = -old_logp (gate "surprisal") or the policy's entropy,  r = exp(logp - old_logp).
    CrEST, arXiv 2608.13179, Eqs. 1-10. Gap and surprisal from old_logp rather than the live policy are this project's
    choice (the same on policy); so are the statistics of u over unmasked tokens only.

    Three passes: the vocabulary pass reads each student and each teacher logit once; the segment pass is one launch
    (Triton, PPOClip at token level; other surrogates in torch); the gradient pass, in backward, reads the student's
    logits and writes their gradient. The teacher gets no gradient.

    logits, targets, token_weight, old_logp, mask, temperature, softcap, logit_scale, vocab_size, ignore_index, backend,
        inplace: as in `policy_loss`. teacher_logits [..., V'] over the same tokens, V' >= vocab_size; the same
        temperature, cap and scale.
    spans over the N positions of targets; turn_advantage [K] of their turns, detached. config: of METHODS["crest"]; its
        reduction is not used, token_weight stands for it.
    metrics: as in `policy_loss`, and phi_mean, amplified (share of tokens with phi > 1), gap_mean.

    Raises ValueError naming the argument, as `policy_loss` does.
    """
    if not isinstance(spans, Spans):
        raise ValueError(f"spans is {type(spans).__name__}, want Spans")
    check_whole(spans)
    if not isinstance(config, CrestConfig):
        raise ValueError(f"config is {type(config).__name__}, want CrestConfig")
    check_loss_arguments(logits, targets, {"token_weight": token_weight, "old_logp": old_logp}, spans)
    num_columns = check_vocabulary_arguments(
        logits, targets, mask, temperature, softcap, logit_scale, vocab_size, ignore_index
    )
    check_teacher(teacher_logits, logits, num_columns)
    check_per_token("turn_advantage", turn_advantage, (spans.num_turns,), FLOAT_DTYPES, logits.device)
    backend = resolve_backend(backend, logits.device, logits.dtype)
    if inplace:
        check_writable_in_place(logits)

    live_N = live_positions(targets, mask, ignore_index, spans)
    temperature = as_rows(temperature, logits)
    target_N = torch.ops.crest.wanted_targets(targets.reshape(-1), live_N, temperature, num_columns, ignore_index)
    logp_N, entropy_N, _, _, teacher_logp_N = torch.ops.crest.teacher_pair(
        as_batch(logits), as_batch(teacher_logits.detach()), target_N, temperature, num_columns,
        float(logit_scale), float(softcap or 0), inplace, backend,
    )  # fmt: skip
    new_N, entropy_N, teacher_logp_N = logp_N.detach(), entropy_N.detach(), teacher_logp_N.detach()
    weight_N = finite_where("token_weight", token_weight.reshape(-1), live_N).to(new_N.dtype)
    old_N = new_N if old_logp is None else finite_where("old_logp", old_logp.reshape(-1), live_N).to(new_N.dtype)
    advantage_K = finite_where("turn_advantage", turn_advantage, torch.ones_like(turn_advantage, dtype=torch.bool))
    advantage_K = advantage_K.to(new_N.dtype)
    teacher_logp_N = finite_where("log-prob of teacher_logits", teacher_logp_N, live_N, True)
    uncertainty_N = (-old_N if config.gate == "surprisal" else entropy_N).clamp(max=1e30)

    surrogate = config.surrogate
    log_ratio_N = log_ratio(new_N, None if old_logp is None else old_N)
    if backend == "triton" and type(surrogate) is PPOClip and surrogate.level == "token":
        value_N, slope_N, ratio_N, clipped_N, phi_N = torch.ops.crest.crest_segments(
            new_N, teacher_logp_N, old_N, uncertainty_N, live_N, spans.turn_of_token, advantage_K, weight_N,
            _ends(spans, config), config.lam, config.eps, config.tau, config.rho, config.std_eps, surrogate.low,
            surrogate.high, surrogate.dual,
        )  # fmt: skip
        found = SurrogateValue(value_N, slope_N, clipped_N, ratio_N)
    else:
        gap_N = torch.where(old_N == -torch.inf, 0, teacher_logp_N - old_N)
        credit_N = crest_credit(advantage_K, gap_N, uncertainty_N, spans, config, mask=live_N)
        found = evaluate_surrogate(surrogate, new_N, log_ratio_N, credit_N, spans, live_N)
        value_N, slope_N = weight_N * found.value, weight_N * found.slope
        advantage_N = segment_expand(advantage_K, spans.turn_of_token)
        phi_N = torch.where(live_N, torch.where(advantage_N == 0, 1, credit_N / advantage_N), 0)

    metrics = batch_metrics(found, entropy_N, log_ratio_N, live_N)
    metrics["phi_mean"] = mean_where(phi_N, live_N)
    metrics["amplified"] = mean_where((phi_N > 1).to(phi_N.dtype), live_N)
    both_N = live_N & (teacher_logp_N != -torch.inf) & (old_N != -torch.inf)
    metrics["gap_mean"] = mean_where(teacher_logp_N - old_N, both_N)
    shape = targets.shape
    return PolicyLoss(
        with_gradient(value_N.sum(), logp_N, slope_N, None, None),
        new_N.view(shape), entropy_N.view(shape), found.ratio.view(shape), found.clipped.view(shape), metrics,
    )  # fmt: skip


def _ends(spans: Spans, config: CrestConfig) -> Tensor:
    """End of the positions of each span of the gate's statistics; the last is N."""
    num_tokens, of_token = spans.num_tokens, spans.action_of_token
    if config.scope == "batch" or not spans.num_turns:
        return torch.full((1,), num_tokens, dtype=torch.int64, device=of_token.device)
    of_token, num_spans = {
        "trajectory": (spans.trajectory_of_token, spans.num_trajectories),
        "turn": (spans.turn_of_token, spans.num_turns),
    }[config.scope]
    place_N = torch.arange(1, num_tokens + 1, device=of_token.device)
    last = torch.zeros(num_spans + 1, dtype=torch.int64, device=of_token.device)
    last = last.scatter_reduce(0, torch.where(of_token < 0, num_spans, of_token).long(), place_N, "amax")[:num_spans]
    ends = last.cummax(0).values
    return torch.cat([ends[:-1], torch.full_like(ends[:1], num_tokens)])


# --- the ops ----------------------------------------------------------------------------------------------------------


@torch.library.custom_op("crest::teacher_pair", mutates_args=())
def teacher_pair_op(
    logits: Tensor, teacher_logits: Tensor, target_N: Tensor, temperature: Tensor, num_columns: int, logit_scale: float,
    softcap: float, inplace: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The student's (logp, entropy, lse) [N] and normaliser [2, N], and the teacher's logp [N]; one read of both
    logits.
    """
    if backend == "triton":
        from crest_kernels.teacher_pair import teacher_pair

        return teacher_pair(logits, teacher_logits, target_N, temperature, num_columns, logit_scale, softcap)
    student = stats_torch(logits, target_N, temperature, num_columns, logit_scale, softcap, True, False)
    teacher = stats_torch(teacher_logits, target_N, temperature, num_columns, logit_scale, softcap, False, False)
    logp, entropy, lse, _, normaliser = student
    return logp, entropy, lse, normaliser, teacher[0]


@teacher_pair_op.register_fake
def _(logits, teacher_logits, target_N, temperature, *_):
    logp, entropy, lse, teacher_logp = (temperature.new_empty(target_N.shape) for _ in range(4))
    return logp, entropy, lse, temperature.new_empty(2, target_N.shape[0]), teacher_logp


def _save(ctx, inputs, output):
    logits, _, target_N, temperature, *ctx.scalars, ctx.inplace, ctx.backend = inputs
    _, entropy_N, _, normaliser, _ = output
    ctx.save_for_backward(logits, target_N, temperature, entropy_N, normaliser)


def _backward(ctx, grad_logp, grad_entropy, *_):
    return logits_gradient(ctx, grad_logp, grad_entropy), *[None] * 8


teacher_pair_op.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("crest::crest_segments", mutates_args=())
def crest_segments_op(
    logp: Tensor, teacher_logp: Tensor, old_logp: Tensor, uncertainty: Tensor, live: Tensor, turn_of_token: Tensor,
    turn_advantage: Tensor, weight: Tensor, ends: Tensor, lam: float, eps: float, tau: float, rho: float, std_eps:
    float, low: float, high: float, dual: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """CrEST's segment pass in Triton: (weight * value, weight * slope, ratio, clipped, phi) [N]."""
    from crest_kernels.crest_segments import crest_segments

    return crest_segments(
        logp, teacher_logp, old_logp, uncertainty, live, turn_of_token, turn_advantage, weight, ends,
        lam=lam, eps=eps, tau=tau, rho=rho, std_eps=std_eps, low=low, high=high, dual=dual,
    )  # fmt: skip


@crest_segments_op.register_fake
def _(logp, teacher_logp, old_logp, uncertainty, live, *_):
    value, slope, ratio, phi = (torch.empty_like(logp) for _ in range(4))
    return value, slope, ratio, torch.empty_like(live), phi
