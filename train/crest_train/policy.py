"""The built-in policy: a decoder of a fifth of a million parameters that Hugging Face's tools take as any other model.

What lets so small a model learn to copy words within two minutes (measured, see warm_start.py): embeddings of unit
scale, an untied head that starts at zero, and the embedding of the previous token added to that of the token itself.

B = rows, T = new positions, L = positions so far (T included), D = model width, H = query heads, W = head width.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

CACHE_FIELD = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
"""What transformers calls the cache in outputs (renamed in 5.24); `forward` takes it under both names."""


class TinyConfig(PretrainedConfig):
    """Sizes of the built-in policy.

    `num_hidden_layers` counts what a cache has to hold: the layer that shifts the tokens, and `num_blocks` blocks.
    """

    model_type = "crest_tiny"

    def __init__(
        self,
        vocab_size: int = 78,
        hidden_size: int = 96,
        num_blocks: int = 2,
        num_attention_heads: int = 4,
        intermediate_size: int = 240,
        rope_base: float = 1000.0,
        norm_eps: float = 1e-5,
        max_position_embeddings: int = 4096,
        pad_token_id: int = 0,
        **others,
    ):
        if hidden_size % (2 * num_attention_heads):
            raise ValueError(
                f"hidden_size is {hidden_size}; wanted a multiple of twice num_attention_heads ({num_attention_heads})"
            )
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_blocks = num_blocks
        self.num_hidden_layers = num_blocks + 1
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = 1
        self.head_dim = hidden_size // num_attention_heads
        self.intermediate_size = intermediate_size
        self.rope_base = rope_base
        self.norm_eps = norm_eps
        self.max_position_embeddings = max_position_embeddings
        derived = ("num_hidden_layers", "num_key_value_heads", "head_dim", "tie_word_embeddings")
        others = {name: value for name, value in others.items() if name not in derived}
        super().__init__(pad_token_id=pad_token_id, tie_word_embeddings=False, **others)


@lru_cache(maxsize=8)
def rotary_table(width: int, base: float, positions: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [positions, width] float32 of rotary embedding (arXiv 2104.09864); the sign of the first half's
    sine is in the table."""
    frequency = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.outer(torch.arange(positions, dtype=torch.float64), frequency)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1).to(device, torch.float32), torch.cat([-sin, sin], -1).to(device, torch.float32)


def _linear(fan_in: int, fan_out: int, init_scale: float = 1.0) -> nn.Linear:
    linear = nn.Linear(fan_in, fan_out, bias=False)
    linear.init_scale = init_scale
    return linear


def _embedding(count: int, width: int, init_scale: float = 1.0) -> nn.Embedding:
    embedding = nn.Embedding(count, width)
    embedding.init_scale = init_scale
    return embedding


class TinyBlock(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + swiglu(norm(x)); all query heads share one key and one value head."""

    def __init__(self, config: TinyConfig, cache_layer: int):
        super().__init__()
        self.cache_layer = cache_layer
        self.num_heads, self.head_width = config.num_attention_heads, config.head_dim
        width, inner = config.hidden_size, config.intermediate_size
        self.attention_norm = nn.LayerNorm(width, eps=config.norm_eps, bias=False)
        damping = 0.5 * config.num_blocks**-0.5
        self.qkv = _linear(width, width + 2 * self.head_width)
        self.attention_out = _linear(width, width, init_scale=damping)
        self.swiglu_norm = nn.LayerNorm(width, eps=config.norm_eps, bias=False)
        self.gate_up = _linear(width, 2 * inner)
        self.down = _linear(inner, width, init_scale=damping)

    def forward(
        self,
        x_BTD: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        cache: Cache | None,
    ) -> torch.Tensor:
        x_BTD = x_BTD + self.attention_out(self._attend(self.qkv(self.attention_norm(x_BTD)), rotary, mask, cache))
        gate, up = self.gate_up(self.swiglu_norm(x_BTD)).chunk(2, dim=-1)
        return x_BTD + self.down(F.silu(gate) * up)

    def _attend(self, qkv, rotary, mask, cache):
        """qkv [B, T, D + 2W] -> [B, T, D]; mask None: causal, the new positions being the last ones."""
        H, W = self.num_heads, self.head_width
        B, T, _ = qkv.shape
        heads = qkv.view(B, T, H + 2, W)
        cos, sin = rotary
        rotated = heads[:, :, : H + 1]
        rotated = rotated * cos + rotated.roll(W // 2, dims=-1) * sin
        query, key, value = rotated[:, :, :H], rotated[:, :, H:].transpose(1, 2), heads[:, :, H + 1 :].transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.cache_layer)
        if T == 1 and mask is None:
            # The heads are the query rows of one shared key head: no copy of the keys, no mask.
            return F.scaled_dot_product_attention(query.view(B, 1, H, W), key, value).view(B, 1, H * W)
        key, value = (states.expand(B, H, -1, W) for states in (key, value))
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2), key, value, attn_mask=mask, is_causal=mask is None
        )
        return mixed.transpose(1, 2).reshape(B, T, H * W)


class TinyPreTrainedModel(PreTrainedModel):
    """What Hugging Face asks of both models below."""

    config_class = TinyConfig
    base_model_prefix = "model"
    _no_split_modules = ["TinyBlock"]
    _supports_sdpa = True
    supports_gradient_checkpointing = True

    def _init_weights(self, module: nn.Module) -> None:
        """Normal weights of standard deviation `init_scale`, by the root of the fan-in for linear maps."""
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.init_scale)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.init_scale * module.in_features**-0.5)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)


class TinyModel(TinyPreTrainedModel):
    """Token ids to hidden states [B, T, D]."""

    def __init__(self, config: TinyConfig):
        super().__init__(config)
        self.embedding = _embedding(config.vocab_size, config.hidden_size)
        self.previous_embedding = _embedding(config.vocab_size, config.hidden_size, init_scale=0.5)
        self.blocks = nn.ModuleList(TinyBlock(config, 1 + block) for block in range(config.num_blocks))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutputWithPast:
        """Hidden states of `input_ids` [B, T] int64, which follow what the cache holds.

        attention_mask [B, L]: 0 where a position is padding (Hugging Face's sense of the word); None for no padding.
        position_ids [B, T] or [1, T]; None: counted on, padding left out.
        past_key_values, cache: two names for a transformers Cache. Its layer 0 holds the token ids themselves, so that
        the token before the first new one is at hand whatever is done to the cache's rows. A new cache is made when
        `use_cache` is True and none is given.
        Raises ValueError for a mask that does not fit, or more positions than `max_position_embeddings`.
        """
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache:
            cache = DynamicCache()
        num_past = 0 if cache is None else int(cache.get_seq_length())
        keep_BL = _checked_keep(attention_mask, input_ids, num_past)
        previous_ids = self._previous(input_ids, cache, num_past, keep_BL)
        hidden = self.embedding(input_ids) + self.previous_embedding(previous_ids)
        rotary = self._rotary(position_ids, input_ids, num_past, keep_BL)
        mask = _attention_mask(input_ids, num_past, keep_BL)
        for block in self.blocks:
            hidden = block(hidden, rotary, mask, cache)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), **{CACHE_FIELD: cache})

    def _previous(self, input_ids, cache, num_past, keep_BL):
        """The token before each new one [B, T]; padding before the first."""
        ids_BL = input_ids
        if cache is not None:
            states = input_ids[:, None, :, None].float()  # keys and values as any cache holds them
            ids_BL = cache.update(states, states, 0)[0][:, 0, :, 0].long()
        if keep_BL is not None:
            ids_BL = ids_BL.masked_fill(~keep_BL, self.config.pad_token_id)
        if num_past:
            return ids_BL[:, num_past - 1 : -1]
        return F.pad(ids_BL[:, :-1], (1, 0), value=self.config.pad_token_id)

    def _rotary(self, position_ids, input_ids, num_past, keep_BL):
        """Cosines and sines for [B, T, heads, W]."""
        config = self.config
        T = input_ids.shape[1]
        if num_past + T > config.max_position_embeddings:
            raise ValueError(
                f"input_ids ends at position {num_past + T}; wanted at most max_position_embeddings, "
                f"{config.max_position_embeddings}"
            )
        table = rotary_table(config.head_dim, config.rope_base, config.max_position_embeddings, input_ids.device)
        if position_ids is None and keep_BL is not None:
            position_ids = (keep_BL.cumsum(-1) - 1).clamp(min=0)[:, num_past:]
        where = slice(num_past, num_past + T) if position_ids is None else position_ids
        return tuple(part[where].unsqueeze(-2).to(self.embedding.weight.dtype) for part in table)


def _checked_keep(attention_mask, input_ids, num_past):
    """The mask as bool [B, L], or None when nothing is padding."""
    if attention_mask is None:
        return None
    wanted = (input_ids.shape[0], num_past + input_ids.shape[1])
    if tuple(attention_mask.shape) != wanted:
        raise ValueError(f"attention_mask has shape {tuple(attention_mask.shape)}; wanted [rows, positions] {wanted}")
    keep_BL = attention_mask.bool()
    return None if keep_BL.all() else keep_BL


def _attention_mask(input_ids, num_past, keep_BL):
    """Which of L positions each new one sees, bool, or None where a one-token step or plain causality says it.

    A padding position sees itself, so that its row of scores is not empty.
    """
    T = input_ids.shape[1]
    if keep_BL is None and (T == 1 or num_past == 0):
        return None
    causal_TL = torch.ones(T, num_past + T, dtype=torch.bool, device=input_ids.device).tril(num_past)
    if keep_BL is None:
        return causal_TL
    itself_TL = torch.eye(num_past + T, dtype=torch.bool, device=input_ids.device)[num_past:]
    return (causal_TL & keep_BL[:, None, None, :]) | itself_TL


class TinyForCausalLM(TinyPreTrainedModel, GenerationMixin):
    """`TinyModel` with a head over the vocabulary."""

    def __init__(self, config: TinyConfig):
        super().__init__(config)
        self.model = TinyModel(config)
        self.head = _linear(config.hidden_size, config.vocab_size, init_scale=0.0)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embedding

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int = 0,
        cache_position: torch.Tensor | None = None,
        inputs_embeds: None = None,
    ) -> CausalLMOutputWithPast:
        """Logits [B, T, V], or of the last `logits_to_keep` positions; the other arguments as `TinyModel.forward`.

        cache_position: passed by transformers 4 and not needed, the cache knows its length. inputs_embeds: always None.
        """
        if inputs_embeds is not None:
            raise ValueError("inputs_embeds is given; wanted input_ids, of which the model embeds each token twice")
        base = self.model(input_ids, attention_mask, position_ids, past_key_values, cache, use_cache)
        logits = self.head(base.last_hidden_state[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, **{CACHE_FIELD: getattr(base, CACHE_FIELD)})


AutoConfig.register(TinyConfig.model_type, TinyConfig)
AutoModel.register(TinyConfig, TinyModel)
AutoModelForCausalLM.register(TinyConfig, TinyForCausalLM)
AutoTokenizer.register(TinyConfig, fast_tokenizer_class=PreTrainedTokenizerFast)
