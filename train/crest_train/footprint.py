"""Bytes that a model's passes take, counted while they run on meta tensors, which have sizes and no memory.

Every tensor that an operation makes is counted once, by its storage, from when it is made until nothing holds it. What
a kernel takes for itself, and what an allocator keeps, is not seen.

B = rows, T = positions, H = hidden size, V = vocabulary, R = positions that the policy wrote.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from crest_train.cache import GrowingCache
from crest_train.model import head_logits, hidden_states, recomputing, shaped_logits, shared_prompt


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made in its block that are still held (`now`), and the most there were (`peak`).

    known: tensors that were there before, which do not count.
    """

    def __init__(self, known: Iterable[torch.Tensor]):
        super().__init__()
        self.now = self.peak = 0
        self.seen = WeakIdKeyDictionary({tensor.untyped_storage(): None for tensor in known})

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operation and count what it made."""
        if func is torch.ops.aten._local_scalar_dense.default:
            return True  # what models ask of values is whether a mask can be left out
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self.seen:
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        self.seen[storage], size = None, storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.now -= size


@dataclass(frozen=True)
class UpdatePass:
    """Bytes of a micro-batch's forward and backward pass without the loss.

    saved: held between the two, for the backward pass; backward: the most that is held in it, parameters and their
    accumulated gradients left out.
    """

    saved: int
    backward: int


@dataclass(frozen=True)
class RolloutPass:
    """Bytes of a rollout's last step: cache of all rows' keys and values, and what comes and goes in the step."""

    cache: int
    step: int


def _fused_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    options = {"attn_mask": attn_mask, "scale": scale}
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attend(query, key, value, dropout_p, is_causal, **options)[0]


@contextmanager
def meta_tensors() -> Iterator[None]:
    """Tensors made in the block are meta tensors; attention is fused, of which torch has no choice to make for them."""
    with torch.device("meta"), patch.object(F, "scaled_dot_product_attention", _fused_attention):
        yield


def update_pass(model: PreTrainedModel, rows: int, length: int, prompt: int, written: int) -> UpdatePass:
    """Of rows of `length` tokens behind a prompt that they share (0: none), where the policy wrote R = written in all.

    model: of meta tensors.
    """
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    with _counting(model) as live, recomputing(model):
        ids_BT = torch.zeros(rows, length, dtype=torch.int64)
        with shared_prompt(model, [0] * prompt) as cache:
            hidden_BTH = hidden_states(model, ids_BT, cache())
            hidden_RH = hidden_BTH.flatten(0, 1).index_select(0, torch.zeros(written, dtype=torch.int64))
            del hidden_BTH
            saved = live.now
            loss = _Head.apply(hidden_RH, model.get_output_embeddings().weight)
            del hidden_RH
            live.peak = live.now
            loss.backward()
    return UpdatePass(saved, live.peak)


class _Head(torch.autograd.Function):
    """A loss whose gradients have the sizes of the real one's."""

    @staticmethod
    def forward(ctx, hidden_RH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
        ctx.shapes = hidden_RH.shape, weight_VH.shape
        return hidden_RH.new_zeros(())

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return tuple(
            grad.new_empty(shape) if needed else None
            for shape, needed in zip(ctx.shapes, ctx.needs_input_grad, strict=True)
        )


@torch.no_grad()
def scoring_pass(model: PreTrainedModel, rows: int, length: int, prompt: int) -> int:
    """The most bytes of a forward pass alone, as in `update_pass`."""
    with _counting(model) as live, shared_prompt(model, [0] * prompt) as cache:
        hidden_states(model, torch.zeros(rows, length, dtype=torch.int64), cache())
    return live.peak


@torch.no_grad()
def rollout_pass(model: PreTrainedModel, rows: int, length: int, prompt: int, options: dict) -> RolloutPass:
    """Of the step in which rows that share a prompt reach `length` positions each, the prompt counted.

    The cache is the largest that such rows have: just grown. options: of the logits (`logit_options`).
    """
    cache = GrowingCache()
    with _counting(model) as live:
        prompt = min(max(1, prompt), length - 2)
        hidden_states(model, torch.zeros(1, prompt, dtype=torch.int64), cache)
        cache.select([0] * rows)
        hidden_states(model, torch.zeros(rows, length - 1 - prompt, dtype=torch.int64), cache)
        held = live.peak = live.now
        hidden_BH = hidden_states(model, torch.zeros(rows, 1, dtype=torch.int64), cache)[:, -1]
        logits_BV = shaped_logits(head_logits(model, hidden_BH), **options)
        live.peak += (
            5 * logits_BV.nbytes
        )  # scaled, log-probs, probabilities, and sums of these in float64 (sampling.draw)
    return RolloutPass(held, live.peak - held)


def _counting(model: PreTrainedModel) -> LiveBytes:
    own = (*model.parameters(), *model.buffers())
    return LiveBytes((*own, *(tensor.grad for tensor in own if tensor.grad is not None)))
