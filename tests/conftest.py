import os

# Kernels run in Triton's interpreter; what needs the compiler starts a process of its own.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Tests are small and run side by side: a thread each, here and in the processes they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import inspect
from types import SimpleNamespace

import pytest
import torch

try:
    from triton.runtime import interpreter
except ImportError:  # no Triton for this system
    interpreter = None


def quicken(interpreter):
    """Let the interpreter find its builtins by name: it looks through all of triton.language at every function call."""
    from triton import language

    core = language.core
    places = [language, core, language.math, language.tensor, getattr(core, "tensor_descriptor_base", None)]
    names = {
        place: [name for name, member in inspect.getmembers(place) if core.is_builtin(member)]
        for place in filter(None, places)
    }

    def getmembers(place):
        if place not in names:
            return inspect.getmembers(place)
        return [(name, getattr(place, name)) for name in names[place]]

    interpreter.inspect = SimpleNamespace(**{**vars(inspect), "getmembers": getmembers})


if interpreter is not None:
    quicken(interpreter)


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
