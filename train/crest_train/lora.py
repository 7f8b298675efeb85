"""Adapters of low rank inside a causal LM, through peft: put in, written, and read back.

They are injected: the model stays the class that it was, with its own forward pass, head and hidden states.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from crest_train.config import PolicySection
from crest_train.model import first_line

CONFIG = "adapter_config.json"
"""What a folder has that holds adapters in place of a whole model."""

_WEIGHTS, _PREFIX = "adapter_model.safetensors", "base_model.model."  # as PeftModel.from_pretrained reads them


def add_adapters(model: PreTrainedModel, section: PolicySection) -> None:
    """Put the section's adapters into the model; they alone learn from then on, and change nothing yet.

    Raises ValueError for targets that the model does not have.
    """
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=section.lora.rank,
        lora_alpha=section.lora.alpha,
        target_modules=section.lora.targets,
        base_model_name_or_path=section.model,
    )
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)  # A is drawn, alike in every run; B begins at 0
            inject_adapter_in_model(config, model)
    except ValueError as error:
        raise ValueError(f"policy.lora.targets: {first_line(error)}") from error


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Write the model, or its adapters alone, as `PeftModel.from_pretrained` reads them."""
    if not hasattr(model, "peft_config"):
        model.save_pretrained(folder)
        return
    from peft import get_peft_model_state_dict

    (config,) = model.peft_config.values()
    config.save_pretrained(folder)
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    save_file({_PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}, folder / _WEIGHTS)


def load_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Put the adapters that `save_model` wrote into the model that they were made for; they alone learn."""
    from peft import PeftConfig, inject_adapter_in_model, set_peft_model_state_dict

    inject_adapter_in_model(PeftConfig.from_pretrained(folder), model)
    tensors = load_file(folder / _WEIGHTS)
    found = {name.removeprefix(_PREFIX): tensor.clone() for name, tensor in tensors.items()}
    set_peft_model_state_dict(model, found)
