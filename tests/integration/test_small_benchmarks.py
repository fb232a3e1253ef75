"""Benchmark scripts without a test file of their own run with their smallest options."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from subset import choose

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = [p.stem for p in BENCHMARKS.glob("*.py") if "ArgumentParser(" in p.read_text("utf-8")]


@pytest.mark.parametrize(
    ("script", "options", "rows"),
    [
        ("search", "--quick --rounds 1", 2),
        pytest.param(*("checkpoint", "--quick", 1), marks=pytest.mark.full),
    ],
)
def test_script_prints_a_table_and_appends_rows(tmp_path, script, options, rows):
    output = tmp_path / "rows.jsonl"
    command = [sys.executable, BENCHMARKS / f"{script}.py", *options.split(), "--output", output]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr
    lines = output.read_text(encoding="utf-8").splitlines()
    assert len(lines) == rows
    assert all(json.loads(line)["commit"] for line in lines)


@pytest.mark.every_combination
@pytest.mark.parametrize(
    "script", choose(quick=["network", "results", "roofline_errors", "train"], full=sorted(SCRIPTS))
)
def test_every_script_starts(script):
    command = [sys.executable, BENCHMARKS / f"{script}.py", "--help"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout
