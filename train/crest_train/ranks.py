"""One run on several processes, as torchrun or accelerate launch start them. Alone, every function here does nothing.

All processes go through the loop together and call these functions in the same order. Each plays, scores and
backpropagates its share of the rows; what they find is put together at once (`gathered`, `total`), so that rollout,
signals and credit are whole, and the same, everywhere. The first process's word counts (`from_first`) for what decides
how many steps there are, and it alone writes and speaks.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

T = TypeVar("T")


@contextmanager
def joined(device: str) -> Iterator[None]:
    """Be one of the WORLD_SIZE processes of the environment until the block ends: gloo, and nccl between CUDA devices.

    After an error the group stands until the process ends: nccl's teardown waits for all processes (PyTorch, pull
    request 122358), of which others may wait for this one elsewhere, and the error would not be seen.

    device: "cpu", or "cuda", of which each process takes one. Raises ValueError: another one; more processes than
    devices.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield
        return
    if device != "cpu":
        local, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if device != "cuda":
            raise ValueError(f"policy.device: found {device}, wanted cuda with several processes: each takes its own")
        if local >= count:
            raise ValueError(f"policy.device: found {count} CUDA devices and a process number {local}, wanted one each")
        torch.cuda.set_device(local)
    dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    yield
    dist.destroy_process_group()


def size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this one is, from 0."""
    return dist.get_rank() if size() > 1 else 0


def is_first() -> bool:
    """Whether this is the process that writes the run's folder and says how it goes."""
    return rank() == 0


def share(items: list[T]) -> list[T]:
    """This process's part of a list that all have: neighbours, as many as for the others, but for one."""
    return items[rank() * len(items) // size() : (rank() + 1) * len(items) // size()]


def gathered(value: T) -> list[T]:
    """The values of all processes, in their order; what pickle can take."""
    values = [value] * size()
    if size() > 1:
        with _together():
            dist.all_gather_object(values, value)
    return values


def from_first(value: T) -> T:
    """The first process's value; the others wait for it."""
    values = [value]
    if size() > 1:
        with _together():
            dist.broadcast_object_list(values, src=0)
    return values[0]


@contextmanager
def first_ahead() -> Iterator[None]:
    """The first process goes through the block before the others do."""
    if not is_first():
        from_first(None)
    yield
    if is_first():
        from_first(None)


def total(tensor: torch.Tensor) -> torch.Tensor:
    """Sum a tensor of equal shapes over the processes, in place, and return it."""
    if size() > 1 and tensor.numel():
        with _together():
            dist.all_reduce(tensor)
    return tensor


def total_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum the gradients over the processes, all in one buffer; a process that has none of a parameter adds 0."""
    if size() == 1:
        return
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    flat = total(torch.cat([grad.flatten() for grad in grads]))
    for parameter, grad in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        parameter.grad = grad.view_as(parameter).to(parameter.dtype)


def weights_from_first(model: nn.Module) -> None:
    """Give every process the first one's parameters and buffers."""
    if size() > 1:
        with _together():
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.data, src=0)


@contextmanager
def _together() -> Iterator[None]:
    """Raises ConnectionError when another process is not there any more: it has said why, or was killed."""
    try:
        yield
    except RuntimeError as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConnectionError(f"another process of the run has ended or cannot be reached ({reason})") from error
