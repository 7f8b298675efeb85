"""The optimizers: Adam in float32 arithmetic whatever the parameters' dtype, or bitsandbytes' with 8-bit states."""

from collections.abc import Callable, Iterable

import torch
from torch import nn
from transformers import PreTrainedModel

from crest_train.config import TrainingSection


class MasterAdam(torch.optim.Adam):
    """Adam on float32 copies of parameters of any dtype, which get the rounded copies after every step.

    A step smaller than a parameter's resolution (2^-9 of it in bfloat16) is kept in the copy and adds up there; rounded
    in place it would be lost. The copies are part of the state that a checkpoint holds, as `master`.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], **options):
        self.rounded = list(parameters)
        super().__init__([nn.Parameter(p.detach().float().clone()) for p in self.rounded], **options)

    @property
    def masters(self) -> list[nn.Parameter]:
        """The float32 copies, in the order of the parameters."""
        return self.param_groups[0]["params"]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Take the parameters' gradients to float32, step there, round back: one by one, so that no second copy of all
        gradients stands beside them."""
        for master, rounded in zip(self.masters, self.rounded, strict=True):
            if rounded.grad is not None:
                master.grad = rounded.grad.float()
                super().step(closure)
                rounded.copy_(master)
                master.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the parameters' gradients."""
        for rounded in self.rounded:
            rounded.grad = None

    def state_dict(self) -> dict:
        """Adam's, with each parameter's `master` in it."""
        found = super().state_dict()
        masters = dict(enumerate(self.masters))
        return found | {"state": {i: {**found["state"].get(i, {}), "master": m.detach()} for i, m in masters.items()}}

    def load_state_dict(self, state_dict: dict) -> None:
        """What `state_dict` gave, copies and the parameters themselves included."""
        state = {i: dict(values) for i, values in state_dict["state"].items()}
        with torch.no_grad():
            for i, (master, rounded) in enumerate(zip(self.masters, self.rounded, strict=True)):
                master.copy_(state[i].pop("master"))
                rounded.copy_(master)
        super().load_state_dict(state_dict | {"state": {i: values for i, values in state.items() if values}})


def make_optimizer(
    model: PreTrainedModel, section: TrainingSection, rate: float | None = None
) -> torch.optim.Optimizer:
    """The section's optimizer over the parameters that learn; rate: in place of the section's.

    "adam": float32 moments, and float32 copies of parameters of another dtype. "adam_8bit": bitsandbytes' Adam8bit
    (arXiv 2110.02861), moments of 8 bits in blocks; parameters of bfloat16 are stepped in place, without copies.
    Raises ValueError where it cannot run.
    """
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    options = {"lr": section.rate if rate is None else rate, "betas": section.betas}
    if section.optimizer == "adam_8bit":
        return _adam_8bit()(learning, **options)
    low = any(parameter.dtype != torch.float32 for parameter in learning)
    return (MasterAdam if low else torch.optim.Adam)(learning, **options)


def check_optimizer(section: TrainingSection, device: str) -> None:
    """Raise ValueError where the section's optimizer does not run on the device, or its package is not installed."""
    if section.optimizer == "adam_8bit":
        if device == "cpu":
            raise ValueError(
                'training.optimizer: found "adam_8bit" with policy.device "cpu", wanted a GPU for it; '
                'on the CPU take "adam"'
            )
        _adam_8bit()


def _adam_8bit() -> Callable[..., torch.optim.Optimizer]:
    try:
        from bitsandbytes.optim import Adam8bit
    except ImportError as error:
        raise ValueError(
            'training.optimizer: "adam_8bit" needs bitsandbytes; pip install bitsandbytes, or take "adam"'
        ) from error
    return Adam8bit
