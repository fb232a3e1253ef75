"""Benchmark rows name the commit of this checkout, and of no repository around it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import provenance


@pytest.fixture(autouse=True)
def uncached(monkeypatch) -> Iterator[None]:
    monkeypatch.delenv("POPLAR_COMMIT", raising=False)
    provenance.commit.cache_clear()
    yield
    provenance.commit.cache_clear()


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    """A repository with one commit, which `provenance` takes for its own checkout."""
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    return tmp_path


def head(repository: Path) -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.check_output(command, cwd=repository, text=True).strip()


def test_commit_of_the_checkout(repository):
    assert provenance.commit() == head(repository)


def test_changed_checkout_is_dirty(repository):
    (repository / "file").write_text("a")
    subprocess.run(["git", "add", "file"], cwd=repository, check=True)
    assert provenance.commit() == head(repository) + "-dirty"


def test_rows_that_were_measured_before_do_not_make_the_code_dirty(repository):
    rows = repository / "benchmarks" / "results" / "codec.jsonl"
    rows.parent.mkdir(parents=True)
    rows.write_text("{}")
    subprocess.run(["git", "add", rows], cwd=repository, check=True)
    assert provenance.commit() == head(repository)


def test_enclosing_repository_is_ignored(repository, monkeypatch):
    (repository / "copy").mkdir()
    monkeypatch.setattr(provenance, "ROOT", repository / "copy")
    assert provenance.commit() == "unknown"
