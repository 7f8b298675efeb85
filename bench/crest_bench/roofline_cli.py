"""`crest-bench traffic` and `crest-bench roofline`: what is counted and predicted without a GPU."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from crest_bench.rows_file import read_rows, write_rows

RESULTS = Path("bench/results")  # seen from the repository's root
messages = Console(stderr=True)
Folder = Annotated[Path, typer.Option(file_okay=False, help="Folder of the CSV files.")]


def traffic(results: Folder = RESULTS) -> None:
    """Count the bytes that the kernels read and write per bf16 logit, in Triton's interpreter. No GPU is needed."""
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when imported
    from crest_bench import traffic as report

    jobs = [(case, masked) for case in report.CASES for masked in report.MASKED_ROWS]
    rows = [row for job in track(jobs, "Interpreting", console=messages, transient=True) for row in report.count(*job)]
    table = Table(
        title="Bytes per bf16 logit, from the kernels' own loads and stores",
        caption=f"V={report.VOCABULARY}, {report.NUM_ROWS} rows. again: read before in the same launch; policy_loss "
        "keeps its rows in flight in cache. times: how often elements are read and written.",
    )
    for name in ("kernel", "tensor"):
        table.add_column(name, no_wrap=True)
    for name in ("masked", "read", "again", "written"):
        table.add_column(name, justify="right")
    for name in ("times read", "times written"):
        table.add_column(name)
    for before, row in zip([None, *rows], rows, strict=False):
        if before and before.kernel != row.kernel:
            table.add_section()
        table.add_row(
            row.kernel, row.tensor, f"{row.masked_percent} %", f"{row.read:.4f}", f"{row.read_again:.4f}",
            f"{row.written:.4f}", row.times_read, row.times_written,
        )  # fmt: skip
    _print(table)
    _write(rows, results / "traffic.csv")


def roofline(results: Folder = RESULTS) -> None:
    """Predict every kernel's share of peak memory bandwidth from codegen.csv and traffic.csv. Nothing is measured."""
    from crest_bench import roofline as report

    for name in ("codegen", "traffic"):
        if not (results / f"{name}.csv").exists():
            raise typer.BadParameter(
                f"{results / name}.csv is not there: run `crest-bench {name}`", param_hint="--results"
            )
    rows = list(report.predict_kernels(read_rows(results / "codegen.csv"), read_rows(results / "traffic.csv")))
    devices = [device.name for device in report.DEVICES]
    table = Table(
        title="PREDICTION, not a measurement: share of the datasheet's memory bandwidth, %",
        caption="time = max(bytes / bandwidth, instructions / issue rate, exponentials / special-function rate). In "
        "brackets: how busy the busier of instruction issue (i) and special-function unit (e) is. Peers: with the "
        "least bytes of their role.",
    )
    _columns(table, "kernel", devices)
    kernels = {(row.package, row.kernel, row.triton): {} for row in rows}
    for row in rows:
        busy, unit = max((row.issue_ps, "i"), (row.exponential_ps, "e"))
        cell = f"{100 * row.share_of_peak_bandwidth:.0f} ({100 * busy / row.predicted_ps:.0f}{unit})"
        kernels[row.package, row.kernel, row.triton][row.device] = cell
    for (package, kernel, triton), cells in kernels.items():
        table.add_row(f"{package} {kernel} (Triton {triton})", *(cells.get(device, "") for device in devices))
    _print(table)
    heads = list(report.predict_heads(rows))
    table = Table(
        title="PREDICTION, not a measurement: linear_policy_loss in bf16, % of the floor of three matrix products",
        caption=f"chunks of {report.MAX_CHUNK_BYTES >> 20} MiB of logits; (floor of products in chunks + fused kernel, "
        "picoseconds per logit)",
    )
    _columns(table, "head", devices)
    for name in dict.fromkeys(row.head for row in heads):
        cells = {
            row.device: f"{100 * row.share_of_floor:.0f} ({row.floor_ps:.1f} of {row.gemm_ps:.1f} + {row.visit_ps:.1f})"
            for row in heads
            if row.head == name
        }
        table.add_row(name, *(cells.get(device, "") for device in devices))
    _print(table)
    _write(rows, results / "roofline.csv")
    _write(heads, results / "roofline_heads.csv")


def _columns(table: Table, first: str, devices: list[str]) -> None:
    table.add_column(first, no_wrap=True)
    for device in devices:
        table.add_column(device, justify="right", no_wrap=True)


def _print(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _write(rows: list, path: Path) -> None:
    if rows:
        write_rows(rows, path)
        messages.print(f"Wrote {path}")
