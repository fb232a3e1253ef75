"""What the documents print below a `poplar` command is what the command prints today."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from poplar.cli.app import app

DOCS = Path(__file__).parents[2] / "docs"
PROFILE = (
    "simulate docs/assets/cluster.toml --model opt-350m --global-batch 64 "
    "--write-profile cluster.json"
)
"""Of the cluster that the pages plan for."""


def printed_commands() -> Iterator[Any]:
    """The commands of a page that are shown with their output, and this output."""
    for page in sorted(DOCS.rglob("*.md")):
        for block in re.findall(r"^```\n(\$ poplar .*?)^```", page.read_text("utf-8"), re.M | re.S):
            for shown in re.split(r"^\$ poplar ", block, flags=re.M)[1:]:
                command, _, output = shown.partition("\n")
                command, _, comment = command.partition("#")
                output = output.strip() or comment.strip()
                if output:
                    yield pytest.param(page, command.strip(), output, id=f"{page.stem}: {command}")


def run(command: str) -> str:
    done = CliRunner().invoke(app, shlex.split(command))
    assert done.exit_code == 0, done.output
    return done.output


def lines_of(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def test_every_page_that_shows_an_output_is_compared():
    pages = {page for page in DOCS.rglob("*.md") if "\n$ poplar " in page.read_text("utf-8")}
    assert pages == {parameters.values[0] for parameters in printed_commands()} != set()


@pytest.mark.parametrize(("page", "command", "output"), [*printed_commands()])
def test_pages_show_what_commands_print(page, command, output, tmp_path, monkeypatch):
    (tmp_path / "docs").symlink_to(DOCS)
    monkeypatch.chdir(tmp_path)
    for contents in re.findall(
        r"^```toml\n(# cluster.toml.*?)^```", page.read_text("utf-8"), re.M | re.S
    ):
        Path("cluster.toml").write_text(contents, "utf-8")
    if "cluster.json" in command:
        run(PROFILE)
    printed = " ".join(lines_of(run(command)))
    for line in lines_of(output):
        if line != "...":
            assert line in printed
