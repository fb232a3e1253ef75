"""The README and the guides as data: programs and changes, for tests that run them."""

from __future__ import annotations

import re
from pathlib import Path

import torchrun

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


def patched(script: str, guide: str) -> tuple[str, int]:
    """A script of the repository with the change that a guide shows.

    Returns:
        The changed script, and how many lines the change removes and adds.
    """
    text = (REPOSITORY / script).read_text("utf-8")
    page = (REPOSITORY / guide).read_text("utf-8")
    (diff,) = re.findall(r"^```diff\n(.*?)^```", page, re.DOTALL | re.M)
    lines = [line for line in diff.splitlines(keepends=True) if line[0] in "+-"]
    for removed, added in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)*)", "".join(lines), re.M):
        old, new = (re.sub(r"^[+-]", "", part, flags=re.M) for part in (removed, added))
        assert text.count(old) == 1, f"{script} has these lines {text.count(old)} times:\n{old}"
        text = text.replace(old, new)
    return text, len(lines)


def program_of(guide: str, folder: Path) -> Path:
    """Write the first Python program of a guide to `folder/train.py`."""
    page = (REPOSITORY / "docs/guides" / guide).read_text("utf-8")
    script = folder / "train.py"
    script.write_text(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.M)[0])
    return script


def launch(script: Path, ranks: int, *arguments: str) -> str:
    """What a program prints under torchrun."""
    output = script.with_suffix(".txt")
    rendezvous = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
    started = (*rendezvous, f"--nproc-per-node={ranks}", str(script), *arguments)
    agent = torchrun.start(started, output, {})
    agent.join(timeout=240)
    assert agent.exitcode == 0, output.read_text()
    return output.read_text()
