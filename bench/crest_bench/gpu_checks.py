"""Checks of the kernels over logits on a device: against float64, row alone against row in batch, past 2^31 logits.

Shape letters: N tokens, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from crest_bench import gpu_reference as exact
from crest_bench.gpu import Check, Found, Setting

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
# Half a unit in the last place and a little; of float32, what a ratio carries of the rounding of a log-prob of 20.
ROUNDING = {torch.float32: 5e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
SURROGATES = {"PPOClip": (0, 0.2, 0.28, math.inf), "PPOClip dual": (0, 0.2, 0.28, 3.0),
              "CISPO": (1, 1.0, 0.28, 0.0), "SAPO": (2, 1.0, 1.05, 0.0)}  # fmt: skip
FEWER = ("-inf blocks", "masked rows", "shift 3e4", "softcap")
KINDS = ("forward_kl", "reverse_kl", "jsd")
JSD_WEIGHT = 0.3


def randn(setting: Setting, *shape: int, seed: int, scale: float = 3.0, dtype=torch.float32) -> Tensor:
    generator = torch.Generator(setting.device).manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device=setting.device) * scale).to(dtype)


def randint(setting: Setting, *shape: int, high: int, seed: int = 1) -> Tensor:
    generator = torch.Generator(setting.device).manual_seed(seed)
    return torch.randint(0, high, shape, generator=generator, device=setting.device)


def worst(*compared: tuple[Tensor, Tensor, Tensor | float]) -> Found:
    """PASS where every |found - exact| <= tolerance; the value is the largest error over its tolerance."""
    ratio = 0.0
    for found, wanted, tolerance in compared:
        error = (found.double() - wanted).abs()
        error = torch.where((found == wanted) | (error == 0), 0.0, error)  # -inf = -inf
        ratio = max(ratio, torch.nan_to_num(error / tolerance, nan=math.inf).max().item())
    return Found("PASS" if ratio <= 1 else "FAIL", ratio, "of tolerance")


def value_tolerance(wanted: Tensor) -> Tensor:
    return 2e-5 + 2e-6 * wanted.abs().nan_to_num(posinf=0.0)


def gradient_tolerance(wanted: Tensor, log_p: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounding of the gradient, and 2e-5 of p times what it is multiplied by; weight [N] is the upstream's size."""
    p = torch.nn.functional.pad(log_p.exp(), (0, wanted.shape[-1] - log_p.shape[-1]))
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return ROUNDING[dtype] * wanted.abs() + (2e-5 * p + 1e-9) * weight[..., None] + smallest


# --- inputs of every kind ---------------------------------------------------------------------------------------------


def inputs(setting: Setting, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], tuple[Tensor, Tensor, dict]]]]:
    """(name, () -> (logits, targets, arguments of token_stats)); a target < 0 is not wanted."""
    N, aligned, odd = (4, 1040, 1031) if setting.tiny else (48, 151936, 50257)

    def plain(V):
        return randn(setting, N, V, seed=0, dtype=dtype), randint(setting, N, high=V), {}

    def excluded():
        x, y, _ = plain(odd)
        x[:, : 2 * odd // 3] = -math.inf
        x[:, -3] = -math.inf
        y[:] = odd - 1
        y[1] = 0  # outside the support
        return x, y, {}

    def masked():
        x, y, _ = plain(odd)
        x[::2] = math.nan
        y[::2] = -100
        return x, y, {}

    def strided():
        x = randn(setting, N // 2, 2, odd + 5, seed=0, dtype=dtype).transpose(0, 1)[..., :odd]
        return x, randint(setting, 2, N // 2, high=odd), {}

    def shifted():
        x, y, _ = plain(odd)
        return x + 3e4, y, {}

    per_row = 0.5 + randn(setting, N, seed=7, scale=1.0).abs()
    yield f"V={aligned}", lambda: plain(aligned)
    yield f"V={odd}", lambda: plain(odd)
    yield "V=1", lambda: plain(1)
    yield "-inf blocks", excluded
    yield "masked rows", masked
    yield "strided view", strided
    yield "shift 3e4", shifted
    yield "softcap", lambda: (*plain(odd)[:2], {"softcap": 5.0, "logit_scale": 0.7})
    yield "temperature per row", lambda: (*plain(odd)[:2], {"temperature": per_row})
    yield "padded columns", lambda: (plain(aligned)[0], randint(setting, N, high=odd - 9), {"vocab_size": odd - 9})


# --- correctness ------------------------------------------------------------------------------------------------------


def correctness(setting: Setting) -> Iterator[Check]:
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        for kind, make in inputs(setting, dtype):
            if dtype == torch.float16 and kind not in FEWER:  # each kind is compiled anew
                continue
            yield Check(f"token_stats {kind} {name}", partial(_token_stats, setting, make))
        for kind in KINDS:
            yield Check(f"token_divergence {kind} {name}", partial(_divergence, setting, kind, dtype, {}))
        transform = {"softcap": 5.0, "logit_scale": 0.7, "temperature": 0.8}
        yield Check(
            f"token_divergence reverse_kl softcap {name}", partial(_divergence, setting, "reverse_kl", dtype, transform)
        )
        for surrogate in SURROGATES:
            yield Check(f"fused policy_loss {surrogate} {name}", partial(_fused, setting, surrogate, dtype, None))
        yield Check(f"fused policy_loss softcap {name}", partial(_fused, setting, "PPOClip", dtype, 5.0))
        yield Check(f"teacher_pair and crest_segments {name}", partial(_crest, setting, dtype))
        yield Check(f"policy_loss in place {name}", partial(_in_place, setting, dtype))
    yield Check("token_stats under torch.compile(fullgraph=True, dynamic=True)", partial(_compiled, setting))


def _token_stats(setting: Setting, make) -> Found:
    from crest_ops import token_stats

    x, y, arguments = make()
    x = x.requires_grad_()
    found = token_stats(x, y, outputs=("logp", "entropy", "sum_sq_probs"), backend="triton", **arguments)
    wanted = y >= 0
    up_logp, up_entropy = (randn(setting, *y.shape, seed=seed, scale=1.0) for seed in (2, 3))
    (gradient,) = torch.autograd.grad((up_logp * found.logp + up_entropy * found.entropy).sum(), x)

    leaf = torch.where(wanted[..., None], x.detach(), 0).double().requires_grad_()
    log_p = exact.log_probs(leaf, **arguments)
    logp, entropy = exact.at_targets(log_p, y), exact.entropy(log_p)
    counted = wanted & (logp > -math.inf)  # a row that excludes its target has no gradient
    up_logp, up_entropy = (torch.where(counted, up, 0).double() for up in (up_logp, up_entropy))
    logp_part = torch.where(counted, up_logp * logp, 0)
    (wanted_gradient,) = torch.autograd.grad((logp_part + up_entropy * entropy).sum(), leaf)
    log_p, logp, entropy = log_p.detach(), *(torch.where(wanted, each.detach(), 0) for each in (logp, entropy))
    sum_sq = torch.where(wanted, log_p.exp().square().sum(-1), 0)
    steepest = 1 + torch.where(log_p > -math.inf, log_p, 0).abs().amax(-1)
    weight = (up_logp.abs() + up_entropy.abs() * steepest) / _least_temperature(arguments)
    return worst(
        (found.logp, logp, value_tolerance(logp)),
        (found.entropy, entropy, value_tolerance(entropy)),
        (found.sum_sq_probs, sum_sq, 2e-5),
        (gradient, wanted_gradient, gradient_tolerance(wanted_gradient, log_p, weight, x.dtype)),
    )


def _least_temperature(arguments: dict) -> Tensor | float:
    return arguments.get("temperature", 1.0)


def _pair(setting: Setting, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    N, V = (6, 1031) if setting.tiny else (48, 50257)
    x, teacher = randn(setting, N, V, seed=0, dtype=dtype), randn(setting, N, V + 3, seed=1, dtype=dtype)
    return x, teacher, randint(setting, N, high=V)


def _divergence(setting: Setting, kind: str, dtype: torch.dtype, transform: dict) -> Found:
    from crest_ops import token_divergence

    x, teacher, y = _pair(setting, dtype)
    V = x.shape[-1]
    x[0, V // 2 :] = teacher[0, V // 2 :] = -math.inf
    y[0] = 5
    y[1] = -100
    wanted = y >= 0
    x = x.requires_grad_()
    found = token_divergence(
        x, teacher, y, kind=kind, jsd_weight=JSD_WEIGHT, vocab_size=V, backend="triton", **transform
    )
    upstream = randn(setting, len(y), seed=4, scale=1.0)
    (gradient,) = torch.autograd.grad((upstream * found.divergence).sum(), x)
    leaf = x.detach().double().requires_grad_()
    log_p, log_q = (exact.log_probs(each, vocab_size=V, **transform) for each in (leaf, teacher))
    value = torch.where(wanted, exact.divergence(log_p, log_q, kind, JSD_WEIGHT), 0)
    (wanted_gradient,) = torch.autograd.grad((upstream.double() * value).sum(), leaf)
    log_p, value = log_p.detach(), value.detach()
    logp, teacher_logp = (torch.where(wanted, exact.at_targets(each, y), 0) for each in (log_p, log_q))
    weight = upstream.double().abs() * (wanted * 40)
    both = torch.logaddexp(log_p, log_q)
    return worst(
        (found.divergence, value, 5e-5 + 5e-6 * value),
        (found.logp, logp, value_tolerance(logp)),
        (found.teacher_logp, teacher_logp, value_tolerance(teacher_logp)),
        (gradient, wanted_gradient, gradient_tolerance(wanted_gradient, both, weight, dtype)),
    )


def _fused(setting: Setting, surrogate: str, dtype: torch.dtype, softcap: float | None) -> Found:
    """The kernel that makes rows of logits their own gradient, with importance weights, k3 and entropy."""
    from crest_kernels.policy_loss import policy_loss

    x, _, y = _pair(setting, dtype)
    V = x.shape[-1] - 5
    y = y.clamp(max=V - 1)
    y[1] = -1
    N, kl_coef, entropy_coef = len(y), 0.1, 0.5
    temperature = 0.5 + randn(setting, N, seed=7, scale=1.0).abs()
    leaf = x.double().requires_grad_()
    log_p = exact.log_probs(leaf, temperature, softcap, vocab_size=V)
    logp, entropy = exact.at_targets(log_p, y), exact.entropy(log_p)
    old, ref = (logp.detach().float() + randn(setting, N, seed=seed, scale=0.3) for seed in (4, 5))
    credit, weight = (randn(setting, N, seed=seed, scale=1.0) for seed in (6, 8))
    importance = randn(setting, N, seed=9, scale=1.0).abs()
    old[2:4] -= math.log(10)  # beyond every bound, on both sides of credit 0
    credit[2], credit[3] = -1.0, 1.0
    value = importance * exact.surrogate_value(surrogate, logp, old.double(), credit.double())
    value = value + kl_coef * exact.k3(logp, ref.double()) - entropy_coef * entropy
    wanted = y >= 0
    (wanted_gradient,) = torch.autograd.grad(torch.where(wanted, weight * value, 0).sum(), leaf)
    found_logp, found_entropy, _ = policy_loss(
        x, y, temperature, credit, weight, old, ref, importance, num_columns=V, logit_scale=1.0,
        softcap=softcap or 0.0, kl_coef=kl_coef, entropy_coef=entropy_coef, surrogate=SURROGATES[surrogate],
    )  # fmt: skip
    log_p, logp, entropy = log_p.detach(), *(torch.where(wanted, each.detach(), 0) for each in (logp, entropy))
    size = weight.double().abs() * (importance * credit.abs() + 1) * 4 / temperature
    return worst(
        (found_logp, logp, value_tolerance(logp)),
        (found_entropy, entropy, value_tolerance(entropy)),
        (x, wanted_gradient, gradient_tolerance(wanted_gradient, log_p, size, dtype)),
    )


def _crest(setting: Setting, dtype: torch.dtype) -> Found:
    from crest_ops import Spans, crest_policy_loss

    x, teacher, y = _pair(setting, dtype)
    N, V = x.shape
    teacher[::2, :V] = x[::2]  # close to the student and a little surer: it sides with the first trajectory
    teacher[torch.arange(0, N, 2, device=setting.device), y[::2]] += 1
    spans = Spans.from_mask(
        torch.ones(2, N // 2, dtype=torch.bool, device=setting.device),
        group=torch.zeros(2, dtype=torch.int64, device=setting.device),
    )
    trajectory = torch.arange(N, device=setting.device) // (N // 2)
    advantage = torch.tensor([0.8, -1.1], device=setting.device)
    leaf = x.double().requires_grad_()
    log_p = exact.log_probs(leaf)
    logp, teacher_logp = exact.at_targets(log_p, y), exact.at_targets(exact.log_probs(teacher, vocab_size=V), y)
    old = logp.detach().float() + randn(setting, N, seed=4, scale=0.1)
    weight = randn(setting, N, seed=8, scale=1.0).abs()
    value = exact.crest_value(logp, teacher_logp, old.double(), advantage.double()[trajectory], trajectory)
    loss = (weight * value).sum()
    (wanted_gradient,) = torch.autograd.grad(loss, leaf)
    x = x.requires_grad_()
    found = crest_policy_loss(
        x, teacher, y, spans, advantage, token_weight=weight, old_logp=old, vocab_size=V, backend="triton"
    )
    (gradient,) = torch.autograd.grad(found.loss, x)
    return worst(
        (found.logp, logp.detach(), value_tolerance(logp.detach())),
        (found.loss, loss.detach(), 2e-5 * (weight * value).abs().sum().detach()),
        (gradient, wanted_gradient, gradient_tolerance(wanted_gradient, log_p.detach(), 5 * weight.double(), dtype)),
    )


def _in_place(setting: Setting, dtype: torch.dtype) -> Found:
    """The gradient written over the logits is bitwise the one beside them."""
    from crest_ops import policy_loss

    x, _, y = _pair(setting, dtype)
    credit, weight = (randn(setting, len(y), seed=seed, scale=1.0) for seed in (6, 8))
    gradients = []
    for inplace in (False, True):
        leaf = x.clone().requires_grad_()
        logits = leaf * 1  # a leaf cannot be overwritten
        found = policy_loss(
            logits, y, credit, token_weight=weight, entropy_coef=0.01, inplace=inplace, backend="triton"
        )
        gradients += torch.autograd.grad(found.loss, leaf)
    return worst((gradients[1], gradients[0].double(), 1e-30))


def _compiled(setting: Setting) -> Found:
    """One graph for any N; values and gradients bitwise those without it."""
    from crest_ops import token_stats

    def loss(x: Tensor, y: Tensor) -> Tensor:
        found = token_stats(x, y, backend="triton")
        return (found.logp - 0.1 * found.entropy).sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager" if setting.tiny else "inductor")
    x, _, y = _pair(setting, torch.bfloat16)
    compared = []
    for rows in (len(y), len(y) - 1):
        leaf = x[:rows].clone().requires_grad_()
        (found,), (wanted,) = (torch.autograd.grad(run(leaf, y[:rows]), leaf) for run in (compiled, loss))
        compared.append((found, wanted.double(), 1e-30))
    return worst(*compared)
