"""Checks that a row's result is its own: bitwise the same alone, in a batch, in a second run, and past 2^31 logits.

Shape letters: N tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from crest_bench.gpu import Check, Found, Setting
from crest_bench.gpu_checks import KINDS, SURROGATES, randint, randn

INT32 = 1 << 31
Op = Callable[[Tensor, Tensor, Tensor], list[Tensor]]


def _token_stats(x: Tensor, teacher: Tensor, y: Tensor) -> list[Tensor]:
    from crest_ops import token_stats

    x = x.detach().requires_grad_()
    found = token_stats(x, y, backend="triton")
    (gradient,) = torch.autograd.grad((0.7 * found.logp - 0.3 * found.entropy).sum(), x)
    return [found.logp.detach(), found.entropy.detach(), found.lse, gradient]


def _divergence(kind: str) -> Op:
    def run(x: Tensor, teacher: Tensor, y: Tensor) -> list[Tensor]:
        from crest_ops import token_divergence

        x = x.detach().requires_grad_()
        found = token_divergence(x, teacher, y, kind=kind, backend="triton")
        (gradient,) = torch.autograd.grad(found.divergence.sum(), x)
        return [found.divergence.detach(), found.logp.detach(), found.teacher_logp.detach(), gradient]

    return run


def _pair(x: Tensor, teacher: Tensor, y: Tensor) -> list[Tensor]:
    from crest_kernels.teacher_pair import teacher_pair

    logp, entropy, lse, _, teacher_logp = teacher_pair(
        x[None], teacher[None], y, torch.ones(1, device=x.device), x.shape[-1], 1.0, 0.0
    )
    return [logp, entropy, lse, teacher_logp]


def _fused(x: Tensor, teacher: Tensor, y: Tensor) -> list[Tensor]:
    from crest_kernels.policy_loss import policy_loss

    x, ones = x.clone(), torch.ones(len(y), device=x.device)
    logp, entropy, _ = policy_loss(
        x, y, ones[:1], ones, ones, None, None, None, num_columns=x.shape[-1], logit_scale=1.0, softcap=0.0,
        kl_coef=0.0, entropy_coef=0.01, surrogate=SURROGATES["PPOClip"],
    )  # fmt: skip
    return [logp, entropy, x]


OPS: dict[str, Op] = {
    "token_stats": _token_stats,
    "teacher_pair": _pair,
    "fused policy_loss": _fused,
} | {f"token_divergence {kind}": _divergence(kind) for kind in KINDS}


def _crest(x: Tensor, teacher: Tensor, y: Tensor) -> list[Tensor]:
    """CrEST's segment pass takes statistics over all rows: alone, a row is another batch."""
    from crest_ops import Spans, crest_policy_loss

    live = torch.ones(1, len(y), dtype=torch.bool, device=x.device)
    spans = Spans.from_mask(live, group=torch.zeros(1, dtype=torch.int64, device=x.device))
    ones = torch.ones(len(y), device=x.device)
    x = x.detach().requires_grad_()
    found = crest_policy_loss(x, teacher, y, spans, ones[:1], token_weight=ones, backend="triton")
    return [found.loss.detach(), *torch.autograd.grad(found.loss, x)]


def _equal(first: list[Tensor], second: list[Tensor], what: str) -> Found:
    differing = sum(int((a != b).sum()) for a, b in zip(first, second, strict=True))
    return Found("FAIL" if differing else "PASS", differing, "differing elements", what)


def invariance(setting: Setting) -> Iterator[Check]:
    N, V = (5, 1031) if setting.tiny else (512, 50257)
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        yield Check(f"crest_policy_loss {name}: two runs", partial(_twice, setting, _crest, N, V, dtype))
        for op_name, op in OPS.items():
            yield Check(f"{op_name} {name}: two runs", partial(_twice, setting, op, N, V, dtype))
            yield Check(f"{op_name} {name}: row alone", partial(_alone, setting, op, N, V, dtype))


def _batch(setting: Setting, N: int, V: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x, teacher = (randn(setting, N, V, seed=seed, dtype=dtype) for seed in (0, 1))
    return x, teacher, randint(setting, N, high=V)


def _twice(setting: Setting, op: Op, N: int, V: int, dtype: torch.dtype) -> Found:
    batch = _batch(setting, N, V, dtype)
    return _equal(op(*batch), op(*batch), "second run")


def _alone(setting: Setting, op: Op, N: int, V: int, dtype: torch.dtype) -> Found:
    return _rows_alone(op, *_batch(setting, N, V, dtype), rows=(0, 1, N // 2, N - 1))


def _rows_alone(op: Op, x: Tensor, teacher: Tensor, y: Tensor, rows: tuple[int, ...]) -> Found:
    found = op(x, teacher, y)
    in_batch = [each[list(rows)].clone() for each in found]
    del found
    alone = [op(x[row : row + 1].clone(), teacher[row : row + 1].clone(), y[row : row + 1]) for row in rows]
    return _equal(in_batch, [torch.cat(each) for each in zip(*alone, strict=True)], f"rows {rows}")


def offsets(setting: Setting) -> Iterator[Check]:
    """bf16, V=151936 and so many rows that the last ones lie past 2^31 logits."""
    N, V = (6, 1031) if setting.tiny else (14200, 151936)
    for name, op in OPS.items():
        yield Check(f"{name} at {N * V / INT32:.3f} * 2^31 logits", partial(_far, setting, op, N, V))
    yield Check("token_stats, 2 sequences of half as many rows", partial(_far_in_batch, setting, N // 2, V))


def _no_room(setting: Setting, N: int, V: int) -> Found | None:
    """LEFT OUT where the device does not hold four tensors of the size."""
    if setting.device == "cuda":
        free, wanted = torch.cuda.mem_get_info()[0], 4 * 2 * N * V
        if free < wanted:
            return Found("LEFT OUT", detail=f"{free / 1e9:.1f} GB are free, {wanted / 1e9:.1f} GB wanted")
    return None


def _large(setting: Setting, N: int, V: int, seed: int) -> Tensor:
    """bf16 logits made in place, without a float32 copy."""
    generator = torch.Generator(setting.device).manual_seed(seed)
    x = torch.empty(N, V, dtype=torch.bfloat16, device=setting.device)
    return x.normal_(0, 3, generator=generator)


def _far(setting: Setting, op: Op, N: int, V: int) -> Found:
    if left_out := _no_room(setting, N, V):
        return left_out
    x, teacher = _large(setting, N, V, 0), _large(setting, N, V, 1)
    return _rows_alone(op, x, teacher, randint(setting, N, high=V), rows=(0, N // 2, N - 2, N - 1))


def _far_in_batch(setting: Setting, T: int, V: int) -> Found:
    if left_out := _no_room(setting, 2 * T, V):
        return left_out
    x, y = _large(setting, 2 * T, V, 0), randint(setting, 2 * T, high=V)
    flat = _token_stats(x, x, y)
    in_batch = _token_stats(x.view(2, T, V), x, y.view(2, T))
    return _equal(
        [each.reshape(found.shape) for each, found in zip(flat, in_batch, strict=True)], in_batch, "[2, T, V]"
    )
