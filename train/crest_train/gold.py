"""How probable a frozen policy finds the right calls at every action boundary: what TRACE takes its credit from.

The sessions are encoded once. Every boundary is then a row that continues from the first positions of its session's
cache, moved right behind left padding, so that all rows of a pass end their prefix at the same place.

B = sessions, S = actions of all sessions, R = rows of a pass, P = cached positions, L = tokens of an answer.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from crest_ops import linear_token_stats, resolve_head
from crest_train.cache import GrowingCache, prompt_cache
from crest_train.chat import Chat
from crest_train.model import KeyValues, context_length, hidden_states
from crest_train.packing import parts
from crest_train.ranks import gathered, share
from crest_train.rollouts import Rollout, Session


@dataclass(frozen=True)
class _Boundary:
    """index: its place in the result. slot: its session in the pass. before: tokens before it, the prompt counted."""

    index: int
    slot: int
    before: int
    answer: list[int]


@torch.no_grad()
def gold_logp(
    reference: PreTrainedModel,
    chat: Chat,
    batch: Rollout,
    group: torch.Tensor,
    *,
    temperature: float,
    tokens_per_micro_batch: int,
) -> torch.Tensor:
    """Mean log-prob [S + B] float32 of the session's right answer at each of its T_i + 1 action boundaries, in order.

    l_k = (1/L) sum_n log pi_ref(y_n | S_k, y_<n); TRACE, arXiv 2607.13988. S_k: all that precedes action k where the
    policy would write; after the last action, its reply. y: the ground truth of all turns, as one message (this
    project's choice); turns that a session did not begin have that of the rollout of its group that came
    furthest. Where S_k and y together leave the model's context, the boundary before stands (no credit); 0 if none.

    group [B] int64: which task each session is a rollout of. Needs a rollout with ground truth (`Sampling.gold`);
    raises ValueError without. Memory: a pass holds at most
    tokens_per_micro_batch positions, or those of one session and its answer.
    """
    if not any(session.gold for session in batch.sessions):
        raise ValueError("batch.sessions hold no gold; wanted a rollout played with Sampling.gold")
    streams = [_stream(chat, session) for session in batch.sessions]
    length_B = torch.tensor([len(stream) for stream in streams])
    boundaries = _boundaries(batch, streams, answer_ids(chat, batch, group))
    found = torch.full((sum(map(len, boundaries)),), torch.nan)
    for prompt, members in batch.by_prompt(share(list(range(len(streams))))):
        room = context_length(reference) - len(prompt)
        for part in parts(members, length_B, tokens_per_micro_batch):
            fitting = [
                _Boundary(index, slot, before + len(prompt), answer)
                for slot, row in enumerate(part)
                for index, before, answer in boundaries[row]
                if before and before + len(answer) <= room
            ]
            if not fitting:
                continue
            longest = max(boundary.before for boundary in fitting)
            full = [prompt + streams[row] for row in part]
            states = _encode(reference, prompt, [stream[len(prompt) : longest] for stream in full])
            for chunk in _chunks(fitting, tokens_per_micro_batch, context_length(reference)):
                indices = [boundary.index for boundary in chunk]
                found[indices] = _score(reference, states, full, chunk, temperature).cpu()
    for part in gathered(found):
        found = torch.where(found.isnan(), part, found)
    return _carried(found, [len(own) for own in boundaries])


def answer_ids(chat: Chat, batch: Rollout, group: torch.Tensor) -> list[list[int]]:
    """The right answer of each session: the ground truth of its turns, a line each, closed as an action is."""
    tasks, furthest = group.tolist(), dict[int, list[str]]()
    for session, task in zip(batch.sessions, tasks, strict=True):
        furthest[task] = max(furthest.get(task, []), session.gold, key=len)
    answers = []
    for session, task in zip(batch.sessions, tasks, strict=True):
        others = furthest[task][len(session.gold) :]
        ids = chat.encode("\n".join([*session.gold, *others]))
        answers.append(ids if ids[-1:] == [chat.end_token] else [*ids, chat.end_token])
    return answers


def _boundaries(
    batch: Rollout, streams: list[list[int]], answers: list[list[int]]
) -> list[list[tuple[int, int, list[int]]]]:
    """Of each session: (place in the result, tokens before it behind the prompt, answer) of every boundary."""
    boundaries, index = [], 0
    for session, stream, answer in zip(batch.sessions, streams, answers, strict=True):
        places = [action.start for action in session.actions] + [len(stream)]
        boundaries.append([(index + k, place, answer) for k, place in enumerate(places)])
        index += len(places)
    return boundaries


def _stream(chat: Chat, session: Session) -> list[int]:
    """A session's tokens behind its prompt, up to where the policy would write after the last reply."""
    if not session.actions:
        return session.ids
    last = session.actions[-1]
    closing = [] if last.tokens[-1:] == [chat.end_token] else [chat.end_token]
    return session.ids + closing + chat.reply(last.observation, None)


def _encode(model: PreTrainedModel, prompt: list[int], rows: list[list[int]]) -> KeyValues:
    """Keys and values per layer [R, heads, P, width] of rows behind a prompt that is encoded once."""
    cache = GrowingCache()
    if prompt:
        hidden_states(model, torch.tensor([prompt], device=model.device), cache)
        cache.select([0] * len(rows))
    longest = max(map(len, rows))
    padded = [row + [0] * (longest - len(row)) for row in rows]  # on the right: no real token sees it
    hidden_states(model, torch.tensor(padded, device=model.device), cache)
    return [(layer.keys, layer.values) for layer in cache.layers]


def _chunks(boundaries: list[_Boundary], budget: int, context: int) -> Iterator[list[_Boundary]]:
    """Boundaries of like length together, as many as leave a pass within `budget` positions, padding counted."""
    chunk: list[_Boundary] = []
    longest = 0
    for boundary in sorted(boundaries, key=lambda boundary: boundary.before):
        longest = max(longest, len(boundary.answer))
        width = boundary.before + longest
        if chunk and ((len(chunk) + 1) * width > budget or width > context):
            yield chunk
            chunk, longest = [], len(boundary.answer)
        chunk.append(boundary)
    if chunk:
        yield chunk


def _score(
    model: PreTrainedModel, states: KeyValues, full: list[list[int]], chunk: list[_Boundary], temperature: float
) -> torch.Tensor:
    """Mean log-prob [R] of the answers; a row feeds the last token before its boundary, then the answer."""
    length = torch.tensor([len(boundary.answer) for boundary in chunk], device=model.device)
    cached = torch.tensor([boundary.before - 1 for boundary in chunk], device=model.device)
    slots = torch.tensor([boundary.slot for boundary in chunk], device=model.device)
    widest = int(length.max())
    padded = [boundary.answer + [0] * (widest - len(boundary.answer)) for boundary in chunk]
    before = [[full[boundary.slot][boundary.before - 1]] for boundary in chunk]
    answer_RL = torch.tensor(padded, device=model.device)
    fed_RL = torch.cat([torch.tensor(before, device=model.device), answer_RL[:, :-1]], 1)
    cache, cached_RP = _moved(states, slots, cached)
    position_RL = cached[:, None] + torch.arange(widest, device=model.device)
    hidden_RLH = hidden_states(
        model,
        fed_RL,
        cache,
        attention_mask=torch.cat([cached_RP, torch.ones_like(fed_RL, dtype=torch.bool)], 1).long(),
        position_ids=position_RL.clamp(max=context_length(model) - 1),  # only padding lies further
    )
    counts_RL = torch.arange(widest, device=model.device) < length[:, None]
    head = resolve_head(model)
    logp_RL = hidden_RLH.new_zeros(counts_RL.shape, dtype=torch.float32)
    logp_RL[counts_RL] = linear_token_stats(
        hidden_RLH[counts_RL],
        head.weight,
        answer_RL[counts_RL],
        temperature=temperature,
        outputs=("logp",),
        **head.options,
    ).logp.float()
    return (logp_RL.sum(1) / length).clamp(max=0)


def _moved(states: KeyValues, slots: torch.Tensor, cached: torch.Tensor) -> tuple[Cache, torch.Tensor]:
    """A cache with the first cached[r] positions of session slots[r] at the end of row r, and where they are [R, P]."""
    width = int(cached.max())
    column_RP = torch.arange(width, device=cached.device) - (width - cached[:, None])
    row_R1, from_RP = slots[:, None], column_RP.clamp(min=0)

    def moved(state: torch.Tensor) -> torch.Tensor:
        return state.transpose(1, 2)[row_R1, from_RP].transpose(1, 2)

    return prompt_cache([(moved(keys), moved(values)) for keys, values in states]), column_RP >= 0


def _carried(found: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """The values with each missing one (NaN) replaced by the one before it in its session, 0 where there is none."""
    parts = []
    for own in found.split(sizes):
        known = torch.where(own.isnan(), 0, torch.arange(len(own))).cummax(0).values
        parts.append(own[known].nan_to_num(0.0))
    return torch.cat(parts)
