"""Trainers on a tiny random model, and batches as TRL makes them."""

import pytest
import torch
from datasets import Dataset
from toy import toy_model, toy_tokenizer
from trl import GRPOConfig, GRPOTrainer

from crest_ops.integrations.trl import CrestGRPOTrainer

DATA = Dataset.from_list([{"prompt": "<user> say a >"}, {"prompt": "<user> say b >"}] * 4)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    toy_model().save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return folder


def length_reward(completion_ids, **kwargs):
    return [float(len(ids) % 3) for ids in completion_ids]


def arguments(folder, **settings):
    defaults = dict(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=11,
        max_steps=1,
        learning_rate=1e-3,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    return GRPOConfig(**defaults | settings)


def make_trainer(kind, folder, model=None, reward_funcs=length_reward, own=None, **settings):
    own = own or {}
    trainer = kind(
        model=str(folder) if model is None else model,
        reward_funcs=reward_funcs,
        args=arguments(folder, **settings),
        train_dataset=own.pop("train_dataset", DATA),
        processing_class=toy_tokenizer(),
        **own,
    )
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    return trainer


def make_batch(tools=True, seed=0, rows=4, length=11, vocabulary=15):
    """Prompts padded left, completions padded right; with tools several turns, and a row of which nothing counts."""
    generator = torch.Generator().manual_seed(seed)

    def ids(*shape):
        return torch.randint(1, vocabulary, shape, generator=generator)

    prompt_mask = (torch.arange(5) >= torch.tensor([0, 2, 1, 3])[:, None]).long()
    completion_mask = (torch.arange(length) < torch.tensor([length, 7, 4, 9])[:, None]).long()
    batch = {
        "prompt_ids": ids(rows, 5) * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": ids(rows, length) * completion_mask,
        "completion_mask": completion_mask,
        "advantages": torch.tensor([1.2, -0.7, 0.4, -1.1]),
    }
    if tools:
        batch["tool_mask"] = torch.tensor(
            [
                [1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1],
                [1, 0, 0, 1, 1, 0, 1, 1, 1, 1, 1],
                [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1],
                [1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1],
            ]
        )
    written = completion_mask * batch.get("tool_mask", 1)
    return batch | {"num_items_in_batch": written.sum() + 5}


def with_logps(batch, trainer, noise=0.3, ref=False, seed=1):
    """The batch with log-probs of an older policy (the trainer's own, moved), and of a reference."""
    generator = torch.Generator().manual_seed(seed)
    whole = [torch.cat([batch[f"prompt_{kind}"], batch[f"completion_{kind}"]], 1) for kind in ("ids", "mask")]
    with torch.no_grad():
        found, _, _ = GRPOTrainer._get_per_token_logps_and_entropies(
            trainer, trainer.model, *whole, batch["completion_ids"].shape[1]
        )

    def moved():
        return found + noise * torch.randn(found.shape, generator=generator)

    batch = batch | {"old_per_token_logps": moved()}
    return batch | {"ref_per_token_logps": moved()} if ref else batch


def loss_and_gradients(trainer, batch):
    trainer.model.train()
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, dict(batch))
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


def differences(trl, ours, batch):
    """Largest difference of loss and of gradients, relative to the largest gradient."""
    (loss, gradients), (own_loss, own_gradients) = (loss_and_gradients(trainer, batch) for trainer in (trl, ours))
    assert gradients.keys() == own_gradients.keys()
    largest = max(g.abs().max() for g in gradients.values())
    off = max((g - own_gradients[name]).abs().max() for name, g in gradients.items())
    return float((loss - own_loss).abs() / loss.abs().clamp(min=1)), float(off / largest.clamp(min=1e-3))


def pair(folder, **settings):
    return (make_trainer(kind, folder, **settings) for kind in (GRPOTrainer, CrestGRPOTrainer))
