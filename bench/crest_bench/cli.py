"""crest-bench: what our kernels cost, beside the peers'."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from crest_bench.plot import plot
from crest_bench.roofline_cli import roofline, traffic
from crest_bench.run import run

if TYPE_CHECKING:
    from crest_bench.codegen import Count

RESULTS = Path("bench/results/codegen.csv")  # seen from the repository's root

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
messages = Console(stderr=True)


app.command()(run)
app.command()(plot)
app.command()(traffic)
app.command()(roofline)


@app.callback()
def _group() -> None:
    """Benchmarks of crest-ops."""


@app.command()
def codegen(
    target: Annotated[list[str] | None, typer.Option(help="Compile for this target only; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    csv: Annotated[
        Path | None, typer.Option(dir_okay=False, help=f"Write here; default {RESULTS}, where that folder is.")
    ] = None,
) -> None:
    """Count what the vocabulary kernels issue per bf16 logit, in machine code compiled offline. No GPU is needed."""
    os.environ.pop("TRITON_INTERPRET", None)  # Triton reads it when imported; interpreted kernels cannot be compiled
    from crest_bench import codegen as report
    from crest_bench.peers import installed

    targets = target or list(report.TARGETS)
    if unknown := sorted(set(targets) - set(report.TARGETS)):
        message = f"found {', '.join(unknown)}, wanted some of {', '.join(report.TARGETS)}"
        raise typer.BadParameter(message, param_hint="--target")
    jobs = [(kernel, name) for kernel in report.KERNELS + installed() for name in targets]
    rows = [row for job in track(jobs, "Compiling", console=messages, transient=True) for row in report.count(*job)]
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        Console(width=None if sys.stdout.isatty() else 140).print(_table(rows))
    path = csv or (RESULTS if RESULTS.parent.is_dir() else None)
    if path:
        report.write_csv(rows, path)
        messages.print(f"Wrote {path}")


def _table(rows: list["Count"]) -> Table:
    table = Table(
        title=f"Per bf16 logit, Triton {rows[0].triton}",
        caption="instructions and exponentials per logit; barriers and shuffles per iteration; local bytes per thread",
    )
    table.add_column("kernel", no_wrap=True)
    for column in ("target", "loop"):
        table.add_column(column)
    for column in ("instr.", "exp.", "load bits", "store bits", "barriers", "shuffles", "local", "registers"):
        table.add_column(column, justify="right")
    previous = ""
    for row in rows:
        name = f"{row.package} {row.kernel}"
        if name != previous:
            table.add_section()
        table.add_row(
            name if name != previous else "", row.target, row.loop,
            f"{row.instructions:.2f}", f"{row.exponentials:.2f}", row.load_bits, row.store_bits,
            *map(str, (row.barriers, row.shuffles, row.local_bytes, row.registers)),
        )  # fmt: skip
        previous = name
    return table


def main() -> None:
    app()


if __name__ == "__main__":
    main()
