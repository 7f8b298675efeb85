"""The command `crest-train`."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from jinja2 import TemplateError
from rich.console import Console
from rich.markup import escape

from crest_train import fetch as fetching

METHOD_NAMES = (
    "grpo, turn_grpo, dr_grpo, dapo, gspo, cispo, gigpo, mt_grpo, rlsd, serl, crest, factor, trace, efca, triage, abc, "
    "toolopd or responsibility"
)
"""Of crest_ops.METHODS, which need torch: help does not."""

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def about() -> None:
    """Train an agent with credit assignment; `crest-train run` does so in a few minutes, downloading nothing."""


@app.command()
def run(
    config: Annotated[
        Path | None, typer.Argument(help="TOML file (see train/recipes/desk.toml); without it, the default run.")
    ] = None,
    method: Annotated[str | None, typer.Option(help=f"Credit method: {METHOD_NAMES}.")] = None,
    steps: Annotated[int | None, typer.Option(help="Rollout-and-update rounds.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same run.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the run; a run that was stopped there goes on. Default: a new one.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Folder of a run that goes on, with its own configuration; more --steps for a finished one."),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check all, open sessions and predict memory; train and write nothing.")
    ] = False,
) -> None:
    """Train, and leave a folder with configuration, metrics, checkpoints, curves and sampled sessions.

    Ctrl-C and SIGTERM keep what was learned so far and say how to go on; a second Ctrl-C does not wait for that.

    An environment of your own (environment.name = "module:Class") is looked for in the current folder first.
    On several processes: torchrun --nproc-per-node 2 -m crest_train.cli run ...
    """
    # Imported late: help and mistakes in the configuration need no torch.
    from crest_train.config import load_config

    given = {"method": {"name": method}, "training": {"steps": steps}, "run": {"seed": seed, "threads": threads}}
    overrides = {
        table: {key: value for key, value in values.items() if value is not None} for table, values in given.items()
    }
    if resume:
        if output:
            raise ValueError("--resume and --output: found both, wanted one; --resume goes on in the folder it names")
        if not (resume / "config.toml").is_file():
            raise ValueError(f"--resume: {resume} holds no run (found no config.toml in it)")
        config, output = config or resume / "config.toml", resume
    resolved = load_config(config, overrides)
    from transformers.utils import logging

    if dry_run:
        from crest_train.dry_run import dry_run as look

        look(resolved, Console())
        return
    from crest_train.loop import train
    from crest_train.orphans import end_with_parent

    end_with_parent()
    logging.disable_progress_bar()  # of loading and saving a model: the run has its own

    train(resolved, output, Console())


@app.command()
def plan(
    config: Annotated[Path | None, typer.Argument(help="TOML file of a run; without it, the default run.")] = None,
    memory: Annotated[str, typer.Option(help="What is to fit: as 80GB (of 10^9 bytes) or 24GiB.")] = "80GB",
    tokens: Annotated[
        int | None, typer.Option(min=4, help="Of the longest session. Default: [training] tokens_per_micro_batch.")
    ] = None,
    prompt: Annotated[int, typer.Option(min=0, help="Tokens of it that all plays of the session share.")] = 0,
) -> None:
    """Predict the memory of a run, part by part, and the longest session that fits; no weight is loaded.

    `run --dry-run` does so with what the environment's own sessions take.
    """
    _refuse_several("plan")
    # Imported late: help needs no torch.
    from crest_train.config import load_config
    from crest_train.plan import Planner
    from crest_train.plan_report import bytes_of, default_sizes, report

    room, planner = bytes_of(memory), Planner(load_config(config))
    report(planner, default_sizes(planner, tokens, prompt), Console(), room)


@app.command()
def compare(
    output: Annotated[
        Path, typer.Option(help="Folder of the comparison; what is finished there is kept, what was stopped goes on.")
    ],
    methods: Annotated[str, typer.Option(help=f"all, or some of {METHOD_NAMES}, with commas between.")] = "all",
    seeds: Annotated[int, typer.Option(help="How many seeds, from run.seed on.")] = 3,
    config: Annotated[
        Path | None, typer.Option(help="TOML file of what all runs share (see train/recipes/compare_desk.toml).")
    ] = None,
    rates: Annotated[
        str, typer.Option(help="Learning rates to sweep, with commas between, training.rate among them; else that one.")
    ] = "",
    options: Annotated[
        Path | None, typer.Option(help="TOML file: a table per method that is not to run with its defaults.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="table.key=value on top of the file; may be given repeatedly.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Runs at a time, each in a process of its own.")] = 2,
    from_csv: Annotated[
        list[Path] | None,
        typer.Option(help="Run nothing: tables and curves of these compare.csv files; may be given repeatedly."),
    ] = None,
) -> None:
    """Compare methods at equal rollouts, warm start and seeds: one CSV, a table and learning curves."""
    _refuse_several("compare")
    # Imported late: help needs no torch.
    from crest_train.compare_report import read_rows, report

    if from_csv:
        rows, there = read_rows(from_csv), output / "compare.csv"
        if there.exists() and not any(there.samefile(path) for path in from_csv):
            raise ValueError(f"--output: {output} holds a comparison that --from-csv leaves out; name another folder")
        output.mkdir(parents=True, exist_ok=True)
        report(rows, output, Console())
        return
    from crest_train.compare import compare as compare_methods
    from crest_train.compare_plan import with_changes
    from crest_train.config import load_config

    shared = with_changes(load_config(config), changes or [])
    compare_methods(shared, methods, output, seeds=seeds, rates=rates, jobs=jobs, options=options, console=Console())


@app.command()
def probe(
    policy: Annotated[
        Path, typer.Argument(help="A run folder, or a Hugging Face model's folder with --rollouts of it.")
    ],
    methods: Annotated[str, typer.Option(help=f"all, or some of {METHOD_NAMES}, with commas between.")] = "all",
    batches: Annotated[int, typer.Option(help="Independent batches of rollouts.")] = 16,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same batches.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file of how to play and to score. Default: the run folder's own.")
    ] = None,
    rollouts: Annotated[Path | None, typer.Option(help="Recorded rollouts, in place of playing new ones.")] = None,
    project: Annotated[
        int,
        typer.Option(help="Dimensions of the random projection that gradients are kept in; 0: all, where they fit."),
    ] = 0,
    controls: Annotated[
        bool, typer.Option(help="Measure shuffled, noisy and absent teacher gaps beside the methods that read them.")
    ] = True,
    options: Annotated[
        Path | None,
        typer.Option(help="TOML file: a table per method that is not to have its defaults; as that of compare."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="table.key=value on top of the configuration; may be given repeatedly. method.session_reward=mean: "
            "where hardly a session has every turn right, methods with one reward per session have no gradient else.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the CSV and the plot. Default: runs/probe-...")
    ] = None,
) -> None:
    """Measure the gradient that each method makes of the same rollouts: signal to noise, bias, concentration."""
    _refuse_several("probe")
    from crest_train.compare_plan import with_changes
    from crest_train.config import load_config

    if seed is not None and seed < 0:
        raise ValueError(f"--seed: found {seed}, want 0 or more")
    own = policy / "config.toml"
    source = config or (own if own.is_file() else None)
    given = [*(changes or []), *([] if seed is None else [f"run.seed={seed}"])]
    resolved = with_changes(load_config(source), given)
    from transformers.utils import logging

    from crest_train.probe import probe as probe_gradients

    logging.disable_progress_bar()
    probe_gradients(
        policy,
        [name.strip() for name in methods.split(",")],
        batches=batches,
        seed=resolved.run.seed,
        config=resolved if source or changes else None,
        rollouts=rollouts,
        project=project,
        controls=controls,
        options=options,
        output=output or Path("runs", f"probe-{policy.resolve().name}"),
        console=Console(),
    )


@app.command("eval")
def evaluate(
    policy: Annotated[
        str | None, typer.Argument(help="A run's folder, a model's folder, or a name: desk, smollm2.")
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(help="Environment, with its defaults, in place of the run's; with --compare: whose evaluations."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file of how to play. Default: the run's own, else the defaults.")
    ] = None,
    sessions: Annotated[
        int | None, typer.Option(min=1, help="Held-out sessions. Default: [evaluation], or as many as there are.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Plays of each session; pass@k for k up to this.")] = 1,
    temperature: Annotated[float | None, typer.Option(help="Of sampling. Default: [evaluation].")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same plays.")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="table.key=value on top of the configuration; may be given repeatedly."),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Play nothing: pair two evaluations, each the folder of one or of a run that holds one."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the evaluation; one that was stopped there goes on. Default: in the run's folder."
        ),
    ] = None,
) -> None:
    """Evaluate on held-out sessions: success per category, pass@k and bootstrap intervals; or compare two evaluations.

    crest-train eval runs/mine --env bfcl --samples 4; crest-train eval --compare runs/mine runs/other
    """
    _refuse_several("eval")
    if (policy is None) == (compare is None):
        raise ValueError("wanted a policy to evaluate, or --compare with two evaluations")
    # Imported late: help needs no torch.
    from transformers.utils import logging

    from crest_train.compare_plan import with_changes
    from crest_train.evaluation import evaluate_policy, evaluation_config
    from crest_train.evaluation_pairs import compare_evaluations

    if compare:
        compare_evaluations(*compare, env, output, Console())
        return
    logging.disable_progress_bar()
    given = {"evaluation.temperature": temperature, "run.seed": seed}
    told = [f"{key}={value}" for key, value in given.items() if value is not None]
    resolved = with_changes(evaluation_config(policy, config, env), [*(changes or []), *told])
    evaluate_policy(policy, resolved, sessions=sessions, samples=samples, output=output, console=Console())


@app.command()
def view(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, finished or under way.")],
    output: Annotated[Path | None, typer.Option(help="Default: view.html in the run's folder.")] = None,
) -> None:
    """Write one HTML file to look at a run: curves, and its sessions turn by turn, every token with its numbers."""
    _refuse_several("view")
    from crest_train.view import write_view  # late: help needs no pydantic

    page = write_view(folder, output or folder / "view.html")
    Console().print(f"open in a browser: {page.resolve().as_uri()}", soft_wrap=True, highlight=False, markup=False)


@app.command()
def fetch(
    names: Annotated[list[str], typer.Argument(help="What to download into the user's cache: smollm2, bfcl.")],
) -> None:
    """Download a model or an environment's data; what is there already is checked and kept."""
    for name, path in fetching.fetch(names).items():
        Console().print(f"{name}: {path}", soft_wrap=True)


def main() -> None:
    """Entry point: what is wrong with the input is told in one line, with exit code 2."""
    try:
        app()
    except (ValueError, OSError, TemplateError, fetching.FetchError) as error:
        words = escape(" ".join(_told(error).split()))
        several = os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ
        which = f" (process {os.environ['RANK']})" if several else ""
        Console(stderr=True).print(f"[bold red]error{which}:[/] {words}", soft_wrap=True, highlight=False)
        sys.exit(2)


def _refuse_several(command: str) -> None:
    size = os.environ.get("WORLD_SIZE", "1")
    if size != "1":
        raise ValueError(f"crest-train {command}: found WORLD_SIZE={size}, wanted one process; only run takes several")


def _told(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        path = error.filename2 or error.filename
        if isinstance(error, FileExistsError | NotADirectoryError):
            return f"{path}: wanted a folder there, found a file or a path through one ({error.strerror})"
        return f"{path}: could not be read or written ({error.strerror})"
    if isinstance(error, TemplateError):
        return f"policy.model: the chat template of its tokenizer is broken: {error}"
    return str(error) or type(error).__name__


if __name__ == "__main__":
    main()
