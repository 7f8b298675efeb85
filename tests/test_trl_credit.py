"""Credit methods under TRL: turns and their rewards from rollouts, signals, denominators."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from toy import toy_model
from transformers import PreTrainedTokenizerFast
from trl import GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template
from trl_cases import DATA, arguments, loss_and_gradients, model_folder
from trl_scripted import TURN_REWARDS, per_turn, scored, scripted, scripted_trainer, teacher, turn_advantages, zscore

from crest_ops import (
    METHODS,
    CrestConfig,
    DrGRPOConfig,
    GRPOConfig,
    PPOClip,
    Signals,
    Spans,
    TurnGRPOConfig,
)
from crest_ops.integrations.trl import CrestGRPOTrainer
from crest_ops.integrations.trl_credit import action_reward

assert model_folder  # a fixture


def test_every_action_is_a_turn(model_folder):
    """A list from a reward function: turn-segmented advantages by hand, and the sum as TRL's reward."""
    trainer = scripted_trainer(model_folder, "turn_grpo")
    batch = scored(trainer)
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
    first, second = zscore([1.0, 0.0, 1.0, 0.0]), zscore([0.0, 0.5, 1.0])
    wanted = turn_advantages(mask, [[first[0], second[0]], [first[1], second[1]], [first[2], second[2], 0], [first[3]]])
    torch.testing.assert_close(batch["advantages"], wanted)
    torch.testing.assert_close(batch["token_weight"], mask / mask.sum())
    assert trainer._metrics["train"]["rewards/per_turn/mean"] == [pytest.approx((1 + 0.5 + 3 + 0) / 4)]


def test_turn_ids_of_a_rollout(model_folder):
    """Two actions of one turn share its reward."""

    def with_ids(prompts, trainer):
        found = scripted(prompts, trainer)
        return found | {"turn_ids": [[0] * len(ids) for ids in found["completion_ids"]]}

    def one_turn(completion_ids, turn_ids, **kwargs):
        return [[float(row)] for row in range(4)]

    batch = scored(scripted_trainer(model_folder, "turn_grpo", dict(rollout_func=with_ids, reward_funcs=one_turn)))
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
    torch.testing.assert_close(batch["advantages"], turn_advantages(mask, [[a] * 3 for a in zscore([0, 1, 2, 3])]))


def test_weighted_sources_and_unscored_rollouts(model_folder):
    """Lists and numbers add up with reward_weights; a rollout that nobody scores is out of its group."""

    def listed(completion_ids, **kwargs):
        return [[2.0, 0.0], None, [0.0] * 3, None]

    def number(completion_ids, **kwargs):
        return [1.0, 3.0, 1.0, None]

    own = dict(reward_funcs=[listed, number], credit_config=GRPOConfig())
    batch = scored(scripted_trainer(model_folder, "grpo", own, reward_weights=[0.5, 2.0]))
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
    reward = zscore([0.5 * 2 + 2, 6.0, 2.0])
    torch.testing.assert_close(batch["advantages"], turn_advantages(mask, [[r] * 3 for r in [*reward, 0.0]]))


class Keys:
    """Keys that end a turn, well or badly; a turn that is left open has failed."""

    def reset(self, **kwargs):
        self.turn_rewards = []

    def press(self, key: str) -> str:
        """Press a key.

        Args:
            key: Which key.

        Returns:
            What happened.
        """
        if key in ("good", "bad"):
            self.turn_rewards.append(float(key == "good"))
        return "next" if key in ("good", "bad") else "ok"

    def get_reward(self):
        return sum(self.turn_rewards)


def bytes_tokenizer():
    alphabet = sorted(ByteLevel.alphabet())
    backend = Tokenizer(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    special = ["<|im_start|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    backend.add_special_tokens([*special[:2], "<|im_end|>"])
    backend.add_tokens(special[2:])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left"
    )
    tokenizer.chat_template = qwen3_chat_template
    return tokenizer


def test_turns_of_an_environment(model_folder, monkeypatch):
    """Actions belong to the turn that the environment was in when they were written."""
    tokenizer = bytes_tokenizer()
    # what every rollout still running does in its turn: a key, or (None) a farewell that ends it
    script = [["x", "good", "bad", "x"], ["good", "bad", None, "good"], ["bad", None, "good"], [None, "x"], [None]]
    spoken = []

    def generate(self, prompt_ids, *args, **kwargs):
        keys = script[len(spoken)]
        assert len(keys) == len(prompt_ids)
        spoken.append(keys)
        call = '<tool_call>\n{{"name": "press", "arguments": {{"key": "{}"}}}}\n</tool_call>'
        texts = ["bye" if key is None else call.format(key) for key in keys]
        return [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts], None

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", generate)
    trainer = CrestGRPOTrainer(
        toy_model(context=4096, vocab_size=len(tokenizer)),
        args=arguments(model_folder, max_completion_length=2000),
        train_dataset=DATA.map(lambda row: {"prompt": [{"role": "user", "content": "press"}]}),
        processing_class=tokenizer,
        environment_factory=Keys,
        credit_method="turn_grpo",
    )
    trainer.model.train()
    batch = trainer._generate_and_score_completions([dict(trainer.train_dataset[0]) for _ in range(4)])
    assert [e.turn_rewards for e in trainer.environments] == [[1, 0], [1, 0], [0], [1, 1]]
    first, second = zscore([1, 1, 0, 1]), zscore([0, 0, 0, 1])
    wanted = [
        [first[0], first[0], second[0], 0],
        [first[1], second[1], 0],
        [first[2], second[2]],
        [first[3], first[3], second[3], 0, 0],
    ]
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
    torch.testing.assert_close(batch["advantages"], turn_advantages(mask, wanted))


def test_asynchronous_rewards_and_arrays(model_folder):
    """A coroutine that returns tensors of turn rewards says the same as a function that returns lists."""

    async def awaited(completion_ids, **kwargs):
        return [torch.tensor(rewards) for rewards in per_turn(completion_ids)]

    found, wanted = (
        scored(scripted_trainer(model_folder, "turn_grpo", dict(reward_funcs=f))) for f in (awaited, per_turn)
    )
    assert torch.equal(found["advantages"], wanted["advantages"])


def test_rewards_of_actions():
    """A turn's reward stands at its last action; without turn rewards a rollout's stands at its end."""
    mask = torch.tensor([[1, 0, 1, 0, 1, 1], [0, 1, 1, 0, 1, 0]]).bool()
    turn = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 0]])
    spans = Spans.from_mask(mask, turn=turn, group=torch.tensor([0, 0]))
    turn_reward = torch.tensor([1.0, 2.0, 0.0, 0.0])
    found = action_reward(spans, torch.tensor([10.0, 5.0]), turn_reward, torch.tensor([True, False]))
    assert found.tolist() == [0, 1, 2, 0, 5]


def test_a_batch_that_nobody_scores_has_no_credit(model_folder):
    def nothing(completion_ids, **kwargs):
        return [None] * len(completion_ids)

    batch = scored(scripted_trainer(model_folder, "turn_grpo", dict(reward_funcs=nothing)))
    assert not batch["advantages"].any()


def test_signals_of_the_user(model_folder):
    """CrEST: the teacher's gap from the callable, surprisal from the trainer."""
    batch = scored(scripted_trainer(model_folder, "crest", dict(signals=teacher)))
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
    spans = Spans.from_mask(mask, group=torch.zeros(4, dtype=torch.int64), turn=batch["turn"])
    model, length = toy_model(), mask.shape[1]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=attention).logits[:, -length - 1 : -1]
    logp = torch.log_softmax(logits.double(), -1).gather(-1, batch["completion_ids"][..., None])[..., 0]
    signals = Signals(
        turn_reward_K=torch.tensor([r for rewards in TURN_REWARDS for r in rewards]),
        surprisal_N=-logp.flatten().float(),
        **teacher(batch, spans, None) | {"skill_gap_N": None},
    )
    wanted = METHODS["crest"].assign(spans, signals, CrestConfig())
    torch.testing.assert_close(batch["advantages"].flatten(), wanted.credit_N, rtol=1e-5, atol=1e-6)


def test_sampled_distillation(model_folder):
    """ToolOPD's term: sum of distill * logp, against a plain log-softmax."""
    trainer = scripted_trainer(model_folder, "toolopd", dict(signals=teacher))
    batch = scored(trainer)
    assert batch["distill"].any()
    _, with_term = loss_and_gradients(trainer, batch)
    _, without = loss_and_gradients(trainer, batch | {"distill": torch.zeros_like(batch["distill"])})
    model, length = toy_model(), batch["completion_ids"].shape[1]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    logits = model(input_ids=ids, attention_mask=attention).logits[:, -length - 1 : -1]
    logp = torch.log_softmax(logits, -1).gather(-1, batch["completion_ids"][..., None])[..., 0]
    (batch["distill"] * logp).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(with_term[name] - without[name], parameter.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "method, config",
    [
        ("turn_grpo", TurnGRPOConfig(reduction="turn_mean")),
        ("turn_grpo", TurnGRPOConfig(surrogate=PPOClip(0.1, 0.1, level="action"), reduction="action_mean")),
        ("dr_grpo", DrGRPOConfig(length=20)),
        ("gspo", None),
        ("cispo", None),
    ],
)
def test_denominators_are_the_batches(model_folder, method, config):
    """An accumulation window adds up to the generation batch in one piece, however it is split, off policy too."""
    gradients = {}
    for parts in (1, 2, 4):
        settings = dict(per_device_train_batch_size=8 // parts, gradient_accumulation_steps=parts)
        trainer = scripted_trainer(model_folder, method, dict(credit_config=config), **settings)
        batch = scored(trainer, rows=8)
        generator = torch.Generator().manual_seed(2)
        batch["old_per_token_logps"] = -2 + 0.1 * torch.randn(batch["turn"].shape, generator=generator)
        trainer.model.train()
        trainer.model.zero_grad()
        for part in range(parts):
            size = 8 // parts
            rows = slice(part * size, part * size + size)
            micro = {name: value[rows] if value.dim() else value for name, value in batch.items()}
            trainer.compute_loss(trainer.model, micro).backward()
        gradients[parts] = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    for parts in (2, 4):
        torch.testing.assert_close(
            gradients[parts], gradients[1], rtol=1e-4, atol=1e-6 * float(gradients[1].abs().max())
        )


def test_training_and_evaluation(model_folder):
    """Two generations, each used in two steps of two micro-batches, then an evaluation; TRL's names in the log."""
    settings = dict(max_steps=4, per_device_train_batch_size=2, per_device_eval_batch_size=4)
    settings |= dict(gradient_accumulation_steps=2, num_iterations=2, beta=0.1, use_bias_correction_kl=False)
    trainer = scripted_trainer(model_folder, "crest", dict(signals=teacher), **settings)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    trainer.evaluate(trainer.train_dataset.select(range(2)))
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    wanted = {"kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_max"}
    assert len(steps) == 4 and all(wanted < entry.keys() for entry in steps)
    assert {"reward", "frac_reward_zero_std", "completions/mean_length"} < steps[0].keys()
    assert all(entry["grad_norm"] > 0 for entry in steps)
    assert any("eval_entropy" in entry for entry in trainer.state.log_history)
    assert any(not torch.equal(before[name], p) for name, p in trainer.model.named_parameters())
