"""Which saved rows are older than the code they measure is written where readers find them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import remeasure
import search
from remeasure import CURRENT, RESULTS, SAVED, Saved, is_known, is_same
from rows import Row, read_rows, write_rows

ROOT = Path(__file__).parents[2]


def git(*command: str) -> str:
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def lines_of_page() -> dict[str, list[str]]:
    """The cells of each file's line."""
    page = (RESULTS / "README.md").read_text("utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if "jsonl" in line]
    return {name: cells for name, *cells in rows}


def test_every_file_of_rows_can_be_measured_again_or_says_why_not():
    files = {str(path.relative_to(RESULTS)) for path in RESULTS.rglob("*.jsonl")}
    assert files == {saved.file for saved in SAVED} == set(lines_of_page())
    scripts = {command.split()[0] for saved in SAVED for command in saved.commands}
    assert all((ROOT / "benchmarks" / script).exists() for script in scripts)
    paths = {path for saved in SAVED for path in saved.measures}
    assert all((ROOT / path).exists() for path in paths)


@pytest.mark.full
@pytest.mark.parametrize("command", [c for saved in SAVED for c in saved.commands])
def test_commands_have_options_that_their_scripts_know(command):
    script, *words = command.split()
    program = [sys.executable, str(ROOT / "benchmarks" / script)]
    # argparse checks values that come before --help; unknown options only without it.
    done = subprocess.run([*program, *words, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in words if word.startswith("--"))


def test_rows_of_the_search_are_measured_by_one_command():
    """`--catalogue` without clusters measured all but those of the catalogue once more."""
    (commands,) = (saved.commands for saved in SAVED if saved.name == "search")
    given = [search.parse_options(command.split()[1:]).catalogue for command in commands]
    assert given == [search.CATALOGUE]
    with pytest.raises(SystemExit):
        search.parse_options(["--catalogue"])


def test_documents_cite_rows_that_exist():
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("benchmarks/*.md")]
    cited = {
        name
        for document in documents
        for name in re.findall(r"benchmarks/results/([\w/]+\.jsonl)", document.read_text("utf-8"))
    }
    assert cited <= {saved.file for saved in SAVED}


@pytest.mark.parametrize("saved", SAVED, ids=lambda saved: saved.file)
def test_the_page_calls_no_rows_current_whose_code_has_changed(saved):
    if git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("no history: the code at the rows' commits is not known")
    _, state, *_ = lines_of_page()[saved.file]
    if state == CURRENT:
        assert not saved.changed(), "python benchmarks/remeasure.py --markdown writes the page"


def test_code_that_has_changed_since_a_commit_is_found_before_it_is_committed(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(remeasure, "ROOT", tmp_path)
    code = tmp_path / "code.py"
    code.write_text("one")
    for command in (
        ["init", "--quiet"],
        ["add", "code.py"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "code"],
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    assert is_known("HEAD")
    assert not is_known("0000000")
    assert is_same("HEAD", "code.py")
    code.write_text("two")
    assert not is_same("HEAD", "code.py")


def test_commands_that_have_ended_are_not_run_again(tmp_path, monkeypatch):
    monkeypatch.setattr(remeasure, "RESULTS", tmp_path)
    saved = Saved("some.jsonl", (), 0.0, ("one.py", "two.py --rounds 1"))
    ran = []

    def run(program, check):
        _, script, *options, output = program
        ran.append([Path(script).name, *options])
        row = Row(benchmark=Path(script).stem, case={}, figures={}, provenance={})
        write_rows(output, [row])
        if len(ran) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(KeyboardInterrupt):
        remeasure.measure(saved)
    assert not saved.path.exists()
    remeasure.measure(saved)
    assert ran == [["one.py", "--output"], *2 * [["two.py", "--rounds", "1", "--output"]]]
    assert [row.benchmark for row in read_rows(saved.path)] == ["one", "two"]
    assert list(tmp_path.iterdir()) == [saved.path]
