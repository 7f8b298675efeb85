"""Rows of one case: speed in one interleaved run, memory in fresh processes, error against float64."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from crest_bench.accuracy import errors, exact
from crest_bench.cases import Case, Inputs, make_inputs
from crest_bench.contract import PRODUCTS
from crest_bench.environment import installed_version
from crest_bench.linear_rows import Row, now
from crest_bench.measure import Times, call, memory, speed, spread
from crest_bench.providers import FLOORS, PROVIDERS

Step = Callable[[str], None]  # called after every call of a provider, for progress
METRICS = ("speed", "memory", "error")
MODES = ("forward", "backward", "full")


def steps(metrics: Sequence[str], providers: Sequence[str], repeats: int) -> int:
    """How often `measure_case` calls its step."""
    floors = [name for name in FLOORS if name not in providers]
    return (
        ("speed" in metrics) * (repeats + 1) * (len(providers) + len(floors))
        + ("memory" in metrics) * len(providers)
        + ("error" in metrics) * len(providers)
    )


def measure_case(
    case: Case,
    device: str,
    metrics: Sequence[str],
    modes: Sequence[str],
    providers: Sequence[str],
    repeats: int,
    environment: Mapping[str, str | int],
    step: Step,
) -> Iterator[list[Row]]:
    """The rows of each wanted metric as it is done, speed first. The floors take part in every speed measurement."""

    def row(name: str, metric: str, mode: str, value: float | str, unit: str, **more) -> Row:
        provider = PROVIDERS[name]
        return Row(
            timestamp=now(), **environment, head=case.head.name, hidden=case.head.hidden,
            vocabulary=case.head.vocabulary, tokens=case.tokens, policy_share=round(case.share, 3),
            policy_tokens=case.policy_tokens, dtype=case.dtype, provider=name,
            provider_version=installed_version(provider.package), objective=provider.objective,
            entropy=provider.entropy, entropy_gradient=provider.entropy_gradient, full_logits=provider.full_logits,
            mode=mode, metric=metric, value=value, unit=unit, **more,
        )  # fmt: skip

    if "speed" in metrics or "error" in metrics:
        inputs = make_inputs(case, device)
        if "speed" in metrics:
            figures = _speed(inputs, providers, modes, repeats, step)
            yield [row(name, "seconds", mode, **more) for name, mode, more in figures]
        if "error" in metrics:
            yield [row(name, metric, "full", **more) for name, metric, more in _errors(inputs, providers, step)]
        del inputs
    if "memory" in metrics:
        yield [row(name, metric, "full", **more) for name, metric, more in _memory(case, device, providers, step)]


def _speed(
    inputs: Inputs, providers: Sequence[str], modes: Sequence[str], repeats: int, step: Step
) -> Iterator[tuple[str, str, dict]]:
    names = [*providers, *(name for name in FLOORS if name not in providers)]
    found = speed({name: PROVIDERS[name].load() for name in names}, inputs, repeats, step)
    floors = [spread(times.of("full"))[1] for name in FLOORS if isinstance(times := found[name], Times)]
    for name in names:
        times = found[name]
        for mode in modes:
            if not isinstance(times, Times):
                yield name, mode, {"value": "", "unit": "s", "notes": _failure(times)}
                continue
            p20, median, p80 = spread(times.of(mode))
            ratio = median / min(floors) if mode == "full" and floors else ""
            yield name, mode, {"value": median, "unit": "s", "p20": p20, "p80": p80, "ratio_to_floor": ratio}


def _errors(inputs: Inputs, providers: Sequence[str], step: Step) -> Iterator[tuple[str, str, dict]]:
    references: dict[str, object] = {}
    for name in providers:
        objective = PROVIDERS[name].objective
        if objective != PRODUCTS:
            if objective not in references:
                references[objective] = exact(inputs, objective)
            try:
                output, gradients, _, _ = call(PROVIDERS[name].load(), inputs)
            except Exception as error:  # a peer may raise anything: that is what it does in this case
                yield name, "logp_error", {"value": "", "unit": "nat", "notes": _failure(error)}
            else:
                for metric, value in errors(output, gradients, inputs, references[objective]).items():
                    yield name, metric, {"value": value, "unit": "1" if "grad" in metric else "nat"}
        step(name)


def _memory(case: Case, device: str, providers: Sequence[str], step: Step) -> Iterator[tuple[str, str, dict]]:
    for name in providers:
        try:
            held = memory(name, case, device)
        except RuntimeError as error:
            yield name, "memory_peak", {"value": "", "unit": "byte", "notes": _failure(error)}
        else:
            yield name, "memory_peak", {"value": held["peak"], "unit": "byte"}
            yield name, "memory_gradients", {"value": held["gradients"], "unit": "byte"}
        step(name)


def _failure(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"failed: {type(error).__name__}: {text[0] if text else ''}"[:300]
