"""The providers of `crest-bench run` under pytest-benchmark: `pytest bench --benchmark-enable`.

A few cases on the head of SmolLM2-135M; `crest-bench run` has all heads, shares, memory and error.
"""

import pytest
import torch
from crest_bench.cases import HEADS, Case, make_inputs
from crest_bench.measure import call
from crest_bench.providers import PROVIDERS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS = 8192 if DEVICE == "cuda" else 256
CASES = [
    Case(HEADS["smollm2-135m"], TOKENS, TOKENS // part, dtype) for dtype in ("float32", "bfloat16") for part in (1, 4)
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case.dtype}-{case.share:g}pct")
def inputs(request):
    return make_inputs(request.param, DEVICE)


@pytest.mark.parametrize("name", PROVIDERS)
def test_forward_and_backward(benchmark, inputs, name):
    if reason := PROVIDERS[name].missing(DEVICE):
        pytest.skip(reason)
    benchmark.group = f"{inputs.hidden.dtype}, {int(inputs.mask.sum())} of {inputs.mask.numel()} tokens"
    benchmark.pedantic(call, (PROVIDERS[name].load(), inputs), rounds=5, warmup_rounds=1)
