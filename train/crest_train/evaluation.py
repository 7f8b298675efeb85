"""`crest-train eval`: plays held-out sessions, several samples of each, and keeps them one by one.

The folder holds settings.json (what was played, and by which weights), sessions.jsonl (a line per sample of a session),
eval.csv and table.txt. The same command goes on with what was stopped and plays nothing twice.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crest_train.chat import Chat, make_chat
from crest_train.config import Config, EnvironmentSection, load_config
from crest_train.display import progress
from crest_train.draws import generator_of
from crest_train.engines import make_engine
from crest_train.environments import FIRST_HELD_OUT_SEED, make_environment
from crest_train.evaluate import held_out_sampling
from crest_train.evaluation_report import report
from crest_train.loading import check_policy_section, first_policy
from crest_train.model import check_policy
from crest_train.rollouts import rollout
from crest_train.run_folder import RunFolder
from crest_train.sessions import Session

SETTINGS, SESSIONS = "settings.json", "sessions.jsonl"
HELD_OUT = {"bfcl": {"split": "eval"}}
"""Options with which an environment plays what is held out, where the seeds alone do not say so."""
ACTION_TOKENS = 128
"""Longest action of a model that comes without a configuration, in environments other than the desk."""
_TRAINING = {"sessions", "group_size", "temperature", "server", "correction"}
"""Keys of [rollout] that say nothing of how a held-out session is sampled."""


@dataclass(frozen=True)
class Sample:
    """One play of one session: its line in sessions.jsonl. session: the seed; category: None where there are none."""

    session: int
    sample: int
    category: str | None
    num_turns: int
    turn_reward: list[float]
    tokens: int
    cut: bool

    @property
    def success(self) -> bool:
        """Whether every turn succeeded; turns that were not reached did not."""
        return len(self.turn_reward) == self.num_turns and all(reward == 1 for reward in self.turn_reward)


def evaluation_config(policy: str, config: Path | None, environment: str | None) -> Config:
    """How a policy is evaluated: by a file, else as its run evaluates itself, else by the defaults.

    environment: played in place of the run's, with its own defaults and what is held out there; an environment that the
    file itself names keeps the file's options. Raises ValueError.
    """
    own = Path(policy) / "config.toml"
    is_run = own.is_file()
    source = config or (own if is_run else None)
    found = load_config(source)
    changes: dict[str, Any] = {}
    if environment and not (config and environment == found.environment.name):
        changes["environment"] = EnvironmentSection(name=environment)
        options = HELD_OUT.get(environment, {})
        changes["evaluation"] = found.evaluation.model_copy(update={"options": options})
    if source is None and environment not in (None, "desk"):
        changes["rollout"] = found.rollout.model_copy(update={"max_action_tokens": ACTION_TOKENS})
    if not is_run:
        changes["policy"] = found.policy.model_copy(update={"model": policy})
    return found.model_copy(update=changes)


def evaluate_policy(
    policy: str, config: Config, *, sessions: int | None, samples: int, output: Path | None, console: Console
) -> None:
    """Play `samples` of each of the first held-out sessions, as far as they are not there yet, and report on all.

    policy: a run's folder (its newest checkpoint), else what [policy] names. sessions: None for [evaluation.sessions],
    or as many as there are. Raises ValueError before any work: wrong numbers, no policy, a folder with something else;
    and SystemExit (130) when interrupted.
    """
    if samples < 1:
        raise ValueError(f"--samples: found {samples}, wanted at least 1")
    check_policy_section(config.policy)
    chosen = held_out(config, sessions)
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    name, step, (model, tokenizer) = _policy(policy, config, console)
    model.eval()
    check_policy(model)
    settings = settings_of(config, len(chosen), samples)
    settings["policy"] = {"name": name, "step": step, "weights": digest(model)}
    folder = output or _folder(policy, config)
    with claim_evaluation(folder, settings):
        try:
            play(model, make_chat(tokenizer), config, chosen, samples, folder, console)
        except KeyboardInterrupt:
            console.print("stopped; the same command goes on", highlight=False)
            raise SystemExit(130) from None
        report(read_samples(folder), settings, folder, console)


def held_out(config: Config, sessions: int | None) -> list[tuple[int, str, str | None]]:
    """The first held-out sessions, as (seed, system prompt, category). Raises ValueError: more than there are."""
    environment = make_environment(config.environment.name, config.held_out_options())
    there = len(environment.session_ids) if hasattr(environment, "session_ids") else None
    number = sessions or config.evaluation.sessions
    if there and sessions and sessions > there:
        raise ValueError(f"--sessions: found {sessions}, but {config.environment.name} has {there}; see --samples")
    chosen = []
    for seed in range(FIRST_HELD_OUT_SEED, FIRST_HELD_OUT_SEED + min(number, there or number)):
        environment.reset(seed)
        chosen.append((seed, environment.system, getattr(environment, "category", None)))
    return chosen


def settings_of(config: Config, sessions: int, samples: int) -> dict[str, Any]:
    """What two evaluations have to have in common to be compared."""
    return {
        "environment": config.environment.name,
        "options": config.held_out_options(),
        "sessions": sessions,
        "samples": samples,
        "temperature": config.evaluation.temperature,
        "seed": config.run.seed,
        "rollout": config.rollout.model_dump(mode="json", exclude=_TRAINING),
    }


def digest(model: PreTrainedModel) -> str:
    """A hash of the weights, whatever files they lie in."""
    found = hashlib.blake2b(digest_size=8)
    for name, tensor in model.state_dict().items():
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


@contextmanager
def claim_evaluation(folder: Path, settings: dict[str, Any]) -> Iterator[None]:
    """Hold the folder until the block ends, new or with the same evaluation. Raises ValueError for any other."""
    held = folder / SETTINGS
    if folder.is_dir() and not held.is_file() and {path.name for path in folder.iterdir()} - {".lock"}:
        raise ValueError(f"--output: {folder} exists and holds no evaluation; name a new or an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise ValueError(f"--output: {folder}: an evaluation is going on there; wait for its end") from None
    try:
        if held.is_file() and (found := settings_difference(read_settings(folder), settings)):
            raise ValueError(f"--output: {folder} holds another evaluation: {found}; name another folder")
        RunFolder(folder).write(SETTINGS, json.dumps(settings, indent=1) + "\n")
        yield
    finally:
        lock.release()


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of an evaluation. Raises ValueError when they are damaged."""
    try:
        return json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{folder / SETTINGS} is damaged ({error}); bring it back, or delete the folder") from error


def settings_difference(there: dict[str, Any], here: dict[str, Any]) -> str | None:
    """The first setting in which two evaluations differ, in words; None when they are equal."""
    for key in dict.fromkeys([*there, *here]):
        if there.get(key) != here.get(key):
            return f"{key} is {there.get(key)!r} there, {here.get(key)!r} here"
    return None


def play(
    model: PreTrainedModel,
    chat: Chat,
    config: Config,
    chosen: list[tuple[int, str, str | None]],
    samples: int,
    folder: Path,
    console: Console,
) -> None:
    """Play what is missing in sessions.jsonl, sessions with the same system prompt together, and append it there.

    The random numbers of sessions that are played together depend on the seed of the first of them and on run.seed.
    """
    kept = {(sample.session, sample.sample): sample for sample in read_samples(folder)}
    lines = "".join(map(_line, kept.values()))
    RunFolder(folder).write(SESSIONS, lines)  # without a line that a stop cut short
    per_lockstep = max(1, config.rollout.rows // samples)
    alike: dict[str, list[tuple[int, str, str | None]]] = {}
    for session in chosen:
        alike.setdefault(session[1], []).append(session)
    parts = [group[at : at + per_lockstep] for group in alike.values() for at in range(0, len(group), per_lockstep)]
    missing = [part for part in parts if not all((seed, i) in kept for seed, _, _ in part for i in range(samples))]
    done = len(chosen) - sum(map(len, missing))
    if not missing:
        return
    engine = make_engine(config.rollout, model)
    engine.push(model)
    with progress(console, "session", len(chosen), done) as show:
        for part in missing:
            rows = [(seed, category, i) for seed, _, category in part for i in range(samples)]
            batch = rollout(
                model,
                chat,
                [make_environment(config.environment.name, config.held_out_options()) for _ in rows],
                [seed for seed, _, _ in rows],
                generator=generator_of(config, part[0][0], "evaluation", model.device),
                sampling=held_out_sampling(config),
                engine=engine,
            )
            found = [_sample(*pair) for pair in zip(rows, batch.sessions, strict=True)]
            with open(folder / SESSIONS, "a", encoding="utf-8") as file:
                file.write("".join(_line(sample) for sample in found if (sample.session, sample.sample) not in kept))
                file.flush()
                os.fsync(file.fileno())
            done += len(part)
            show(done, f"{sum(sample.success for sample in found)} of {len(found)} succeeded")


def read_samples(folder: Path) -> list[Sample]:
    """The lines of sessions.jsonl that are whole."""
    path = folder / SESSIONS
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            found.append(Sample(**json.loads(line)))
        except (ValueError, TypeError):  # cut short by a stop, or damaged: played again
            continue
    return found


def _policy(
    policy: str, config: Config, console: Console
) -> tuple[str, int | None, tuple[PreTrainedModel, PreTrainedTokenizerBase]]:
    """Name, step (None: not of a run), model and tokenizer."""
    if not (Path(policy) / "config.toml").is_file():
        return policy, None, first_policy(config.policy, console)
    saved = RunFolder(Path(policy)).last_checkpoint(console)
    if saved is None:
        raise ValueError(f"POLICY: the run in {policy} has no checkpoint yet")
    return policy, saved.step, saved.restore_policy(config.policy)


def _folder(policy: str, config: Config) -> Path:
    environment = config.environment.name.replace(":", "-")
    if (Path(policy) / "config.toml").is_file():
        return Path(policy, f"eval-{environment}")
    return Path("runs", f"eval-{Path(policy).name}-{environment}")


def _sample(row: tuple[int, str | None, int], session: Session) -> Sample:
    seed, category, number = row
    tokens = sum(len(action.tokens) for action in session.actions)
    return Sample(seed, number, category, session.num_turns, session.turn_reward, tokens, session.cut)


def _line(sample: Sample) -> str:
    return json.dumps(asdict(sample)) + "\n"
