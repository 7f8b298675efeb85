"""CSV files of dataclass rows, written whole or not at all; a link is followed to its file."""

import csv
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any


def write_rows(rows: Sequence[Any], path: Path) -> None:
    """Write rows of one dataclass with a header, in place of what is there."""
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(rows[0])], lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_rows(path: Path, kind: type) -> list[dict[str, str]]:
    """Rows of a dataclass, as text. Raises ValueError with file and line for other columns or a damaged row."""
    wanted = [field.name for field in fields(kind)]
    with path.open(newline="") as file:
        lines = csv.reader(file)
        try:
            columns = next(lines, [])
            if columns != wanted:
                raise ValueError(f"{path}:1 has the columns {', '.join(columns)}, want {', '.join(wanted)}")
            rows = []
            for line in lines:
                if len(line) != len(wanted):
                    raise ValueError(f"{path}:{lines.line_num} has {len(line)} fields, want {len(wanted)}")
                rows.append(dict(zip(wanted, line, strict=True)))
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path}:{lines.line_num + 1} is not CSV: {error}") from None
    return rows


def check_writable(path: Path) -> None:
    """Raises ValueError where `write_rows` could not write."""
    found = path.resolve()
    try:
        found.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=found.parent):
            pass
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None
