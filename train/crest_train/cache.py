"""Key-value caches for rollouts and for training behind a shared prompt, usable by any Hugging Face causal LM.

B = rows, T = positions in the cache.
"""

import torch
from transformers.cache_utils import Cache, DynamicLayer


class GrowingLayer(DynamicLayer):
    """One layer with its keys and values in a buffer that grows by an eighth when full.

    A step copies its own token, and now and then all: little beside attention, which reads them all in every step.
    For inference: the buffer is written in place. `keys` and `values` are views of its filled part.
    """

    least_spare = 128

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Append states [B, heads, new, width] and return all states so far."""
        filled = self.get_seq_length()
        total = filled + key_states.shape[-2]
        if filled == 0 or total > self.key_buffer.shape[-2]:
            self._grow(key_states, value_states, total)
        self.key_buffer[:, :, filled:total] = key_states
        self.value_buffer[:, :, filled:total] = value_states
        self._show(total)
        return self.keys, self.values

    def select(self, rows: torch.Tensor) -> None:
        """Keep the given rows [R] int64, in the given order; a row may be repeated."""
        filled = self.get_seq_length()
        self.key_buffer, self.value_buffer = self.key_buffer[rows], self.value_buffer[rows]
        self._show(filled)

    def _grow(self, key_states: torch.Tensor, value_states: torch.Tensor, total: int) -> None:
        filled = self.get_seq_length()
        capacity = total + max(self.least_spare, total // 8)
        key_buffer, value_buffer = (
            states.new_empty(*states.shape[:-2], capacity, states.shape[-1]) for states in (key_states, value_states)
        )
        if filled:
            key_buffer[:, :, :filled], value_buffer[:, :, :filled] = self.keys, self.values
        self.key_buffer, self.value_buffer, self.is_initialized = key_buffer, value_buffer, True

    def _show(self, total: int) -> None:
        self.keys, self.values = self.key_buffer[:, :, :total], self.value_buffer[:, :, :total]


class GrowingCache(Cache):
    """The cache of a rollout: rows in lockstep, grown in place, rows dropped or repeated with `select`."""

    def __init__(self):
        super().__init__(layer_class_to_replicate=GrowingLayer)

    def select(self, rows: list[int]) -> None:
        """Keep the given rows, in the given order; a row may be repeated (a shared prompt spread over its rollouts)."""
        for layer in self.layers:
            layer.select(torch.tensor(rows, device=layer.keys.device))


class PromptLayer(DynamicLayer):
    """One layer of a prompt that was encoded once (batch 1) and stands before every row; nothing is appended to it."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """The prompt's states followed by the rows' own [B, heads, T, width]; gradients reach both."""
        rows = key_states.shape[0]
        keys = torch.cat([self.keys.expand(rows, -1, -1, -1), key_states], dim=-2)
        values = torch.cat([self.values.expand(rows, -1, -1, -1), value_states], dim=-2)
        return keys, values


def prompt_cache(states: list[tuple[torch.Tensor, torch.Tensor]]) -> Cache:
    """A cache that puts a prompt's keys and values (per layer [1, heads, T, width]) before every row of a pass."""
    return Cache(layers=[PromptLayer(keys, values) for keys, values in states])
