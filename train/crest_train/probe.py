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

A value of states (factor) that is learned comes from the run, where its method learns one; else a head learns it from
further batches, which are not measured: five more are played, or those in the file behind the measured ones are taken.

A method with one reward per session (grpo, say) has a gradient of 0 in a batch where all rollouts of a group earned the
same, as with `session_reward = "all"` where hardly any session has every turn right. The table says so; the setting
method.session_reward = "mean" gives such methods something to learn from.

Gradients are kept, all parameters of every batch and method, or as sketches of `project` numbers (see projection).

B = sessions.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from transformers import PreTrainedModel

from crest_ops import Credit, Signals, Spans
from crest_train.chat import make_chat
from crest_train.compare_plan import entries
from crest_train.config import Config, MethodSection
from crest_train.credit import make_method, needs_of, spans_of
from crest_train.display import progress
from crest_train.draws import generator_of
from crest_train.model import check_policy
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
from crest_train.probe_subject import (
    VALUE_BATCHES,
    Batch,
    Subject,
    needs_spare,
    played,
    recorded,
    recorder,
    scorers_of,
    subject_of,
)
from crest_train.sessions import Rollout
from crest_train.signals import Scorers, check_environment, gather, teacher_of
from crest_train.teacher import Teacher
from crest_train.update import accumulate_gradient, trained_rows

LARGEST_KEPT = 20_000_000
"""Models with more parameters than this have their gradients sketched, with SKETCH numbers where nothing else is said:
the cosine of two gradients is then off by about 1 / sqrt(SKETCH) = 0.002."""
SKETCH = 1 << 18
FEWEST_BATCHES = 3
TOLD_OFF = 0.05
"""Mean difference of recorded log-probs and the policy's, in nats, from which on the probe says so."""


@dataclass(frozen=True)
class Variant:
    """A row of the probe: its name, a method with its settings, and which control of it (None: the method itself)."""

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
    options: Path | None = None,
    output: Path,
    console: Console | None = None,
) -> list[dict[str, str | int | float]]:
    """Measure the methods at a policy; write probe.csv, probe_batches.csv, probe.png and rollouts.jsonl to `output`.

    policy: the folder of a run (its checkpoint, its configuration), or a model's. methods: names of METHODS or labels
    of `options`, with `@control` behind them or without; or "all" alone. batches: how many, 3 or more. seed: of the
    sessions, the sampling, controls and sketches; the sessions are those that a run of that seed would play after the
    policy's last step. config: in place of the run's; needed for a model's folder without rollouts. rollouts: a file of
    recorded ones, in place of playing. project: keep sketches of so many numbers (0: whole gradients, sketches for more
    than LARGEST_KEPT parameters). controls: add those of every method that they concern. options: TOML file with a
    [method] table for each label that is not to have its defaults (see compare_plan.entries). Returns the rows of
    probe.csv.

    Raises ValueError, before any work: too few batches, unknown methods or controls, a wrong table of options, a folder
    that is none or has no checkpoint, a rollouts file that does not fit, an output folder that holds a probe.
    """
    console = console or Console()
    if batches < FEWEST_BATCHES:
        raise ValueError(f"--batches: {batches} are too few, want {FEWEST_BATCHES} or more")
    if project < 0:
        raise ValueError(f"--project: found {project}, want 0 or more numbers per gradient")
    if (output / "probe.csv").exists():
        raise ValueError(f"--output: {output} holds a probe already; name another folder")
    subject = subject_of(policy, config, seed, rollouts is not None, console)
    config, model = subject.config, subject.model
    variants = variants_of(methods, config, controls, options)
    needs = {need for variant in variants for need in variant.needs}
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    model.eval()
    check_policy(model)
    if not project and sum(parameter.numel() for parameter in model.parameters()) > LARGEST_KEPT:
        project = SKETCH
    chat = make_chat(subject.tokenizer) if rollouts is None or needs & {*GAPS, "gold_logp", "value_S"} else None
    spare = needs_spare(subject, needs)
    if rollouts is None:
        for variant in variants:
            check_environment(config.model_copy(update={"method": variant.section}))
        given = played(subject, chat, 0, batches)
        learned_from = played(subject, chat, batches, VALUE_BATCHES if spare else 0)
    else:
        given, learned_from = recorded(rollouts, model, batches, spare)
    output.mkdir(parents=True, exist_ok=True)

    gradients: dict[str, list[torch.Tensor]] = {variant.name: [] for variant in variants} | {REFERENCE: []}
    shares: dict[str, list[list[float]]] = {name: [] for name in gradients}
    with progress(console, "batch", batches) as show, recorder(output, rollouts is None) as keep:
        spare_batches = (batch[:2] for batch in _prepared(subject, learned_from, batches, keep, console))
        scorers = scorers_of(subject, chat, needs, spare_batches)
        for number, prepared in enumerate(_prepared(subject, given, 0, keep, console)):
            batch, group, logp_BT, sum_sq_BT = prepared
            spans = spans_of(batch, group)
            for name, credit, teacher in _credits(batch, group, spans, variants, subject, scorers, number):
                backward(model, batch, credit, teacher, config)
                gradients[name].append(gradient_vector(model, project, seed))
                shares[name].append(top_shares(token_sizes(credit, batch, spans, logp_BT, sum_sq_BT)))
            show(number + 1, f"turn success {float(batch.turn_reward.sum() / batch.num_turns.sum()):.3f}")

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


def variants_of(methods: list[str], config: Config, controls: bool, options: Path | None = None) -> list[Variant]:
    """The methods named and those they are compared with, each followed by its controls.

    The run's own method keeps the run's options where no table of `options` gives it others, others have their
    defaults; schedules over training steps (factor's warm-up and decay, say) are not followed. Raises ValueError: none
    named, one that is not known, a control of a method that needs no gap, what is wrong with `options`.
    """
    named = list(entries("all", config.method, options)) if methods == ["all"] else methods
    if not named:
        raise ValueError("--methods: none named; wanted names of methods, or all")
    named = list(dict.fromkeys([*reversed(COMPARED), *named]))
    labels = dict.fromkeys(given.partition("@")[0] for given in named)
    sections = entries(",".join(labels), config.method, options)
    found: dict[str, Variant] = {}
    for given in named:
        label, _, control = given.partition("@")
        if label == REFERENCE:
            raise ValueError(f"{options}: [{label}]: the row of the reference has that name")
        section = sections[label]
        needs = needs_of(section)
        has_gap = bool(set(GAPS) & set(needs))
        if "@" in given and (control not in CONTROLS or not has_gap):
            known = ", ".join(CONTROLS) if has_gap else f"none for {label}, which reads no teacher's gap"
            raise ValueError(f"--methods: unknown control {given!r}; known: {known}")
        wanted = [control] if "@" in given else [None, *CONTROLS] if controls and has_gap else [None]
        for one in wanted:
            row = f"{label}@{one}" if one else label
            found[row] = Variant(row, section, needs, one)
    return list(found.values())


def _prepared(
    subject: Subject,
    batches: Iterable[Batch],
    first: int,
    keep: Callable[[int, Rollout, torch.Tensor], None],
    console: Console,
) -> Iterator[tuple[Rollout, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Batches, recorded under numbers from `first` on, with the policy's log-probs and sum of squared probabilities."""
    for number, (batch, group) in enumerate(batches, first):
        logp_BT, entropy_BT, sum_sq_BT = token_statistics(subject.model, batch, subject.config)
        off = complete(batch, logp_BT, entropy_BT)
        keep(number, batch, group)
        if off > TOLD_OFF:
            console.print(
                f"batch {number}: recorded log-probs differ from the policy's by {off:.3f} nats on average; other "
                "weights or another temperature played it, and the reference is biased",
                soft_wrap=True,
                highlight=False,
            )
        yield batch, group, logp_BT, sum_sq_BT


def _credits(
    batch: Rollout,
    group: torch.Tensor,
    spans: Spans,
    variants: list[Variant],
    subject: Subject,
    scorers: Scorers,
    number: int,
) -> Iterator[tuple[str, Credit, Teacher | None]]:
    """Name, credit and, for distillation, teacher of every row; signals are gathered once for equal needs."""
    generator = generator_of(subject.config, number, "controls", torch.device("cpu"))
    gathered: dict[tuple, Signals] = {}
    for variant in variants:
        own = subject.config.model_copy(update={"method": variant.section})
        asked = variant.needs, variant.section.session_reward
        if asked not in gathered:
            gathered[asked] = gather(variant.needs, batch, group, spans, own, scorers)
        signals = controlled(gathered[asked], spans, variant.control, generator)
        method, settings = make_method(variant.section)
        credit = method.assign(spans, signals, settings)
        yield variant.name, credit, teacher_of(credit, batch, group, own, scorers)
    yield REFERENCE, reference_credit(batch, spans), None


def backward(model: PreTrainedModel, batch: Rollout, credit: Credit, teacher: Teacher | None, config: Config) -> None:
    """Leave the gradient of the credit's loss over the whole batch, and nothing else, at the parameters."""
    model.zero_grad()
    rows, temperature = trained_rows(batch, credit), config.rollout.temperature
    accumulate_gradient(model, batch, credit, rows, config.training, temperature=temperature, teacher=teacher)
