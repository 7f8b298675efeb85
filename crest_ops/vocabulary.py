"""What every vocabulary op asks of its arguments: shapes, dtypes, devices and values, checked before any work.

Shape letters: N tokens, V vocabulary, B batch, T rows of a batch entry (N = B * T).
"""

import math

import torch
from torch import Tensor

from .backend import checks_values

MAX_TEMPERATURE = 1e16  # hotter, what is out of the support would come back into it
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_vocabulary_arguments(
    logits, targets, mask, temperature, softcap, logit_scale, vocab_size, ignore_index
) -> int:
    """Check what shapes, dtypes and devices say, before any work. Returns the number of valid columns."""
    if not isinstance(logits, Tensor) or logits.dim() < 1 or logits.dtype not in FLOAT_DTYPES or not logits.shape[-1]:
        found = f"{[*logits.shape]} {logits.dtype}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"logits is {found}, want [..., V] with V >= 1 of float16, bfloat16, float32 or float64")
    check_differentiation(logits=logits)
    return check_row_arguments(
        logits.shape[:-1], logits.shape[-1], logits.device, targets, mask, temperature, softcap, logit_scale,
        vocab_size, ignore_index,
    )  # fmt: skip


def check_row_arguments(
    rows, width: int, device, targets, mask, temperature, softcap, logit_scale, vocab_size, ignore_index
) -> int:
    """Check the arguments of an op over rows of `width` logits. Returns the number of valid columns."""
    check_per_token("targets", targets, rows, (torch.int64, torch.int32), device)
    if mask is not None:
        check_per_token("mask", mask, rows, (torch.bool,), device)
    if isinstance(temperature, Tensor):
        check_per_token("temperature", temperature, rows, FLOAT_DTYPES, device)
    else:
        check_positive("temperature", temperature)
    if softcap is not None:
        check_positive("softcap", softcap)
    check_positive("logit_scale", logit_scale)
    if not isinstance(ignore_index, int):
        raise ValueError(f"ignore_index is {ignore_index!r}, want an int")
    if vocab_size is None:
        vocab_size = width
    if not isinstance(vocab_size, int) or not 1 <= vocab_size <= width:
        raise ValueError(f"vocab_size is {vocab_size}, want 1 <= vocab_size <= {width}, the columns there are")
    return vocab_size


def check_teacher(teacher_logits, logits: Tensor, num_columns: int) -> None:
    """`teacher_logits` are over the tokens of `logits`, at least `num_columns` wide, floating, on the same device."""
    if not isinstance(teacher_logits, Tensor):
        raise ValueError(f"teacher_logits is {type(teacher_logits).__name__}, want a tensor like logits")
    if (
        teacher_logits.shape[:-1] != logits.shape[:-1]
        or teacher_logits.shape[-1] < num_columns
        or teacher_logits.dtype not in FLOAT_DTYPES
        or teacher_logits.device != logits.device
    ):
        raise ValueError(
            f"teacher_logits is {[*teacher_logits.shape]} {teacher_logits.dtype} on {teacher_logits.device}, want "
            f"{[*logits.shape[:-1], num_columns]} (or wider), floating, on {logits.device}"
        )


def check_differentiation(**tensors: Tensor | None) -> None:
    """Raises ValueError under torch.func and in forward mode: backward is all there is; None is passed over."""
    if torch.compiler.is_compiling():
        return
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            continue
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise ValueError(f"{name} is under torch.func (vmap, grad, jvp), want a plain tensor and torch.autograd")
        if torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None:
            raise ValueError(f"{name} has a forward-mode tangent, want a plain tensor: there is backward alone")


def check_savable(name: str, tensor: Tensor) -> None:
    """Backward may keep it: it was not made under inference_mode."""
    if not torch.compiler.is_compiling() and torch.is_grad_enabled() and tensor.is_inference():
        raise ValueError(f"{name} was made under torch.inference_mode, want torch.no_grad there (or pass a clone)")


def check_per_token(name: str, tensor, shape, dtypes, device) -> None:
    """`tensor` has exactly this shape (nothing is broadcast), one of these dtypes, and lies on this device."""
    wanted = f"{[*shape]} of {' or '.join(str(d).removeprefix('torch.') for d in dtypes)}"
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} is {type(tensor).__name__}, want a tensor {wanted}")
    if tensor.shape != shape or tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {[*tensor.shape]} {str(tensor.dtype).removeprefix('torch.')}, want {wanted}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, want {device}, where the others are")


def check_positive(name: str, value) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}, want a number > 0")


def as_batch(logits: Tensor) -> Tensor:
    """logits [..., V] as [B, T, V] with a contiguous last dimension, without a copy where strides allow it."""
    width = logits.shape[-1]
    if logits.stride(-1) != 1 and width > 1:
        logits = logits.contiguous()
    if logits.dim() == 3:
        return logits
    return logits.reshape(1, -1, width)


def as_rows(temperature: float | Tensor, logits: Tensor) -> Tensor:
    """[N] per-token temperatures, or [1] for a number, in the dtype of the arithmetic."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if isinstance(temperature, Tensor):
        return temperature.detach().reshape(-1).to(dtype).contiguous()
    return torch.full((1,), temperature, dtype=dtype, device=logits.device)


def check_writable_in_place(logits: Tensor) -> None:
    """Raises ValueError unless `as_batch` is a view of the logits and no two elements share memory."""
    shape, strides = logits.shape, logits.stride()
    rows = range(logits.dim() - 2)
    copied = (shape[-1] > 1 and strides[-1] != 1) or (
        logits.dim() > 3 and any(strides[d] != strides[d + 1] * shape[d + 1] for d in rows)
    )
    if copied or any(stride == 0 and size > 1 for size, stride in zip(shape, strides, strict=True)):
        raise ValueError(
            "inplace is True, but logits overlap themselves in memory or would have to be copied: use inplace=False"
        )


@torch.library.custom_op("crest::wanted_targets", mutates_args=())
def wanted_targets(
    targets: Tensor, mask: Tensor | None, temperature: Tensor, num_columns: int, ignore_index: int
) -> Tensor:
    """int64 targets with -1 where the row is not wanted; values of targets and temperature checked."""
    wanted = targets != ignore_index
    if mask is not None:
        wanted = wanted & mask
    good_target = ~wanted | ((targets >= 0) & (targets < num_columns))
    good_temperature = (temperature > 0) & (temperature < MAX_TEMPERATURE)
    if temperature.numel() > 1:
        good_temperature = good_temperature | ~wanted
    if checks_values(targets):
        if not good_target.all():
            at = int((~good_target).nonzero()[0])
            raise ValueError(
                f"targets[{at}] is {int(targets[at])} (positions counted row by row), want 0 <= target < "
                f"{num_columns}, or ignore_index = {ignore_index}"
            )
        if not good_temperature.all():
            at = int((~good_temperature).nonzero()[0])
            raise ValueError(f"temperature[{at}] is {float(temperature[at])}, want a number > 0")
    else:
        torch._assert_async(good_target.all(), "targets must lie in [0, vocab_size) or be ignore_index")
        torch._assert_async(good_temperature.all(), "temperature must be > 0")
    return torch.where(wanted, targets, -1).to(torch.int64)


@wanted_targets.register_fake
def _(targets, mask, temperature, num_columns, ignore_index):
    return torch.empty_like(targets, dtype=torch.int64)
