"""`crest-train eval --compare A B`: two evaluations of the same sessions, paired session by session."""

from pathlib import Path

from rich.console import Console

from crest_train.evaluation import SESSIONS, SETTINGS, Sample, read_samples, read_settings, settings_difference
from crest_train.evaluation_report import differences, report_differences


def compare_evaluations(a: Path, b: Path, environment: str | None, output: Path | None, console: Console) -> None:
    """Print how B differs from A; with an output folder, write comparison.csv there.

    a, b: folders of evaluations, or of runs that hold one (of several, that in `environment`). Raises ValueError: none
    or several there, one that is not whole, different settings (naming the first).
    """
    folders = [evaluation_in(path, environment) for path in (a, b)]
    settings = [read_settings(folder) for folder in folders]
    policies = [found.pop("policy") for found in settings]
    if difference := settings_difference(*settings):
        raise ValueError(f"--compare: {folders[0]} and {folders[1]} are of different sessions: {difference}")
    samples = [whole(folder, settings[0]["sessions"] * settings[0]["samples"]) for folder in folders]
    if keys(samples[0]) != keys(samples[1]):
        raise ValueError(f"--compare: {folders[0] / SESSIONS} and {folders[1] / SESSIONS} hold different sessions")
    names = [
        f"{policy['name']}{'' if policy['step'] is None else ', step {step}'.format(**policy)}" for policy in policies
    ]
    report_differences(differences(*samples), (names[0], names[1]), output, console)


def evaluation_in(path: Path, environment: str | None) -> Path:
    """The evaluation that a path names: itself, or the only one (in `environment`) in a run's folder."""
    if (path / SETTINGS).is_file():
        return path
    name = f"eval-{environment.replace(':', '-')}" if environment else "eval-*"
    found = sorted(held.parent for held in path.glob(f"{name}/{SETTINGS}"))
    if not found:
        raise ValueError(f"--compare: {path} holds no evaluation; first run: crest-train eval {path}")
    if len(found) > 1:
        raise ValueError(f"--compare: {path} holds {', '.join(one.name for one in found)}; name one, or --env")
    return found[0]


def whole(folder: Path, wanted: int) -> list[Sample]:
    """The samples of an evaluation that is finished. Raises ValueError for one that was stopped."""
    found = read_samples(folder)
    if len(found) != wanted:
        raise ValueError(f"--compare: {folder} holds {len(found)} of {wanted} samples; go on with it first")
    return found


def keys(samples: list[Sample]) -> set[tuple[int, int, str | None]]:
    """Which sessions and samples these are."""
    return {(sample.session, sample.sample, sample.category) for sample in samples}
