"""Which code runs an op, plain torch or Triton, and when values are looked at: decided here and nowhere else."""

import importlib.util
import os

import torch
from torch import Tensor

BACKENDS = ("auto", "torch", "triton")


def debugging() -> bool:
    """CREST_DEBUG=1 asks for checks that wait for the device; never while compiling."""
    return not torch.compiler.is_compiling() and os.environ.get("CREST_DEBUG") == "1"


def checks_values(tensor: Tensor) -> bool:
    """True where looking at values costs no device sync (CPU, not being compiled) or CREST_DEBUG=1 asks for it."""
    return debugging() or (tensor.device.type == "cpu" and not torch.compiler.is_compiling())


def resolve_backend(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """ "torch" or "triton" for tensors of this device and dtype.

    "auto" takes Triton on a GPU and torch elsewhere, and torch for float64, which the kernels do not compute in.
    "triton" on the CPU needs Triton's interpreter (TRITON_INTERPRET=1 before triton is imported).

    Raises ValueError, naming the way out, for an unknown name and for what Triton cannot run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, want one of {', '.join(map(repr, BACKENDS))}")
    if backend == "torch":
        return "torch"
    has_triton = importlib.util.find_spec("triton") is not None
    if backend == "auto":
        return "triton" if device.type == "cuda" and dtype != torch.float64 and has_triton else "torch"
    if not has_triton:
        raise ValueError("backend is 'triton', but triton is not installed: install it, or use backend='torch'")
    if dtype == torch.float64:
        raise ValueError(
            "backend is 'triton' and logits are float64: the kernels compute in float32; use backend='torch'"
        )
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "backend is 'triton' and logits are on the CPU: use backend='torch' (or 'auto'), or set TRITON_INTERPRET=1 "
            "before triton is imported to run the kernels in its interpreter"
        )
    return "triton"
