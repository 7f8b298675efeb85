"""Scripted rollouts under TRL, for the tests of credit methods: four fixed ones a prompt, with rewards by turn."""

import torch
from toy import WORDS
from trl_cases import DATA, make_trainer

from crest_ops.integrations.trl import CrestGRPOTrainer

COMPLETIONS = ["a ; <obs> no > b ;", "c ; <obs> no > d ;", "a ; <obs> no > d ; <obs> no > b ;", "b b ;"]
TURN_REWARDS = [[1.0, 0.0], [0.0, 0.5], [1.0, 1.0, 1.0], [0.0]]
OBSERVATION = {"<obs>", "no", ">"}


def tokens(text):
    return [WORDS.index(word) for word in text.split()]


def scripted(prompts, trainer):
    """Four fixed rollouts per prompt group, `<obs> no >` between the policy's actions."""
    texts = [COMPLETIONS[row % 4] for row in range(len(prompts))]
    ids = [tokens(text) for text in texts]
    return {
        "prompt_ids": [tokens(prompt) for prompt in prompts],
        "completion_ids": ids,
        "logprobs": [[0.0] * len(row) for row in ids],
        "env_mask": [[int(word not in OBSERVATION) for word in text.split()] for text in texts],
    }


def per_turn(completion_ids, **kwargs):
    return [TURN_REWARDS[row % 4] for row in range(len(completion_ids))]


def scripted_trainer(folder, method, own=None, **settings):
    settings = dict(max_completion_length=20) | settings
    own = dict(rollout_func=scripted, credit_method=method) | (own or {})
    reward_funcs = own.pop("reward_funcs", per_turn)
    return make_trainer(CrestGRPOTrainer, folder, reward_funcs=reward_funcs, own=own, **settings)


def scored(trainer, rows=4):
    trainer.model.train()
    return trainer._generate_and_score_completions([dict(DATA[0]) for _ in range(rows)])


def turn_advantages(mask, per_turn_of_row):
    """Credit [B, T] from one number per action of each row."""
    credit = torch.zeros(mask.shape)
    for row, numbers in enumerate(per_turn_of_row):
        action, before = -1, False
        for at, written in enumerate(mask[row].tolist()):
            action += written and not before
            before = written
            if written:
                credit[row, at] = numbers[action]
    return credit


def zscore(values):
    values = torch.tensor(values, dtype=torch.float64)
    return ((values - values.mean()) / (values.std() + 1e-6)).tolist()


def teacher(batch, spans, trainer):
    gap = torch.linspace(-1, 1, spans.num_tokens)
    return {"teacher_gap_N": gap, "skill_gap_N": gap.flip(0)}
