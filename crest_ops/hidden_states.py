"""The hidden states that a causal LM's head multiplies, through the model's own forward, and the check that head and
states give the model's logits.

Shape letters: B rows, T positions, H hidden size, V vocabulary.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .head_arguments import kind_of
from .heads import SCALES, SOFTCAPS, causal_lm, head_module, resolve_head, states_divisor


def hidden_states(model: nn.Module, batch: Mapping[str, Any], then: Callable[[Tensor], Any] | None = None) -> Any:
    """Final hidden states h [B, T, H] of `model(**batch)`: what the head multiplies, after the last norm.

    z = softcap * tanh(logit_scale * (h W^T + b) / softcap) with the numbers of `resolve_head`. This project's own way:
    the model is called as it stands, with all its wrappers, and its head is applied to none of the rows. No logits are
    computed; hooks run (the model's own get (h, logits [B, 0, V]) for its output); gradient checkpointing and autocast
    stay as they are; the output reaches every parameter of the head, so that DistributedDataParallel (also with
    find_unused_parameters or static_graph) and FSDP reduce its gradient. One backward pass must hold the states'
    gradient and the head's.

    model: a causal LM of transformers, alone or in DistributedDataParallel, FSDP, PEFT, torch.compile (one more graph
        beside that of `model(**batch)`).
    batch: the arguments of its forward by name (input_ids, attention_mask, position_ids, ...), without labels. With
        logits_to_keep the states are those of the positions kept. What else the model gives (cache, auxiliary loss) is
        dropped.
    then: gives what is wanted of the states (a tensor, or a tuple or dict of tensors), inside the model's forward, as
        in `then=lambda hidden: linear_policy_loss(hidden, resolve_head(model).weight, ...).loss`. FSDP1, and FSDP2 that
        reshards its root after forward, hold the head's weight together only there. A head with a `fully_shard` of
        its own is refused by `resolve_head` all the same: leave it to the root's.

    Gives h in the dtype in which the head gets it (float32 where a wrapper brings outputs to float32), or what `then`
    gave. Shifting the labels is the caller's: h at a position predicts the next token.

    Raises ValueError: model has no head, calls it not exactly once, or is a DataParallel (whose replicas are not seen
    from here: want DistributedDataParallel); batch holds labels or a key that the model's forward does not name
    (transformers would ignore it).
    """
    if isinstance(model, nn.DataParallel):
        raise ValueError("model is a DataParallel, want it alone or in DistributedDataParallel")
    lm = causal_lm(model)
    head = head_module(lm)
    _check_batch(lm, batch)
    lm_forward, head_forward = lm.forward, head.forward
    found, divisor = [], states_divisor(lm)

    def on_no_rows(hidden: Tensor) -> Tensor:
        found.append(hidden)
        return head_forward(hidden[..., :0, :])

    on_no_rows.keeps_product = "forward" not in vars(head)  # for `resolve_head` in `then`

    def with_states(*args, **kwargs) -> tuple:
        output = lm_forward(*args, **kwargs)
        if len(found) != 1:
            raise ValueError(f"model is {kind_of(lm)}, which called its head {len(found)} times, want once")
        hidden = found[0] if divisor == 1 else found[0] * divisor
        return hidden if then is None else then(hidden), output[0]

    with _forward(lm, with_states), _forward(head, on_no_rows):
        return model(**batch)[0]


@torch.no_grad()
def check_head(model: nn.Module, input_ids: Tensor) -> None:
    """Compare the logits z of `resolve_head(model)` on `hidden_states(model, ...)` with the model's own.

    Tolerance: max |z_head - z_model| < 0.05 * max(1, max |z_model|), this project's choice, above the rounding of
    bfloat16. Once at the start of a training run is enough: it finds model families that compute their logits in a way
    that neither module nor config shows.

    model: as in `hidden_states`. input_ids [B, T] int64: a few tokens do.

    Raises ValueError when they differ, and for what `resolve_head` and `hidden_states` refuse.
    """
    hidden = hidden_states(model, {"input_ids": input_ids})
    head = resolve_head(model)
    wanted = model(input_ids=input_ids).logits.float()[..., : head.vocab_size]
    logits = nn.functional.linear(hidden.to(head.weight.dtype), head.weight, head.bias)[..., : head.vocab_size]
    logits = logits.float() * head.logit_scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    if logits.shape != wanted.shape:
        raise ValueError(f"model is {kind_of(model)}: its logits are {[*wanted.shape]}, its head's {[*logits.shape]}")
    error = (logits - wanted).abs().max()
    if not error < 0.05 * wanted.abs().max().clamp(min=1):
        raise ValueError(
            f"model is {kind_of(model)}, whose logits are not those of its head on the last hidden states (off by "
            f"{error:.2g}; known: {', '.join((*SCALES, *SOFTCAPS))} of the config): pass hidden states, weight, "
            "logit_scale and softcap yourself, as its forward uses them"
        )


@contextmanager
def _forward(module: nn.Module, forward: Callable) -> Iterator[None]:
    """Call `forward` for the module's own inside this block; its hooks run around it."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def _check_batch(lm: nn.Module, batch) -> None:
    if not isinstance(batch, Mapping):
        raise ValueError(f"batch is {kind_of(batch)}, want a mapping of the names of the model's arguments")
    if batch.get("labels") is not None:
        raise ValueError("batch has labels, want none: the loss is taken from the hidden states")
    known = _argument_names(type(lm)).union(
        *(_argument_names(type(module)) for module in lm.modules() if hasattr(type(module), "get_input_embeddings"))
    )
    unknown = sorted(map(str, batch.keys() - known))
    if unknown:
        raise ValueError(f"batch has {', '.join(unknown)}, want arguments of the forward of {kind_of(lm)} alone")


@cache
def _argument_names(kind: type[nn.Module]) -> frozenset[str]:
    """What the forward of a class names, and what transformers lets through its **kwargs."""
    from transformers.utils import TransformersKwargs

    parameters = inspect.signature(kind.forward).parameters.values()
    names = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
    if len(names) < len(parameters):
        names |= TransformersKwargs.__annotations__.keys() | {"return_dict"}
    return frozenset(names - {"self"})
