"""Credit methods under TRL: what is refused, at construction and in a batch, with its name and the way out."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trl_cases import DATA, model_folder
from trl_scripted import scored, scripted, scripted_trainer, teacher, turn_advantages, zscore

from crest_ops import (
    DrGRPOConfig,
    GRPOConfig,
    SERLConfig,
    Spans,
    ToolOPDConfig,
)
from crest_ops.integrations.trl_credit import TurnRewards, check_method, environment_rewards, turn_reward

assert model_folder  # a fixture


@pytest.mark.parametrize(
    "method, own, settings, message",
    [
        ("ppo", {}, {}, "'ppo' is unknown"),
        ("turn_grpo", dict(credit_config=GRPOConfig()), {}, "want TurnGRPOConfig"),
        ("crest", {}, {}, "needs teacher_gap_N.*signals="),
        ("grpo", dict(signals=teacher), {}, "asks for none"),
        ("turn_grpo", {}, dict(loss_type="grpo"), "args.loss_type is 'grpo'.*credit_config=TurnGRPOConfig"),
        ("turn_grpo", {}, dict(epsilon_high=0.28), "args.epsilon_high"),
        ("turn_grpo", {}, dict(entropy_coef=0.1), "args.entropy_coef"),
        ("turn_grpo", {}, dict(beta=0.1), "use_bias_correction_kl"),
        ("grpo", {}, dict(cast_lm_head_to_fp32=True), "args.cast_lm_head_to_fp32 is True, want False"),
    ],
)
def test_refusals_at_construction(model_folder, method, own, settings, message):
    with pytest.raises(ValueError, match=message):
        scripted_trainer(model_folder, method, own, **settings)


def no_turns(completion_ids, **kwargs):
    return [1.0] * len(completion_ids)


def too_many(completion_ids, **kwargs):
    return [[1.0] * 3] * len(completion_ids)


def no_numbers(completion_ids, **kwargs):
    return [[None]] * len(completion_ids)


def not_finite(completion_ids, **kwargs):
    return [[1.0, float("nan")]] * len(completion_ids)


def of_two_dimensions(completion_ids, **kwargs):
    return [torch.ones(1, 2)] * len(completion_ids)


def with_ids(turn_ids):
    """A rollout_func whose turn_ids are turn_ids(the completions' ids)."""

    def rollouts(prompts, trainer):
        found = scripted(prompts, trainer)
        return found | {"turn_ids": turn_ids(found["completion_ids"])}

    return rollouts


def one_skipped(ids):
    """Turns 0 and 2 for a rollout of two actions, in places of a token; 0 for the others."""
    return [[0, 0, 0, 0, 0, 2, 2], *([0] * len(row) for row in ids[1:])]


def reward_of_the_skipped(completion_ids, **kwargs):
    return [[1.0, 0.5, 1.0], [1.0], [1.0], [1.0]]


@pytest.mark.parametrize(
    "method, own, message",
    [
        ("turn_grpo", dict(reward_funcs=no_turns), "rollout 0 has none: return a list of numbers"),
        ("turn_grpo", dict(reward_funcs=too_many), "too_many gives 3 turn rewards for rollout 0, which has 2"),
        ("turn_grpo", dict(reward_funcs=no_numbers), "no_numbers gives None at place 0 of rollout 0, want a finite"),
        ("turn_grpo", dict(reward_funcs=not_finite), "not_finite gives nan at place 1 of rollout 0, want a finite"),
        ("turn_grpo", dict(reward_funcs=of_two_dimensions), r"dimensions gives \[1.0, 1.0\] at place 0 of rollout 0"),
        (
            "turn_grpo",
            dict(rollout_func=with_ids(one_skipped), reward_funcs=reward_of_the_skipped),
            "reward_of_the_skipped gives 0.5 for turn 1 of rollout 0, in which no action",
        ),
        ("crest", dict(signals=lambda *_: {"gap": None}), "signals gave .*gap"),
        ("crest", dict(signals=lambda *_: {}), "teacher_gap_N is missing"),
        ("serl", dict(signals=teacher, credit_config=SERLConfig(kl=True)), "distils with 'forward_kl'"),
        ("toolopd", dict(signals=teacher, credit_config=ToolOPDConfig(kind="reverse_kl")), "hidden states"),
    ],
)
def test_refusals_of_a_batch(model_folder, method, own, message):
    trainer = scripted_trainer(model_folder, method, own)
    with pytest.raises(ValueError, match=message):
        scored(trainer)


@pytest.mark.parametrize(
    "turn_ids, message",
    [
        (lambda ids: [[0]] * 4, r"turn_ids\[0\] has 1 entries, want 7"),
        (lambda ids: [[0] * len(row) for row in ids[:2]], "turn_ids is .*want 4 lists, one per rollout"),
        (lambda ids: [], r"turn_ids is \[\], want 4 lists"),
        (lambda ids: 0, "turn_ids is 0, want 4 lists"),
        (lambda ids: [None] * 4, "turn_ids gives None for rollout 0, want a list"),
        (lambda ids: ["0" * len(row) for row in ids], "turn_ids gives '0000000' for rollout 0"),
        (lambda ids: [["0"] * len(row) for row in ids], "turn_ids gives '0' at place 0 of rollout 0, want an int"),
        (lambda ids: [[0] * 7, [0.0, *[1.5] * 6], *ids[2:]], "turn_ids gives 0.0 at place 0 of rollout 1"),
    ],
)
def test_refusals_of_turn_ids(model_folder, turn_ids, message):
    with pytest.raises(ValueError, match=message):
        scored(scripted_trainer(model_folder, "turn_grpo", dict(rollout_func=with_ids(turn_ids))))


def test_turn_ids_as_tensors(model_folder):
    """Of any kind of whole numbers; a turn that was skipped may have the reward 0."""

    def tensors(ids):
        return [np.array(one_skipped(ids)[0]), *(torch.tensor(row) for row in one_skipped(ids)[1:])]

    def rewards(completion_ids, **kwargs):
        return [[1.0, 0.0, 3.0], [0.0], [0.0], [0.0]]

    own = dict(rollout_func=with_ids(tensors), reward_funcs=rewards)
    batch = scored(scripted_trainer(model_folder, "turn_grpo", own))
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
    assert batch["turn"][0][mask[0]].tolist() == [0, 0, 2, 2]
    first = zscore([1.0, 0.0, 0.0, 0.0])
    wanted = turn_advantages(mask, [[first[0], 0.0], *([a] * 3 for a in first[1:])])
    torch.testing.assert_close(batch["advantages"], wanted)


@pytest.mark.parametrize("rewards", [[0.25, 0.5], (0.25, 0.5), torch.tensor([0.25, 0.5]), np.array([0.25, 0.5])])
def test_rewards_of_environments(rewards):
    found = environment_rewards([SimpleNamespace(turn_rewards=rewards), SimpleNamespace()])
    assert found == [[0.25, 0.5], None]


@pytest.mark.parametrize(
    "rewards, message",
    [
        (["great"], "gives 'great' at place 0 of rollout 1, want a finite number"),
        (["1.0"], "gives '1.0' at place 0"),
        ([0.0, float("nan")], "gives nan at place 1"),
        (torch.ones(1, 2), r"gives \[1.0, 1.0\] at place 0"),
        ([torch.ones(2)], "gives tensor.* at place 0"),
        (1.0, "gives 1.0 for rollout 1, want a list"),
        ("good", "gives 'good' for rollout 1, want a list"),
    ],
)
def test_refusals_of_environments(rewards, message):
    with pytest.raises(ValueError, match="environment.turn_rewards " + message):
        environment_rewards([SimpleNamespace(turn_rewards=[]), SimpleNamespace(turn_rewards=rewards)])


def test_rewards_of_turns_without_an_action():
    """Two turns that one action ended: the second's reward would reach no token; 0 may, and rows that count nothing."""
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0]]).bool()
    spans = Spans.from_mask(mask, turn=torch.tensor([[0, 0, 0, 2]] * 2), group=torch.tensor([0, 0]))

    def found(*rewards):
        return turn_reward(spans, [TurnRewards("environment.turn_rewards", 1.0, rewards, exact=False)])[0].tolist()

    assert found([0.25, 0.0, 1.0, 0.0], [0.5]) == [0.25, 1.0]
    for rewards, turn in (([0.25, 0.5], 1), ([0.25, 0.0, 1.0, -0.5], 3)):
        with pytest.raises(ValueError, match=rf"gives {rewards[-1]} for turn {turn} of rollout 0, in which no action"):
            found(rewards, None)


def test_whole_groups_on_several_processes(model_folder):
    """Of the training batch and, where it is evaluated on the way, of the evaluation batch; else as it starts."""
    trainer = scripted_trainer(
        model_folder, "dr_grpo", dict(credit_config=DrGRPOConfig(length=20)), per_device_eval_batch_size=2
    )
    two = SimpleNamespace(num_processes=2)

    def check(accelerator, **settings):
        args = SimpleNamespace(**vars(trainer.args) | settings)
        check_method("dr_grpo", trainer.credit_config, False, accelerator, args)

    check(two)
    check(two, eval_strategy="steps", per_device_eval_batch_size=8)
    check(SimpleNamespace(num_processes=1), eval_strategy="steps")
    with pytest.raises(ValueError, match="per_device_eval_batch_size is 2, want a multiple of num_generations_eval, 4"):
        check(two, eval_strategy="steps")
    with pytest.raises(ValueError, match="steps_per_generation is 2, want a multiple of num_generations, 4"):
        check(two, per_device_train_batch_size=2)
    check(two, eval_strategy="steps", num_generations_eval=2)
    trainer.accelerator = two
    trainer.model.eval()
    with pytest.raises(ValueError, match="per_device_eval_batch_size is 2, want a multiple of num_generations_eval, 4"):
        trainer._generate_and_score_completions([dict(DATA[0])] * 2)
