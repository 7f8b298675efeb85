"""What `crest-bench run` prints: one table per case, and how seconds grow with tokens."""

from collections.abc import Iterable, Sequence

from rich.table import Table

from crest_bench.linear_rows import Row

ERRORS = {"logp_error": "logp", "entropy_error": "entropy", "hidden_grad_error": "dH", "weight_grad_error": "dW"}
MIB = 1 << 20


def case_tables(rows: Sequence[Row]) -> Iterable[Table]:
    """One table per head, tokens, policy tokens and dtype, with the columns that were measured."""
    cases: dict[tuple, list[Row]] = {}
    for row in rows:
        cases.setdefault((row.head, row.tokens, row.policy_tokens, row.dtype), []).append(row)
    for (head, tokens, policy, dtype), own in cases.items():
        yield _table(f"{head}: {policy} policy tokens of {tokens}, {dtype}, {own[0].device}", own)


def _table(title: str, rows: Sequence[Row]) -> Table:
    figures = {(row.provider, row.mode, row.metric): row for row in rows}
    measured = {(row.mode, row.metric) for row in rows}
    modes = [mode for mode in ("forward", "backward", "full") if (mode, "seconds") in measured]
    full, memory = ("full", "seconds") in measured, ("full", "memory_peak") in measured
    captions = ["seconds, median (20th - 80th percentile)"] * bool(modes) + ["peak: above the inputs"] * memory
    table = Table(title=title, caption="; ".join(captions) or None)
    table.add_column("provider", no_wrap=True)
    for mode in modes:
        table.add_column(mode, justify="right", no_wrap=True)
    if full:
        table.add_column("x floor", justify="right")
        table.add_column("x crest", justify="right")
    if memory:
        table.add_column("peak MiB", justify="right")
        table.add_column("of them gradients", justify="right")
    shown_errors = [metric for metric in ERRORS if ("full", metric) in measured]
    for metric in shown_errors:
        table.add_column(f"{ERRORS[metric]} error", justify="right")
    table.add_column("computes")
    for name in dict.fromkeys(row.provider for row in rows):
        own = {key[1:]: row for key, row in figures.items() if key[0] == name}
        cells = [_seconds(own.get((mode, "seconds"))) for mode in modes]
        if full:
            seconds = own.get(("full", "seconds"))
            cells += [_ratio(seconds.ratio_to_floor) if seconds else "", _over(seconds, figures)]
        if memory:
            cells += [_mib(own.get(("full", metric))) for metric in ("memory_peak", "memory_gradients")]
        cells += [_error(own.get(("full", metric))) for metric in shown_errors]
        table.add_row(name, *cells, _computes(next(iter(own.values()))))
    return table


def _seconds(row: Row | None) -> str:
    if row is None or row.value == "":
        return "failed" if row else ""
    spread = f" ({row.p20:.3g} - {row.p80:.3g})" if row.mode == "full" else ""
    return f"{row.value:.3g}{spread}"


def _ratio(value: float | str) -> str:
    return "" if value == "" else f"{value:.2f}"


def _over(row: Row | None, figures: dict) -> str:
    crest = figures.get(("crest", "full", "seconds"))
    return "" if not row or not crest or "" in (row.value, crest.value) else _ratio(row.value / crest.value)


def _mib(row: Row | None) -> str:
    if row is None:
        return ""
    return "failed" if row.value == "" else f"{row.value / MIB:.1f}"


def _error(row: Row | None) -> str:
    if row is None:
        return ""
    return "failed" if row.value == "" else f"{row.value:.1e}"


def _computes(row: Row) -> str:
    parts = [row.objective, "entropy" * bool(row.entropy), "all logits kept" * bool(row.full_logits)]
    return ", ".join(part for part in parts if part)


def growth_table(rows: Sequence[Row]) -> Table | None:
    """Full seconds over those of fewer tokens, at the same share or with the same policy tokens; None without pairs."""
    full = [row for row in rows if (row.mode, row.metric) == ("full", "seconds") and row.value != ""]
    table = Table(title="Growth with tokens")
    for column in ("head", "dtype", "provider", "tokens", "policy tokens"):
        table.add_column(column, no_wrap=True)
    table.add_column("x seconds", justify="right")
    for row in full:
        for other in full:
            same = (row.head, row.dtype, row.provider) == (other.head, other.dtype, other.provider)
            related = row.policy_share == other.policy_share or row.policy_tokens == other.policy_tokens
            if same and related and other.tokens < row.tokens:
                table.add_row(
                    row.head, row.dtype, row.provider, f"{other.tokens} -> {row.tokens}",
                    f"{other.policy_tokens} -> {row.policy_tokens}", f"{row.value / other.value:.2f}",
                )  # fmt: skip
    return table if table.row_count else None
