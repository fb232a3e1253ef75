"""`benchmarks/per_tensor.py`: simulated rows with published figures and their sources."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torchrun

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import per_tensor
import per_tensor_measured
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


def measured(policy, speed, *, provider="poplar", stage=0, error=None, **more) -> str:
    """A row as `train.py --output` writes it, with the fields that the table reads."""
    row = {"run": "first", "cluster": "2:1@1G", "model": "vgg", "absent": "", "over_gloo": False}
    row |= {"provider": provider, "policy": policy, "stage": stage, "p50_speed": speed}
    return json.dumps(row | {"prediction_error": error, "day": "2026-11-26"} | more)


def test_measured_decisions_are_shown_by_their_faster_stage(tmp_path):
    rows = [
        measured("exact", 200.0, run="an earlier one"),
        measured("even", 40.0, error=0.1),
        measured("even", 400.0, over_gloo=True),
        measured("flops", 45.0, stage=1, error=-0.02),
        measured("exact", 80.0, error=-0.04),
        measured("unfactored", 50.0, error=0.05),
        measured("exact", 60.0, stage=1),
        measured("programme", 90.0, stage=1, error=-0.3),
        measured("even", 41.0, provider="ddp"),
        measured("uneven", 45.0, provider="ddp"),
        measured("even", 30.0, provider="deepspeed"),
        measured("even", 35.0, provider="deepspeed", stage=1, absent="no memory"),
        measured("exact", 70.0, model="vit"),
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(rows) + "\n")
    text = list(per_tensor_measured.markdown(per_tensor_measured.read_cases(path)))
    assert text[2:4] == [
        "| 2:1@1G | vgg | 41 | 30 | 45 | 40 | 45 | 60 | 80 | 90 | 2.00x |",
        "| 2:1@1G | vit | – | – | – | – | – | 70 | – | plan | – |",
    ]
    assert text[5] == (
        "- step times of plans and programmes were predicted within 5 % in the median, 30 % at "
        "most, of 5"
    )
    assert text[-1] == "- measured on 2026-11-26"
