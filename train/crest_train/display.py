"""Progress while a run works: a bar on a terminal, plain lines elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress(console: Console, name: str, total: int, done: int = 0) -> Iterator[Callable[[int, str], None]]:
    """Yields a function to call with the number done so far and a few words on how it goes."""
    if not console.is_terminal:
        yield lambda done, words: console.print(f"{name} {done}/{total}  {words}", highlight=False, soft_wrap=True)
        return
    columns = (
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[words]}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(name, total=total, completed=done, words="")
        yield lambda done, words: bar.update(task, completed=done, words=words)
