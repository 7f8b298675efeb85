"""estimate_memory: its terms by hand, what it refuses, and two calls measured."""

import json
import os
import subprocess
import sys

import pytest
import torch

from crest_ops import estimate_memory

SMALL = dict(num_tokens=8, policy_share=0.5, hidden_size=4, vocab_size=10)


@pytest.mark.parametrize(
    "change",
    [
        dict(dtype="float32"), dict(dtype=torch.int64), dict(dtype=None), dict(weight_dtype=torch.int8),
        dict(compute_dtype=torch.bool), dict(logits_dtype="float32"), dict(logits_dtype=torch.complex64),
        dict(device="mps"), dict(device="gpu"), dict(device=torch.device("meta")), dict(device=0), dict(device=None),
    ],
    ids=str,
)  # fmt: skip
def test_bad_arguments(change):
    with pytest.raises(ValueError, match=f"^{next(iter(change))} is "):
        estimate_memory(**SMALL | change)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_device_as_text_or_torch_device(kind):
    assert estimate_memory(**SMALL, device=kind) == estimate_memory(**SMALL, device=torch.device(kind, 0))


def test_frozen_head_where_backward_decides():
    # 1000 tokens, none trained on: the gradient of hidden states [1000, 512] and its copy, 160 bytes a token
    size = dict(num_tokens=1000, policy_share=0.0, hidden_size=512, vocab_size=64, frozen_head=True, device="cpu")
    assert estimate_memory(**size, dtype=torch.float32) == 2 * 1000 * 512 * 4 + 1000 * 160
    assert estimate_memory(**size, dtype=torch.bfloat16) == 2 * 1000 * 512 * 2 + 1000 * 160
    # float16 is kept in float32 until backward rounds it
    assert estimate_memory(**size, dtype=torch.float16) == 1000 * 512 * (4 + 2) + 1000 * 160


def test_one_chunk_that_decides():
    # 4 of 8 rows, V = 6400, float32, one chunk: logits 4 * 6400, gradient of the weight 6400 * 4, operands twice 4 * 4
    # and two buffers of all 4 rows; beside the gradient of hidden states 8 * 4 and 160 bytes a token
    found = estimate_memory(**SMALL | dict(vocab_size=6400), dtype=torch.float32, device="cpu")
    assert found == 4 * (4 * 6400 + 6400 * 4 + 2 * 4 * 4 + 2 * 4 * 6400 + 8 * 4) + 160 * 8


def test_float16_costs_the_float32_of_its_logits_and_gradients():
    size = dict(num_tokens=4096, policy_share=0.5, hidden_size=1024, vocab_size=5000, device="cpu")
    assert estimate_memory(**size, dtype=torch.float16) > 1.5 * estimate_memory(**size, dtype=torch.bfloat16)


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="the peak is Linux's")
@pytest.mark.parametrize(
    "case",
    [
        dict(tokens=8192, share=0.02, hidden=1024, vocab=8192, dtype="float32"),
        dict(tokens=2048, share=0.25, hidden=256, vocab=32000, max_chunk_bytes=32 << 20, dtype="float32"),
    ],
    ids=["backward decides", "chunks decide"],
)
def test_measured(case):
    """Within 15 % of the peak of a fresh process."""
    command = [sys.executable, "-m", "crest_bench.memory_check", json.dumps(case)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr
    assert abs(float(found.stdout.split()[0]) - 1) <= 0.15, found.stdout


def test_a_chunk_has_at_most_four_times_as_many_rows_as_the_hidden_size():
    # H = 64: chunks of 256 rows of 6400 float32 logits, whatever the budget allows
    size = dict(num_tokens=4096, policy_share=1.0, hidden_size=64, vocab_size=6400, dtype=torch.float32, device="cpu")
    assert estimate_memory(**size) == estimate_memory(**size, max_chunk_bytes=256 * 6400 * 4)
    assert estimate_memory(**size, max_chunk_bytes=128 * 6400 * 4) < estimate_memory(**size)
