"""The examples run as they stand, and the README shows them as they are."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_plain_pytorch_learns(capsys):
    runpy.run_path(str(ROOT / "examples/plain_pytorch.py"))
    rewards = [float(found) for found in re.findall(r"reward (\S+)", capsys.readouterr().out)]
    assert len(rewards) == 20
    assert abs(rewards[0] - 1 / 8) < 0.05  # of eight tokens one is right
    assert min(rewards[-3:]) > 0.6


def test_the_readme_shows_the_example():
    readme, example = ((ROOT / name).read_text() for name in ("README.md", "examples/plain_pytorch.py"))
    opening = example.splitlines()[0]
    shown = [block for block in re.findall(r"^```python\n(.*?)^```", readme, re.S | re.M) if opening in block]
    assert shown == ([example] if "examples/plain_pytorch.py" in readme else [])
