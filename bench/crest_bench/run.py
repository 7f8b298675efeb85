"""`crest-bench run`: the linear policy loss beside its peers, on the heads of real models."""

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from crest_bench.command import RESULTS_HELP, messages, need_writable, progress, say_written
from crest_bench.environment import environment, results

if TYPE_CHECKING:
    from crest_bench.cases import Case


def run(
    head: Annotated[
        list[str] | None, typer.Option(help="Head of a model; may be repeated (default smollm2-135m).")
    ] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="With --vocab: a head of this size instead.")] = None,
    vocab: Annotated[int | None, typer.Option(min=2, help="With --hidden: a head of this size instead.")] = None,
    share: Annotated[
        list[float] | None,
        typer.Option(help="Percent of the tokens that the policy wrote; may be repeated (default 3, 10, 30, 100)."),
    ] = None,
    policy_tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="The same as a number of tokens; may be repeated.")
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens of the batch; may be repeated (default: by head and device)."),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="float32 or bfloat16; may be repeated (default both).")
    ] = None,
    mode: Annotated[
        list[str] | None, typer.Option(help="forward, backward or full; may be repeated (default all).")
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option(help="speed, memory or error; may be repeated (default speed).")
    ] = None,
    provider: Annotated[list[str] | None, typer.Option(help="Whom to measure; may be repeated (default all).")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of a speed measurement, after one to warm up.")] = 5,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default: cuda where there is one).")] = None,
    csv: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help=f"Append here; default linear_DEVICE.csv in {RESULTS_HELP}."),
    ] = None,
) -> None:
    """Measure speed, peak memory and error of the linear policy loss beside the peers, and append them to a CSV."""
    import torch

    from crest_bench.cases import DTYPES, HEADS, SHARES, Head
    from crest_bench.linear_measure import METRICS, MODES, measure_case, steps
    from crest_bench.linear_rows import Row, append_rows
    from crest_bench.linear_tables import case_tables, growth_table
    from crest_bench.providers import PROVIDERS

    has_gpu = torch.cuda.is_available()
    (device,) = chosen("--device", [device or ("cuda" if has_gpu else "cpu")], ["cpu", "cuda"])
    if device == "cuda" and not has_gpu:
        raise typer.BadParameter("found cuda, but torch sees no GPU on this machine", param_hint="--device")
    metrics = chosen("--metric", metric or ["speed"], METRICS)
    modes = chosen("--mode", mode or MODES, MODES)
    dtypes = chosen("--dtype", dtype or DTYPES, DTYPES)
    if (hidden is None) != (vocab is None):
        raise typer.BadParameter("--hidden and --vocab go together")
    heads = [HEADS[name] for name in chosen("--head", head or ([] if hidden else ["smollm2-135m"]), HEADS)]
    if hidden:
        heads.append(Head(f"h{hidden}-v{vocab}", hidden, vocab))
    if share and policy_tokens:
        raise typer.BadParameter("--share and --policy-tokens say the same: give one of them")
    if wrong := [value for value in share or () if not 0 < value <= 100]:
        raise typer.BadParameter(f"found {wrong[0]:g}, want 0 < share <= 100", param_hint="--share")
    cases = _cases(heads, tokens, share or SHARES, policy_tokens, dtypes, device)
    wanted = chosen("--provider", provider or PROVIDERS, PROVIDERS)
    missing = {name: reason for name in wanted if (reason := PROVIDERS[name].missing(device))}
    for name, reason in missing.items():
        messages.print(f"{name} is left out: {reason}", style="yellow", markup=False, soft_wrap=True)
    if not (present := [name for name in wanted if name not in missing]):
        raise typer.BadParameter("none of the providers is there", param_hint="--provider")
    if "memory" in metrics and device == "cpu" and not Path("/proc/self/clear_refs").exists():
        raise typer.BadParameter("memory on a CPU is read from Linux's /proc, which is not here", param_hint="--metric")
    path = csv or results() / f"linear_{device}.csv"
    need_writable(path, Row, "--csv")

    rows, where = [], environment(device)
    with progress(len(cases) * steps(metrics, present, repeats)) as step:
        for case in cases:
            title = f"{case.head.name} {case.policy_tokens}/{case.tokens} {case.dtype}"
            for found in measure_case(case, device, metrics, modes, present, repeats, where, partial(step, title)):
                append_rows(found, path)
                rows += found
    output = Console(width=None if sys.stdout.isatty() else 180)
    for table in case_tables(rows):
        output.print(table)
    if growth := growth_table(rows):
        output.print(growth)
    for note in dict.fromkeys(f"{row.provider} {row.dtype}: {row.notes}" for row in rows if row.notes):
        messages.print(note, markup=False, soft_wrap=True)
    say_written(path, f"Added {len(rows)} rows to")


def chosen(option: str, names: Iterable[str], known: Iterable[str]) -> list[str]:
    """The names, each once, all of them known. Raises BadParameter naming the option."""
    names = list(dict.fromkeys(names))
    if unknown := [name for name in names if name not in known]:
        message = f"found {', '.join(unknown)}, wanted some of {', '.join(known)}"
        raise typer.BadParameter(message, param_hint=option)
    return names


def _cases(
    heads: Iterable[Any],
    tokens: Sequence[int] | None,
    shares: Iterable[float],
    policy_tokens: Sequence[int] | None,
    dtypes: Iterable[str],
    device: str,
) -> "list[Case]":
    from crest_bench import cases

    found = []
    for head in heads:
        for count in tokens or [head.default_tokens(device)]:
            if policy_tokens and max(policy_tokens) > count:
                message = f"found {max(policy_tokens)}, want at most the {count} tokens of the case"
                raise typer.BadParameter(message, param_hint="--policy-tokens")
            written = policy_tokens or [cases.policy_tokens(count, share) for share in shares]
            found += [cases.Case(head, count, policy, dtype) for dtype in dtypes for policy in dict.fromkeys(written)]
    return found
