"""The self-teacher: the same weights, with every turn's ground truth in its request, scoring what the policy wrote.

B = sessions, T = token positions, R = policy-written positions.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from crest_ops import head_of, linear_token_stats
from crest_train.model import hidden_states, shared_prompt
from crest_train.rollouts import Rollout


@dataclass(frozen=True)
class Teacher:
    """The self-teacher's distributions at all R policy-written positions of a rollout, read row by row.

    hidden [R,H]: hidden states that its head turns into logits. head_weight [V,H]: a copy, since the policy learns.
    known [R] bool: False where there was no hint, or no room for it; hidden is 0 there, and nothing is to be learned.
    """

    hidden: torch.Tensor
    head_weight: torch.Tensor
    known: torch.Tensor


@torch.no_grad()
def teacher_gap(
    model: PreTrainedModel, rollout: Rollout, rows: list[int], *, temperature: float, rows_per_micro_batch: int
) -> torch.Tensor:
    """Self-teacher minus policy log-prob [B,T] float32 of each policy token of the given rows; 0 elsewhere.

    Needs a rollout with a teacher stream. Runs without gradient, a shared prompt encoded once.
    """
    head = head_of(model)
    gap_BT = torch.zeros_like(rollout.old_logp)
    for prompt, members in rollout.by_prompt([row for row in rows if rollout.policy[row].any()]):
        with shared_prompt(model, prompt) as cache:
            for start in range(0, len(members), rows_per_micro_batch):
                part = members[start : start + rows_per_micro_batch]
                written = rollout.policy[part]
                row_R, column_R = written.nonzero(as_tuple=True)
                place_R = rollout.teacher_position[part][row_R, column_R]
                length = int(place_R.max()) + 1
                teacher_ids = rollout.teacher_ids[part, :length].to(model.device)
                hidden_BTH = hidden_states(model, teacher_ids, cache())
                stats = linear_token_stats(
                    hidden_BTH[row_R, place_R - 1],
                    head.weight,
                    teacher_ids[row_R, place_R],
                    temperature=temperature,
                    outputs=("logp",),
                    **head.options,
                )
                at = torch.tensor(part)[row_R], column_R
                gap_BT[at] = stats.logp.cpu() - rollout.old_logp[at]
    return gap_BT
