"""The head of a model as the linear ops take it, and the checks of their hidden states and head: resolved or refused,
never read through. The effective weight of a head is this project's own definition: the matrix W with which the head
itself would compute its output h W^T + b.

Shape letters: V vocabulary, H hidden size, R rank of an adapter.
"""

import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .vocabulary import FLOAT_DTYPES, check_positive

# What a config says about logits: the power with which its number multiplies them; the cap that comes after.
SCALES = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1, "logits_mup_width_multiplier": -1}
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")
FSDP = "call the op inside the wrapped model's forward, or inside FSDP.summon_full_params where no gradient is wanted"
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, eq=False)
class Head:
    """What turns hidden states h into logits z: z = softcap * tanh(logit_scale * (h W^T + b) / softcap).

    weight W [V, H] and bias b [V] or None, as the head computes with them, with the graph to its parameters; softcap
    None: no cap. Used as `linear_policy_loss(hidden, head.weight, targets, credit, ..., **head.options)`.
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    logit_scale: float = 1.0

    @property
    def options(self) -> dict:
        """The keyword arguments of the linear ops besides the weight."""
        return {"head_bias": self.bias, "softcap": self.softcap, "logit_scale": self.logit_scale}


def head_of(model: nn.Module, *, dtype: torch.dtype | None = None) -> Head:
    """The head of a causal LM, or of a head module alone, with the adapters on it counted in.

    W = base + sum over active LoRA adapters of scaling * B A,  b = base + sum of scaling * (bias of B), with A [R, H]
    and B [V, R] (LoRA: arXiv 2106.09685, eq. 3), summed in the widest of the dtypes.

    model: with `get_output_embeddings()` (Hugging Face; its config names softcap and logit scale; a PEFT model around
        it), or the head itself. Resolved: torch.nn.Linear (also tied or parametrized); PEFT's modules_to_save (the
        active copy); PEFT's LoRA, several at once, merged or disabled. Everything else is refused. Virtual tokens of
        prompt-learning PEFT concern the body and are not looked at.

    dtype: in which the sum with adapters is given; None is the base's, whose rounding hides small updates (a bfloat16
        base and |scaling * B A| below 2^-9 of its weights): torch.float32 keeps them, and widens the products.

    Call it once for each forward pass: a LoRA weight is a new tensor [V, H] with the graph to A and B. `check_head`
    compares the result with the model's own logits.

    Raises ValueError that says what was found and the way out: DoRA and other adapters, LoRA with active dropout,
    quantised heads, sharded or unmaterialised weights, hooks, a forward of its own.
    """
    module = model
    if hasattr(model, "get_output_embeddings"):
        module = model.get_output_embeddings()
        if module is None:
            raise ValueError(f"model is {_kind(model)} without output embeddings, want a causal LM or its head")
    weight, bias = _effective("head", module, dtype)
    return Head(weight, bias, **logit_options(model))


@torch.no_grad()
def check_head(model: nn.Module, input_ids: Tensor) -> None:
    """Compare the logits of `head_of(model)` on the last hidden states with the model's own, in one forward pass.

    Tolerance: max |z_head - z_model| < 0.05 * max(1, max |z_model|), this project's choice, above the rounding of
    bfloat16. Once at the start of a training run is enough: it finds model families that compute their logits in a way
    that neither module nor config shows.

    model: a Hugging Face causal LM. input_ids [B, T] int64: a few tokens do.

    Raises ValueError when they differ, and for what `head_of` refuses.
    """
    head = head_of(model)
    found = model(input_ids=input_ids, output_hidden_states=True)
    wanted = found.logits.float()
    hidden = found.hidden_states[-1].to(head.weight.dtype)
    logits = nn.functional.linear(hidden, head.weight, head.bias).float() * head.logit_scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    if logits.shape != wanted.shape:
        raise ValueError(f"model is {_kind(model)}: its logits are {[*wanted.shape]}, its head's {[*logits.shape]}")
    error = (logits - wanted).abs().max()
    if not error < 0.05 * wanted.abs().max().clamp(min=1):
        raise ValueError(
            f"model is {_kind(model)}, whose logits are not those of its head on the last hidden states (off by "
            f"{error:.2g}; known: {', '.join((*SCALES, *SOFTCAPS))} of the config): pass hidden states, weight, "
            "logit_scale and softcap yourself, as its forward uses them"
        )


def logit_options(model: nn.Module) -> dict[str, float]:
    """softcap and logit_scale, where the config of a Hugging Face model names them; empty for a module without."""
    config = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
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
            f"{name} is {_kind(module)}, want a torch.nn.Linear, LoRA on one, or modules_to_save: merge the adapter "
            "for good (merge_and_unload()), or train the head through LoRA or modules_to_save instead"
        )
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.Module) and isinstance(weight, Tensor):
        check_weight(f"{name}.weight", weight)
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        raise ValueError(
            f"{name} is {_kind(module)}, want a torch.nn.Linear that keeps its forward (or a causal LM with such a "
            "head; of a wrapper like DistributedDataParallel pass .module): keep the head out of quantisation, or pass "
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
    if "forward" in vars(module):
        raise ValueError(
            f"{name} is {_kind(module)} with a forward set on the instance (as Accelerate's hooks do), want the "
            "forward of its class: undo that (accelerate.hooks.remove_hook_from_module), or pass the ops the weight "
            "yourself"
        )
    hooks = [hook for kind in HOOKS for hook in getattr(module, kind).values()]
    if hooks:
        raise ValueError(
            f"{name} is {_kind(module)} with hooks ({', '.join(getattr(h, '__qualname__', _kind(h)) for h in hooks)}), "
            "which do not run where its weight is used alone: remove them, or pass the ops the weight yourself if they "
            "change neither logits nor gradients"
        )


def _kind(value) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def check_head_arguments(hidden, head_weight, head_bias, targets, *, prefix: str = "") -> None:
    """hidden [..., H] floating with a row for each of targets [...]; head_weight [V, H] and head_bias [V] (or None),
    whole, floating, on the device of hidden. Names in messages start with prefix ("teacher_").

    Raises ValueError naming the argument, what was found and what was wanted.
    """
    hidden_name, weight_name, bias_name = f"{prefix}hidden", f"{prefix}head_weight", f"{prefix}head_bias"
    check_whole(hidden_name, hidden)
    check_weight(weight_name, head_weight)
    if not isinstance(targets, Tensor):
        raise ValueError(f"targets is {_kind(targets)}, want a tensor of ids with the shape of {hidden_name}[..., 0]")
    if hidden.dim() < 1 or hidden.shape[:-1] != targets.shape or not hidden.shape[-1]:
        wanted = ", ".join(map(str, (*targets.shape, "H")))
        raise ValueError(f"{hidden_name} is {[*hidden.shape]}, want [{wanted}] for targets {[*targets.shape]}")
    if head_weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"{weight_name} is {[*head_weight.shape]}, want [V, {hidden.shape[-1]}] for {hidden_name} {[*hidden.shape]}"
        )
    if head_bias is not None:
        check_whole(bias_name, head_bias)
        if head_bias.shape != head_weight.shape[:1]:
            raise ValueError(f"{bias_name} is {[*head_bias.shape]}, want [{head_weight.shape[0]}] (or None)")
    for name, tensor in ((weight_name, head_weight), (bias_name, head_bias), ("targets", targets)):
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"{name} is on {tensor.device}, want {hidden.device}, where {hidden_name} is")


def check_weight(name: str, tensor) -> None:
    """A whole floating [V, H]."""
    check_whole(name, tensor)
    if tensor.dim() != 2 or not tensor.numel():
        raise ValueError(f"{name} is {[*tensor.shape]}, want [V, H]; an empty or flat one is a shard of FSDP: {FSDP}")


def check_whole(name: str, tensor) -> None:
    """A floating tensor that is all there: no module, no shard of one (ZeRO-3, FSDP, DTensor), not quantised."""
    if isinstance(tensor, nn.Module):
        raise ValueError(
            f"{name} is the module {_kind(tensor)}, want a tensor: pass head_of(module).weight, which counts its "
            "adapters in"
        )
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} is {_kind(tensor)}, want a tensor")
    found = f"{type(tensor).__name__} {[*tensor.shape]} of {str(tensor.dtype).removeprefix('torch.')}"
    if hasattr(tensor, "ds_id") and (not tensor.numel() or "NOT_AVAILABLE" in str(getattr(tensor, "ds_status", ""))):
        raise ValueError(
            f"{name} is {found}, partitioned by DeepSpeed ZeRO-3, want all of it: run forward and backward inside "
            "deepspeed.zero.GatheredParameters([weight])"
        )
    if type(tensor).__name__ == "DTensor":
        raise ValueError(
            f"{name} is {found}, want a plain tensor. Sharded for data parallelism (FSDP2): {FSDP}, or pass "
            ".full_tensor(grad_placements=[Partial('avg')]). Vocabulary split by tensor parallelism: pass .to_local() "
            "and process_group"
        )
    if tensor.device.type == "meta":
        raise ValueError(f"{name} is {found} on the meta device, want data: load it first, without offloading")
    if tensor.dtype not in FLOAT_DTYPES or hasattr(tensor, "__tensor_flatten__"):
        raise ValueError(
            f"{name} is {found}, want a plain tensor of float16, bfloat16, float32 or float64: keep the head out of "
            "quantisation (modules_to_not_convert, llm_int8_skip_modules), or dequantise it"
        )
    if torch.compiler.is_compiling() or not tensor.numel():
        return
    try:
        num_bytes = tensor.untyped_storage().nbytes()
    except NotImplementedError as error:
        raise ValueError(
            f"{name} is {found} without memory of its own (sparse, or under torch.func), want a plain tensor"
        ) from error
    if not num_bytes:
        raise ValueError(f"{name} is {found} whose memory was freed, as FSDP does between uses: {FSDP}")
