"""What a probe leaves to look at: figures of every method with their errors, two CSVs, a plot and a table.

Shape letters: n batches, D entries of a gradient or its sketch.
"""

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor

from crest_train.probe_statistics import (
    TOP_SHARES,
    alignment,
    cosines_to_rest,
    inner_products,
    jackknife_error,
    leave_one_out,
    mean_and_error,
    signal_to_noise,
)

REFERENCE = "reward_to_go"
"""Row of the unbiased reference gradient: see probe.reference_credit."""

COMPARED = ("turn_grpo", "grpo")
"""What every method is compared with, batch by batch."""

_SHARES = tuple(f"top_{round(100 * part)}" for part in TOP_SHARES)

Row = dict[str, str | int | float]


def summarise(gradients: Mapping[str, Tensor], shares: Mapping[str, Tensor]) -> tuple[list[Row], list[Row]]:
    """The figures of every method with their standard errors, and those of every batch.

    gradients: name -> [n, D], one row a batch, the same batches under every name, with those of REFERENCE and COMPARED.
    shares: name -> [n, 3], those of TOP_SHARES.

    snr, alignment: errors by the jackknife over batches, that of a difference too. cosine (of the one-batch gradient
    with the mean reference gradient of the other batches) and top shares: mean and standard error over the batches;
    `x_vs_y` is x minus that of y on the same batches. zero_gradients: batches that gave a gradient of exactly 0; where
    all did, the other figures are NaN.
    """
    reference = gradients[REFERENCE]
    y_y = inner_products(reference, reference)
    cosines, replicates, whole, aligned = {}, {}, {}, {}
    for name, gradient in gradients.items():
        x_x, x_y = inner_products(gradient, gradient), inner_products(gradient, reference)
        cosines[name] = cosines_to_rest(x_x, x_y, y_y) if x_x.any() else torch.full((len(x_x),), torch.nan).double()
        replicates[name], whole[name] = leave_one_out(signal_to_noise, x_x), signal_to_noise(x_x)
        aligned[name] = alignment(x_x, x_y, y_y), jackknife_error(leave_one_out(alignment, x_x, x_y, y_y))
    rows, by_batch = [], []
    for name, gradient in gradients.items():
        norms = gradient.double().norm(dim=1)
        row = {"method": name, "batches": len(gradient), "zero_gradients": int((norms == 0).sum())}
        row |= _with_error("snr", whole[name], jackknife_error(replicates[name]))
        row |= _with_error("cosine", *mean_and_error(cosines[name]))
        for other in COMPARED:
            error = jackknife_error(replicates[name] - replicates[other])
            row |= _with_error(f"snr_vs_{other}", whole[name] - whole[other], error)
            row |= _with_error(f"cosine_vs_{other}", *mean_and_error(cosines[name] - cosines[other]))
        row |= _with_error("alignment", *aligned[name])
        for key, values in zip(_SHARES, shares[name].unbind(1), strict=True):
            row |= _with_error(key, *mean_and_error(values))
        rows.append(row)
        for batch, (norm, cosine) in enumerate(zip(norms.tolist(), cosines[name].tolist(), strict=True)):
            own = {"method": name, "batch": batch, "gradient_norm": norm, "cosine": cosine}
            by_batch.append(own | dict(zip(_SHARES, shares[name][batch].tolist(), strict=True)))
    return rows, by_batch


def _with_error(key: str, value: float, error: float) -> Row:
    return {key: value, f"{key}_error": error}


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file in one piece."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def write_csv(path: Path, rows: list[Row]) -> None:
    """One line per row, under the names of the first one's figures; numbers with six significant digits."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: f"{v:.6g}" if isinstance(v, float) else v for key, v in row.items()})
    write_atomically(path, text.getvalue().encode())


def draw(path: Path, rows: list[Row], title: str) -> None:
    """Signal to noise and paired cosine of every method, with their standard errors; controls in grey."""
    figure = Figure(figsize=(10, 1.2 + 0.3 * len(rows)), layout="constrained")
    figure.suptitle(title)
    panels = (
        ("snr", "linear", "signal to noise of one batch's gradient"),
        ("cosine_vs_turn_grpo", "symlog", "cosine with the mean reward-to-go gradient,\nminus turn_grpo's"),
    )
    for axes, (key, scale, words) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        for place, row in enumerate(rows):
            colour = "0.55" if "@" in row["method"] else "black" if row["method"] == REFERENCE else "tab:blue"
            if row["zero_gradients"] == row["batches"]:
                at = axes.get_yaxis_transform()  # across the panel as shares of its width
                axes.text(0.5, place, "no signal", transform=at, ha="center", va="center", fontsize=8, color="0.4")
            axes.errorbar(row[key], place, xerr=row[f"{key}_error"], fmt="o", color=colour, capsize=3)
        axes.set_xscale(scale, **({"linthresh": 0.01} if scale == "symlog" else {}))
        axes.set_xlabel(words, fontsize=9)
        axes.grid(alpha=0.3)
        axes.axvline(0, color="0.3", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row["method"] for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    write_atomically(path, image.getvalue())


def table(rows: list[Row], title: str) -> Table:
    """The figures that decide, with their standard errors; the rest is in probe.csv."""
    found = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    found.add_column("method", no_wrap=True)
    for words in ("SNR", "cosine", "- turn_grpo", "alignment", "top 5%"):
        found.add_column(words, justify="right")
    for row in rows:
        if row["zero_gradients"] == row["batches"]:
            found.add_row(row["method"], "no signal", *"----")
            continue
        found.add_row(
            row["method"],
            _told(row, "snr", ".2f"),
            _told(row, "cosine", ".2f"),
            _told(row, "cosine_vs_turn_grpo", "+.4f"),
            _told(row, "alignment", ".2f"),
            f"{row['top_5']:.2f}",
        )
    without = [f"{row['method']} {row['zero_gradients']}" for row in rows if row["zero_gradients"]]
    if without:
        found.caption_justify = "left"
        found.caption = (
            f"Batches, of {rows[0]['batches']}, with a gradient of 0: {', '.join(without)}. No credit in them: a "
            "method of session rewards has none where no group's rollouts earned differently (--set "
            "method.session_reward=mean tells more sessions apart), another where its own signal is all equal."
        )
    return found


def _told(row: Row, key: str, digits: str) -> str:
    error = row[f"{key}_error"]
    return f"{row[key]:{digits}}" + ("" if torch.tensor(error).isnan() else f" ± {error:{digits.lstrip('+')}}")
