"""The self-teacher: the same weights, with hints in what it is shown (see contexts.py), scoring what the policy wrote.

B = sessions, T = token positions, R = policy-written positions, H = hidden size, V = vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from crest_ops import linear_token_stats, resolve_head
from crest_train.chat import Chat
from crest_train.config import TeacherSection
from crest_train.contexts import hints, teacher_stream
from crest_train.model import context_length, hidden_states, shared_prompt
from crest_train.packing import parts
from crest_train.ranks import share, total
from crest_train.sessions import Rollout

Place = tuple[torch.Tensor, torch.Tensor]
"""Rows and columns [R] int64 of policy-written positions of the rollout."""


@dataclass(frozen=True)
class Teacher:
    """The self-teacher's distributions at all R policy-written positions of a rollout, read row by row.

    hidden [R,H]: hidden states that its head turns into logits. head_weight [V,H], head_bias [V] or None: copies, since
    the policy learns.
    known [R] bool: False where there was no hint, or no room for it; hidden is 0 there, and nothing is to be learned.
    """

    hidden: torch.Tensor
    head_weight: torch.Tensor
    head_bias: torch.Tensor | None
    known: torch.Tensor


@torch.no_grad()
def teacher_gap(
    model: PreTrainedModel,
    chat: Chat,
    rollout: Rollout,
    group: torch.Tensor,
    rows: list[int],
    section: TeacherSection,
    *,
    temperature: float,
    tokens_per_micro_batch: int,
) -> torch.Tensor:
    """Self-teacher minus policy log-prob [B,T] float32 of each policy token of the given rows; 0 elsewhere.

    0 too in sessions without a hint, for which no pass is made, and where hints push a token out of the context.
    group [B] int64: which task each session is a rollout of. Runs without gradient, a shared prompt encoded once.
    """
    head = resolve_head(model)
    gap_BT = torch.zeros_like(rollout.old_logp)
    for at, hidden_RH, target_R in _score(model, chat, rollout, group, rows, section, tokens_per_micro_batch):
        stats = linear_token_stats(
            hidden_RH, head.weight, target_R, temperature=temperature, outputs=("logp",), **head.options
        )
        gap_BT[at] = stats.logp.cpu() - rollout.old_logp[at]
    return total(gap_BT)


@torch.no_grad()
def teacher_states(
    model: PreTrainedModel,
    chat: Chat,
    rollout: Rollout,
    group: torch.Tensor,
    rows: list[int],
    section: TeacherSection,
    *,
    tokens_per_micro_batch: int,
) -> Teacher:
    """The self-teacher's hidden states at every policy token of the rollout, known for the given rows alone.

    For distillation over the whole vocabulary; otherwise as `teacher_gap`, on the model's device.
    """
    head = resolve_head(model)
    weight, bias = head.weight.clone(), None if head.bias is None else head.bias.clone()
    place_BT = rollout.policy.flatten().cumsum(0).view_as(rollout.policy) - 1
    num_written = int(rollout.policy.sum())
    hidden = torch.zeros(num_written, weight.shape[1], dtype=weight.dtype, device=weight.device)
    known = torch.zeros(num_written, dtype=torch.bool, device=weight.device)
    for at, hidden_RH, _ in _score(model, chat, rollout, group, rows, section, tokens_per_micro_batch):
        place_R = place_BT[at].to(weight.device)
        hidden[place_R], known[place_R] = hidden_RH.to(hidden.dtype), True
    return Teacher(total(hidden), weight, bias, total(known.int()).bool())


def _score(
    model: PreTrainedModel,
    chat: Chat,
    rollout: Rollout,
    group: torch.Tensor,
    rows: list[int],
    section: TeacherSection,
    tokens_per_micro_batch: int,
) -> Iterator[tuple[Place, torch.Tensor, torch.Tensor]]:
    """Part by part of a process's share: places of policy tokens, what predicts them when hinted [R,H], tokens [R]."""
    given = hints(rollout, group, section)
    hinted = share([row for row in rows if any(hint is not None for hint in given[row])])
    if not hinted:
        return
    ids_BT, position_BT = teacher_stream(chat, rollout, given, section)
    length_B = position_BT.masked_fill(~rollout.policy, -1).amax(1) + 1
    for prompt, members in rollout.by_prompt(hinted):
        known_BT = rollout.policy & (position_BT < context_length(model) - len(prompt))
        with shared_prompt(model, prompt) as cache:
            for part in parts(members, length_B, tokens_per_micro_batch):
                row_R, column_R = known_BT[part].nonzero(as_tuple=True)
                if not len(row_R):
                    continue
                place_R = position_BT[part][row_R, column_R]
                ids = ids_BT[part, : int(place_R.max()) + 1].to(model.device)
                hidden_BTH = hidden_states(model, ids, cache())
                yield (torch.tensor(part)[row_R], column_R), hidden_BTH[row_R, place_R - 1], ids[row_R, place_R]
