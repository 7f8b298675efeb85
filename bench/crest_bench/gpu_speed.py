"""Speed and memory on a device: ours, plain torch and the peers, over ceilings measured on the same device.

Ops over logits: milliseconds, and the bytes that the op must move over a device copy's rate. Ops over hidden states:
milliseconds, and the FLOP of three matrix products over a large product's rate. Peers that are not there, or that
raise, are named.

Shape letters: N tokens, V vocabulary, H hidden size.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from crest_bench import cases
from crest_bench.contract import logp_and_entropy
from crest_bench.gpu import Check, Found, Setting
from crest_bench.gpu_checks import SURROGATES, randint
from crest_bench.providers import PROVIDERS

REPEATS = 9
WARM = 2
SHARES = (100.0, 10.0)  # percent of policy tokens
Run = Callable[[], object]


@dataclass(frozen=True)
class Cost:
    """Median milliseconds and the most memory, in bytes, held above what was there."""

    ms: float
    peak: int


def cost(setting: Setting, run: Run, before: Run | None = None) -> Cost:
    """Of one call. `before` runs, untimed, ahead of every call, and its result is given to `run`."""
    times, peak = [], 0
    for repeat in range(1 if setting.tiny else WARM + REPEATS):
        given = () if before is None else (before(),)
        if setting.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            result = run(*given)
            end.record()
            torch.cuda.synchronize()
            ms, peak = start.elapsed_time(end), torch.cuda.max_memory_allocated() - held
        else:
            began = time.perf_counter()
            result = run(*given)
            ms = 1e3 * (time.perf_counter() - began)
        del result, given
        if setting.tiny or repeat >= WARM:
            times.append(ms)
    return Cost(statistics.median(times), peak)


# --- ceilings ---------------------------------------------------------------------------------------------------------


@cache
def copy_rate(setting: Setting) -> float:
    """Bytes per second, read and written, of a copy on the device."""
    source = torch.empty(1 << (10 if setting.tiny else 31), dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    return 2 * source.numel() / (1e-3 * cost(setting, lambda: target.copy_(source)).ms)


@cache
def product_rate(setting: Setting) -> float:
    """FLOP per second of a bf16 product of two square matrices."""
    size = 64 if setting.tiny else 8192
    a, b = (torch.randn(size, size, device=setting.device).to(torch.bfloat16) for _ in range(2))
    return 2 * size**3 / (1e-3 * cost(setting, lambda: a @ b).ms)


def _ceilings(setting: Setting) -> list[Found]:
    return [
        Found("MEASURED", copy_rate(setting) / 1e12, "TB/s", "read and written by a device copy", "ceiling: copy"),
        Found("MEASURED", product_rate(setting) / 1e12, "TFLOP/s", "bf16, square", "ceiling: matrix product"),
    ]


# --- ops over logits --------------------------------------------------------------------------------------------------


@cache
def _logits(setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, teacher's logits, targets): bf16, V=151936."""
    N, V = (4, 1031) if setting.tiny else (8192, cases.HEADS["qwen3-8b"].vocabulary)
    x, teacher = (torch.empty(N, V, dtype=torch.bfloat16, device=setting.device).normal_(0, 3) for _ in range(2))
    return x.requires_grad_(), teacher, randint(setting, N, high=V)


def _plain(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return logp_and_entropy(x.float().log_softmax(-1), y, entropy_gradient=True)


def _crest_stats(setting):
    from crest_ops import token_stats

    def run(x, teacher, y):
        found = token_stats(x, y, backend="triton")
        return found.logp, found.entropy

    return run


def _crest_loss(setting):
    from crest_ops import policy_loss

    def run(x, teacher, y):
        ones = torch.ones(len(y), device=x.device)
        return (policy_loss(x, y, ones, token_weight=ones, backend="triton").loss,)

    return run


def _crest_divergence(kind: str):
    def make(setting):
        from crest_ops import token_divergence

        return lambda x, teacher, y: (token_divergence(x, teacher, y, kind=kind, backend="triton").divergence,)

    return make


def _eager_stats(setting):
    return lambda x, teacher, y: _plain(x, y)


def _compiled_stats(setting):
    compiled = torch.compile(_plain, backend="eager" if setting.tiny else "inductor")
    return lambda x, teacher, y: compiled(x, y)


def _eager_kl(setting):
    def run(x, teacher, y):
        log_p, log_q = x.float().log_softmax(-1), teacher.float().log_softmax(-1)
        return ((log_p.exp() * (log_p - log_q)).sum(-1),)

    return run


def _trl_stats(setting):
    from trl.kernels import selective_log_softmax_and_entropy

    return lambda x, teacher, y: selective_log_softmax_and_entropy(x[None], y[None])


def _liger_grpo(setting):
    """A whole GRPO loss; no entropy. It takes one row more than there are tokens."""
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    def run(x, teacher, y):
        advantage = torch.ones(1, device=x.device)
        loss, *_ = triton_grpo_loss(
            x[None], None, None, y[None, :-1], advantage, temperature=1.0, beta=0.0, inplace=False
        )
        return (loss,)

    return run


# name: (what makes the run, tensors of logits that forward reads)
OVER_LOGITS = {
    "crest token_stats": (_crest_stats, 1),
    "crest policy_loss": (_crest_loss, 1),
    "crest token_divergence reverse_kl": (_crest_divergence("reverse_kl"), 2),
    "crest token_divergence jsd": (_crest_divergence("jsd"), 2),
    "trl selective_log_softmax_and_entropy": (_trl_stats, 1),
    "liger triton_grpo_loss": (_liger_grpo, 1),
    "eager log_softmax and entropy": (_eager_stats, 1),
    "eager reverse_kl": (_eager_kl, 2),
    "torch.compile log_softmax and entropy": (_compiled_stats, 1),
}


def _left_out(error: Exception) -> Found:
    return Found("LEFT OUT", detail=f"{type(error).__name__}: {error}"[:200])


def _over_logits(setting: Setting, make, tensors: int, name: str) -> list[Found] | Found:
    x, teacher, y = _logits(setting)
    try:
        run = make(setting)
        forward = cost(setting, lambda: run(x, teacher, y))
        backward = cost(setting, partial(_backward, x), lambda: run(x, teacher, y))
        both = cost(setting, lambda: _backward(x, run(x, teacher, y)))
    except Exception as error:  # a peer may raise anything
        if name.startswith("crest"):
            raise
        return _left_out(error)
    return [
        _logits_row(setting, f"{name} forward", forward, tensors),
        _logits_row(setting, f"{name} backward", backward, tensors + 1),
        _memory_row(f"{name} forward and backward", both),
    ]


def _backward(x: Tensor, outputs: tuple[Tensor, ...]) -> Tensor:
    outputs = [output for output in outputs if output.requires_grad]
    return torch.autograd.grad(outputs, x, [torch.ones_like(output) for output in outputs])[0]


def _logits_row(setting: Setting, name: str, spent: Cost, tensors: int) -> Found:
    """tensors: of the logits' size, read or written."""
    x = _logits(setting)[0]
    bytes_per_logit = tensors * x.element_size()
    rate = bytes_per_logit * x.numel() / (1e-3 * spent.ms)
    share = f"{100 * rate / copy_rate(setting):.0f} % of the copy"
    return Found("MEASURED", spent.ms, "ms", f"{bytes_per_logit} B per logit: {rate / 1e12:.3g} TB/s, {share}", name)


def _memory_row(name: str, spent: Cost) -> Found:
    return Found("MEASURED", spent.peak / 2**30, "GiB", "above the inputs", f"{name}, memory")


def _fused(setting: Setting) -> Found:
    """The kernel that makes logits their own gradient, with the entropy term."""
    from crest_kernels.policy_loss import policy_loss

    x, _, y = _logits(setting)
    ones = torch.ones(len(y), device=setting.device)

    def run(logits):
        return policy_loss(
            logits, y, ones[:1], ones, ones, None, None, None, num_columns=x.shape[1], logit_scale=1.0, softcap=0.0,
            kl_coef=0.0, entropy_coef=0.01, surrogate=SURROGATES["PPOClip"],
        )  # fmt: skip

    # The copy that is overwritten is made anew before each call, outside the time.
    spent = cost(setting, run, x.detach().clone)
    return _logits_row(setting, "crest fused policy_loss, in place", spent, 2)


# --- ops over hidden states -------------------------------------------------------------------------------------------


@cache
def _inputs(setting: Setting, share: float) -> cases.Inputs:
    head = cases.Head("tiny", 16, 203) if setting.tiny else cases.HEADS["qwen3-8b"]
    tokens = 32 if setting.tiny else 8192
    case = cases.Case(head, tokens, cases.policy_tokens(tokens, share), "float32" if setting.tiny else "bfloat16")
    return cases.make_inputs(case, setting.device)


def _over_hidden(setting: Setting, provider, share: float) -> list[Found] | Found:
    ours = provider.package == "crest-ops"  # found on PYTHONPATH, so without a version
    if not ours and (reason := provider.missing(setting.device)):
        return Found("LEFT OUT", detail=reason)
    inputs = _inputs(setting, share)
    wanted = (inputs.hidden, inputs.head_weight)
    try:
        run = provider.load()
        spent = cost(setting, lambda: torch.autograd.grad(run(inputs).loss, wanted))
    except Exception as error:  # a peer may raise anything
        if ours:
            raise
        return _left_out(error)
    flops = 6 * int(inputs.mask.sum()) * inputs.head_weight.numel()
    rate = flops / (1e-3 * spent.ms)
    detail = (
        f"{rate / 1e12:.3g} TFLOP/s of the policy tokens, {100 * rate / product_rate(setting):.0f} % of the product"
    )
    name = f"{provider.name}, H={inputs.hidden.shape[1]}, {share:.0f} % policy tokens"
    rows = [Found("MEASURED", spent.ms, "ms", detail, name), _memory_row(name, spent)]
    if provider.name == "crest" and setting.device == "cuda":
        rows.append(_estimate(inputs, spent, f"estimate_memory, {share:.0f} % policy tokens"))
    return rows


def _estimate(inputs: cases.Inputs, spent: Cost, name: str) -> Found:
    """estimate_memory is within 15 % of what was measured."""
    from crest_ops import estimate_memory

    (tokens, hidden), vocabulary = inputs.hidden.shape, inputs.head_weight.shape[0]
    estimated = estimate_memory(
        tokens, inputs.mask.float().mean().item(), hidden, vocabulary, dtype=inputs.hidden.dtype
    )
    off = abs(estimated / spent.peak - 1)
    return Found("PASS" if off <= 0.15 else "FAIL", off / 0.15, "of 15 %", f"{estimated / 2**30:.3g} GiB", name)


def speed(setting: Setting) -> Iterator[Check]:
    yield Check("ceilings", partial(_ceilings, setting))
    for name, (make, tensors) in OVER_LOGITS.items():
        yield Check(name, partial(_over_logits, setting, make, tensors, name))
    yield Check("crest fused policy_loss", partial(_fused, setting))
    for share in SHARES:
        for provider in PROVIDERS.values():
            yield Check(f"{provider.name} {share:.0f} %", partial(_over_hidden, setting, provider, share))
