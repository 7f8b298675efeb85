"""The training loop, from top to bottom: rollout -> verify -> signals -> credit -> loss -> step -> log."""

import shlex
import time
from pathlib import Path

import torch
from rich.console import Console
from transformers import PreTrainedModel

from crest_train.chat import Chat, make_chat
from crest_train.config import Config, to_toml
from crest_train.correction import corrected, rescore
from crest_train.credit import assign_credit, make_method, needs_of, session_reward, spans_of
from crest_train.display import progress
from crest_train.draws import generator_of, random_states, restore_random, seed_random, session_seeds
from crest_train.engines import make_engine
from crest_train.engines.protocol import Engine
from crest_train.environments import make_environment
from crest_train.evaluate import evaluate, sampling_of
from crest_train.failures import explained, refuse_bad_steps
from crest_train.imitation import imitate
from crest_train.leaving import Leaving, leaving
from crest_train.loading import check_policy_section, first_policy
from crest_train.metrics import credit_metrics, outcome_metrics, peak_memory_mib, teacher_metrics
from crest_train.model import check_policy, context_length
from crest_train.optimizer import check_optimizer, make_optimizer
from crest_train.probe_credit import token_statistics
from crest_train.ranks import first_ahead, from_first, is_first, joined, weights_from_first
from crest_train.records import records_of
from crest_train.report import closing_table, draw_curves, grpo_reference
from crest_train.resuming import accepted_changes
from crest_train.rollouts import rollout
from crest_train.run_folder import RunFolder, claim_run
from crest_train.signals import Scorers, check_environment, gather, reads_gold, teacher_of
from crest_train.trackers import Log, check_trackers
from crest_train.update import update
from crest_train.value import StateValue
from crest_train.view import write_view


def train(config: Config, output: Path | None = None, console: Console | None = None) -> RunFolder:
    """Run the configuration, or go on with the run that `output` holds, and return its folder.

    Everything drawn depends on (seed, step) alone, so that a resumed run is the uninterrupted one. Raises ValueError
    for bad input before any work, OSError that names the space left when the disk is full, and SystemExit when
    interrupted (130) or terminated (143), after a checkpoint of the last whole step (see leaving.py).

    Started by torchrun or accelerate launch, the processes share the work and make the run that one would make, up to
    rounding (see ranks.py); any number of them can go on with it.
    """
    console = console or Console()
    make_method(config.method)
    for options in (config.environment.options, config.held_out_options()):
        make_environment(config.environment.name, options)
    check_environment(config)
    check_policy_section(config.policy)
    check_optimizer(config.training, config.policy.device)
    check_trackers(config.run.trackers)
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    with joined(config.policy.device), claim_run(config, output) as folder, leaving() as leave:
        console = console if is_first() else Console(quiet=True)
        try:
            with explained(folder):
                run(config, folder, console, leave)
        except KeyboardInterrupt:
            console.print(f"stopped; {folder.way_on}", soft_wrap=True, highlight=False, markup=False)
            raise SystemExit(leave.exit_code) from None
    return folder


def run(config: Config, folder: RunFolder, console: Console, leave: Leaving) -> None:
    """Play, score and learn, step by step, from where the folder is to the end."""
    began = time.perf_counter()
    saved = from_first(folder.last_checkpoint(console))
    changes = accepted_changes(saved, config) if saved else []
    if saved is None:
        with first_ahead():
            model, tokenizer = first_policy(config.policy, console)
    else:
        model, tokenizer = saved.restore_policy(config.policy)
    weights_from_first(model)
    model.eval()  # no dropout: a token's log-prob must not change between the rollout and the update
    check_policy(model)
    chat = make_chat(tokenizer)
    optimizer = make_optimizer(model, config.training)
    asked = needs_of(config.method)  # before any schedule: what is learned is learned from the first step on
    value = StateValue(model, chat, config) if "value_S" in asked else None

    def keep() -> None:
        folder.save(config, model, tokenizer, optimizer, done, value and value.state_dict(), random)

    if saved is None:
        done = 0
        folder.begin(config)
        log = Log(config, folder, console, resumed=False)
        seed_random(config)
        imitation = imitate(model, chat, config, console)
        seconds = time.perf_counter() - began
        log("warm_start", 0, **imitation, warm_start_seconds=seconds, peak_memory_mib=peak_memory_mib())
        if "gold_logp" in asked:
            folder.save_reference(model)
        random = random_states()
        keep()
    else:
        done, random = saved.step, saved.random()
        saved.restore_optimizer(optimizer)
        if value:
            value.load_state_dict(saved.restore_value())
        if damaged := folder.forget_after(done):
            console.print(f"metrics.jsonl: left out {damaged} damaged line(s)", highlight=False)
        if changes:
            folder.write("config.toml", to_toml(config))
            console.print(f"changed since then: {', '.join(changes)}", soft_wrap=True, highlight=False, markup=False)
        log = Log(config, folder, console, resumed=True)
        console.print(f"{folder.path} holds {done} of {config.training.steps} steps: going on", soft_wrap=True)
    with first_ahead():
        reference = folder.restore_reference(config.policy) if "gold_logp" in asked else None
    scorers = Scorers(model, chat, reference, value)
    engine = make_engine(config.rollout, model)
    engine.push(model)
    restore_random(random)
    evaluate_where_due(folder, log, model, chat, config, done, console, engine)

    total, cuts_told = config.training.steps, False
    with progress(console, "step", total, done) as show, leave.keeping(keep):
        for step in range(done + 1, total + 1):
            # Rollout: every environment verifies its session, turn by turn.
            seeds = session_seeds(config, step)
            group = torch.arange(len(seeds)) // config.rollout.group_size
            batch = rollout(
                model,
                chat,
                [make_environment(config.environment.name, config.environment.options) for _ in seeds],
                seeds,
                generator=generator_of(config, step, "rollout", model.device),
                sampling=sampling_of(config, gold=reads_gold(config)),
                engine=engine,
            )
            if batch.cut_sessions and not cuts_told:
                cuts_told = True
                console.print(
                    f"{batch.cut_sessions} of {len(seeds)} sessions reached the model's context of "
                    f"{context_length(model)} tokens: the turn under way failed, finished turns count (said once)"
                )

            # Signals: what the method asks for in this step, from rules, the self-teacher and other scorers.
            began = time.perf_counter()
            if not engine.exact:
                rescore(model, batch, config)
            spans = spans_of(batch, group)
            signals = gather(needs_of(config.method, step), batch, group, spans, config, scorers)
            scored = time.perf_counter()

            # Credit, and the teacher's distributions where it distils them.
            credit = from_first(assign_credit(spans, signals, config.method, step))
            credit, mismatch = corrected(credit, batch, config.rollout.correction)
            assigned = time.perf_counter()
            teacher = teacher_of(credit, batch, group, config, scorers)

            distributed = time.perf_counter()
            with leave.unbroken():
                # Loss, step.
                learned = value.learn(batch, spans) if value else {}
                metrics = update(
                    model,
                    optimizer,
                    batch,
                    credit,
                    config.training,
                    temperature=config.rollout.temperature,
                    generator=generator_of(config, step, "minibatches", torch.device("cpu")),
                    teacher=teacher,
                )
                stepped = time.perf_counter()

                # Log.
                reward = session_reward(batch, config.method.session_reward)
                metrics |= outcome_metrics(batch, reward, config.rollout.group_size)
                metrics |= credit_metrics(credit, spans) | teacher_metrics(credit, signals) | learned
                metrics |= mismatch
                metrics |= {
                    "learning_rate": config.training.rate,
                    "rollout_seconds": batch.seconds,
                    "teacher_seconds": scored - began + distributed - assigned,
                    "credit_seconds": assigned - scored,
                    "training_seconds": stepped - distributed,
                }
                done, random = step, random_states()
                log("step", step, **metrics, peak_memory_mib=peak_memory_mib())
                show(step, "turn {turn_success:.3f}  session {session_success:.3f}  loss {loss:+.4f}".format(**metrics))
                if is_first() and metrics["skipped_steps"]:
                    refuse_bad_steps(folder.metrics(), config.training.bad_steps)
                if config.run.records and (step == total or due(step, config.run.records)):
                    logp, *_ = token_statistics(model, batch, config)
                    kept = records_of(step, batch, group, credit, signals, logp, tokenizer)
                    folder.write(f"records/step-{step:05d}.jsonl", kept)
                if step == total or due(step, config.run.checkpoint_every):
                    keep()
            engine.push(model)
            evaluate_where_due(folder, log, model, chat, config, step, console, engine)
    log.close()
    if is_first():
        finish(folder, config, console)


def due(step: int, every: int) -> bool:
    """True at every multiple of `every`; never when it is 0."""
    return every > 0 and step % every == 0


def evaluate_where_due(
    folder: RunFolder,
    log: Log,
    model: PreTrainedModel,
    chat: Chat,
    config: Config,
    step: int,
    console: Console,
    engine: Engine,
) -> None:
    """Evaluate, log it and say it: at the first step, the last and those between that are due, each of them once."""
    if not (step in (0, config.training.steps) or due(step, config.evaluation.every)):
        return
    if from_first(any(line["event"] == "evaluation" and line["step"] == step for line in folder.metrics())):
        return
    random = random_states()
    found = evaluate(model, chat, config, engine)
    restore_random(random)  # what is trained does not depend on when is evaluated
    log("evaluation", step, **found, peak_memory_mib=peak_memory_mib())
    words = "turn {turn_success:.3f}  session {session_success:.3f}".format(**found)
    console.print(f"held out, after step {step}: {words}", highlight=False)


def finish(folder: RunFolder, config: Config, console: Console) -> None:
    """Draw the curves, write the page and print the closing table."""
    lines = folder.metrics()
    draw_curves(lines, folder.path / "curves.png")
    console.print(closing_table(lines, config))
    if reference := grpo_reference(config):
        console.print(reference, soft_wrap=True, highlight=False)
    steps = [line for line in lines if line["event"] == "step"]
    if steps and not any(line["trained_rows"] for line in steps):
        console.print(
            "nothing was learned: at every step all rollouts of a group earned the same, so that none had credit; "
            'rewards differ more often with method.session_reward = "mean", for methods that read a session\'s reward, '
            "and for a policy that sometimes succeeds: see [warm_start] in the configuration",
            markup=False,
            soft_wrap=True,
        )
    page = write_view(folder.path, folder.path / "view.html")
    again = shlex.join(["crest-train", "view", str(folder.path)])
    console.print(f"sessions, token by token: {page} ({again} writes it anew)", soft_wrap=True, highlight=False)
    console.print(f"run folder: {folder.path}", soft_wrap=True)
