"""One round of optimizer steps on a rollout's credit.

B = sessions, T = token positions, N = B*T, R = policy-written positions of a micro-batch.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from crest_ops import Credit, PolicyLoss, Spans, head_of, linear_policy_loss
from crest_train.config import TrainingSection
from crest_train.model import policy_hidden, shared_prompt
from crest_train.rollouts import Rollout


def update(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    credit: Credit,
    section: TrainingSection,
    *,
    temperature: float,
    generator: torch.Generator,
) -> dict[str, float]:
    """Step the optimizer minibatches x epochs times and return metrics: means over the tokens or steps trained on.

    The loss of a minibatch is minibatches * sum_N weight * surrogate, however it is split into micro-batches: the
    weights come from the whole rollout. Rows whose credit is all zero are left out of the passes.
    """
    rows = (credit.credit_N.view_as(rollout.policy) != 0).any(1).nonzero().flatten()
    sums = dict.fromkeys(("loss", "entropy", "ratio", "clipped", "grad_norm"), 0.0)
    written = fed = steps = 0
    for _ in range(section.epochs):
        order = rows[torch.randperm(len(rows), generator=generator)].tolist()
        for part in range(min(section.minibatches, len(order))):
            optimizer.zero_grad()
            for micro, cache in _micro_batches(model, rollout, order[part :: section.minibatches], section):
                result = _loss(model, rollout, credit, micro, cache, temperature)
                loss = result.loss * section.minibatches
                loss.backward()
                sums["loss"] += loss.detach()
                for name in ("entropy", "ratio", "clipped"):
                    sums[name] += getattr(result, name).float().sum()
                written += result.logp.numel()
                fed += int(rollout.lengths[micro].sum())
            sums["grad_norm"] += torch.nn.utils.clip_grad_norm_(
                model.parameters(), section.clip, error_if_nonfinite=True
            )
            optimizer.step()
            steps += 1
    counts = {name: steps if name in ("loss", "grad_norm") else written for name in sums}
    means = {name: float(total) / max(1, counts[name]) for name, total in sums.items()}
    return means | {"trained_rows": len(rows), "trained_tokens": fed}


def _micro_batches(
    model: PreTrainedModel, rollout: Rollout, rows: list[int], section: TrainingSection
) -> Iterator[tuple[list[int], Cache | None]]:
    """Rows that share a prompt, in parts, each with a cache of it; the prompt's own backward pass comes last."""
    size = section.rows_per_micro_batch
    for prompt, members in rollout.by_prompt(rows):
        with shared_prompt(model, prompt) as cache:
            for start in range(0, len(members), size):
                yield members[start : start + size], cache()


def _loss(
    model: PreTrainedModel,
    rollout: Rollout,
    credit: Credit,
    rows: list[int],
    cache: Cache | None,
    temperature: float,
) -> PolicyLoss:
    length = int(rollout.lengths[rows].max())
    ids_BT, policy_BT = (tensor[rows, :length].to(model.device) for tensor in (rollout.ids, rollout.policy))

    def written(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(rollout.policy)[rows, :length].to(model.device)[policy_BT]

    spans = None
    if credit.surrogate.level != "token":
        turn_BT = rollout.turn[rows, :length].to(model.device)
        spans = Spans.from_mask(policy_BT, group=torch.arange(len(rows), device=model.device), turn=turn_BT)
        spans = replace(spans, action_of_token=spans.action_of_token[spans.mask])  # of the written positions alone
    head = head_of(model)
    return linear_policy_loss(
        policy_hidden(model, ids_BT, policy_BT, cache),
        head.weight,
        ids_BT[policy_BT],
        written(credit.credit_N),
        token_weight=written(credit.token_weight_N),
        old_logp=written(rollout.old_logp),
        surrogate=credit.surrogate,
        spans=spans,
        temperature=temperature,
        **head.options,
    )
