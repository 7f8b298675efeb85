import os

# Kernels run in Triton's interpreter; what needs the compiler starts a process of its own.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Tests are small and run side by side: a thread each, here and in the processes they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch


@pytest.fixture
def poisoned_memory():
    """Uninitialised tensors start as NaN, so that a kernel that leaves an output unwritten is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory):
    """A policy that does about half of the toy's turns."""
    from toy_runs import save_policy  # here, since most tests need no trainer

    return save_policy(tmp_path_factory.mktemp("policy"))
