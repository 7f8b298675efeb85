"""`estimate_memory` beside the peak of resident memory that a fresh process shows (Linux, CPU).

python -m crest_bench.memory_check: all CASES, to memory_check.csv in the results; with a CASE, a JSON object like them:
that one alone.
"""

import ctypes
import json
import subprocess
import sys
from dataclasses import dataclass

import torch

import crest_ops
from crest_bench.command import say_written
from crest_bench.environment import commit, results
from crest_bench.rows_file import write_rows

CASES = (
    dict(tokens=16384, share=0.1, hidden=64, vocab=151936, dtype="float32"),
    dict(tokens=16384, share=0.1, hidden=64, vocab=151936),
    dict(tokens=16384, share=0.1, hidden=64, vocab=151936, max_chunk_bytes=64 << 20),
    dict(tokens=16384, share=0.1, hidden=64, vocab=151936, frozen=True),
    dict(tokens=2048, share=1.0, hidden=576, vocab=49152, dtype="float32"),
    dict(tokens=2048, share=1.0, hidden=576, vocab=49152),
    dict(tokens=2048, share=0.25, hidden=576, vocab=49152, dtype="float32"),
    dict(tokens=2048, share=0.25, hidden=576, vocab=49152),
    dict(tokens=2048, share=0.1, hidden=576, vocab=49152),
    dict(tokens=2048, share=1.0, hidden=576, vocab=49152, max_chunk_bytes=64 << 20),
    dict(tokens=2048, share=0.25, hidden=576, vocab=49152, logits="float32"),
    dict(tokens=2048, share=0.25, hidden=576, vocab=49152, dtype="float16"),
    dict(tokens=16384, share=0.02, hidden=2560, vocab=16000, frozen=True),
    dict(tokens=4096, share=0.5, hidden=64, vocab=50257, max_chunk_bytes=8 << 20),
)


@dataclass(frozen=True)
class Row:
    """One case: bytes above the inputs, and their ratio."""

    case: str
    estimated: int
    measured: int
    ratio: float
    torch: str
    commit: str


def measure(
    tokens: int, share: float, hidden: int, vocab: int, dtype="bfloat16", logits=None, max_chunk_bytes=256 << 20,
    frozen=False,
) -> tuple[int, int]:  # fmt: skip
    """(estimated, measured) bytes, in this process; the first call of a process is the one that counts."""
    torch.set_num_threads(1)
    dtype, logits = getattr(torch, dtype), logits and getattr(torch, logits)

    def inputs(tokens: int, vocab: int) -> list[torch.Tensor]:
        random = torch.Generator().manual_seed(0)
        states = torch.randn(tokens, hidden, generator=random).to(dtype).requires_grad_()
        weight = (torch.randn(vocab, hidden, generator=random) / hidden**0.5).to(dtype).requires_grad_(not frozen)
        targets = torch.randint(0, vocab, (tokens,), generator=random)
        mask = torch.zeros(tokens, dtype=torch.bool)
        mask[torch.randperm(tokens, generator=random)[: round(tokens * share)]] = True
        return [states, weight, targets, torch.randn(tokens, generator=random), mask, torch.full((tokens,), -10.0)]

    def run(states, weight, targets, credit, mask, old_logp):
        found = crest_ops.linear_policy_loss(
            states, weight, targets, credit, token_weight=mask / mask.sum(), old_logp=old_logp, mask=mask,
            logits_dtype=logits, max_chunk_bytes=max_chunk_bytes,
        )  # fmt: skip
        found.loss.backward()

    for warm_tokens in (48, 64):
        run(*inputs(warm_tokens, 1000))
    given = inputs(tokens, vocab)
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts anew
    before = _status("VmRSS")
    run(*given)
    measured = _status("VmHWM") - before
    estimated = crest_ops.estimate_memory(
        tokens, share, hidden, vocab, dtype=dtype, logits_dtype=logits, max_chunk_bytes=max_chunk_bytes,
        frozen_head=frozen, device="cpu",
    )  # fmt: skip
    return estimated, measured


def _status(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name + ":"))


def main(arguments: list[str]) -> None:
    if arguments:
        estimated, measured = measure(**json.loads(arguments[0]))
        print(f"{estimated / measured:5.3f} of {measured / 2**20:7.1f} MiB", estimated, measured, flush=True)
        return
    rows = []
    for case in map(json.dumps, CASES):
        command = [sys.executable, "-m", "crest_bench.memory_check", case]
        told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        estimated, measured = map(int, told.split()[-2:])
        print(f"{estimated / measured:5.3f} of {measured / 2**20:7.1f} MiB  {case}", flush=True)
        rows.append(Row(case, estimated, measured, round(estimated / measured, 3), torch.__version__, commit()))
    path = results() / "memory_check.csv"
    write_rows(rows, path)
    say_written(path)


if __name__ == "__main__":
    main(sys.argv[1:])
