"""Machine code and traffic turned into a predicted share of a device's peak memory bandwidth. Nothing is measured.

A kernel takes at least as long as its bytes need at the datasheet's bandwidth, as its instructions need to be issued,
and as its exponentials need in the special-function units:

    time per logit = max(bytes / bandwidth, instructions / issue rate, exponentials / special-function rate)
    share of peak  = (bytes / bandwidth) / time

The three are taken to overlap perfectly, and latency, launches, half-rate instructions and what DRAM loses to refresh
are left out, so this is an upper bound: it shows which kernels cannot reach peak, not that the others do.

What a launch reads again (the fused kernel, the JSD) counts as bytes from memory, in time and in the share, which is
then of all that moves, unless it comes from the cache. It is taken to do so for the fused kernel where one row per
multiprocessor fits the cache's whole nominal size; the launcher itself counts on half of that. The cache's bandwidth is
in no term. The fused kernel's time is that of one vocabulary, V=151936, and stands for all heads.

Datasheet figures, all dense, SXM or OAM form:
    A100 80GB: NVIDIA A100 datasheet (2,039 GB/s, 312 TFLOPS bf16) and GA100 whitepaper (108 SMs, 1,410 MHz, 40 MB L2).
    H100: NVIDIA H100 datasheet (3.35 TB/s, 989 TFLOPS) and GH100 whitepaper (132 SMs, 50 MB L2); 1,830 MHz is the clock
        at which 132 SMs of 4,096 bf16 FLOP a cycle give those 989 TFLOPS (light loads may clock up to 1,980 MHz).
    H200: NVIDIA H200 datasheet (4.8 TB/s, 989 TFLOPS); the die is GH100, so SMs, clock and L2 are those of the H100.
    B200: NVIDIA Blackwell / HGX B200 datasheet (8 TB/s, 2.25 PFLOPS); 148 SMs and 126 MB L2: chipsandcheese.com,
        "Nvidia's B200"; 1,850 MHz is the clock at which 148 SMs of 8,192 FLOP a cycle give 2.25 PFLOPS.
    MI300X: AMD Instinct MI300X datasheet (304 compute units, 2,100 MHz, 5.3 TB/s, 1,307 TFLOPS); 256 MB Infinity
        Cache, which stands for the L2 here (AMD CDNA 3 white paper).
Lanes per cycle: 4 schedulers of 32 lanes per SM (CUDA C++ programming guide, compute capability 8.0, 9.0, 10.0); 4 SIMD
units of 16 lanes per CDNA 3 compute unit, a wave of 64 taking 4 cycles (CDNA 3 ISA guide). Exponentials: 16 per cycle
and SM (the same guide, table of arithmetic throughput; unchanged on sm_100: FlashAttention-4, together.ai, 2026);
quarter rate on CDNA 3, so 16 per cycle and compute unit.

Shape letters: V vocabulary, H hidden size, R rows of a chunk.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from crest_bench.cases import CUDA_TOKENS, HEADS
from crest_bench.codegen import LOGIT_BITS, OURS, VOCABULARY
from crest_ops.chunks import chunk_rows
from crest_ops.linear import MAX_CHUNK_BYTES

PREDICTION = "prediction, not a measurement"
LOGIT_BYTES = LOGIT_BITS // 8
PICO = 1e12


@dataclass(frozen=True)
class Device:
    """Datasheet figures: bytes per second, compute units (SMs), Hz, lanes issued and exponentials per unit and cycle,
    dense bf16 FLOP per second, bytes of the last cache before memory.
    """

    name: str
    target: str
    bandwidth: float
    units: int
    clock: float
    lanes: int
    exponentials: int
    flops: float
    cache: float

    @property
    def issue_rate(self) -> float:
        """Instructions of single lanes per second."""
        return self.units * self.clock * self.lanes

    @property
    def exponential_rate(self) -> float:
        return self.units * self.clock * self.exponentials


DEVICES = (
    Device("A100", "sm_80", 2.039e12, 108, 1.41e9, 128, 16, 312e12, 40e6),
    Device("H100", "sm_90", 3.35e12, 132, 1.83e9, 128, 16, 989e12, 50e6),
    Device("H200", "sm_90", 4.8e12, 132, 1.83e9, 128, 16, 989e12, 50e6),
    Device("B200", "sm_100", 8e12, 148, 1.85e9, 128, 16, 2250e12, 126e6),
    Device("MI300X", "gfx942", 5.3e12, 304, 2.1e9, 64, 16, 1307e12, 256e6),
)


@dataclass(frozen=True)
class Moved:
    """Bytes per logit of the student that a kernel reads the first time, reads again in the same launch, and writes."""

    read: float
    read_again: float
    written: float
    source: str


# What a kernel of the role cannot do without, for kernels whose traffic is not counted (the peers').
LEAST = MappingProxyType(
    {
        "stats": Moved(LOGIT_BYTES, 0, 0, "least of the role"),
        "grad": Moved(LOGIT_BYTES, 0, LOGIT_BYTES, "least of the role"),
        "grad_entropy": Moved(LOGIT_BYTES, 0, LOGIT_BYTES, "least of the role"),
    }
)


FUSED = ("fused", "fused_entropy")
# Logits of either row that each loop of a kernel loads per column, where loops differ.
LOADS = MappingProxyType({"divergence_jsd": (1, 1, 2)})


@dataclass(frozen=True)
class Prediction:
    """One kernel on one device. Per logit of the student: bytes from and to memory, bytes that come from the cache,
    instructions, exponentials, and picoseconds that each of them needs; the longest is the predicted time.
    """

    kind: str
    package: str
    kernel: str
    role: str
    device: str
    target: str
    triton: str
    memory_bytes: float
    cache_bytes: float
    bytes_source: str
    instructions: float
    exponentials: float
    memory_ps: float
    issue_ps: float
    exponential_ps: float
    predicted_ps: float
    limit: str
    share_of_peak_bandwidth: float


@dataclass(frozen=True)
class HeadPrediction:
    """`linear_policy_loss` with one head on one device, in picoseconds per logit of a policy token.

    floor_ps: three matrix products at peak FLOP/s. gemm_ps: with what each product reads and writes, chunk by chunk.
    visit_ps: the fused kernel. share_of_floor = floor / (gemm + visit).
    """

    kind: str
    head: str
    hidden_size: int
    vocabulary: int
    device: str
    triton: str
    chunk_rows: int
    floor_ps: float
    gemm_ps: float
    visit_ps: float
    share_of_floor: float


def moved_by_kernel(traffic_rows: Iterable[Mapping[str, str]]) -> dict[str, Moved]:
    """Bytes per logit by kernel, from the rows of traffic.csv without masked rows; other memory is left out."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for row in traffic_rows:
        if row["masked_percent"] == "0" and row["tensor"] != "other":
            for i, name in enumerate(("read", "read_again", "written")):
                sums[row["kernel"]][i] += float(row[name])
    return {kernel: Moved(*(round(each, 3) for each in three), "counted") for kernel, three in sums.items()}


def predict(loops: list[Mapping[str, str]], moved: Moved, device: Device) -> Prediction:
    """Prediction for one kernel from the rows of its hot loops in codegen.csv.

    Counts there are per logit that a loop loads.
    """
    total = (moved.read + moved.read_again) / LOGIT_BYTES
    loads = LOADS.get(loops[0]["kernel"], [total / len(loops)] * len(loops))
    if len(loads) != len(loops) or abs(sum(loads) - total) > 1e-6:
        raise ValueError(f"{loops[0]['kernel']} has {len(loops)} loops and {total} loads per logit, want {loads}")
    instructions, exponentials = (
        sum(load * float(loop[name]) for load, loop in zip(loads, loops, strict=True))
        for name in ("instructions", "exponentials")
    )
    # The fused kernel's launcher keeps one row per multiprocessor in flight, or more where they fit.
    cached = loops[0]["role"] in FUSED and device.units * VOCABULARY * LOGIT_BYTES <= device.cache
    memory_bytes = moved.read + moved.written + (0 if cached else moved.read_again)
    needs = {
        "memory": memory_bytes / device.bandwidth,
        "issue": instructions / device.issue_rate,
        "exponentials": exponentials / device.exponential_rate,
    }
    limit = max(needs, key=needs.get)
    first = loops[0]
    return Prediction(
        PREDICTION, first["package"], first["kernel"], first["role"], device.name, device.target, first["triton"],
        memory_bytes, moved.read_again if cached else 0.0, moved.source, round(instructions, 3), round(exponentials, 3),
        *(round(PICO * need, 4) for need in needs.values()), round(PICO * needs[limit], 4), limit,
        round(needs["memory"] / needs[limit], 3),
    )  # fmt: skip


def predict_kernels(
    codegen_rows: Iterable[Mapping[str, str]], traffic_rows: Iterable[Mapping[str, str]]
) -> Iterator[Prediction]:
    """Every kernel of codegen.csv on every device of its target.

    Peers' bytes are the least of their role; kernels whose bytes are not known are left out.
    """
    counted = moved_by_kernel(traffic_rows)
    kernels: dict[tuple, list[Mapping[str, str]]] = defaultdict(list)
    for row in codegen_rows:
        if row["loop"] != "tail":
            kernels[row["package"], row["kernel"], row["target"], row["triton"]].append(row)
    for (_, kernel, target, _), loops in kernels.items():
        moved = counted.get(kernel) if loops[0]["package"] == OURS else LEAST.get(loops[0]["role"])
        if moved:
            yield from (predict(loops, moved, device) for device in DEVICES if device.target == target)


def product_times(hidden: int, vocabulary: int, rows: int, device: Device) -> list[float]:
    """Seconds per logit of logits = h W^T, dh = g W and dW += g^T h over chunks of `rows` rows: each the larger of its
    2 H FLOP and its bytes, with dW read and written in float32 once per chunk.
    """
    weight, hidden_bytes = 2 * hidden / rows, 2 * hidden / vocabulary
    moved = (
        weight + hidden_bytes + LOGIT_BYTES,
        weight + hidden_bytes + LOGIT_BYTES,
        4 * weight + hidden_bytes + LOGIT_BYTES,
    )
    return [max(2 * hidden / device.flops, each / device.bandwidth) for each in moved]


def predict_heads(predictions: Iterable[Prediction]) -> Iterator[HeadPrediction]:
    """`linear_policy_loss` of CUDA_TOKENS policy tokens in bf16, in its default chunks, for every head and device for
    which the fused kernel's time is predicted.
    """
    for visit in predictions:
        if visit.role != "fused":
            continue
        device = next(device for device in DEVICES if device.name == visit.device)
        for head in HEADS.values():
            rows = chunk_rows(CUDA_TOKENS, head.vocabulary, torch.bfloat16, MAX_CHUNK_BYTES)
            floor = PICO * 6 * head.hidden / device.flops
            products = PICO * sum(product_times(head.hidden, head.vocabulary, rows, device))
            yield HeadPrediction(
                PREDICTION, head.name, head.hidden, head.vocabulary, device.name, visit.triton, rows, round(floor, 3),
                round(products, 3), visit.predicted_ps, round(floor / (products + visit.predicted_ps), 3),
            )  # fmt: skip
