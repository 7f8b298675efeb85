"""What a run keeps of a step's sessions: records/step-00010.jsonl, a line a session, numbers for every token.

A line is `recording.RecordedSession`: what `crest-train probe --rollouts` reads, what `crest-train view` shows, and

    pandas.read_json("records/step-00010.jsonl", lines=True)

a row a session. `batch` is the step. Tokens are rows after .explode("actions") and, of the columns that
pandas.json_normalize makes of these, .explode(["tokens", "logp", "entropy", "credit", "token_weight"]).

B = sessions, T = token positions, N = B*T.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from crest_ops import Credit, Signals
from crest_train.recording import CREDITED, MEASURED, line_of
from crest_train.sessions import Rollout

MOST_BYTES = 32 * 2**20
"""The groups of a step are recorded as far as they fit into a file of this size; the first one always."""


def records_of(
    step: int,
    batch: Rollout,
    group: torch.Tensor,
    credit: Credit,
    signals: Signals,
    logp: torch.Tensor,
    tokenizer: PreTrainedTokenizerBase,
    most_bytes: int = MOST_BYTES,
) -> str:
    """The lines of a step's sessions, group after group, numbers with six digits.

    group [B] int: as the credit has it. logp [B,T] float: of the policy that the step's update left, at the sampling
    temperature. Numbers that are not finite are left out. Raises ValueError: see recording.line_of.
    """
    values = {
        "credit": credit.credit_N,
        "token_weight": credit.token_weight_N,
        "distill": credit.distill_N,
        "teacher_gap": signals.teacher_gap_N if signals.skill_gap_N is None else signals.skill_gap_N,
        "ratio": (logp - batch.old_logp).exp(),
    }
    known = {name: value.view_as(batch.policy) for name, value in values.items() if value is not None}
    lines = _lines(step, batch, group.tolist(), known, tokenizer)
    text, size = "", 0
    for _, several in groupby(lines, key=lambda placed: placed[0]):
        more = "".join(line for _, line in several)
        size += len(more.encode())
        if text and size > most_bytes:
            break
        text += more
    return text


def _lines(
    step: int, batch: Rollout, group: list[int], known: dict[str, torch.Tensor], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[int, str]]:
    for row, (session, place) in enumerate(zip(batch.sessions, group, strict=True)):
        fields: dict[str, Any] = {"batch": step, "group": place, **asdict(session)}
        for action in fields["actions"]:
            written = slice(action["start"], action["start"] + len(action["tokens"]))
            action |= {name: _rounded(action[name]) for name in MEASURED}
            action |= {name: _rounded(known[name][row, written].tolist()) for name in CREDITED if name in known}
        fields["texts"] = token_texts(tokenizer, session.ids)
        yield place, line_of(fields)


def _rounded(values: list[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in values] if all(map(math.isfinite, values)) else []


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """The text of every id, which joined are the text of all: a character of several ids stands at the last of them.

    None from a tokenizer that is not one of the library tokenizers ("fast").
    """
    if not tokenizer.is_fast:
        return []
    backend, stream = tokenizer.backend_tokenizer, DecodeStream(skip_special_tokens=False)
    texts = [stream.step(backend, token) or "" for token in ids]
    whole = backend.decode(ids, skip_special_tokens=False)
    texts[-1] += whole.removeprefix("".join(texts))  # a character that ends with the session, unfinished
    return texts
