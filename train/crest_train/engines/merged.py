"""The folder that another engine reads the policy's weights from."""

import copy
from pathlib import Path

import torch
from transformers import PreTrainedModel


@torch.no_grad()
def save_merged(model: PreTrainedModel, folder: str | Path) -> None:
    """What `save_pretrained` writes of the whole model; adapters of peft are added to copies of their weights.

    W + alpha / rank * B A, in the weight's dtype. The model itself stays as it is, to the bit, which merging and
    unmerging would not leave it.
    """
    adapted = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    if not adapted:
        model.save_pretrained(folder)
        return
    state = {name.replace(".base_layer.", "."): t for name, t in model.state_dict().items() if ".lora_" not in name}
    for name, layer in adapted.items():
        weight = state[f"{name}.weight"]
        delta = sum(layer.get_delta_weight(adapter).float() for adapter in layer.active_adapters)
        state[f"{name}.weight"] = (weight.float() + delta).to(weight.dtype)
    whole = copy.copy(model)  # its adapters would be all that `save_pretrained` writes
    whole._hf_peft_config_loaded = False
    whole.save_pretrained(folder, state_dict=state)
