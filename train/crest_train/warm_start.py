"""The warm start of the built-in policy: imitation of demonstrations that slip, done once and kept in the user's cache.

Afterwards the policy does about half of the turns, and nearly all of them when a hint tells the right calls: there is
something left to learn, and a self-teacher to learn it from.

B = sessions, T = token positions, R = positions that the demonstrator wrote, V = vocabulary.
"""

import hashlib
import inspect
import json
import os
import random
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from filelock import FileLock
from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from crest_train import chat, policy, tokenizer
from crest_train.chat import Chat, make_chat
from crest_train.display import progress
from crest_train.environments import desk, desk_demos, desk_sessions, desk_world
from crest_train.environments.desk import Desk
from crest_train.environments.desk_demos import Demonstration, demonstrate
from crest_train.environments.desk_world import VOCABULARY
from crest_train.fetch import cache_folder
from crest_train.model import policy_logits
from crest_train.policy import TinyConfig, TinyForCausalLM
from crest_train.tokenizer import build_tokenizer

Row = tuple[list[int], list[bool]]
"""Token ids of a demonstration, and which of them the demonstrator wrote."""


@dataclass(frozen=True)
class WarmStart:
    """How the imitation goes. seed, steps; turns_per_step: user turns per step, whatever the length of the sessions;
    rate: highest learning rate of AdamW; hinted: share of sessions with the right calls in the requests."""

    seed: int = 0
    steps: int = 1200
    turns_per_step: int = 96
    rate: float = 3e-3
    hinted: float = 0.35


def built_in_policy(
    settings: WarmStart = WarmStart(), *, console: Console
) -> tuple[TinyForCausalLM, PreTrainedTokenizerBase]:
    """The warm-started policy and its tokenizer: from the cache folder, or trained now and left there.

    The file's name is a digest of all that determines its weights; a damaged file is noticed and built again.
    """
    path = cache_folder() / f"desk-policy-{_fingerprint(settings)}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        weights = _read(path)
        if weights is None:
            if path.exists():
                console.print(f"{path} is damaged; training the built-in policy again")
            model, _ = warm_start(settings, console=console)
            _write(path, model.state_dict())
        else:
            model = new_policy(settings.seed)
            model.load_state_dict(weights)
    return model, build_tokenizer(VOCABULARY)


def new_policy(seed: int) -> TinyForCausalLM:
    """The untrained policy."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TinyForCausalLM(TinyConfig(vocab_size=len(VOCABULARY), eos_token_id=VOCABULARY.index(";")))


def warm_start(settings: WarmStart = WarmStart(), *, console: Console) -> tuple[TinyForCausalLM, list[float]]:
    """Train the policy on demonstrations; also gives the loss of every step (mean cross-entropy per written token).

    Sessions are short at first (2 turns, then 4, then 8 and some 16): on them the policy learns to copy soonest.
    """
    model, layout = new_policy(settings.seed), make_chat(build_tokenizer(VOCABULARY))
    rng = random.Random(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, betas=(0.9, 0.98), weight_decay=0.01)
    losses = []
    with progress(console, "warm start", settings.steps) as show:
        for step in range(settings.steps):
            for group in optimizer.param_groups:
                group["lr"] = _rate(settings, step)
            rows = _demonstrations(settings, step, rng, layout)
            num_written = sum(sum(written) for _, written in rows)
            optimizer.zero_grad()
            loss = 0.0
            for ids_BT, written_BT in _batches(rows):
                logits_RV = policy_logits(model, ids_BT, written_BT)
                part = F.cross_entropy(logits_RV, ids_BT[written_BT], reduction="sum") / num_written
                part.backward()
                loss += part.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss)
            if (step + 1) % 50 == 0 or step + 1 == settings.steps:
                show(step + 1, f"loss {loss:.3f}")
    return model, losses


def _rate(settings: WarmStart, step: int) -> float:
    """Up over the first 40 steps, down to nearly nothing at the last."""
    return settings.rate * min(1.0, (step + 1) / 40) * (1 - step / settings.steps) ** 0.7 + 1e-5


def _demonstrations(settings: WarmStart, step: int, rng: random.Random, layout: Chat) -> list[Row]:
    share = step / settings.steps
    num_turns = 2 if share < 0.35 else 4 if share < 0.7 else 16 if rng.random() < 0.25 else 8
    desk = Desk(num_turns=num_turns)
    count = max(1, settings.turns_per_step // num_turns)
    return [
        lay_out(layout, demonstrate(desk, rng.getrandbits(30), rng, hinted=rng.random() < settings.hinted))
        for _ in range(count)
    ]


def _batches(rows: list[Row], num_batches: int = 3) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Padded ids [B, T] int64 and which the demonstrator wrote [B, T] bool, rows of like length together."""
    rows = sorted(rows, key=lambda row: len(row[0]))
    size = -(-len(rows) // num_batches)
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        length = len(part[-1][0])
        ids = [ids + [0] * (length - len(ids)) for ids, _ in part]
        written = [written + [False] * (length - len(written)) for _, written in part]
        yield torch.tensor(ids), torch.tensor(written)


def lay_out(layout: Chat, shown: Demonstration) -> Row:
    """Token ids of a demonstration in the chat format, and which of them are the demonstrator's."""
    prompt, opening = layout.open("", shown.request)
    ids = prompt + opening
    written = [False] * len(ids)
    for action, step in shown.played:
        tokens = [*layout.encode(action), layout.end_token]
        reply = [] if step.done else layout.reply(step.observation, step.request)
        ids += tokens + reply
        written += [True] * len(tokens) + [False] * len(reply)
    return ids, written


def _fingerprint(settings: WarmStart) -> str:
    sources = [inspect.getsource(m) for m in (chat, policy, tokenizer, desk, desk_demos, desk_sessions, desk_world)]
    sources.append(Path(__file__).read_text(encoding="utf-8"))
    facts = json.dumps([asdict(settings), torch.__version__, sources])
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def _digest(weights: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def _read(path: Path) -> dict[str, torch.Tensor] | None:
    """The weights of a cached file; None when there is none, or it does not hold what was written."""
    try:
        with safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}
            return weights if file.metadata()["sha256"] == _digest(weights) else None
    except (OSError, SafetensorError, KeyError, TypeError):
        return None


def _write(path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write beside `path` and rename, so that the file is there whole or not at all."""
    handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    os.close(handle)
    try:
        save_file(weights, partial, metadata={"sha256": _digest(weights)})
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
