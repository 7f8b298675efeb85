"""python kernels/publish.py OUT: the kernels as a Hugging Face Hub kernel repository in the new folder OUT.

OUT/build.toml, README.md (the card) and LICENSE; OUT/torch-ext/crest_kernels, the sources that build.toml is about; and
OUT/build/torch-universal, what `kernels.get_local_kernel(OUT)` and, once it is uploaded, `kernels.get_kernel` load.
"""

import argparse
import ast
import base64
import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "crest_kernels"
NAME = "crest-kernels"
VERSION = 0  # of the Hub: a whole number, 0 while the functions may still change
LICENSE_ID = "apache-2.0"

BUILD_TOML = f"""[general]
name = "{NAME}"
version = {VERSION}
edition = 5
license = "{LICENSE_ID}"
backends = ["cuda", "rocm"]

[torch-noarch]
"""

# Versions of `kernels` before the flat layout look for a folder of the kernel's name.
NESTED = '''"""The same functions, for versions of `kernels` that look here."""

import importlib.util
import sys
from pathlib import Path

_path = Path(__file__).resolve().parent.parent / "__init__.py"
_spec = importlib.util.spec_from_file_location(f"{__name__}_flat", _path)
_flat = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_flat)
__all__ = _flat.__all__
globals().update({name: getattr(_flat, name) for name in __all__})
'''

CARD = """---
library_name: kernels
license: {license}
tags:
- kernels
- triton
- reinforcement-learning
---

# {name}

{about}

Needs torch >= 2.8 and triton >= 3.4, nothing else, on NVIDIA or AMD GPUs; with TRITON_INTERPRET=1 set before triton is
imported, on the CPU too, slowly.

```python
import torch
from kernels import get_kernel

kernel = get_kernel("ORGANISATION/{name}", version={version}, trust_remote_code=True)

logits = torch.randn(1, 4, 1000, device="cuda", dtype=torch.bfloat16)  # [B, T, V]
targets = torch.tensor([1, 2, -1, 3], device="cuda")  # [B * T]; -1: not wanted
temperature = torch.ones(1, device="cuda")
logp, entropy, lse, _, normaliser = kernel.token_stats(logits, targets, temperature, 1000)
grad = torch.empty_like(logits)  # of logp.sum(), in one read and one write of the logits
kernel.token_stats_grad(grad, logits, targets, temperature, entropy, normaliser, torch.ones_like(logp), None, 1000)
```

| function | what it does |
|---|---|
{functions}

Every function's docstring has the formula, shapes and dtypes. Plain functions over tensors: wrap them in an
autograd.Function, or in torch.library for torch.compile; the package crest-ops, whose kernels these are, does both.

License: {license}.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT", type=Path, help="a folder that does not exist yet, or is empty")
    out = parser.parse_args().out
    try:
        publish(out)
    except OSError as error:
        sys.exit(f"publish.py: {error}")
    print(f"wrote {out}; try it: kernels.get_local_kernel(pathlib.Path({str(out)!r}))")


def publish(out: Path) -> None:
    """Write the repository; OUT is there as a whole or not at all. FileExistsError: OUT is there already."""
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise FileExistsError(f"OUT is {out}, which is there already: want a new folder, or an empty one")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        made = Path(folder) / "repository"
        write_repository(made)
        os.replace(made, out)  # refuses a folder that has been filled in the meantime


def write_repository(folder: Path) -> None:
    """Everything of the repository, in a new folder."""
    variant = folder / "build" / "torch-universal"
    for place in (variant, folder / "torch-ext" / SOURCE.name):
        place.mkdir(parents=True)
        for source in sorted(SOURCE.glob("*.py")):
            shutil.copyfile(source, place / source.name)
    nested = variant / SOURCE.name / "__init__.py"
    nested.parent.mkdir()
    nested.write_text(NESTED)
    (variant / "metadata.json").write_text(json.dumps(metadata(variant), indent=2) + "\n")
    (folder / "build.toml").write_text(BUILD_TOML)
    (folder / "README.md").write_text(card())
    shutil.copyfile(HERE.parent / "LICENSE", folder / "LICENSE")


def metadata(variant: Path) -> dict:
    """What `kernels` reads of a variant. Its id, a Python name, is that of these very files."""
    files = {
        path.relative_to(variant).as_posix(): hashlib.sha256(path.read_bytes()).digest()
        for path in sorted(variant.rglob("*.py"))
    }
    digest = hashlib.sha256(b"".join(name.encode() + content for name, content in files.items())).hexdigest()
    return {
        "id": f"_{SOURCE.name}_{digest[:12]}",
        "name": NAME,
        "version": VERSION,
        "license": LICENSE_ID,
        "python-depends": [],
        "backend": {"type": "cuda"},
        "digest": {
            "algorithm": "sha256",
            "files": {name: base64.b64encode(content).decode() for name, content in files.items()},
        },
    }


def card() -> str:
    """The repository's README: its functions are those that the package exports, with their first lines."""
    package = ast.parse((SOURCE / "__init__.py").read_text())
    rows = []
    for imported in package.body:
        if isinstance(imported, ast.ImportFrom):
            module = ast.parse((SOURCE / f"{imported.module}.py").read_text())
            functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
            for name in imported.names:
                rows.append(f"| `{name.name}` | {ast.get_docstring(functions[name.name]).splitlines()[0]} |")
    about = ast.get_docstring(package)
    return CARD.format(name=NAME, version=VERSION, license=LICENSE_ID, about=about, functions="\n".join(rows))


if __name__ == "__main__":
    main()
