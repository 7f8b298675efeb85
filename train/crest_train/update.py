"""One round of optimizer steps on a rollout's credit.

B = sessions, T = token positions, N = B*T, R = policy-written positions of a micro-batch, H = hidden size.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from crest_ops import (
    Credit,
    Head,
    Spans,
    linear_policy_loss,
    linear_token_divergence,
    linear_token_stats,
    resolve_head,
)
from crest_train.config import TrainingSection
from crest_train.failures import out_of_memory
from crest_train.model import policy_hidden, recomputing
from crest_train.packing import MicroBatch, micro_batches
from crest_train.ranks import share, total, total_gradients
from crest_train.sessions import Rollout
from crest_train.teacher import Teacher

T = TypeVar("T")

SUMMED = ("loss", "distillation", "entropy", "ratio", "clipped", "tokens", "fed")
"""What `accumulate_gradient` sums: the loss and the distillation in it, then over the policy's tokens; tokens written
and tokens fed."""


def update(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    credit: Credit,
    section: TrainingSection,
    *,
    temperature: float,
    generator: torch.Generator,
    teacher: Teacher | None = None,
) -> dict[str, float]:
    """Step the optimizer minibatches x epochs times and return metrics: means over the tokens or steps trained on.

    The loss of a minibatch is minibatches * sum_N (weight * surrogate + distillation), however it is split into
    micro-batches and over processes: the weights come from the whole rollout. Rows whose credit is all zero are left
    out of the passes. A step whose loss or gradient is not finite is not made, and counted in `skipped_steps`.
    teacher: for credit that distils over the whole vocabulary (signals.teacher_of).
    """
    rows = trained_rows(rollout, credit)
    sums, steps, skipped, grad_norm = dict.fromkeys(SUMMED, 0.0), 0, 0, 0.0
    for _ in range(section.epochs):
        order = [rows[place] for place in torch.randperm(len(rows), generator=generator).tolist()]
        for part in range(min(section.minibatches, len(order))):
            mine = share(order[part :: section.minibatches])

            def accumulate(section: TrainingSection, rows: list[int] = mine) -> dict[str, torch.Tensor | float]:
                optimizer.zero_grad()
                return accumulate_gradient(
                    model,
                    rollout,
                    credit,
                    rows,
                    section,
                    temperature=temperature,
                    teacher=teacher,
                    scale=section.minibatches,
                )

            found, section = within_memory(accumulate, section)
            total_gradients(model.parameters())
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), section.clip)
            bad = ~(torch.isfinite(norm).cpu() & torch.isfinite(torch.as_tensor(found["loss"])).cpu())
            if total(bad.double()):
                skipped += 1
                continue
            sums = {name: sums[name] + found[name] for name in SUMMED}
            grad_norm += norm
            optimizer.step()
            steps += 1
    optimizer.zero_grad()
    sums_M = total(torch.tensor([float(sums[name]) for name in SUMMED], dtype=torch.float64))
    sums = dict(zip(SUMMED, sums_M.tolist(), strict=True))
    tokens = max(1, sums["tokens"])
    metrics = {"loss": sums["loss"] / max(1, steps), "grad_norm": float(grad_norm) / max(1, steps)}
    metrics |= {name: sums[name] / tokens for name in ("entropy", "ratio", "clipped")}
    if credit.distill_N is not None:
        metrics["distillation"] = sums["distillation"] / max(1, steps)
    return metrics | {"trained_rows": len(rows), "trained_tokens": int(sums["fed"]), "skipped_steps": skipped}


def within_memory(accumulate: Callable[[TrainingSection], T], section: TrainingSection) -> tuple[T, TrainingSection]:
    """What accumulate gives, begun again once with micro-batches of half the tokens where it runs out of memory.

    Returns with it the section whose micro-batches fitted. Raises the error of the second time.
    """
    try:
        return accumulate(section), section
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
    # Out here the error, and with it all that its frames held, is gone.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    half = section.model_copy(update={"tokens_per_micro_batch": max(1, section.tokens_per_micro_batch // 2)})
    return accumulate(half), half


def trained_rows(rollout: Rollout, credit: Credit) -> list[int]:
    """The rows of the rollout in which some token has credit or is distilled."""
    trained_N = credit.credit_N != 0
    if credit.distill_N is not None:
        trained_N = trained_N | (credit.distill_N != 0)
    return trained_N.view_as(rollout.policy).any(1).nonzero().flatten().tolist()


def accumulate_gradient(
    model: PreTrainedModel,
    rollout: Rollout,
    credit: Credit,
    rows: list[int],
    section: TrainingSection,
    *,
    temperature: float,
    teacher: Teacher | None = None,
    scale: float = 1.0,
) -> dict[str, torch.Tensor | float]:
    """Add the gradient of scale * loss over the rows to the parameters', and return the sums that SUMMED names.

    loss = sum_N (token_weight * surrogate(ratio, credit) + distillation), in parts of section.tokens_per_micro_batch
    tokens. Raises ValueError: a distillation over the whole vocabulary without a teacher.
    """
    if teacher is None and credit.distill_N is not None and credit.distill_kind != "sampled_reverse_kl":
        raise ValueError(f"teacher is None, want one, as the credit distils with kind {credit.distill_kind!r}")
    sums: dict[str, torch.Tensor | float] = dict.fromkeys(SUMMED, 0.0)
    with recomputing(model):
        for micro in micro_batches(model, rollout, rows, section.tokens_per_micro_batch):
            found = _backward(model, rollout, credit, micro, temperature, teacher, scale)
            for name, value in found.items():
                sums[name] = sums[name] + value
    return sums


def _backward(
    model: PreTrainedModel,
    rollout: Rollout,
    credit: Credit,
    micro: MicroBatch,
    temperature: float,
    teacher: Teacher | None,
    scale: float,
) -> dict[str, torch.Tensor | float]:
    """The backward pass of a micro-batch."""
    rows, policy_BT = micro.rows, rollout.policy[micro.rows]

    def written(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(rollout.policy)[rows][policy_BT].to(model.device)

    spans = None if credit.surrogate.level == "token" else _written_spans(rollout, rows).to(model.device)
    head, target_R = resolve_head(model), written(rollout.ids)
    positions = {} if micro.positions is None else {"position_ids": micro.positions.to(model.device)}
    ids_BT, written_BT = micro.ids.to(model.device), micro.written.to(model.device)
    hidden_RH = policy_hidden(model, ids_BT, written_BT, micro.cache, **positions)
    result = linear_policy_loss(
        hidden_RH,
        head.weight,
        target_R,
        written(credit.credit_N),
        token_weight=written(credit.token_weight_N),
        old_logp=written(rollout.old_logp),
        surrogate=credit.surrogate,
        spans=spans,
        temperature=temperature,
        **head.options,
    )
    loss, distilled = result.loss, 0.0
    if credit.distill_N is not None:
        place_R = written(rollout.policy.flatten().cumsum(0) - 1)
        weight_R, kind = written(credit.distill_N), credit.distill_kind
        distilled = distillation(hidden_RH, head, target_R, weight_R, kind, temperature, teacher, place_R)
        loss = loss + distilled
        distilled = distilled.detach() * scale
    (loss * scale).backward()
    return {
        "loss": loss.detach() * scale,
        "distillation": distilled,
        "entropy": result.entropy.float().sum(),
        "ratio": result.ratio.float().sum(),
        "clipped": result.clipped.float().sum(),
        "tokens": result.logp.numel(),
        "fed": int(rollout.lengths[rows].sum()),
    }


def _written_spans(rollout: Rollout, rows: list[int]) -> Spans:
    """The actions of these rows as recorded, over the positions that the policy wrote alone."""
    sessions = [rollout.sessions[row] for row in rows]
    actions = [(len(action.tokens), action.turn, place) for place, s in enumerate(sessions) for action in s.actions]
    lengths, turn, place = torch.tensor(actions).unbind(1)
    written = torch.ones_like(lengths, dtype=torch.bool)
    return Spans.from_lengths(lengths, action=written, turn=turn, trajectory=place, group=torch.arange(len(rows)))


def distillation(
    hidden: torch.Tensor,
    head: Head,
    targets: torch.Tensor,
    weight: torch.Tensor,
    kind: str,
    temperature: float,
    teacher: Teacher | None,
    place: torch.Tensor,
) -> torch.Tensor:
    """The auxiliary term of the loss, a scalar: sum_R weight_R * D_R, D by kind as `crest_ops.Credit` defines it.

    hidden [R,H] and head: of the policy. targets [R] int64: the realised tokens. weight [R]: distill_N there. place
    [R]: of each token among all that the policy wrote in the rollout, the rows of teacher. Only tokens with a weight
    are looked at, and over the whole vocabulary only those for which the teacher had a hint.
    """
    wanted_R = weight != 0
    if kind != "sampled_reverse_kl":
        wanted_R = wanted_R & teacher.known[place]
    hidden, targets, weight, place = hidden[wanted_R], targets[wanted_R], weight[wanted_R], place[wanted_R]
    options = {"temperature": temperature, **head.options}
    if kind == "sampled_reverse_kl":
        term = linear_token_stats(hidden, head.weight, targets, outputs=("logp",), **options).logp
    else:
        term = linear_token_divergence(
            hidden,
            head.weight,
            teacher.hidden[place],
            teacher.head_weight,
            targets,
            teacher_head_bias=teacher.head_bias,
            kind=kind,
            **options,
        ).divergence
    return (weight * term).sum()
