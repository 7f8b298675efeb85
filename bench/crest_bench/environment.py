"""Where a figure was measured: commit, device, threads, versions."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_HERE = Path(__file__).resolve().parent
PACKAGES = ("trl", "liger-kernel", "cut-cross-entropy", "transformers")


def environment(device: str) -> dict[str, str | int]:
    """commit, device, device_name, threads, torch, triton and the versions of PACKAGES that are installed."""
    import torch

    versions = {name: installed_version(name) for name in PACKAGES}
    return {
        "commit": commit(),
        "device": device,
        "device_name": torch.cuda.get_device_name() if device == "cuda" else processor_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": installed_version("triton"),
        "packages": "; ".join(f"{name} {found}" for name, found in versions.items() if found),
    }


def installed_version(distribution: str) -> str:
    """The version, or an empty text where the distribution is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def checkout() -> Path | None:
    """The root of the checkout that this package lies in; None where it is installed apart from one."""
    root = _HERE.parents[1]
    return root if _HERE == root / "bench" / "crest_bench" and (root / "pyproject.toml").is_file() else None


def results() -> Path:
    """bench/results of that checkout, else the current folder."""
    root = checkout()
    return root / "bench" / "results" if root else Path()


def commit() -> str:
    """The short commit of that checkout, "+changes" where tracked files besides results differ; else empty."""
    try:
        if Path(_git("rev-parse", "--show-toplevel")).resolve() != checkout():
            return ""
        head = _git("rev-parse", "--short=10", "HEAD")
        changed = _git("status", "--porcelain", "-uno", "--", ":/", ":(exclude,top)*/results/*")
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head + ("+changes" if changed else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=_HERE, capture_output=True, text=True, check=True)
    return done.stdout.strip()
