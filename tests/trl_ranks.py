"""Two steps of a trainer on scripted rollouts; run under torchrun by test_trl_ranks.py.

Where a case says so, the second prompt's group, which is the second rank's, has no token that counts.
"""

import sys
from pathlib import Path

import torch
from trl_scripted import TURN_REWARDS, scripted, scripted_trainer, tokens

from crest_ops import DrGRPOConfig, TurnGRPOConfig

CASES = {
    "TRL's settings": ("grpo", None, dict(loss_type="dapo", beta=0.1, use_bias_correction_kl=False), False),
    "TRL's own loss, one rank without a policy token": ("grpo", None, dict(loss_type="grpo", beta=0.1), True),
    "a method": ("dr_grpo", DrGRPOConfig(length=20), {}, False),
    "a method, one rank without a policy token": ("turn_grpo", TurnGRPOConfig(reduction="action_mean"), {}, True),
}


def train(folder: Path, case: str, world: int) -> torch.Tensor:
    """The weights after two steps of eight rollouts over all ranks."""

    method, config, settings, masked = CASES[case]

    def rollouts(prompts, trainer):
        found = scripted(prompts, trainer)
        for row, prompt in enumerate(prompts):
            if "b" in prompt.split():
                found["completion_ids"][row] = ids = tokens("c a d ;" if row % 2 else "d ; <obs> no > b b b ;")
                mask = [1, 1, 1, 1] if row % 2 else [1, 1, 0, 0, 0, 1, 1, 1, 1]
                found["env_mask"][row] = [0 if masked else m for m in mask]
                found["logprobs"][row] = [0.0] * len(ids)
        return found

    def rewards(prompts, **kwargs):
        second = [[1.0, 0.0], [0.0], [1.0, 0.5], [1.0]]
        return [(second if "b" in prompt.split() else TURN_REWARDS)[row % 4] for row, prompt in enumerate(prompts)]

    trainer = scripted_trainer(
        folder,
        method,
        dict(rollout_func=rollouts, reward_funcs=rewards, credit_config=config),
        per_device_train_batch_size=8 // world,
        max_steps=2,
        shuffle_dataset=False,
        optim="sgd",
        learning_rate=0.05,
        **settings,
    )
    trainer.train()
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    found = {case: train(folder, case, 2) for case in CASES}
    if torch.distributed.get_rank() == 0:
        torch.save(found, folder / "two_ranks.pt")
