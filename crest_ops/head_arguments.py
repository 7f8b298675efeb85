"""The checks of hidden states and head that the linear ops make before any work: whole, floating, of one shape.

Shape letters: V vocabulary, H hidden size.
"""

import torch
from torch import Tensor, nn

from .vocabulary import FLOAT_DTYPES, check_differentiation

FSDP = (
    "call the op inside the wrapped model's forward (hidden_states(model, batch, then=...)), or inside "
    "FSDP.summon_full_params where no gradient is wanted"
)


def check_head_arguments(hidden, head_weight, head_bias, targets, *, prefix: str = "") -> None:
    """hidden [..., H] floating with a row for each of targets [...]; head_weight [V, H] and head_bias [V] (or None),
    whole, floating, on the device of hidden; none under torch.func or in forward mode. Names in
    messages start with prefix ("teacher_").

    Raises ValueError naming the argument, what was found and what was wanted.
    """
    hidden_name, weight_name, bias_name = f"{prefix}hidden", f"{prefix}head_weight", f"{prefix}head_bias"
    check_differentiation(**{hidden_name: hidden, weight_name: head_weight, bias_name: head_bias})
    check_whole(hidden_name, hidden)
    check_weight(weight_name, head_weight)
    if not isinstance(targets, Tensor):
        raise ValueError(f"targets is {kind_of(targets)}, want a tensor of ids with the shape of {hidden_name}[..., 0]")
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
            f"{name} is the module {kind_of(tensor)}, want a tensor: pass resolve_head(module).weight, which counts "
            "its adapters in"
        )
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} is {kind_of(tensor)}, want a tensor")
    found = f"{type(tensor).__name__} {[*tensor.shape]} of {str(tensor.dtype).removeprefix('torch.')}"
    if hasattr(tensor, "ds_id") and (not tensor.numel() or "NOT_AVAILABLE" in str(getattr(tensor, "ds_status", ""))):
        raise ValueError(
            f"{name} is {found}, partitioned by DeepSpeed ZeRO-3, want all of it: run forward and backward inside "
            "deepspeed.zero.GatheredParameters([weight])"
        )
    if type(tensor).__name__ == "DTensor":
        raise ValueError(
            f"{name} is {found}, want a plain tensor. Sharded for data parallelism (FSDP2): leave the head to the "
            f"root's fully_shard, and {FSDP}, or pass .full_tensor(grad_placements=[Partial('avg')]). Vocabulary split "
            "by tensor parallelism: pass .to_local() and process_group"
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
        raise ValueError(f"{name} is {found} without memory of its own (sparse), want a plain tensor") from error
    if not num_bytes:
        raise ValueError(f"{name} is {found} whose memory was freed, as FSDP does between uses: {FSDP}")


def kind_of(value) -> str:
    """The full name of a value's class, for messages."""
    return f"{type(value).__module__}.{type(value).__qualname__}"
