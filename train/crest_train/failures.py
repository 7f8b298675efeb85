"""What can end a run, in words that say what to do: a full disk, too little memory, steps that are not finite."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from crest_train.model import first_line
from crest_train.run_folder import RunFolder

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def explained(folder: RunFolder) -> Iterator[None]:
    """Errors in the block that come of a full disk or of too little memory say what there is and how to go on.

    Raises OSError with the path that could not be written and the space left, ValueError for memory; others stay.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = error.errno if isinstance(error, OSError) else _number(str(error))
        if number not in _FULL:
            raise
        path = Path(getattr(error, "filename2", None) or getattr(error, "filename", None) or folder.path)
        free = shutil.disk_usage(folder.path).free / 2**20
        words = f"{os.strerror(number)}: {free:.1f} MiB are free; make room; {folder.way_on}"
        raise OSError(number, words, str(path)) from error
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise ValueError(
            f"out of memory ({first_line(error)}); in a run that goes on, rollout.rows, evaluation.sessions and "
            "training.tokens_per_micro_batch can be smaller, and policy.gradient_checkpointing true; "
            f"`crest-train plan {folder.path / 'config.toml'}` says what fits; {folder.way_on}"
        ) from error


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had: a GPU's, or torch's or Python's on the CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def refuse_bad_steps(lines: list[dict[str, Any]], limit: int) -> None:
    """Raise ValueError when each of the last `limit` steps skipped an optimizer step, its loss or gradient not finite.

    lines: of metrics.jsonl; steps without credit, which learn nothing, are passed over.
    """
    steps = [line for line in lines if line["event"] == "step" and line["trained_rows"]]
    bad = len(list(takewhile(lambda line: line["skipped_steps"] > 0, reversed(steps))))
    if bad >= limit:
        raise ValueError(
            f"step {steps[-1]['step']}: the loss or its gradient was not finite in {bad} steps in a row "
            f"(training.bad_steps = {limit}), from step {steps[-bad]['step']} on; these were skipped, the policy is "
            "as it was before; begin another run from a checkpoint (policy.model) with a smaller training.rate or "
            'training.clip, or policy.dtype = "float32"'
        )


def _number(words: str) -> int | None:
    # safetensors tells an error of the operating system in words alone
    found = re.search(r"os error (\d+)", words)
    return int(found[1]) if found else None
