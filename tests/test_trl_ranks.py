"""Two processes under torchrun (gloo) end with the weights of one, also where one of them has nothing to learn from."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trl_cases import model_folder
from trl_ranks import CASES, train

assert model_folder  # a fixture


@pytest.fixture(scope="module")
def two_ranks(model_folder):
    script = Path(__file__).with_name("trl_ranks.py")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        script,
        model_folder,
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONWARNINGS": "ignore"})
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(model_folder / "two_ranks.pt")


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_are_one(model_folder, two_ranks, case):
    torch.testing.assert_close(two_ranks[case], train(model_folder, case, 1), rtol=1e-5, atol=2e-6)
