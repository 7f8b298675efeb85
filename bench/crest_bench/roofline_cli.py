"""`crest-bench traffic` and `crest-bench roofline`: what is counted and predicted without a GPU."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from crest_bench.command import RESULTS_HELP, messages, need_triton, need_writable, progress, rows_of, say_written
from crest_bench.environment import results
from crest_bench.rows_file import write_rows

Folder = Annotated[
    Path | None,
    typer.Option("--results", file_okay=False, help=f"Folder of the CSV files; default {RESULTS_HELP}."),
]


def traffic(folder: Folder = None) -> None:
    """Count the bytes that the kernels read and write per bf16 logit, in Triton's interpreter. No GPU is needed."""
    need_triton()
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when imported
    from crest_bench import traffic as report

    path = (folder or results()) / "traffic.csv"
    need_writable(path, report.Traffic, "--results")
    jobs = [(case, masked) for case in report.CASES for masked in report.MASKED_ROWS]
    rows = []
    with progress(len(jobs)) as step:
        for case, masked in jobs:
            rows += report.count(case, masked)
            step(case.kernel, f"{masked} masked")
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
    _write(rows, path)


def roofline(folder: Folder = None) -> None:
    """Predict every kernel's share of peak memory bandwidth from codegen.csv and traffic.csv. Nothing is measured."""
    need_triton()
    from crest_bench import roofline as report
    from crest_bench.codegen import Count
    from crest_bench.traffic import Traffic

    folder = folder or results()
    tables = []
    for name, kind in (("codegen", Count), ("traffic", Traffic)):
        if not (path := folder / f"{name}.csv").exists():
            raise typer.BadParameter(f"{path} is not there: run `crest-bench {name}`", param_hint="--results")
        tables.append(rows_of(path, kind, "--results"))
    need_writable(folder / "roofline.csv", report.Prediction, "--results")
    rows = list(report.predict_kernels(*tables))
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
    _write(rows, folder / "roofline.csv")
    _write(heads, folder / "roofline_heads.csv")


def _columns(table: Table, first: str, devices: list[str]) -> None:
    table.add_column(first, no_wrap=True)
    for device in devices:
        table.add_column(device, justify="right", no_wrap=True)


def _print(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _write(rows: list, path: Path) -> None:
    if rows:
        write_rows(rows, path)
        say_written(path)
    else:
        messages.print(f"No rows, so {path} is not written", markup=False, soft_wrap=True)
