"""Folders and files that are on the disk whole or not at all, and folders whose manifest tells damage."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MANIFEST = "manifest.json"


@contextmanager
def made_whole(path: Path) -> Iterator[Path]:
    """A folder to fill, which is at `path` when the block ends: complete, with a manifest, and safe from a power cut.

    Until then it is `path`.tmp; an error leaves neither. Raises OSError when there is something at `path`.
    """
    new = path.with_name(f"{path.name}.tmp")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
        files = sorted(file for file in new.rglob("*") if file.is_file())
        contents = {
            file.relative_to(new).as_posix(): {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in files
        }
        (new / _MANIFEST).write_text(json.dumps(contents, indent=1), encoding="utf-8")
        folders = [folder for folder in new.rglob("*") if folder.is_dir()]
        for place in (*files, new / _MANIFEST, *folders, new):
            synced(place)
        os.rename(new, path)
        synced(path.parent)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def damage(path: Path) -> str | None:
    """What is wrong with a folder that `made_whole` made, None when every byte is as it was."""
    try:
        contents = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        for name, wanted in contents.items():
            size = (path / name).stat().st_size
            if size != wanted["bytes"]:
                return f"{name} has {size} bytes, wanted {wanted['bytes']}"
            if _sha256(path / name) != wanted["sha256"]:
                return f"{name} has other contents than were written"
    except OSError as error:
        return f"{Path(error.filename).name}: {error.strerror}" if error.filename else str(error)
    except (ValueError, LookupError, TypeError, AttributeError):
        return f"{_MANIFEST} is not what was written"
    return None


def write_whole(path: Path, text: str) -> None:
    """Write a text file in one piece, safe from a power cut."""
    new = path.with_name(f"{path.name}.tmp")
    try:
        new.write_text(text, encoding="utf-8")
        synced(new)
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    synced(path.parent)


def synced(path: Path) -> None:
    """Wait until a file's bytes, or a folder's list of names, are on the disk."""
    place = os.open(path, os.O_RDONLY)
    try:
        os.fsync(place)
    finally:
        os.close(place)


def _sha256(path: Path) -> str:
    digest, buffer = hashlib.sha256(), bytearray(2**20)
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(memoryview(buffer)[:size])
    return digest.hexdigest()
