import os

# Kernels run in Triton's interpreter; what needs the compiler starts a process of its own.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch


@pytest.fixture
def poisoned_memory():
    """Uninitialised tensors start as NaN, so that a kernel that leaves an output unwritten is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
