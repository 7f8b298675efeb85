"""Weights for another engine: a model with adapters is written whole, and stays as it was."""

import pytest
import torch
from crest_train.engines.merged import save_merged
from toy import toy_model
from transformers import LlamaForCausalLM

IDS = torch.tensor([[1, 6, 11, 2, 11, 3]])


@pytest.mark.parametrize("tied", [False, True])
def test_adapters_are_in_the_written_weights_and_the_model_stays_as_it_was(tmp_path, tied):
    peft = pytest.importorskip("peft")
    model = toy_model(tie_word_embeddings=tied)
    without = model(IDS).logits
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"]), model)
    model._hf_peft_config_loaded = True  # as `add_adapter` leaves it, which asks for a newer peft than others need
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wanted = model(IDS).logits
    assert (wanted - without).abs().max() > 0.1
    save_merged(model, tmp_path)
    found = LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.allclose(found(IDS).logits, wanted, atol=1e-5)
    assert not any("lora" in name for name in found.state_dict())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model(IDS).logits, wanted) and model._hf_peft_config_loaded
