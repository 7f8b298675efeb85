"""What may differ between a run's configuration and the one that it goes on with."""

from crest_train.checkpoint import Checkpoint
from crest_train.config import Config, differences

MAY_CHANGE = {
    "training.steps",
    "training.tokens_per_micro_batch",
    "training.bad_steps",
    "policy.attention",
    "policy.device",
    "policy.gradient_checkpointing",
    "policy.liger",
    "rollout.rows",
    "rollout.server",
    *(f"run.{key}" for key in ("threads", "checkpoint_every", "checkpoints_kept", "records", "trackers")),
}
"""Keys, beside all of [evaluation], that change neither what is learned nor from what, but how long, how far and where:
a run goes on with other values of these, bit for bit the same only as far as they leave the arithmetic alone."""


def accepted_changes(saved: Checkpoint, config: Config) -> list[str]:
    """The changes since the checkpoint, in words. Raises ValueError that names those that a run cannot go on with."""
    changes = differences(saved.config(), config)
    words = {key: f"{key} {there!r} -> {here!r}" for key, (there, here) in changes.items()}
    refused = [words[key] for key in changes if key not in MAY_CHANGE and not key.startswith("evaluation.")]
    if refused:
        raise ValueError(
            f"{saved.path} is of a run with another configuration: {', '.join(refused)}; put these back, or begin "
            f'another run (policy.model = "{saved.path}" begins it with what this one has learned)'
        )
    if config.training.steps < saved.step:
        raise ValueError(f"training.steps: found {config.training.steps}, but the run has {saved.step} behind it")
    return list(words.values())
