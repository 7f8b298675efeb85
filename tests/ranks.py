"""Work in several processes of one gloo group, for the tests of what runs on several ranks."""

import multiprocessing
from datetime import timedelta

import torch
import torch.distributed as dist

PRELOADED = [
    "torch.distributed",
    "triton",
    "crest_ops",
    "crest_kernels.token_stats",
    "crest_kernels.divergence",
    "pytest",
]


def run_ranks(work, folder, size: int) -> list:
    """[work(rank) of every rank]: `work` is a module's function and gives what torch.save can keep.

    A rank that waits for another for a minute fails.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    processes = [context.Process(target=_start, args=(work, rank, size, str(folder))) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * size
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _start(work, rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    torch.save(work(rank), f"{folder}/{rank}.pt")
    dist.destroy_process_group()
