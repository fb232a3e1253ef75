"""Every script in `benchmarks/` runs with its smallest options, and its rows can be read."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torchrun

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import largest_base
import largest_model
import limited_ranks
import per_tensor
import per_tensor_measured
from published_clusters.policies import POLICIES
from published_clusters.published import EVALUATIONS
from rows import Row, read_rows, write_rows

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MEASURING = {
    "allreduce": "--ranks 2 --operations reduce_scatter --providers gloo shared_memory "
    "--sizes 4KiB --dtypes fp32 --shares --rounds 1",
    "checkpoint": "--quick",
    "codec": "--quick --rounds 1",
    "convergence": "--steps 3",
    "drift": "--quick",
    "elastic": "--kills 1 --stages 1",
    "gpu_unequal": "--device cpu --case tiny_ranks --percent 50 50 --stage 1 --rounds 1 "
    "--seconds 0.5 --speed-seconds 0.2 --turn-seconds 0.1",
    "host_overhead": "--models llama-1.1b --ranks 4 --stages 3 --layers 2 --rounds 1 --steps 1",
    "largest_base": "--limits 2 1 --largest 24 --width 512",
    "largest_model": "--limits 2 1 --largest 24 --width 256 --peers fsdp2",
    "learning": "--quick",
    "left_out": "--quick --rounds 2",
    "noise": "--clusters 7",
    "memory": "--models convolutional --stages 3 --batches 1",
    "optimizers": "--quick --rounds 1",
    "paper": "--quick --clusters A --models bert-large --stages 1",
    "per_tensor": "--quick",
    "prediction": "--quick --clusters 2:1 --models encoder --stages 1 --seconds 2 --steps 1",
    "recomputation": "--quick",
    "search": "--quick --rounds 1",
    "train": "--quick --clusters 1:1:1 --size tiny --context 16 --samples 2 --stages 1 "
    "--policies even --peers ddp --steps 3",
    "watched_jobs": "--quick",
}
"""Options of the scripts that write rows. gpu_step.py and gpu_ranks.py have tests of their own."""
SLOW = {
    *("allreduce", "checkpoint", "convergence", "drift", "elastic", "gpu_unequal"),
    *("host_overhead", "largest_base", "largest_model", "learning", "left_out", "memory"),
    *("optimizers", "per_tensor", "prediction", "train", "watched_jobs"),
}
"""Only with --full: they start ranks, profile, or search for long. Tests of their parts run always,
and so does host_overhead.py in test_host_overhead_benchmark.py."""
SHOWING = {
    "allreduce": "--show allreduce.jsonl",
    "checkpoint": "--show checkpoint_format.jsonl",
    "codec": "--show codec.jsonl",
    "convergence": "--show convergence.jsonl",
    "demo_runs": "--show demo.jsonl",
    "drift": "--show drift.jsonl",
    "elastic": "--show elastic.jsonl",
    "gpu_ranks": "--show h200/ranks.jsonl",
    "gpu_step": "--show h200/step.jsonl",
    "gpu_unequal": "--show h200/unequal.jsonl",
    "largest_base": "--show largest_base.jsonl",
    "largest_model": "--show largest_model.jsonl",
    "learning": "--show h200/learning.jsonl",
    "left_out": "--show left_out.jsonl",
    "memory": "--show memory.jsonl",
    "noise": "--show noise.jsonl",
    "optimizers": "--show optimizers.jsonl",
    "pairs": "",
    "per_tensor": "--show per_tensor.jsonl --markdown",
    "per_tensor_measured": "",
    "prediction": "--show prediction.jsonl",
    "recomputation": "--show recomputation.jsonl",
    "roofline_errors": "",
    "summary": "",
    "watched_jobs": "--show watched_jobs.jsonl",
}
"""Options of the scripts that print saved rows, or need none."""
NO_ROWS = {
    "emulation",
    "gpu",
    "gpu_build",
    "idle_states",
    "network",
    "remeasure",
    "results",
    "watchdog",
}
"""They have tests of their own, or start other processes."""


def run(script: str, options: str, *more: Any) -> str:
    """What a script prints."""
    words = [word.replace("tiny_ranks", "tiny ranks") for word in options.split()]
    done = torchrun.run([BENCHMARKS / f"{script}.py", *words, *more], timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "script",
    [pytest.param(s, marks=[pytest.mark.full] if s in SLOW else []) for s in sorted(MEASURING)],
)
def test_script_prints_a_table_and_appends_rows(tmp_path, script):
    if script == "prediction" and os.geteuid():
        pytest.skip("CPU quotas need root")
    output = tmp_path / "rows.jsonl"
    printed = run(script, MEASURING[script], "--output", output)
    found = [Row(**json.loads(line)) for line in output.read_text("utf-8").splitlines()]
    assert found
    for row in found:
        assert row["commit"]
        assert not row.get("absent"), row["absent"]
        assert all(map(math.isfinite, numbers(row.figures))), row
    assert len(printed.splitlines()) > 3


def numbers(value: Any) -> Iterator[float]:
    """All numbers within figures."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict):
        yield from numbers(list(value.values()))
    elif isinstance(value, list):
        for part in value:
            yield from numbers(part)


@pytest.mark.parametrize("script", sorted(SHOWING))
def test_saved_rows_are_shown(script):
    words = [
        str(BENCHMARKS / "results" / word) if word.endswith(".jsonl") else word
        for word in SHOWING[script].split()
    ]
    printed = run(script, "", *words)
    assert len(printed.splitlines()) > 3


def test_saved_rows_of_slow_links_are_shown():
    printed = run("train", "--show", BENCHMARKS / "results" / "slow_links.jsonl")
    assert "int4" in printed


@pytest.mark.parametrize(
    ("script", "cases"), [(largest_base, [0, 0, 1]), (largest_model, [0, 0, 0, 0, *[1] * 5, 2, 2])]
)
def test_targets_are_those_of_complete_cases(script, cases):
    saved = read_rows(BENCHMARKS / "results" / f"{script.__name__}.jsonl")
    found = [len(list(script.targets(saved[:count]))) for count in range(len(saved) + 1)]
    assert found == cases
    wider = [replace(row, case={**row.case, "width": 2 * row["width"]}) for row in saved]
    assert len(list(script.targets(saved + wider))) == 2 * cases[-1]


@pytest.mark.parametrize("most", [0, 1, 5, 8, 30])
def test_search_for_the_largest_model_ends_where_it_fits(most):
    assert limited_ranks.largest(lambda blocks: blocks <= most) == most


def test_cluster_without_the_model_is_a_usage_error(capsys, monkeypatch):
    words = ["per_tensor.py", "--cluster", "heterog", "--model", "bert-base"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        per_tensor.main()
    assert "no cluster of heterog has a model of bert-base" in capsys.readouterr().err


def test_every_script_is_run_by_a_test():
    scripts = {
        path.stem for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text("utf-8")
    }
    assert scripts == {*MEASURING, *SHOWING, *NO_ROWS}


def test_results_page_is_what_its_command_prints():
    page = (BENCHMARKS / "RESULTS.md").read_text("utf-8")
    assert run("results", "") == page


def test_simulated_rows_have_ranges_and_sources():
    found = read_rows(BENCHMARKS / "results" / "per_tensor.jsonl", "per_tensor")
    assert {row["policy"] for row in found} == set(POLICIES)
    for row in found:
        own = row["policy"] == EVALUATIONS[row["cluster"]].system
        assert bool(row["published"]) == bool(row["published_source"]) == own
        assert row["reconstructed"] == (row["policy"] in ("HAP", "HeteroG"))
        if row["samples_per_second"] is None:
            assert row["why_not"]
        else:
            assert row["samples_per_second_low"] <= row["samples_per_second"]
            assert row["samples_per_second"] <= row["samples_per_second_high"]


def measured(policy: str, speed: float, **more: Any) -> Row:
    """A row of `train.py`, with the values that the table reads."""
    case = {"run": "first", "cluster": "2:1@1G", "model": "vgg", "over_gloo": False, "stage": 0}
    figures = {"absent": "", "p50_speed": speed, "prediction_error": None}
    case |= {"provider": "poplar", "policy": policy}
    for name, value in more.items():
        (case if name in case else figures)[name] = value
    return Row.of("train", case, figures)


def test_measured_decisions_are_shown_by_their_faster_stage(tmp_path):
    rows = [
        measured("exact", 200.0, run="an earlier one"),
        measured("even", 40.0, prediction_error=0.1),
        measured("even", 400.0, over_gloo=True),
        measured("flops", 45.0, stage=1, prediction_error=-0.02),
        measured("exact", 80.0, prediction_error=-0.04),
        measured("unfactored", 50.0, prediction_error=0.05),
        measured("exact", 60.0, stage=1),
        measured("programme", 90.0, stage=1, prediction_error=-0.3),
        measured("even", 41.0, provider="ddp"),
        measured("uneven", 45.0, provider="ddp"),
        measured("even", 30.0, provider="deepspeed"),
        measured("even", 35.0, provider="deepspeed", stage=1, absent="no memory"),
        measured("exact", 70.0, model="vit"),
    ]
    write_rows(tmp_path / "rows.jsonl", rows)
    cases = per_tensor_measured.read_cases(tmp_path / "rows.jsonl")
    text = list(per_tensor_measured.markdown(cases))
    assert text[2:4] == [
        "| 2:1@1G | vgg | 41 | 30 | 45 | 40 | 45 | 60 | 80 | 90 | 2.00x |",
        "| 2:1@1G | vit | – | – | – | – | – | 70 | – | plan | – |",
    ]
    assert text[5] == (
        "- step times of plans and programmes were predicted within 5 % in the median, 30 % at "
        "most, of 5"
    )
