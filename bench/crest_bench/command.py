"""What the commands share: where results go, what they say, and how they fail."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from crest_bench.rows_file import check_writable, read_rows

RESULTS_HELP = "bench/results of the checkout, else here"
messages = Console(stderr=True)


def say_written(path: Path, what: str = "Wrote") -> None:
    messages.print(f"{what} {path}", markup=False, soft_wrap=True)


def need_triton() -> None:
    """Exits with 1 and one line where Triton is not installed."""
    if find_spec("triton") is None:
        messages.print("This command needs Triton, which is not installed: pip install triton", markup=False)
        raise typer.Exit(1)


def rows_of(path: Path, kind: type, option: str) -> list[dict[str, str]]:
    """The rows of a file that is there; what is wrong with them is wrong with the option."""
    try:
        return read_rows(path, kind)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def need_writable(path: Path, kind: type, option: str) -> None:
    """Refuses, before anything is measured, a file that cannot be written or whose rows are not of the kind."""
    try:
        check_writable(path)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
    if path.exists():
        rows_of(path, kind, option)


@contextmanager
def progress(steps: int) -> Iterator[Callable[..., None]]:
    """Gives what to call at every step, with a title and a detail: a bar on a terminal, else a line per title."""
    if messages.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=messages, transient=True) as shown:
            task = shown.add_task("", total=steps)
            yield lambda title, detail="": shown.update(task, advance=1, description=f"{title} {detail}")
        return
    said = []

    def step(title: str, detail: str = "") -> None:
        if title not in said:
            said.append(title)
            messages.print(title, markup=False, soft_wrap=True)

    yield step
