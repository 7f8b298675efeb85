"""What is drawn in a run depends on its seed, the step and the purpose alone: no random state outlives a step."""

import hashlib

import torch

from crest_train.config import Config
from crest_train.environments import FIRST_HELD_OUT_SEED


def session_seeds(config: Config, step: int) -> list[int]:
    """The seeds of a step's sessions, each repeated group_size times: counted on from step to step, never held out."""
    first = config.run.seed * 1_000_000 + (step - 1) * config.rollout.sessions
    sessions = range(first, first + config.rollout.sessions)
    return [session % FIRST_HELD_OUT_SEED for session in sessions for _ in range(config.rollout.group_size)]


def generator_of(config: Config, step: int, purpose: str, device: torch.device) -> torch.Generator:
    """A random generator that depends on the run's seed, the step and the purpose alone."""
    digest = hashlib.blake2b(f"{config.run.seed} {step} {purpose}".encode(), digest_size=4).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))
