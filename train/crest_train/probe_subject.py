"""What is probed: a policy with its configuration, its batches (played or recorded), and what scores them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crest_train.chat import Chat
from crest_train.checkpoint import Checkpoint
from crest_train.config import Config, load_config
from crest_train.credit import needs_of, spans_of
from crest_train.draws import generator_of, session_seeds
from crest_train.environments import make_environment
from crest_train.evaluate import sampling_of
from crest_train.loading import check_policy_section, load_pretrained
from crest_train.recording import read_rollouts, record
from crest_train.rollouts import rollout
from crest_train.run_folder import RunFolder
from crest_train.sessions import Rollout
from crest_train.signals import Scorers
from crest_train.value import StateValue

VALUE_BATCHES = 5
"""Batches that a value head learns from before the first measured one, where the run has no value of its own."""

Batch = tuple[Rollout, torch.Tensor]
"""A rollout and the group [B] int64 of its sessions."""


@dataclass(frozen=True)
class Subject:
    """A policy, the configuration it is probed with, the steps it was trained for, its run and that
    one's checkpoint (None: a model alone)."""

    config: Config
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    step: int = 0
    run: RunFolder | None = None
    saved: Checkpoint | None = None


def subject_of(policy: Path, config: Config | None, seed: int, recorded: bool, console: Console) -> Subject:
    """The policy of a run's folder or a model's, with the configuration given, or the run's, and this seed.

    Raises ValueError: no such folder, no checkpoint, a model alone with neither rollouts nor configuration.
    """
    run = RunFolder(policy) if (policy / "config.toml").is_file() else None
    if run is None and config is None and not recorded:
        what = "is no run folder" if policy.is_dir() else "is not there"
        raise ValueError(f"POLICY: {policy} {what}; want a run's folder, or a model's with --rollouts or --config")
    config = config or (load_config(policy / "config.toml") if run else Config())
    check_policy_section(config.policy)
    config = config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})
    if run is None:
        return Subject(config, *load_pretrained(policy, config.policy))
    saved = run.last_checkpoint(console)
    if saved is None:
        raise ValueError(f"policy: the run in {policy} has no checkpoint yet")
    return Subject(config, *saved.restore_policy(config.policy), saved.step, run, saved)


def needs_spare(subject: Subject, needs: set[str]) -> bool:
    """Whether a value head has to learn from batches of its own: it is asked for, and the run has none."""
    config = subject.config
    asked = "value_S" in needs and config.value.source == "head"
    return asked and not (subject.run and "value_S" in needs_of(load_config(subject.run.path / "config.toml").method))


def played(subject: Subject, chat: Chat, first: int, number: int) -> Iterator[Batch]:
    """Batches `first` + 1.. of those that a run with this seed would play next, all with the policy as it is."""
    config, device = subject.config, subject.model.device
    for step in range(subject.step + first + 1, subject.step + first + number + 1):
        seeds = session_seeds(config, step)
        environments = [make_environment(config.environment.name, config.environment.options) for _ in seeds]
        generator = generator_of(config, step, "probe", device)
        sampling = sampling_of(config, gold=True)
        batch = rollout(subject.model, chat, environments, seeds, generator=generator, sampling=sampling)
        yield batch, torch.arange(len(seeds)) // config.rollout.group_size


def recorded(path: Path, model: PreTrainedModel, batches: int, spare: bool) -> tuple[list[Batch], list[Batch]]:
    """The first batches of a file, and those behind them. Raises ValueError: too few; none behind, though needed."""
    found = list(read_rollouts(path, model.config.get_text_config().vocab_size))
    for number, (_, group) in enumerate(found):
        if (group.bincount() < 2).any():
            lone = int((group.bincount() < 2).nonzero()[0])
            raise ValueError(f"--rollouts: {path}: batch {number} holds one rollout of group {lone}, want two or more")
    if len(found) < batches + spare:
        what = ", and one or more that the value head learns from" if spare else ""
        raise ValueError(f"--batches: {path} holds {len(found)} batches, want {batches}{what}")
    return found[:batches], found[batches:] if spare else []


@contextmanager
def recorder(output: Path, wanted: bool) -> Iterator[Callable[[int, Rollout, torch.Tensor], None]]:
    """A function that records a batch under its number in rollouts.jsonl; the file is there when all are."""
    if not wanted:
        yield lambda number, batch, group: None
        return
    temporary = output / "rollouts.jsonl.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        yield lambda number, batch, group: record(file, number, batch, group)
    temporary.replace(output / "rollouts.jsonl")


def scorers_of(subject: Subject, chat: Chat | None, needs: set[str], spare: Iterator[Batch]) -> Scorers:
    """The policy as its own teacher, the reference and the value of its run.

    Without those: the policy itself as the reference; a value head that learns from the spare batches.
    """
    model, run = subject.model, subject.run
    reference = model
    if "gold_logp" in needs and run and run.reference.exists():
        reference = run.restore_reference(subject.config.policy)
    value = StateValue(model, chat, subject.config) if "value_S" in needs else None
    if value and value.head and not needs_spare(subject, needs):
        value.load_state_dict(subject.saved.restore_value())
    for batch, group in spare:
        value.learn(batch, spans_of(batch, group))
    return Scorers(model, chat, reference, value)
