"""Micro-batches of a rollout within a budget of tokens, laid out as the model takes them best.

Which layout is taken (`layout_of`), and what a token of the budget is there:

- "packed", with flash-attn: sessions with their prompts end to end in one row, positions beginning anew with each; its
  variable-length kernels (found by transformers from these positions) keep them apart. Every token counts.
- "padded", where layers recompute their activations, which goes with no cache: a session with its prompt a row.
- "shared", else: rows behind a cache of the prompt they share, encoded once, its gradient gathered and sent back once.
  In both, tokens and padding count, not the prompt of the latter.

Rows are causal and padded on the right, so that no mask is needed anywhere.

B = rows, T = positions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from crest_train.model import recomputing_layers, shared_prompt
from crest_train.sessions import Rollout

Layout = Literal["packed", "padded", "shared"]


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass.

    rows: of the rollout, in the order in which reading `written` row by row meets their tokens. ids [B,T] int64 and
    written [B,T] bool (True where the policy wrote): as fed. positions [B,T] int64: of each token in its session; None
    for counted on. cache: the prompt that stands before every row.
    """

    rows: list[int]
    ids: torch.Tensor
    written: torch.Tensor
    positions: torch.Tensor | None = None
    cache: Cache | None = None


def layout_of(model: PreTrainedModel) -> Layout:
    """The layout of this module's table that the model is trained in."""
    if getattr(model.config, "_attn_implementation", None) == "flash_attention_2":
        return "packed"
    return "padded" if recomputing_layers(model) else "shared"


def micro_batches(
    model: PreTrainedModel, rollout: Rollout, rows: list[int], tokens: int, layout: Layout | None = None
) -> Iterator[MicroBatch]:
    """The rows in parts of at most `tokens` tokens, one row at least; a shared prompt's own backward pass comes last.

    layout: None for that of `layout_of`.
    """
    layout = layout or layout_of(model)
    if layout == "shared":
        for part, cache in passes(model, rollout, rows, tokens):
            length = int(rollout.lengths[part].max())
            yield MicroBatch(part, rollout.ids[part, :length], rollout.policy[part, :length], cache=cache)
        return
    lengths = rollout.lengths + torch.tensor([len(session.prompt) for session in rollout.sessions])
    for part in parts(sorted(rows, key=lengths.tolist().__getitem__), lengths, tokens, padded=layout == "padded"):
        sessions = [rollout.sessions[row] for row in part]
        ids = [torch.tensor(session.prompt + session.ids) for session in sessions]
        written = [
            torch.cat([torch.zeros(len(session.prompt), dtype=torch.bool), rollout.policy[row, : len(session.ids)]])
            for row, session in zip(part, sessions, strict=True)
        ]
        if layout == "padded":
            yield MicroBatch(part, pad_sequence(ids, batch_first=True), pad_sequence(written, batch_first=True))
        else:
            positions = torch.cat([torch.arange(len(own)) for own in ids])[None]
            yield MicroBatch(part, torch.cat(ids)[None], torch.cat(written)[None], positions)


def passes(
    model: PreTrainedModel, rollout: Rollout, rows: list[int], tokens: int
) -> Iterator[tuple[list[int], Cache | None]]:
    """Rows that share a prompt, in parts of at most `tokens` padded tokens, each with a cache of the prompt."""
    for prompt, members in rollout.by_prompt(rows):
        with shared_prompt(model, prompt) as cache:
            for part in parts(members, rollout.lengths, tokens):
                yield part, cache()


def parts(rows: list[int], lengths: torch.Tensor, tokens: int, *, padded: bool = True) -> Iterator[list[int]]:
    """The rows in their order, as many at a time as stay within `tokens`, and at least one.

    lengths [B] int64: tokens of each row of the rollout. padded: every row of a part counts as long as its longest.
    """
    part: list[int] = []
    longest = total = 0
    for row, length in zip(rows, lengths[rows].tolist(), strict=True):
        longest, total = max(longest, length), total + length
        if part and (longest * (len(part) + 1) if padded else total) > tokens:
            yield part
            part, longest, total = [], length, length
        part.append(row)
    if part:
        yield part
