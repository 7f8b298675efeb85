"""Where a figure was measured: commit, device, threads, versions."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

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


def commit() -> str:
    """The short commit, "+changes" where tracked files besides results differ; empty outside a checkout."""
    here = Path(__file__).resolve().parent
    try:
        head = _git(here, "rev-parse", "--short=10", "HEAD")
        changed = _git(here.parent.parent, "status", "--porcelain", "-uno", "--", ".", ":(exclude)*/results/*")
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head + ("+changes" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()
