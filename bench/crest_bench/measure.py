"""Time, peak memory and error of one call of a provider: forward, then the gradients by hidden states and weight."""

import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

import torch

from crest_bench.cases import Case, Head, Inputs, make_inputs
from crest_bench.contract import Output
from crest_bench.providers import PROVIDERS

WARM_ROWS = (48, 64)  # two small calls, so that compilers settle on code for any number of rows
Run = Callable[[Inputs], Output]


@dataclass
class Times:
    """Seconds of each repeat."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)

    def of(self, mode: str) -> list[float]:
        """mode: "forward" (with gradients wanted, as in training), "backward", or "full", their sum."""
        if mode == "full":
            return [sum(pair) for pair in zip(self.forward, self.backward, strict=True)]
        return getattr(self, mode)


def spread(values: list[float]) -> tuple[float, float, float]:
    """(20th percentile, median, 80th percentile)."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return fifths[0], statistics.median(values), fifths[-1]


def call(run: Run, inputs: Inputs) -> tuple[Output, tuple[torch.Tensor, torch.Tensor], float, float]:
    """(output, gradients by hidden and head_weight, seconds of forward, seconds of backward)."""
    _wait(inputs)
    start = time.perf_counter()
    output = run(inputs)
    _wait(inputs)
    middle = time.perf_counter()
    gradients = torch.autograd.grad(output.loss, (inputs.hidden, inputs.head_weight))
    _wait(inputs)
    return output, gradients, middle - start, time.perf_counter() - middle


def _wait(inputs: Inputs) -> None:
    if inputs.hidden.is_cuda:
        torch.cuda.synchronize()


def speed(
    runs: Mapping[str, Run], inputs: Inputs, repeats: int, step: Callable[[str], None]
) -> dict[str, Times | Exception]:
    """Times of every provider, in rounds over all of them so that a ratio is of one stretch of time.

    The first round warms up and is not counted. A provider that raises is left out of later rounds, and what it raised
    is its result.
    """
    found: dict[str, Times | Exception] = {name: Times() for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            times = found[name]
            if isinstance(times, Times):
                try:
                    forward, backward = call(run, inputs)[2:]
                except Exception as error:  # a peer may raise anything: that is what it does in this case
                    found[name] = error
                else:
                    if repeat:
                        times.forward.append(forward)
                        times.backward.append(backward)
            step(name)
    return found


# --- memory -----------------------------------------------------------------------------------------------------------


def memory(provider: str, case: Case, device: str) -> dict[str, int]:
    """{"peak": most bytes held at once above the inputs, "gradients": bytes of the gradients, part of the peak}.

    Measured in a fresh process after two small calls of the same provider. On a CPU it is resident memory, read from
    Linux's /proc; on a GPU what the allocator hands out. Raises RuntimeError with what the process said when it fails.
    """
    job = json.dumps({"provider": provider, "case": asdict(case), "device": device})
    done = subprocess.run([sys.executable, "-m", "crest_bench.measure", job], capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        reason = f"killed by signal {-done.returncode}" if done.returncode < 0 else f"exit {done.returncode}"
        raise RuntimeError(said[-1] if said else reason)
    return json.loads(done.stdout.splitlines()[-1])


def _memory_here(provider: str, case: Case, device: str) -> dict[str, int]:
    inputs = make_inputs(case, device)
    run = PROVIDERS[provider].load()
    for rows in WARM_ROWS:
        call(run, inputs.policy_rows(rows))
    gc.collect()
    before = restart_peak(device)
    output, gradients, _, _ = call(run, inputs)
    peak = peak_bytes(device)
    size = sum(gradient.numel() * gradient.element_size() for gradient in gradients)
    return {"peak": peak - before, "gradients": size}


def restart_peak(device: str) -> int:
    """Forget the peak so far; what is held now, in bytes."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    import ctypes

    ctypes.CDLL(None).malloc_trim(0)  # what the heap keeps free would hide allocations
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _status("VmRSS")


def peak_bytes(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else _status("VmHWM")


def _status(name: str) -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    wanted = job["case"] | {"head": Head(**job["case"]["head"])}
    print(json.dumps(_memory_here(job["provider"], Case(**wanted), job["device"])))
