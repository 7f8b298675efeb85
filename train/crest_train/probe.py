"""The gradient probe: what a credit method does to the gradient of one batch, at a policy that is not moved.

Learning curves of five seeds do not tell token-level rules apart; many independent batches at one policy do. For every
method the gradient that one batch gives is taken on the same batches, and compared (see probe_statistics):

    snr         |E g|^2 / tr Var(g): how much of a one-batch gradient is signal
    cosine      of the one-batch gradient with the mean reference gradient of all other batches
    alignment   of the expected gradient with the expected reference gradient: the bias in direction (1: none). Noise
                can carry it over 1
    top shares  of the gradient (its size at the logits) on the top 1, 5 and 10 % of tokens

The reference is REINFORCE with the reward to go of each turn and a baseline from the other rollouts (reference_credit):
unbiased, noisier than what one would train with. Its row is named reward_to_go; grpo and turn_grpo are always measured.

Controls say where an effect comes from. `method@shuffled`: the teacher's gaps (and those of the skill) are dealt out
anew among the scored tokens of the batch; `method@noise`: with Gaussian noise of 1 nat added; `method@reduction`: all
gaps 0, what is left of the method is its advantage and reduction. They come with every method that needs such a gap. A
full-vocabulary distillation term keeps its teacher under all of them, and is not in the top shares.

Rollouts of your own. Any causal LM that `save_pretrained` wrote can be probed on sessions played elsewhere: write them
to a file, one session a line (`recording.RecordedSession` says which fields; its module has the smallest example), with
a chat template in the tokenizer if a method needs the self-teacher, and pass the file as `rollouts`. What it takes:
three or more batches, drawn apart from each other by this very policy at the temperature of the configuration; in each
batch two or more rollouts of every task (equal `group`). Sessions of another policy make the reference biased: where
recorded log-probs differ from the policy's by more than 0.05 nats on average, the probe says so. A probe that plays its
own sessions leaves them as rollouts.jsonl beside its figures: the same probe can be made from them on another machine.

Gradients are kept, all parameters of every batch and method, or as sketches of `project` numbers (see projection).

B = sessions.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from crest_ops import METHODS, Credit, Signals, Spans
from crest_train.chat import Chat, make_chat
from crest_train.config import Config, MethodSection, load_config
from crest_train.credit import assign_credit, needs_of, spans_of
from crest_train.display import progress
from crest_train.environments import make_environment
from crest_train.evaluate import sampling_of
from crest_train.loop import generator_of, session_seeds
from crest_train.model import check_policy, load_pretrained
from crest_train.probe_credit import (
    CONTROLS,
    GAPS,
    complete,
    controlled,
    gradient_vector,
    reference_credit,
    token_sizes,
    token_statistics,
)
from crest_train.probe_report import COMPARED, REFERENCE, draw, summarise, table, write_csv
from crest_train.probe_statistics import top_shares
from crest_train.recording import read_rollouts, record
from crest_train.rollouts import rollout
from crest_train.run_folder import RunFolder
from crest_train.sessions import Rollout
from crest_train.signals import Scorers, gather, teacher_of
from crest_train.teacher import Teacher
from crest_train.update import accumulate_gradient, trained_rows

LARGEST_KEPT = 20_000_000
"""Models with more parameters than this have their gradients sketched, with SKETCH numbers where nothing else is said:
the cosine of two gradients is then off by about 1 / sqrt(SKETCH) = 0.002."""
SKETCH = 1 << 18
FEWEST_BATCHES = 3
TOLD_OFF = 0.05
"""Mean difference of recorded log-probs and the policy's, in nats, from which on the probe says so."""

Batch = tuple[Rollout, torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """A row of the probe: a method with its settings, and which control of it (None: the method itself)."""

    name: str
    section: MethodSection
    needs: tuple[str, ...]
    control: str | None = None


def probe(
    policy: Path,
    methods: list[str],
    *,
    batches: int = 16,
    seed: int = 0,
    config: Config | None = None,
    rollouts: Path | None = None,
    project: int = 0,
    controls: bool = True,
    output: Path,
    console: Console | None = None,
) -> list[dict[str, str | int | float]]:
    """Measure the methods at a policy; write probe.csv, probe_batches.csv, probe.png and rollouts.jsonl to `output`.

    policy: the folder of a run (its checkpoint, its configuration), or a model's. methods: names of METHODS, or
    `name@control`. batches: how many, 3 or more. seed: of the sessions, the sampling, controls and sketches; the
    sessions are those that a run of that seed would play after the policy's last step. config: in place of the run's;
    needed for a model's folder without rollouts. rollouts: a file of recorded ones, in place of playing. project: keep
    sketches of so many numbers (0: whole gradients, sketches for more than LARGEST_KEPT parameters). controls: add
    those of every method that they concern. Returns the rows of probe.csv.

    Raises ValueError, before any work: too few batches, unknown methods or controls, a folder that is none or has no
    checkpoint, a rollouts file that does not fit, an output folder that holds a probe.
    """
    console = console or Console()
    if batches < FEWEST_BATCHES:
        raise ValueError(f"--batches: {batches} are too few, want {FEWEST_BATCHES} or more")
    if project < 0:
        raise ValueError(f"--project: found {project}, want 0 or more numbers per gradient")
    if (output / "probe.csv").exists():
        raise ValueError(f"--output: {output} holds a probe already; name another folder")
    config, model, tokenizer, step = _subject(policy, config, rollouts is not None)
    config = config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})
    variants = variants_of(methods, config, step + 1, controls)
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    model.eval()
    check_policy(model)
    if not project and sum(parameter.numel() for parameter in model.parameters()) > LARGEST_KEPT:
        project = SKETCH
    needs = {need for variant in variants for need in variant.needs}
    chat = make_chat(tokenizer) if rollouts is None or needs & {*GAPS, "gold_logp"} else None
    if rollouts is None:
        given = _played(model, chat, config, step, batches)
    else:
        given = _recorded(rollouts, model, batches)
    output.mkdir(parents=True, exist_ok=True)
    scorers = Scorers(model=model, chat=chat, reference=model, value=None)

    gradients: dict[str, list[torch.Tensor]] = {variant.name: [] for variant in variants} | {REFERENCE: []}
    shares: dict[str, list[list[float]]] = {name: [] for name in gradients}
    with progress(console, "batch", batches) as show, _recorder(output, rollouts is None) as keep:
        for number, (batch, group) in enumerate(given):
            logp_BT, entropy_BT, sum_sq_BT = token_statistics(model, batch, config)
            off = complete(batch, logp_BT, entropy_BT)
            keep(number, batch, group)
            spans = spans_of(batch, group)
            generator = generator_of(config, number, "controls", torch.device("cpu"))
            for name, credit, teacher in _credits(batch, group, spans, variants, config, step + 1, scorers, generator):
                backward(model, batch, credit, teacher, config)
                gradients[name].append(gradient_vector(model, project, seed))
                shares[name].append(top_shares(token_sizes(credit, batch, spans, logp_BT, sum_sq_BT)))
            show(number + 1, f"turn success {float(batch.turn_reward.sum() / batch.num_turns.sum()):.3f}")
            if off > TOLD_OFF:
                console.print(
                    f"batch {number}: recorded log-probs differ from the policy's by {off:.3f} nats on average; other "
                    "weights or another temperature played it, and the reference is biased",
                    soft_wrap=True,
                    highlight=False,
                )

    rows, by_batch = summarise(
        {name: torch.stack(gradients.pop(name)) for name in [*gradients]},  # popped: never all of them twice
        {name: torch.tensor(found) for name, found in shares.items()},
    )
    title = f"{policy.resolve().name}, {batches} batches, {f'sketches of {project}' if project else 'whole gradients'}"
    write_csv(output / "probe_batches.csv", by_batch)
    draw(output / "probe.png", rows, title)
    write_csv(output / "probe.csv", rows)
    console.print(table(rows, title))
    console.print(f"probe: {output}", soft_wrap=True, highlight=False)
    return rows


def variants_of(methods: list[str], config: Config, step: int, controls: bool) -> list[Variant]:
    """The methods named and those they are compared with, as they are in training step `step`, each with its controls.

    The run's own method keeps the run's options, others have their defaults. Raises ValueError: none named, one that is
    not known, a control of a method that needs no gap.
    """
    if not methods:
        raise ValueError(f"--methods: none named; known: {', '.join(METHODS)}")
    found: dict[str, Variant] = {}
    for given in dict.fromkeys([*reversed(COMPARED), *methods]):
        name, _, control = given.partition("@")
        if name not in METHODS:
            raise ValueError(f"--methods: unknown method {name!r}; known: {', '.join(METHODS)}")
        options = config.method.options if name == config.method.name else {}
        section = config.method.model_copy(update={"name": name, "options": options})
        needs = needs_of(section, step)
        has_gap = bool(set(GAPS) & set(needs))
        if "@" in given and (control not in CONTROLS or not has_gap):
            known = ", ".join(CONTROLS) if has_gap else f"none for {name}, which reads no teacher's gap"
            raise ValueError(f"--methods: unknown control {given!r}; known: {known}")
        wanted = [control] if "@" in given else [None, *CONTROLS] if controls and has_gap else [None]
        for one in wanted:
            row = f"{name}@{one}" if one else name
            found[row] = Variant(row, section, needs, one)
    return list(found.values())


def _subject(
    policy: Path, config: Config | None, recorded: bool
) -> tuple[Config, PreTrainedModel, PreTrainedTokenizerBase, int]:
    """Configuration, model, tokenizer and steps trained of a run's folder or a model's."""
    if not (policy / "config.toml").is_file():
        if config is None and not recorded:
            raise ValueError(
                f"--rollouts: {policy} is no run folder; want recorded rollouts, or a configuration to play"
            )
        config = config or Config()
        return config, *load_pretrained(policy, config.policy), 0
    folder = RunFolder(policy)
    step = folder.saved_step()
    if step is None:
        raise ValueError(f"policy: the run in {policy} has no checkpoint yet")
    config = config or load_config(policy / "config.toml")
    return config, *folder.restore_policy(config.policy), step


def _played(model: PreTrainedModel, chat: Chat, config: Config, step: int, batches: int) -> Iterator[Batch]:
    """The batches that a run with this seed would play after its step `step`, all with the policy as it is."""
    for number in range(1, batches + 1):
        seeds = session_seeds(config, step + number)
        environments = [make_environment(config.environment.name, config.environment.options) for _ in seeds]
        generator = generator_of(config, step + number, "probe", model.device)
        sampling = sampling_of(config, gold=True)
        played = rollout(model, chat, environments, seeds, generator=generator, sampling=sampling)
        yield played, torch.arange(len(seeds)) // config.rollout.group_size


def _recorded(path: Path, model: PreTrainedModel, batches: int) -> Iterator[Batch]:
    found = list(islice(read_rollouts(path, model.config.get_text_config().vocab_size), batches))
    if len(found) < batches:
        raise ValueError(f"--batches: {path} holds {len(found)} batches, want {batches}")
    return iter(found)


@contextmanager
def _recorder(output: Path, wanted: bool) -> Iterator[Callable[[int, Rollout, torch.Tensor], None]]:
    """A function that records a batch; the file is there when all are."""
    if not wanted:
        yield lambda number, batch, group: None
        return
    temporary = output / "rollouts.jsonl.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        yield lambda number, batch, group: record(file, number, batch, group)
    temporary.replace(output / "rollouts.jsonl")


def _credits(
    batch: Rollout,
    group: torch.Tensor,
    spans: Spans,
    variants: list[Variant],
    config: Config,
    step: int,
    scorers: Scorers,
    generator: torch.Generator,
) -> Iterator[tuple[str, Credit, Teacher | None]]:
    """Name, credit and, for distillation, teacher of every row of the probe; signals are gathered once per method."""
    gathered: dict[str, Signals] = {}
    for variant in variants:
        own = config.model_copy(update={"method": variant.section})
        if variant.section.name not in gathered:
            gathered[variant.section.name] = gather(variant.needs, batch, group, spans, own, scorers)
        signals = controlled(gathered[variant.section.name], spans, variant.control, generator)
        credit = assign_credit(batch, group, signals, variant.section, step)
        yield variant.name, credit, teacher_of(credit, batch, group, own, scorers)
    yield REFERENCE, reference_credit(batch, spans), None


def backward(model: PreTrainedModel, batch: Rollout, credit: Credit, teacher: Teacher | None, config: Config) -> None:
    """Leave the gradient of the credit's loss over the whole batch, and nothing else, at the parameters."""
    model.zero_grad()
    rows, temperature = trained_rows(batch, credit), config.rollout.temperature
    accumulate_gradient(model, batch, credit, rows, config.training, temperature=temperature, teacher=teacher)
