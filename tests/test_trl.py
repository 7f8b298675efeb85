"""The loss of CrestGRPOTrainer is TRL's: value, gradients and metrics on the same batch, for every setting of it."""

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from toy import toy_model
from trl import GRPOTrainer
from trl_cases import differences, loss_and_gradients, make_batch, make_trainer, model_folder, pair, with_logps

from crest_ops.integrations.trl import CrestGRPOTrainer
from crest_ops.surrogates import CISPO, SAPO, PPOClip

assert model_folder  # a fixture
ROUNDING = 4e-6
"""Of float32 sums of up to 44 tokens, relative to 1 or the largest gradient: 30 of its units."""


def assert_equal(trl, ours, batch):
    assert max(differences(trl, ours, batch)) < ROUNDING


def assert_same_metrics(trl, ours):
    found, wanted = ours._metrics["train"], trl._metrics["train"]
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert found[name] == pytest.approx(values, abs=1e-5, nan_ok=True), name


@pytest.mark.parametrize(
    "loss_type, level, surrogate",
    [
        ("grpo", "token", PPOClip(0.1, 0.15)),
        ("grpo", "sequence", PPOClip(0.1, 0.15, level="trajectory")),
        ("dapo", "token", PPOClip(0.1, 0.15)),
        ("dapo", "sequence", PPOClip(0.1, 0.15, level="trajectory")),
        ("dr_grpo", "token", PPOClip(0.1, 0.15)),
        ("bnpo", "token", PPOClip(0.1, 0.15)),
        ("luspo", "sequence", PPOClip(0.1, 0.15, level="trajectory")),
        ("cispo", "token", CISPO(0.25)),
        ("cispo", "sequence", CISPO(0.25, level="trajectory")),
        ("sapo", "token", SAPO(1.0, 1.05)),
        ("sapo", "sequence", SAPO(1.0, 1.05, level="trajectory")),
        ("vespo", "token", None),
    ],
)
def test_loss_types(model_folder, loss_type, level, surrogate):
    """On and off policy, with and without tool tokens; a row of which no token counts."""
    trl, ours = pair(
        model_folder,
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon=0.1,
        epsilon_high=1.25 if loss_type == "cispo" else 0.15,
        temperature=0.7,
        gradient_accumulation_steps=2,
    )
    assert (ours._surrogate is None) == (surrogate is None)
    if surrogate is not None:
        numbers = [getattr(ours._surrogate, name) for name in surrogate.__dataclass_fields__]
        assert numbers == pytest.approx([getattr(surrogate, name) for name in surrogate.__dataclass_fields__])
    for tools in (False, True):
        batch = make_batch(tools)
        assert_equal(trl, ours, batch)
        assert_equal(trl, ours, with_logps(batch, trl))
    batch["tool_mask"][1] = 0
    assert_equal(trl, ours, with_logps(batch, trl))
    assert_same_metrics(trl, ours)


@pytest.mark.parametrize(
    "settings, fused",
    [
        (dict(beta=0.2, use_bias_correction_kl=False), True),
        (dict(beta=0.2, use_bias_correction_kl=False, loss_type="grpo"), True),
        (dict(beta=0.2), False),
        (dict(delta=1.3, epsilon=0.05), True),
        (dict(delta=1.01), False),
        (dict(loss_type="cispo"), False),
        (dict(entropy_coef=0.05), False),
        (dict(top_entropy_quantile=0.5), False),
        (dict(off_policy_mask_threshold=0.01), False),
    ],
)
def test_terms(model_folder, settings, fused):
    trl, ours = pair(model_folder, **settings)
    assert (ours._surrogate is not None) == fused
    batch = with_logps(make_batch(), trl, ref=True)
    if not settings.get("beta"):
        batch.pop("ref_per_token_logps")
    assert_equal(trl, ours, batch)
    assert_same_metrics(trl, ours)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("per_token", [True, False])
def test_importance_sampling_ratio_is_a_weight(model_folder, level, per_token):
    """It multiplies the surrogate alone: not the penalty, not the mask."""
    settings = dict(beta=0.1, use_bias_correction_kl=False, loss_type="grpo", importance_sampling_level=level)
    trl, ours = pair(model_folder, **settings)
    batch = with_logps(make_batch(), trl, ref=True)
    ratio = torch.rand(4, 11 if per_token else 1, generator=torch.Generator().manual_seed(3)) * 2
    batch["importance_sampling_ratio"] = ratio
    trl.use_vllm = True
    assert_equal(trl, ours, batch)


def test_evaluation_has_no_accumulation(model_folder):
    trl, ours = pair(model_folder, gradient_accumulation_steps=4, steps_per_generation=2)
    batch = with_logps(make_batch(), trl)
    for trainer in (trl, ours):
        trainer.model.eval()
    with torch.no_grad():
        found, wanted = (float(trainer.compute_loss(trainer.model, dict(batch))) for trainer in (ours, trl))
    assert found == pytest.approx(wanted, rel=1e-5)
    assert ours._metrics["eval"].keys() == trl._metrics["eval"].keys()


def test_nothing_counts(model_folder):
    """A micro-batch of masked rows: loss 0, gradients 0 and there."""
    ours = make_trainer(CrestGRPOTrainer, model_folder)
    batch = make_batch()
    batch["tool_mask"].zero_()
    loss, gradients = loss_and_gradients(ours, batch)
    assert loss == 0 and gradients and all((g == 0).all() for g in gradients.values())


def test_masked_tokens_have_no_part(model_folder):
    ours = make_trainer(CrestGRPOTrainer, model_folder)
    batch = with_logps(make_batch(), ours)
    spoiled = {name: value.clone() for name, value in batch.items()}
    spoiled["old_per_token_logps"][(batch["tool_mask"] * batch["completion_mask"]) == 0] = math.nan
    loss, gradients = loss_and_gradients(ours, batch)
    found, own = loss_and_gradients(ours, spoiled)
    assert found == loss and all(torch.equal(own[name], gradients[name]) for name in gradients)


def test_per_token_advantages(model_folder):
    trl, ours = pair(model_folder)
    batch = with_logps(make_batch(), trl)
    batch["advantages"] = torch.randn(4, 11, generator=torch.Generator().manual_seed(5))
    assert_equal(trl, ours, batch)
    with pytest.raises(ValueError, match="credit"):
        loss_and_gradients(ours, batch | {"advantages": torch.zeros(4, 10)})


def test_unknown_batch_keys_raise(model_folder):
    ours = make_trainer(CrestGRPOTrainer, model_folder)
    with pytest.raises(ValueError, match="pixel_values"):
        loss_and_gradients(ours, make_batch() | {"pixel_values": torch.zeros(4)})
    with pytest.raises(ValueError, match="token_weight"):
        loss_and_gradients(ours, make_batch() | {"token_weight": torch.zeros(4, 11)})


def lora(**config):
    torch.manual_seed(7)
    model = get_peft_model(toy_model(), LoraConfig(init_lora_weights=False, **config))
    return model


@pytest.mark.parametrize("extra", [{}, {"modules_to_save": ["lm_head"]}], ids=["body", "saved_head"])
def test_peft(model_folder, extra):
    trl, ours = (
        make_trainer(kind, model_folder, model=lora(target_modules=["q_proj", "down_proj"], **extra))
        for kind in (GRPOTrainer, CrestGRPOTrainer)
    )
    assert_equal(trl, ours, with_logps(make_batch(), trl))


def test_a_head_that_cannot_be_read_is_refused_at_construction(model_folder):
    with pytest.raises(ValueError, match="lm_head"):
        make_trainer(CrestGRPOTrainer, model_folder, model=lora(target_modules=["q_proj", "lm_head"]))
    with pytest.raises(ValueError, match="args.cast_lm_head_to_fp32 is True"):
        make_trainer(CrestGRPOTrainer, model_folder, cast_lm_head_to_fp32=True)


def test_training_goes_as_with_trl(model_folder):
    """The same rollouts, losses and weights over two generations of two micro-batches, and an evaluation after them."""
    settings = dict(max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2, num_iterations=2)
    settings |= dict(per_device_eval_batch_size=4, loss_type="dapo", beta=0.05, use_bias_correction_kl=False)
    logs, weights = [], []
    for trainer in pair(model_folder, **settings):
        trainer.train()
        trainer.evaluate(trainer.train_dataset.select(range(2)))
        logs.append(trainer.state.log_history)
        weights.append(dict(trainer.model.named_parameters()))
    for wanted, found in zip(*logs, strict=True):
        assert wanted.keys() == found.keys()
        for name in wanted.keys() - {"step_time", "train_runtime", "eval_runtime"}:
            if not name.endswith("_per_second"):
                assert found[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-5, nan_ok=True), name
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-3, atol=1e-4)
