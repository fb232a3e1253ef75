"""What `make gpu` does beside a GPU's own work, on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARK = Path(__file__).parent.parent / "benchmarks" / "gpu.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARK), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_every_stage_agrees_with_one_process(tmp_path):
    done = run("--part", "training", "--device", "cpu", "--size", "tiny", "--output", str(tmp_path))
    assert done.stdout.endswith("4 of 4 stages agree with one process\n"), done.stderr
    rows = [json.loads(line) for line in (tmp_path / "training.jsonl").read_text().splitlines()]
    assert [row["stage"] for row in rows] == [0, 1, 2, 3]
    assert all(row["losses"][-1] < row["losses"][0] for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_it_says_so(tmp_path):
    done = run("--output", str(tmp_path))
    assert done.returncode == 1
    assert "sees no GPU here" in done.stderr
