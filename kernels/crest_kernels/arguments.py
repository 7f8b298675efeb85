"""What the launchers ask of their tensors: a kernel reads addresses, whatever lies there.

N rows of logits (or tokens), V columns.
"""

import torch

LOGITS = (torch.float16, torch.bfloat16, torch.float32)


def check_rows(targets, temperature, num_columns: int, **logits) -> None:
    """Raises ValueError naming the argument unless logits are [B, T, V] of B * T = N rows, V >= num_columns, with a
    contiguous last dimension; targets [N] int64, temperature [N] or [1] float32; all on one device.
    """
    num_rows = targets.numel()
    for name, rows in logits.items():
        if (
            rows.dim() != 3
            or rows.dtype not in LOGITS
            or rows.shape[0] * rows.shape[1] != num_rows
            or not 1 <= num_columns <= rows.shape[2]
            or (rows.shape[2] > 1 and rows.stride(2) != 1)
        ):
            raise ValueError(
                f"{name} is {[*rows.shape]} {rows.dtype} of strides {rows.stride()}, want [B, T, V] of float16, "
                f"bfloat16 or float32 with a contiguous last dimension, B * T = {num_rows} rows and V >= {num_columns} "
                ">= 1 columns"
            )
        if rows.device != targets.device:
            raise ValueError(f"{name} is on {rows.device}, want {targets.device}, where targets are")
    check_tensor("targets", targets, torch.int64, (num_rows,), targets.device)
    per_row = (1 if temperature.numel() == 1 else num_rows,)
    check_tensor("temperature", temperature, torch.float32, per_row, targets.device)


def check_per_row(targets, **values) -> None:
    """Raises ValueError naming the argument unless values are contiguous float32 tensors [N] where targets are; None
    is passed over.
    """
    for name, value in values.items():
        if value is not None:
            check_tensor(name, value, torch.float32, targets.shape, targets.device)


def check_tensor(name: str, value, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    """Raises ValueError naming the argument unless value is a contiguous tensor of this dtype, shape and device."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} is {type(value).__name__}, want a {dtype} tensor {[*shape]}")
    if value.dtype != dtype or value.shape != shape or not value.is_contiguous():
        found = f"{[*value.shape]} {value.dtype} of strides {value.stride()}"
        raise ValueError(f"{name} is {found}, want a contiguous {dtype} tensor {[*shape]}")
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}, want {device}, where the others are")


def check_values(name: str, value, wrong, wanted: str) -> None:
    """Raises ValueError naming the first wrong value; on a GPU, which is not waited for, a device-side assert."""
    if value.device.type != "cpu":
        torch._assert_async(~wrong.any(), f"{name}: want {wanted}")
    elif wrong.any():
        at = int(wrong.nonzero()[0])
        raise ValueError(f"{name}[{at}] is {int(value[at])}, want {wanted}")
