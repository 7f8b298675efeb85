"""The folders of this repository shadow nobody's package."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run_from_the_root(code: str) -> str:
    """Standard output of `python -c code`, started in the repository's root, which python then searches first."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def has_kernels() -> bool:
    try:
        return bool(importlib.metadata.version("kernels"))
    except importlib.metadata.PackageNotFoundError:
        return False


def test_outer_folders_are_not_packages():
    assert not [folder for folder in ("kernels", "train", "bench", "tests") if (ROOT / folder / "__init__.py").exists()]


def test_transformers_is_unharmed():
    found = run_from_the_root(
        "import transformers; from transformers.utils import is_kernels_available; print(is_kernels_available())"
    )
    assert found in ("True", "False") and (found == "False" or has_kernels())


@pytest.mark.skipif(not has_kernels(), reason="Hugging Face's kernels is not installed")
def test_kernels_is_hugging_faces():
    assert run_from_the_root("import kernels; print(kernels.get_kernel.__module__.split('.')[0])") == "kernels"
    assert "site-packages" in Path(run_from_the_root("import kernels; print(kernels.__file__)")).parts


def test_without_kernels_the_folder_is_not_taken_for_it():
    """As where the package is missing: only this repository's folder can be found under its name."""
    found = run_from_the_root(
        "import sys, importlib.metadata as metadata\n"
        "from importlib.machinery import PathFinder\n"
        "version = metadata.version\n"
        "def without_kernels(name):\n"
        "    if name == 'kernels': raise metadata.PackageNotFoundError(name)\n"
        "    return version(name)\n"
        "class OnlyHere:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        return PathFinder.find_spec(name, ['']) if name == 'kernels' else None\n"
        "metadata.version = without_kernels\n"
        "sys.meta_path.insert(0, OnlyHere)\n"
        "from transformers import AutoModelForCausalLM\n"
        "from transformers.utils import is_kernels_available\n"
        "print(is_kernels_available())"
    )
    assert found == "False"


def test_arrows_run_one_way():
    """train, bench -> crest_ops -> crest_kernels, and the kernels import nothing of ours but each other, relatively."""
    for source in (ROOT / "crest_ops").rglob("*.py"):
        assert "crest_train" not in source.read_text() and "crest_bench" not in source.read_text(), source
    for source in (ROOT / "kernels" / "crest_kernels").rglob("*.py"):
        imports = [line for line in source.read_text().splitlines() if line.startswith(("import ", "from "))]
        assert all(line.split()[1].split(".")[0] in ("", "math", "os", "torch", "triton") for line in imports), (
            source,
            imports,
        )
