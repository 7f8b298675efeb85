"""How a policy comes into memory: from where it lies, with what [policy] asks of it: attention, adapters, kernels."""

import importlib.util
import re
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from crest_train.config import PolicySection
from crest_train.fetch import path_of
from crest_train.lora import CONFIG, add_adapters, load_adapters
from crest_train.model import first_line, recomputing_layers
from crest_train.warm_start import built_in_policy


def first_policy(section: PolicySection, console: Console) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """What a run begins with: the built-in policy, warm-started (once, then cached), a fetched model, or a folder's.

    Raises ValueError when policy.model is none of them, or cannot do what the section asks for.
    """
    model, tokenizer = _base(section, console)
    return with_options(model, section), tokenizer


def load_pretrained(folder: Path, section: PolicySection) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal LM and its tokenizer from a folder that `save_pretrained` wrote, as the section asks.

    Raises ValueError when the folder is not one or is damaged.
    """
    path = folder.expanduser()
    if not any((path / name).is_file() for name in ("config.json", CONFIG)):
        raise ValueError(f"policy.model: {str(folder)!r} is no model folder (found no config.json in it)")
    try:
        return read_pretrained(path, section)
    except Exception as error:  # whatever the libraries raise for a damaged file
        raise ValueError(f"policy.model: could not load the model in {str(folder)!r}: {first_line(error)}") from error


def read_pretrained(path: Path, section: PolicySection) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """What `load_pretrained` gives, with the libraries' own errors."""
    return read_model(path, section), AutoTokenizer.from_pretrained(path)


def read_model(path: Path, section: PolicySection) -> PreTrainedModel:
    """The model alone; of a folder with adapters, the section's model with these."""
    if not (path / CONFIG).is_file():
        return prepared(_read(path, section), section)
    model, _ = _base(section, Console(quiet=True))
    load_adapters(model, path)
    return prepared(model, section)


def check_policy_section(section: PolicySection) -> None:
    """Raise ValueError where the section asks for what this machine, or what is installed, cannot do."""
    cpu, count = section.device == "cpu", torch.cuda.device_count()
    if not cpu and int(section.device.partition(":")[2] or 0) >= count:
        raise ValueError(
            f"policy.device: torch finds {count or 'no'} CUDA device{'s' * (count != 1)}, found {section.device!r}"
        )
    if section.attention == "flash_attention_2" and (cpu or section.dtype != "bfloat16"):
        raise ValueError(
            f'policy.attention: found "flash_attention_2" with device {section.device!r} and dtype {section.dtype!r}, '
            'wanted a GPU and bfloat16 for it; elsewhere take "auto" or "sdpa"'
        )
    if section.liger and cpu:
        raise ValueError(
            'policy.liger: found true with policy.device "cpu", wanted a GPU for Liger\'s kernels, or false'
        )
    wanted = [
        ("attention", "flash_attn", "flash-attn", section.attention == "flash_attention_2"),
        ("liger", "liger_kernel", "liger-kernel", section.liger),
        ("lora", "peft", "peft", section.lora.rank > 0),
    ]
    for key, module, package, needed in wanted:
        if needed and importlib.util.find_spec(module) is None:
            raise ValueError(f"policy.{key}: needs {package}, which is not installed: pip install {package}")


def _base(section: PolicySection, console: Console) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if section.model == "desk":
        model, tokenizer = built_in_policy(console=console)
        return model.to(section.device, getattr(torch, section.dtype)), tokenizer
    whole = section.model_copy(update={"lora": type(section.lora)(), "gradient_checkpointing": False, "liger": False})
    if _is_hub_name(section.model):
        return _from_hub(whole)
    return load_pretrained(path_of("smollm2") if section.model == "smollm2" else Path(section.model), whole)


def _is_hub_name(model: str) -> bool:
    """Whether it reads as OWNER/NAME and no folder of that name is begun here."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model) is not None and not Path(model).parent.is_dir()


def _from_hub(section: PolicySection) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        return _read(section.model, section), AutoTokenizer.from_pretrained(section.model)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"policy.model: {section.model!r} is no folder, nor to be had of the Hugging Face Hub or its cache "
            f"({first_line(error)})"
        ) from error


def _read(path: Path | str, section: PolicySection) -> PreTrainedModel:
    attention = section.attention
    if attention == "auto":
        flash = section.device != "cpu" and section.dtype == "bfloat16" and importlib.util.find_spec("flash_attn")
        attention = "flash_attention_2" if flash else "sdpa"
    dtype = getattr(torch, section.dtype)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention)
    _place(model)
    return model.to(section.device)


def _place(model: PreTrainedModel) -> None:
    """Put every parameter where the allocator wants it.

    One that still lay in the mapped file, at an odd offset, would take other CPU kernels, and a resumed run would
    differ in its last bits.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def with_options(model: PreTrainedModel, section: PolicySection) -> PreTrainedModel:
    """A whole model with the adapters, recomputed activations and kernels that the section asks for."""
    if section.lora.rank:
        add_adapters(model, section)
    return prepared(model, section)


def prepared(model: PreTrainedModel, section: PolicySection) -> PreTrainedModel:
    """The model with recomputed activations and Liger's kernels where the section asks for them."""
    if section.gradient_checkpointing:
        # transformers 5.24 renamed it
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        if not recomputing_layers(model):
            raise ValueError(
                f"policy.gradient_checkpointing: {type(model).__name__} has no layers that recompute their activations"
            )
    if section.liger:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(
            model, rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False
        )
    return model
