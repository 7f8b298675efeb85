"""The page of a run: one HTML file with all of it inside, that a browser opens without a network."""

import base64
import gzip
import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from crest_train.config import load_config
from crest_train.recording import RecordedSession, read_sessions
from crest_train.run_folder import RunFolder
from crest_train.whole import write_whole

MOST_BYTES = 200 * 2**20
"""Of records on one page: more, and browsers are slow to open it. The last steps go first; the last one always."""


def write_view(run: Path, output: Path) -> Path:
    """Write the page of a run's folder to `output`, in one piece, and return it.

    Raises ValueError: no run there, a record that is damaged (naming its line).
    """
    if not (run / "config.toml").is_file():
        raise ValueError(f"RUN: {run} holds no run (found no config.toml in it)")
    pages = Environment(loader=PackageLoader("crest_train", "page"), autoescape=True, undefined=StrictUndefined)
    data = page_data(run)
    packed = base64.b64encode(gzip.compress(json.dumps(data, ensure_ascii=False).encode(), mtime=0)).decode()
    write_whole(output, pages.get_template("view.html").render(title=data["title"], data=packed))
    return output


def page_data(run: Path, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """What the page shows of a run's folder, as JSON: the lines of metrics.jsonl and the recorded sessions.

    sessions: as `recording.RecordedSession`, of the last steps whose records make most_bytes together. left_out: the
    steps before, which are recorded and not on the page. sessions_per_step: how many were played in each.
    """
    config = load_config(run / "config.toml")
    folder, room = RunFolder(run), most_bytes
    shown: list[Path] = []
    files = sorted(folder.records.glob("step-*.jsonl"), reverse=True)
    for path in files:
        room -= path.stat().st_size
        if shown and room < 0:
            break
        shown.insert(0, path)
    return {
        "title": f"{config.method.name} on {config.environment.name}",
        "run": run.resolve().name,
        "policy": config.policy.model,
        "steps": config.training.steps,
        "records_every": config.run.records,
        "sessions_per_step": config.rollout.sessions * config.rollout.group_size,
        "left_out": sorted(int(path.stem.removeprefix("step-")) for path in files[len(shown) :]),
        "config": (run / "config.toml").read_text(encoding="utf-8"),
        "metrics": folder.metrics(),
        "sessions": [_shown(session) for path in shown for _, session in read_sessions(path, "RUN")],
    }


def _shown(session: RecordedSession) -> dict[str, Any]:
    return session.model_dump(exclude={"prompt", "ids"}, exclude_defaults=True)
