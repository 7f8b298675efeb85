"""A plan on the screen: a table of parts and phases, and what would fit."""

import re

from rich.console import Console
from rich.table import Table

from crest_train.engines.vllm import MEMORY
from crest_train.model import recomputing_layers
from crest_train.plan import Plan, Planner, Sizes

_UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}


def bytes_of(text: str) -> int:
    """A number of bytes from a text like 80GB (10^9 each) or 24GiB (2^30 each). Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(MB|GB|MiB|GiB)", text.strip())
    if not found or not float(found[1]):
        raise ValueError(f"--memory: found {text!r}, wanted a size such as 80GB or 24GiB")
    return round(float(found[1]) * _UNITS[found[2]])


def default_sizes(planner: Planner, tokens: int | None = None, prompt: int = 0) -> Sizes:
    """Sessions of so many tokens (None: a micro-batch's, as far as the model's context reaches)."""
    return Sizes(tokens or min(planner.config.training.tokens_per_micro_batch, planner.context), prompt)


def report(planner: Planner, sizes: Sizes, console: Console, memory: int | None = None) -> None:
    """Print the plan for sessions of these sizes, and what fits into the memory (None: nothing of it)."""
    plan = planner.plan(sizes)
    console.print(_table(plan, _title(planner, sizes)))
    _say(console, _words_on_full_logits(plan))
    if sizes.tokens > planner.context:
        _say(console, f"The model's context is {planner.context:,} tokens, less than planned for")
    if memory:
        _say_what_fits(planner, plan, sizes, memory, console)
    if planner.config.policy.device == "cpu":
        _say(
            console,
            "Counted are tensors. Beside them stand 400 to 500 MiB of a process that has imported everything, and what "
            "glibc keeps of freed memory, which may be more than all of this (RESULTS.md); it keeps nothing, at 10 to "
            "25 % more time for updates, with MALLOC_MMAP_THRESHOLD_=131072 in the environment",
        )


def _table(plan: Plan, title: str) -> Table:
    everywhere = {"weights": plan.weights, "reference": plan.reference, "optimizer": plan.optimizer}
    in_backward = max(plan.backward, plan.stepping) - plan.activations - plan.head
    columns = {
        "rollout": {"keys and values": plan.cache, "sampling": plan.sampling},
        "teacher": {"scoring": plan.scoring},
        "update": {
            "gradients": plan.gradients,
            "activations": plan.activations,
            "head chunk and loss": plan.head,
            "beyond these, in the backward pass or step": max(0, in_backward),
        },
    }
    table = Table(title=title, caption="MiB")
    for name in ("", *columns):
        table.add_column(name, justify="right" if name else "left")
    for part, size in everywhere.items():
        table.add_row(part, *[_mib(size)] * len(columns))
    for phase, parts in columns.items():
        for part, size in parts.items():
            table.add_row(part, *(_mib(size) if phase == column else "" for column in columns))
    table.add_section()
    table.add_row("peak", *(_mib(size) for size in plan.phases.values()), style="bold")
    return table


def _title(planner: Planner, sizes: Sizes) -> str:
    policy = planner.config.policy
    how = [policy.model, policy.dtype, planner.config.training.optimizer]
    how += [f"adapters of rank {policy.lora.rank}"] if policy.lora.rank else []
    how += ["activations recomputed"] if recomputing_layers(planner.model) else []
    prompt = f", {sizes.prompt:,} of them a prompt" if sizes.prompt else ""
    return f"{', '.join(how)}; sessions of {sizes.tokens:,} tokens{prompt}"


def _words_on_full_logits(plan: Plan) -> str:
    return (
        f"With all logits of a micro-batch's {plan.micro_batch:,} tokens in float32, and their gradient, in place of "
        f"the head chunk: {_mib(plan.full_logits)} MiB there, {_mib(plan.with_full_logits)} MiB at the update's peak"
    )


def _say_what_fits(planner: Planner, plan: Plan, sizes: Sizes, memory: int, console: Console) -> None:
    config = planner.config
    own = memory
    if config.rollout.engine == "vllm":
        own = round(memory * (1 - MEMORY))
        _say(console, f"vLLM takes {MEMORY:.0%} of the memory for itself: {_gb(own)} of {_gb(memory)} are left")
    fits = "fits" if plan.peak <= own else "DOES NOT FIT"
    _say(console, f"The highest peak, {_gb(plan.peak)}, {fits} into {_gb(own)}")
    longest, full = planner.longest(own, plan, sizes.share)
    _say(console, f"Longest trajectory whose update fits there: {longest:,} tokens; with full logits: {full:,}")
    if plan.cache:
        played = planner.longest_played(own, plan, sizes)
        _say(console, f"Longest that {planner.rows} rows can be played at a time: {played:,} tokens")


def _say(console: Console, words: str) -> None:
    console.print(words, highlight=False, markup=False, soft_wrap=True)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}" if size else "-"


def _gb(size: int) -> str:
    return f"{size / 10**9:,.2f} GB"
