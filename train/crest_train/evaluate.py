"""Success on held-out sessions, sampled at a temperature of its own."""

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from crest_train.chat import Chat
from crest_train.config import Config
from crest_train.credit import session_reward
from crest_train.engines.protocol import Engine
from crest_train.environments import FIRST_HELD_OUT_SEED, make_environment
from crest_train.rollouts import Sampling, rollout


def evaluate(model: PreTrainedModel, chat: Chat, config: Config, engine: Engine | None = None) -> dict[str, float]:
    """Turn success (mean turn reward) and session success (every turn succeeded) on the first held-out sessions.

    The sessions and the random numbers are the same at every call; their seeds start at FIRST_HELD_OUT_SEED, which no
    training session reaches. Turns that were not reached count as failed. engine: as of `rollout`.
    """
    num_sessions = config.evaluation.sessions
    environments = [make_environment(config.environment.name, config.held_out_options()) for _ in range(num_sessions)]
    played = rollout(
        model,
        chat,
        environments,
        [FIRST_HELD_OUT_SEED + i for i in range(num_sessions)],
        generator=torch.Generator(model.device).manual_seed(0),
        sampling=held_out_sampling(config),
        engine=engine,
    )
    return {
        "turn_success": float(played.turn_reward.sum() / played.num_turns.sum()),
        "session_success": float((session_reward(played, "all") == 1).float().mean()),
        "evaluation_seconds": played.seconds,
    }


def held_out_sampling(config: Config) -> Sampling:
    """How the policy samples where it is evaluated."""
    return replace(sampling_of(config), temperature=config.evaluation.temperature)


def sampling_of(config: Config, *, gold: bool = False) -> Sampling:
    """How the policy of a run samples; gold: the ground truth is recorded too."""
    section = config.rollout
    return Sampling(
        temperature=section.temperature,
        max_action_tokens=section.max_action_tokens,
        rows=section.rows,
        gold=gold,
        top_p=section.top_p,
        top_k=section.top_k,
        min_p=section.min_p,
    )
