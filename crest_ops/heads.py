"""The head of a model as the linear ops take it: resolved or refused, never read through. The effective weight of a
head is this project's own definition: the matrix W with which the head itself would compute its output h W^T + b.

Shape letters: V vocabulary, H hidden size, R rank of an adapter.
"""

import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .head_arguments import check_weight, check_whole, kind_of
from .vocabulary import check_positive

# What a config says about logits: the power with which its number multiplies them; the cap that comes after.
SCALES = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1, "logits_mup_width_multiplier": -1}
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")
# Where wrappers keep the model: DDP and DeepSpeed, torch.compile, FSDP1, PEFT's model and its tuner.
WRAPPED = ("module", "_orig_mod", "_fsdp_wrapped_module", "base_model", "model")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, eq=False)
class Head:
    """What turns hidden states h into logits z: z = softcap * tanh(logit_scale * (h W^T + b) / softcap).

    weight W [V, H] and bias b [V] or None, as the head computes with them, with the graph to its parameters; softcap
    None: no cap. vocab_size: the columns that are tokens, where the weight has more rows; None: all are. Used as
    `linear_policy_loss(hidden, head.weight, targets, credit, ..., **head.options)`.
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    logit_scale: float = 1.0
    vocab_size: int | None = None

    @property
    def options(self) -> dict:
        """The keyword arguments of the linear ops besides the weight."""
        return {
            "head_bias": self.bias,
            "softcap": self.softcap,
            "logit_scale": self.logit_scale,
            "vocab_size": self.vocab_size,
        }


def resolve_head(model: nn.Module, *, dtype: torch.dtype | None = None) -> Head:
    """The head of a causal LM, or of a head module alone, with the adapters on it counted in.

    W = base + sum over active LoRA adapters of scaling * B A,  b = base + sum of scaling * (bias of B), with A [R, H]
    and B [V, R] (LoRA: arXiv 2106.09685, eq. 3), summed in the widest of the dtypes.

    model: with `get_output_embeddings()` (Hugging Face; its config names softcap, logit scale and vocabulary size), a
        wrapper around it that `causal_lm` knows, or the head itself. Resolved: torch.nn.Linear (also tied or
        parametrized); PEFT's modules_to_save (the active copy); PEFT's LoRA, several at once, merged or disabled.
        Everything else is refused. Virtual tokens of prompt-learning PEFT concern the body and are not looked at.

    dtype: in which the sum with adapters is given; None is the base's, whose rounding hides small updates (a bfloat16
        base and |scaling * B A| below 2^-9 of its weights): torch.float32 keeps them, and widens the products.

    vocab_size is the config's `unpadded_vocab_size` or `vocab_size` where the weight has more rows. What a tokenizer
    does not use of them (Qwen) stays: the model's own logits, and the samplers that take its config, count it in.

    Call it once for each forward pass, after it: a LoRA weight is a new tensor [V, H] with the graph to A and B, and
    FSDP2 holds a weight together from then on. A gradient reaches the model's parameters past its forward: get the
    states from `hidden_states`, which shows DDP and FSDP that use. `check_head` compares with the model's own logits.

    Raises ValueError that says what was found and the way out: DoRA and other adapters, LoRA with active dropout,
    quantised heads, sharded or unmaterialised weights, hooks, a forward of its own.
    """
    model = causal_lm(model)
    module = head_module(model) if hasattr(model, "get_output_embeddings") else model
    weight, bias = _effective("head", module, dtype)
    return Head(weight, bias, **logit_options(model), vocab_size=_true_vocab_size(model, len(weight)))


def causal_lm(model: nn.Module) -> nn.Module:
    """The module with `get_output_embeddings()` in DistributedDataParallel, FSDP, DeepSpeed's engine, torch.compile and
    PEFT, one in the other; a module that is none of these is given back.
    """
    inner = model
    while isinstance(inner, nn.Module) and not hasattr(type(inner), "get_output_embeddings"):
        inner = next((inner._modules[name] for name in WRAPPED if name in inner._modules), None)
    return model if inner is None else inner


def head_module(lm: nn.Module) -> nn.Module:
    """What `get_output_embeddings()` of a causal LM gives. Raises ValueError: no such method, or it gives None."""
    head = lm.get_output_embeddings() if hasattr(lm, "get_output_embeddings") else None
    if head is None:
        raise ValueError(f"model is {kind_of(lm)} without output embeddings, want a causal LM")
    return head


def _true_vocab_size(model, num_rows: int) -> int | None:
    """How many of the head's rows the config counts; None: all, or nothing is said."""
    config = _text_config(model)
    size = getattr(config, "unpadded_vocab_size", None) or getattr(config, "vocab_size", None)
    return size if isinstance(size, int) and 0 < size < num_rows else None


def _text_config(model):
    config = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def logit_options(model: nn.Module) -> dict[str, float]:
    """softcap and logit_scale, where the config of a Hugging Face model names them; empty for a module without."""
    config = _text_config(model)
    options = {}
    for name, power in SCALES.items():
        value = getattr(config, name, None)
        if isinstance(value, int | float) and value:
            if name == "logits_scaling" and str(getattr(config, "model_type", "")).startswith("hyperclovax"):
                power = 1  # HyperCLOVA X multiplies by what Granite divides by
            options["logit_scale"] = options.get("logit_scale", 1.0) * float(value) ** power
    for name in SOFTCAPS:
        if getattr(config, name, None):
            options["softcap"] = float(getattr(config, name))
    for name, value in options.items():
        check_positive(f"{name} of the model's config", value)
    return options


def states_divisor(model: nn.Module) -> float:
    """By what the model's forward divides the last hidden states before its head, where the config has that number as
    one of SCALES; 1: nothing. As of transformers 5.24: Inkling and MiniCPM3.
    """
    config = _text_config(model)
    before = "logits_scaling" if getattr(config, "model_type", "") == "minicpm3" else "logits_mup_width_multiplier"
    return float(getattr(config, before, None) or 1)


def _effective(name: str, module, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
    """Weight [V,H] and bias [V] with which the module computes; sums with adapters in `dtype`, None: the base's."""
    if type(module) is _peft("peft.utils.other", "ModulesToSaveWrapper"):
        _check_called_as_defined(name, module)
        return _effective(*_active_copy(name, module), dtype)
    if type(module) is _peft("peft.tuners.lora.layer", "Linear"):
        _check_called_as_defined(name, module)
        return _with_lora(name, module, dtype)
    if type(module).__module__.startswith("peft."):
        raise ValueError(
            f"{name} is {kind_of(module)}, want a torch.nn.Linear, LoRA on one, or modules_to_save: merge the adapter "
            "for good (merge_and_unload()), or train the head through LoRA or modules_to_save instead"
        )
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.Module) and isinstance(weight, Tensor):
        check_weight(f"{name}.weight", weight)
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        raise ValueError(
            f"{name} is {kind_of(module)}, want a torch.nn.Linear that keeps its forward (or a causal LM with such a "
            "head): keep the head out of quantisation, or pass "
            "the ops the weight [V, H] that it computes with"
        )
    _check_called_as_defined(name, module)
    if module.bias is not None:
        check_whole(f"{name}.bias", module.bias)
    return weight, module.bias


def _peft(module: str, name: str) -> type | None:
    """A class of PEFT; None where PEFT was never imported, so that no module can be of that class."""
    return getattr(sys.modules.get(module), name, None)


def _active_copy(name: str, wrapper) -> tuple[str, nn.Module]:
    """The module that a ModulesToSaveWrapper calls, with its name."""
    active = _names(wrapper.active_adapters)
    if wrapper.disable_adapters or not active or any(adapter not in wrapper.modules_to_save for adapter in active):
        return f"{name}.original_module", wrapper.original_module
    return f"{name}.modules_to_save.{active[0]}", wrapper.modules_to_save[active[0]]


def _with_lora(name: str, layer, dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a LoRA layer on a linear one: base, plus the active adapters where they are not merged."""
    weight, bias = _effective(f"{name}.base_layer", layer.base_layer, dtype)
    if layer.disable_adapters and layer.merged:
        raise ValueError(f"{name} holds merged adapters that are disabled: call unmerge_adapter(), or enable them")
    if layer.disable_adapters or layer.merged:
        return weight, bias
    dtype = dtype or weight.dtype
    for adapter in _names(layer.active_adapters):
        if adapter not in layer.lora_A:
            continue
        _check_plain_lora(name, layer, adapter)
        a_RH, _ = _effective(f"{name}.lora_A.{adapter}", layer.lora_A[adapter])
        b_VR, b_bias_V = _effective(f"{name}.lora_B.{adapter}", layer.lora_B[adapter])
        scaling = layer.scaling[adapter]
        wide = torch.promote_types(weight.dtype, torch.promote_types(a_RH.dtype, b_VR.dtype))
        with torch.autocast(weight.device.type, enabled=False):
            weight = torch.addmm(weight.to(wide), b_VR.to(wide), a_RH.to(wide), alpha=scaling)
        if b_bias_V is not None:
            bias = scaling * b_bias_V if bias is None else bias + scaling * b_bias_V
    return weight.to(dtype), bias if bias is None else bias.to(dtype)


def _check_plain_lora(name: str, layer, adapter: str) -> None:
    """The adapter adds scaling * B A h and nothing else: no variant like DoRA, no dropout at work."""
    variant = getattr(layer, "lora_variant", {}).get(adapter)
    if variant is not None or getattr(layer, "use_dora", {}).get(adapter):
        kind = "DoRA" if variant is None else type(variant).__name__
        raise ValueError(
            f"{name} has the adapter {adapter!r} of kind {kind}, want plain LoRA: merge it for good "
            "(merge_and_unload()), or leave the head out of target_modules"
        )
    dropout = layer.lora_dropout[adapter]
    idle = isinstance(dropout, nn.Identity) or (type(dropout) is nn.Dropout and not (dropout.p and dropout.training))
    if not idle:
        raise ValueError(
            f"{name} has the adapter {adapter!r} with active dropout ({dropout}), which no weight can express: set "
            "lora_dropout=0 for the head, call .eval() on it, or leave it out of target_modules"
        )


def _names(adapters) -> list[str]:
    return [adapters] if isinstance(adapters, str) else list(adapters)


def _check_called_as_defined(name: str, module: nn.Module) -> None:
    """No hooks on the module, and the forward of its class: both would be passed by where the weight is used alone."""
    forward = vars(module).get("forward")
    if forward is not None and not getattr(forward, "keeps_product", False):
        raise ValueError(
            f"{name} is {kind_of(module)} with a forward set on the instance (as Accelerate's hooks do), want the "
            "forward of its class: undo that (accelerate.hooks.remove_hook_from_module), or pass the ops the weight "
            "yourself"
        )
    hooks = [hook for kind in HOOKS for hook in getattr(module, kind).values()]
    if hooks:
        found = ", ".join(getattr(hook, "__qualname__", kind_of(hook)) for hook in hooks)
        raise ValueError(
            f"{name} is {kind_of(module)} with hooks ({found}), which do not run where its weight is used alone: "
            "remove them, or pass the ops the weight yourself if they change neither logits nor gradients"
        )
