"""What the launchers ask of their tensors: a kernel reads addresses, whatever lies there.

N rows of logits, V columns.
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
    _check("targets", targets, torch.int64, num_rows, targets.device)
    _check("temperature", temperature, torch.float32, 1 if temperature.numel() == 1 else num_rows, targets.device)


def check_per_row(targets, **values) -> None:
    """Raises ValueError naming the argument unless values are contiguous float32 tensors [..., N] where targets are;
    None is passed over.
    """
    for name, value in values.items():
        if value is not None:
            _check(name, value, torch.float32, targets.numel(), targets.device)


def _check(name: str, value, dtype, length: int, device) -> None:
    if value.dtype != dtype or value.dim() < 1 or value.shape[-1] != length or not value.is_contiguous():
        found = f"{[*value.shape]} {value.dtype} of strides {value.stride()}"
        raise ValueError(f"{name} is {found}, want a contiguous {dtype} tensor of {length}")
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}, want {device}, where targets are")
