"""DistributedDataParallel over two processes: the gradients of one process with the joined batch."""

import pytest
import torch
import torch.distributed as dist
from parallel_step import KINDS, MASK, SPLITS, check_step, loss_of, make_model
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel

CASES = [(True, kind, "uneven") for kind in KINDS] + [(False, kind, split) for kind in KINDS for split in SPLITS]
OPTIONS = {"plain": {}, "unused": dict(find_unused_parameters=True), "static": dict(static_graph=True)}


def step(tied, kind, split, rank, options):
    model = DistributedDataParallel(make_model(tied), **options)
    loss = loss_of(model, kind, split, SPLITS[split][rank], dist.group.WORLD)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.module.named_parameters()}


def accumulated_step(rank):
    """A row of each rank a backward, with the count of both; gradients are exchanged once."""
    model = DistributedDataParallel(make_model(False))
    losses = []
    for i in range(2):
        row = [SPLITS["one rank without a policy token"][rank][i]]
        model.require_backward_grad_sync = i == 1
        losses.append(loss_of_part(model, row))
        losses[-1].backward()
    return sum(losses).detach(), {name: parameter.grad for name, parameter in model.module.named_parameters()}


def loss_of_part(model, row):
    """Half a step's loss: `loss_of` counts one row of each rank, the step four."""
    here = MASK[row].sum()
    dist.all_reduce(here)
    return loss_of(model, "PPO", "uneven", row, dist.group.WORLD) * here / MASK.sum()


def work(rank):
    found = {(*case, "plain"): step(*case, rank, {}) for case in CASES}
    for options in ("unused", "static"):
        for split in SPLITS:
            found[False, "PPO", split, options] = step(False, "PPO", split, rank, OPTIONS[options])
    found["accumulated"] = accumulated_step(rank)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(work, tmp_path_factory.mktemp("ddp"), 2)


@pytest.mark.parametrize(("tied", "kind", "split"), CASES)
def test_gradients_are_those_of_the_joined_batch(ranks, tied, kind, split):
    check_step(ranks, (tied, kind, split, "plain"), tied, kind, split)


@pytest.mark.parametrize("options", ["unused", "static"])
@pytest.mark.parametrize("split", SPLITS)
def test_with_options_of_ddp(ranks, split, options):
    check_step(ranks, (False, "PPO", split, options), False, "PPO", split)


def test_accumulated_over_two_passes(ranks):
    check_step(ranks, "accumulated", False, "PPO", "uneven")


def test_a_rank_without_a_token_has_gradients(ranks):
    """Those of the other rank's tokens, divided; without any, exact zeros."""
    for rank in ranks:
        for tied, kind, split in CASES:
            loss, grads = rank[tied, kind, split, "plain"]
            assert all(grad is not None for grad in grads.values())
            if split == "no policy token":
                assert loss == 0 and all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads.values())
    assert ranks[1][False, "PPO", "one rank without a policy token", "plain"][0] == 0
