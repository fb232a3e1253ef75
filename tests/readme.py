"""The README as data: its quickstart program, for tests that run it as it stands."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
README = REPOSITORY / "README.md"
QUICKSTART_LINES = 45
"""The quickstart has fewer lines than this."""


def code_blocks(language: str) -> list[str]:
    """All fenced blocks of one language in the README, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text("utf-8"), re.DOTALL | re.M)


def quickstart() -> str:
    """The README's only Python program."""
    (program,) = code_blocks("python")
    return program


def save_quickstart(folder: Path) -> Path:
    """Write the quickstart to `folder/train.py`, as in the README's instructions."""
    path = folder / "train.py"
    path.write_text(quickstart(), encoding="utf-8")
    return path
