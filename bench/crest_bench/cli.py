"""crest-bench: what our kernels cost, beside the peers'."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from crest_bench.command import RESULTS_HELP, need_triton, need_writable, progress, say_written
from crest_bench.environment import results
from crest_bench.plot import plot
from crest_bench.roofline_cli import roofline, traffic
from crest_bench.run import run

if TYPE_CHECKING:
    from crest_bench.codegen import Count

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


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
        Path | None, typer.Option(dir_okay=False, help=f"Write here; default codegen.csv in {RESULTS_HELP}.")
    ] = None,
) -> None:
    """Count what the vocabulary kernels issue per bf16 logit, in machine code compiled offline. No GPU is needed."""
    need_triton()
    os.environ.pop("TRITON_INTERPRET", None)  # Triton reads it when imported; interpreted kernels cannot be compiled
    from crest_bench import codegen as report
    from crest_bench.peers import installed

    targets = target or list(report.TARGETS)
    if unknown := sorted(set(targets) - set(report.TARGETS)):
        message = f"found {', '.join(unknown)}, wanted some of {', '.join(report.TARGETS)}"
        raise typer.BadParameter(message, param_hint="--target")
    path = csv or results() / "codegen.csv"
    need_writable(path, report.Count, "--csv")
    jobs = [(kernel, name) for kernel in report.KERNELS + installed() for name in targets]
    rows = []
    with progress(len(jobs)) as step:
        for kernel, name in jobs:
            rows += report.count(kernel, name)
            step(f"{kernel.package} {kernel.name}", name)
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        Console(width=None if sys.stdout.isatty() else 140).print(_table(rows))
    report.write_csv(rows, path)
    say_written(path)


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
