"""The README's code runs as it stands."""

import re
from pathlib import Path

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def test_the_setup_is_two_commands():
    blocks = re.findall(r"^```bash\n(.*?)^```", README, re.S | re.M)
    assert "crest-train run" in blocks[0] and "pytest" in blocks[1]
    assert all(len(block.strip().splitlines()) == 1 for block in blocks[:2])
