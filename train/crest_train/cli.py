"""The command `crest-train`."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from jinja2 import TemplateError
from rich.console import Console
from rich.markup import escape

from crest_train import fetch as fetching

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def about() -> None:
    """Train an agent with credit assignment; `crest-train run` does so in a few minutes, downloading nothing."""


@app.command()
def run(
    config: Annotated[
        Path | None, typer.Argument(help="TOML file (see train/recipes/desk.toml); without it, the default run.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="Credit method: grpo, turn_grpo or crest.")] = None,
    steps: Annotated[int | None, typer.Option(help="Rollout-and-update rounds.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same run.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the run; a run that was stopped there goes on. Default: a new one.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch.")] = None,
) -> None:
    """Train, and leave a folder with configuration, metrics, checkpoint, curves and sampled sessions.

    An environment of your own (environment.name = "module:Class") is looked for in the current folder first.
    """
    # Imported late: help and mistakes in the configuration need no torch.
    from crest_train.config import load_config

    given = {"method": {"name": method}, "training": {"steps": steps}, "run": {"seed": seed, "threads": threads}}
    overrides = {
        table: {key: value for key, value in values.items() if value is not None} for table, values in given.items()
    }
    resolved = load_config(config, overrides)
    from transformers.utils import logging

    from crest_train.loop import train

    logging.disable_progress_bar()  # of loading and saving a model: the run has its own

    train(resolved, output, Console())


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
        Console(stderr=True).print(f"[bold red]error:[/] {words}", soft_wrap=True, highlight=False)
        sys.exit(2)


def _told(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        path = error.filename2 or error.filename
        if isinstance(error, FileExistsError | NotADirectoryError):
            return f"{path}: wanted a folder there, found a file or a path through one ({error.strerror})"
        return f"{path}: could not be read or written ({error.strerror})"
    if isinstance(error, TemplateError):
        return f"policy.model: the chat template of its tokenizer is broken: {error}"
    return str(error) or type(error).__name__
