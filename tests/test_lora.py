"""Adapters of low rank: they alone learn and are kept; a run with them goes on bit for bit; the reference has them."""

import pytest
import torch
from crest_train.config import LoraSection, PolicySection
from crest_train.loading import first_policy, load_pretrained
from rich.console import Console
from toy_runs import drawn, last_of, quiet_train, toy_config

pytest.importorskip("peft")

LORA = {"rank": 4, "alpha": 8.0}


def section(folder, **changes):
    return toy_config(folder, policy={"model": str(folder), "lora": LORA | changes}).policy


def test_adapters_alone_learn(policy_folder):
    model, _ = first_policy(section(policy_folder), Console(quiet=True))
    learning = [name for name, p in model.named_parameters() if p.requires_grad]
    assert learning and all(".lora_" in name for name in learning) and not any("lm_head" in name for name in learning)
    assert len(learning) == 2 * 2 * 7  # A and B, two layers, seven maps in each
    model, _ = first_policy(section(policy_folder, targets=["q_proj"]), Console(quiet=True))
    assert sum(p.requires_grad for p in model.parameters()) == 2 * 2
    with pytest.raises(ValueError, match="policy.lora.targets: .*nothing"):
        first_policy(section(policy_folder, targets=["nothing"]), Console(quiet=True))


@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16"}, {"gradient_checkpointing": True}], ids=str)
def test_a_run_with_adapters_goes_on_bit_for_bit(policy_folder, tmp_path, changes):
    policy = {"model": str(policy_folder), "lora": LORA} | changes
    config = toy_config(policy_folder, policy=policy, method={"name": "crest", "session_reward": "mean"})
    whole = quiet_train(config, tmp_path / "whole")
    half = toy_config(
        policy_folder, policy=policy, method=dict(config.method), training={**dict(config.training), "steps": 2}
    )
    quiet_train(half, tmp_path / "parts")
    parts = quiet_train(config, tmp_path / "parts")
    assert [line["step"] for line in drawn(parts) if line["event"] == "step"] == [1, 2, 3, 4]
    assert [line for line in drawn(parts) if line["event"] == "step"] == [
        line for line in drawn(whole) if line["event"] == "step"
    ]
    kept = {path.name for path in last_of(whole).iterdir()}
    assert "adapter_model.safetensors" in kept and "model.safetensors" not in kept
    one, other = (load_pretrained(last_of(run), config.policy)[0] for run in (whole, parts))
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))
    base, _ = load_pretrained(policy_folder, config.policy.model_copy(update={"lora": LoraSection()}))
    assert torch.equal(one.get_input_embeddings().weight, base.get_input_embeddings().weight)
    assert any(p.abs().max() > 0 for name, p in one.named_parameters() if "lora_B" in name)


def test_adapters_on_the_head_are_part_of_the_loss(policy_folder, tmp_path):
    policy = {"model": str(policy_folder), "lora": LORA | {"targets": ["lm_head", "q_proj"]}}
    run = quiet_train(toy_config(policy_folder, policy=policy, training={"steps": 2, "rate": 1e-3}), tmp_path / "run")
    lines = [line for line in run.metrics() if line["event"] == "step"]
    assert all(abs(line["ratio"] - 1) < 0.5 for line in lines) and lines[0]["ratio"] == pytest.approx(1, abs=1e-2)


def test_a_reference_with_adapters_is_the_policy_as_it_was(policy_folder, tmp_path):
    policy = {"model": str(policy_folder), "lora": LORA}
    config = toy_config(policy_folder, policy=policy, method={"name": "trace", "session_reward": "mean"})
    run = quiet_train(config, tmp_path / "run")
    reference = run.restore_reference(config.policy)
    assert not any(p.requires_grad for p in reference.parameters())
    assert all((p == 0).all() for name, p in reference.named_parameters() if "lora_B" in name)


def test_dtype_of_a_section_is_that_of_its_adapters(policy_folder):
    model, _ = first_policy(PolicySection(model=str(policy_folder), dtype="bfloat16", lora=LORA), Console(quiet=True))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
