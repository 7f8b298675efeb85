"""Train an agent on long sessions with TRL's GRPOTrainer: verified rewards turn by turn, credit turn by turn.

    python examples/trl_multi_turn.py                        # about a minute on one CPU core
    python examples/trl_multi_turn.py --method grpo          # the same with one reward per session, to compare

The environment is `desk`: sessions of eight user requests over a small world of files. The policy is the built-in one,
a fifth of a million parameters, warm-started by imitation (once, about two minutes, then kept in the user's cache).
"""

import argparse
import tempfile

import torch
from crest_train.chat import make_chat
from crest_train.environments.desk import Desk
from crest_train.rollouts import Sampling, rollout
from crest_train.warm_start import built_in_policy
from datasets import Dataset
from rich.console import Console
from trl import GRPOConfig

from crest_ops import GRPOConfig as GRPOCredit
from crest_ops import PPOClip, TurnGRPOConfig
from crest_ops.integrations.trl import CrestGRPOTrainer

GROUP = 8  # rollouts of the same session
CLIP = PPOClip(0.2, 0.28)
CREDIT = {"turn_grpo": TurnGRPOConfig(surrogate=CLIP), "grpo": GRPOCredit(surrogate=CLIP, reduction="token_mean")}


def player(chat, turns):
    """TRL's rollout_func: plays the sessions that the prompts name, many in lockstep."""
    generator = torch.Generator().manual_seed(0)

    def play(prompts, trainer):
        environments = [Desk(num_turns=turns) for _ in prompts]
        seeds = [int(prompt) for prompt in prompts]
        model = trainer.accelerator.unwrap_model(trainer.model)
        sessions = rollout(model, chat, environments, seeds, generator=generator, sampling=Sampling()).sessions
        found = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": [], "turn_ids": []}
        for session in sessions:
            start = session.actions[0].start  # the prompt is what comes before the first action
            length = len(session.ids) - start
            written, turn, logp = [0] * length, [0] * length, [0.0] * length
            for action in session.actions:
                here = slice(action.start - start, action.start - start + len(action.tokens))
                size = len(action.tokens)
                written[here], turn[here], logp[here] = [1] * size, [action.turn] * size, action.logp
            found["prompt_ids"].append(session.ids[:start])
            found["completion_ids"].append(session.ids[start:])
            found["logprobs"].append(logp)
            found["env_mask"].append(written)  # 0: the environment wrote the token, which is not trained on
            found["turn_ids"].append(turn)
        return found | {"turn_rewards": [session.turn_reward for session in sessions]}

    return play


def turn_success(turn_rewards, **kwargs):
    """TRL's reward function: one number per turn; TRL itself sees their sum."""
    return turn_rewards


def train(model, tokenizer, *, method="turn_grpo", steps=12, sessions=8, turns=8):
    """Train for some steps of `sessions` groups; gives the mean share of turns that succeeded, step by step."""
    trainer = CrestGRPOTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": [str(seed) for seed in range(sessions * steps)]}),
        rollout_func=player(make_chat(tokenizer), turns),
        reward_funcs=turn_success,
        credit_method=method,
        credit_config=CREDIT[method],
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            max_steps=steps,
            num_generations=GROUP,
            per_device_train_batch_size=sessions * GROUP // 2,
            steps_per_generation=2,  # two optimizer steps per generation, the second off policy
            num_iterations=1,
            learning_rate=6e-4,
            lr_scheduler_type="constant",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            disable_tqdm=True,
            report_to="none",
            save_strategy="no",
        ),
    )
    trainer.train()
    return [entry["reward"] / turns for entry in trainer.state.log_history if "reward" in entry]


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--method", choices=CREDIT, default="turn_grpo")
    options.add_argument("--steps", type=int, default=24)
    arguments = options.parse_args()
    model, tokenizer = built_in_policy(console=Console())
    for step, success in enumerate(train(model, tokenizer, method=arguments.method, steps=arguments.steps), 1):
        print(f"generation {step:2d}: {success:.3f} of the turns succeeded")


if __name__ == "__main__":
    main()
