"""What the trainer needs of a Hugging Face causal LM: hidden states with a cache, logits of chosen rows, limits.

B = rows, T = positions, H = hidden size, V = vocabulary, R = chosen positions.
"""

import inspect
from contextlib import contextmanager
from functools import lru_cache

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer

from crest_ops import resolve_head
from crest_ops.heads import logit_options
from crest_train.cache import prompt_cache

KeyValues = list[tuple[torch.Tensor, torch.Tensor]]


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type when it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@lru_cache
def _cache_argument(model_type: type) -> str:
    # transformers 5.2x renamed the argument; older releases and many custom models have the old name.
    return "cache" if "cache" in inspect.signature(model_type.forward).parameters else "past_key_values"


def hidden_states(
    model: PreTrainedModel, ids_BT: torch.Tensor, cache: Cache | None = None, **others: torch.Tensor
) -> torch.Tensor:
    """Last hidden states [B,T,H] of ids [B,T] int64 that follow what the cache holds (which then holds them too).

    others: attention_mask and position_ids, where rows do not all begin at the cache's first position.
    """
    base = model.base_model
    arguments = {_cache_argument(type(base)): cache, "use_cache": cache is not None}
    return base(input_ids=ids_BT, **arguments, **others).last_hidden_state


def encode_prompt(model: PreTrainedModel, prompt: list[int]) -> KeyValues:
    """Keys and values per layer [1, heads, T, width] of a prompt, with gradient when gradients are on."""
    cache = DynamicCache()
    hidden_states(model, torch.tensor([prompt], device=model.device), cache)
    return [(layer.keys, layer.values) for layer in cache.layers]


@contextmanager
def shared_prompt(model: PreTrainedModel, prompt: list[int]):
    """Encode a prompt once for any number of forward (and backward) passes; yields a function that makes their cache.

    The function gives None for an empty prompt. The gradients that the passes leave at the prompt's keys and values are
    gathered there and sent through the prompt once, when the block ends.
    """
    if not prompt:
        yield lambda: None
        return
    states = encode_prompt(model, prompt)
    train = torch.is_grad_enabled()
    leaves = [tuple(state.detach().requires_grad_(train) for state in pair) for pair in states]
    yield lambda: prompt_cache(leaves)
    pairs = [(s, leaf.grad) for both in zip(states, leaves, strict=True) for s, leaf in zip(*both, strict=True)]
    pairs = [(state, grad) for state, grad in pairs if grad is not None and state.requires_grad]
    if pairs:
        torch.autograd.backward(*zip(*pairs, strict=True))


def head_logits(model: PreTrainedModel, hidden_RH: torch.Tensor) -> torch.Tensor:
    """The head's raw logits [R,V], before the scale and softcap that `logit_options` names."""
    return model.get_output_embeddings()(hidden_RH)


def shaped_logits(logits: torch.Tensor, *, logit_scale: float = 1.0, softcap: float | None = None) -> torch.Tensor:
    """Float32 logits as the model defines them, from the head's raw ones."""
    logits = logits.float() * logit_scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


@torch.no_grad()
def check_policy(model: PreTrainedModel) -> None:
    """Raise ValueError unless the head on the hidden states gives the model's own logits, alone and behind a prompt,
    and has a weight that the loss can be taken from.
    """
    resolve_head(model)
    ids_BT = torch.arange(1, 5, device=model.device).remainder(model.config.get_text_config().vocab_size)[None]
    wanted = model(input_ids=ids_BT).logits.float()
    with shared_prompt(model, ids_BT[0, :2].tolist()) as cache:
        behind = hidden_states(model, ids_BT[:, 2:], cache())
    options = logit_options(model)
    for hidden, part in ((hidden_states(model, ids_BT), wanted), (behind, wanted[:, 2:])):
        found = shaped_logits(head_logits(model, hidden), **options)
        error = (found - part).abs().max() / part.abs().max().clamp(min=1)
        if not error < 0.05:
            raise ValueError(
                f"policy.model: {type(model).__name__} computes its logits in a way the trainer does not know "
                f"(wanted head(hidden) with logit_scale, logits_scaling, final_logit_softcapping; off by {error:.2g})"
            )


def recomputing_layers(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """The layers for which gradient checkpointing has been turned on."""
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]


@contextmanager
def recomputing(model: PreTrainedModel):
    """Let these layers, of a model in eval mode, recompute their activations in backward passes inside the block.

    transformers has them do so in training mode, and drop the cache that they are given; outside of the block a rollout
    needs its cache, and nowhere is there to be dropout.
    """
    layers = recomputing_layers(model)
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def context_length(model: PreTrainedModel) -> int:
    """The number of positions the model was made for (2^31 when its config names none)."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31


def policy_hidden(
    model: PreTrainedModel,
    ids_BT: torch.Tensor,
    policy_BT: torch.Tensor,
    cache: Cache | None = None,
    **others: torch.Tensor,
) -> torch.Tensor:
    """Hidden states [R,H] behind the R positions where policy_BT is True, row by row; position 0 is never one."""
    hidden_BTH = hidden_states(model, ids_BT, cache, **others)
    return hidden_BTH[:, :-1][policy_BT[:, 1:]]


def policy_logits(
    model: PreTrainedModel, ids_BT: torch.Tensor, policy_BT: torch.Tensor, cache: Cache | None = None
) -> torch.Tensor:
    """Raw logits [R,V] that predict the R positions where policy_BT is True, row by row; position 0 is never one."""
    return head_logits(model, policy_hidden(model, ids_BT, policy_BT, cache))
