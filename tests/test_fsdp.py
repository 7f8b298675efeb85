"""FSDP2 (fully_shard) over two processes: the gradients of one process with the joined batch."""

import pytest
import torch
import torch.distributed as dist
from parallel_step import KINDS, SPLITS, check_step, loss_of, make_model
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

CASES = [(True, "PPO", "uneven")] + [(False, kind, split) for kind in KINDS for split in SPLITS]


def step(mesh, tied, kind, split, rank, reshard):
    model = make_model(tied)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    loss = loss_of(model, kind, split, SPLITS[split][rank], dist.group.WORLD)
    loss.backward()
    return loss.detach(), {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


def work(rank):
    mesh = init_device_mesh("cpu", (2,))
    found = {case: step(mesh, *case, rank, None) for case in CASES}
    found["resharded"] = step(mesh, False, "PPO", "uneven", rank, True)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(work, tmp_path_factory.mktemp("fsdp"), 2)


@pytest.mark.parametrize(("tied", "kind", "split"), CASES)
def test_gradients_are_those_of_the_joined_batch(ranks, tied, kind, split):
    check_step(ranks, (tied, kind, split), tied, kind, split)
    if split == "no policy token":
        assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in ranks[0][tied, kind, split][1].values())


def test_with_a_root_that_is_sharded_again_after_forward(ranks):
    check_step(ranks, "resharded", False, "PPO", "uneven")
