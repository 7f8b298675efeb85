"""What is drawn in a run depends on its seed, the step and the purpose alone: no random state outlives a step.

The global random states, which the trainer leaves alone, are kept with a checkpoint for an environment that uses them.
"""

import hashlib
import random
from typing import Any

import numpy as np
import torch
from transformers import set_seed

from crest_train.config import Config
from crest_train.environments import FIRST_HELD_OUT_SEED


def session_seeds(config: Config, step: int) -> list[int]:
    """The seeds of a step's sessions, each repeated group_size times: counted on from step to step, never held out."""
    first = config.run.seed * 1_000_000 + (step - 1) * config.rollout.sessions
    sessions = range(first, first + config.rollout.sessions)
    return [session % FIRST_HELD_OUT_SEED for session in sessions for _ in range(config.rollout.group_size)]


def generator_of(config: Config, step: int, purpose: str, device: torch.device) -> torch.Generator:
    """A random generator that depends on the run's seed, the step and the purpose alone."""
    return torch.Generator(device).manual_seed(_number(config, step, purpose))


def seed_random(config: Config) -> None:
    """Begin the global random states by the run's seed, in all processes alike."""
    set_seed(_number(config, 0, "global"))


def random_states() -> dict[str, Any]:
    """The global random states of Python, numpy and torch (of its CUDA devices too, where they are in use), as JSON."""
    kind, keys, *rest = np.random.get_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), *rest],
        "torch": [state.tolist() for state in (torch.get_rng_state(), *devices)],
    }


def restore_random(states: dict[str, Any]) -> None:
    """Go on from what `random_states` gave; of CUDA devices that are not there any more, the states are left out."""
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state(tuple(states["numpy"]))
    cpu, *devices = (torch.tensor(state, dtype=torch.uint8) for state in states["torch"])
    torch.set_rng_state(cpu)
    for index, state in enumerate(devices[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, index)


def _number(config: Config, step: int, purpose: str) -> int:
    digest = hashlib.blake2b(f"{config.run.seed} {step} {purpose}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")
