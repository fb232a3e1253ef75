"""`benchmarks/per_tensor.py`: simulated rows with published figures and their sources."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torchrun

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import per_tensor
from published_clusters.policies import POLICIES
from published_clusters.published import EVALUATIONS


def test_quick_run_prints_both_clusters_and_writes_rows(tmp_path):
    output = tmp_path / "rows.jsonl"
    command = [per_tensor.__file__, "--quick", "--output", str(output)]
    done = torchrun.run(command, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("our reconstruction, simulated") == 4
    for words in ("simulated: hap-1", "simulated: heterog", "2.41x", "222 %", "Left out"):
        assert words in done.stdout
    rows = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    assert len(rows) == 2 * len(POLICIES)
    for row in rows:
        assert row["simulated"] is True
        assert row["samples_per_second_low"] < row["samples_per_second"]
        assert row["samples_per_second"] < row["samples_per_second_high"]
        assert row["over_even_low"] <= row["over_even"] <= row["over_even_high"]
        assert row["settings"]
        assert row["reconstructed"] == (row["policy"] in ("HAP", "HeteroG"))
        is_own = row["policy"] == EVALUATIONS[row["cluster"]].system
        assert bool(row["published"]) == bool(row["published_source"]) == is_own
    shown = torchrun.run([per_tensor.__file__, "--show", str(output), "--markdown"], timeout=60)
    table = shown.stdout.splitlines()
    assert len(table) == 2 + 2
    assert table[2].startswith("| hap-1 | vgg19 | ")
    assert table[2].endswith("| HAP: up to 2.41x |")


def test_a_model_that_no_cluster_has_is_refused():
    command = [per_tensor.__file__]
    done = torchrun.run([*command, "--cluster", "heterog", "--model", "bert-moe"], timeout=60)
    assert done.returncode == 2
    assert "no cluster of heterog has such a model" in done.stderr
