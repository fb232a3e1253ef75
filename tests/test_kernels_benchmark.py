"""`benchmarks/kernels.py` as values: lists, tasks whose ways agree, rows and thresholds."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from operators.lists import LISTS
from operators.measure import Wrong, check, measure
from operators.row import read_rows, rows_of, write_rows
from operators.show import draw, table_of, verdicts_table
from operators.targets import verdicts
from operators.task import Task, Way
from operators.tasks import DTYPES, OPERATIONS, OURS, tasks_of
from rich.console import Console

import kernels


def test_lists_have_the_sizes_of_their_models() -> None:
    assert LISTS["gpt-124m"].numel == 124_439_808
    assert LISTS["llama-1.1b"].numel == 1_100_048_384
    assert len(LISTS["gpt-124m"].shapes) == 148


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ways_of_a_task_give_the_same(dtype: str) -> None:
    names = []
    for make in tasks_of(OPERATIONS, LISTS["small"], dtype):
        task = make()
        check(task)
        names.append(task.name)
        assert OURS in task.ways
        assert task.usual in task.ways
    assert names == [*OPERATIONS] if dtype == "fp32" else ["pack", "reduce"]


def test_another_result_is_told() -> None:
    right, wrong = torch.ones(3), torch.tensor([1.0, 2.0, 1.0])
    ways = {"a": Way(lambda: None, lambda: right), "b": Way(lambda: None, lambda: wrong)}
    with pytest.raises(Wrong, match="'b' is off by 1"):
        check(Task("sum", 3, 12, ways, "a"))


def rows_with(**seconds: float):
    ways = {name: Way(lambda: None, lambda: torch.ones(1)) for name in seconds}
    task = Task("chain", 1000, 36_000, ways, "usual torch")
    return rows_of(task, "gpt-124m", "fp32", {n: [s] * 3 for n, s in seconds.items()}, [1e9] * 3, 2)


def test_rows_say_how_much_of_a_copy_and_how_much_faster() -> None:
    ours, usual, best = rows_with(**{OURS: 40e-6, "usual torch": 60e-6, "best torch": 50e-6})
    assert ours.bytes_per_second == pytest.approx(0.9e9)
    assert ours.of_copy == pytest.approx(0.9)
    assert (ours.over_usual, usual.over_usual) == (pytest.approx(1.5), pytest.approx(1.0))
    found = {v.what: (v.value, v.met) for v in verdicts([ours, usual, best])}
    assert found["over the best torch"] == (pytest.approx(1.25), True)
    assert found["over the usual torch"][1]
    slow = replace(ours, of_copy=0.5)
    assert not next(v for v in verdicts([slow]) if v.what == "of its bandwidth bound").met


def test_rows_are_written_read_shown_and_drawn(tmp_path: Path) -> None:
    task = next(tasks_of(["pack"], LISTS["small"], "bf16"))()
    seconds, speeds = measure(task, rounds=2)
    assert all(s > 0 and math.isfinite(s) for own in seconds.values() for s in own)
    rows = rows_of(task, "small", "bf16", seconds, speeds, threads=2)
    write_rows(rows, tmp_path / "rows.jsonl")
    assert read_rows(tmp_path / "rows.jsonl") == rows
    draw(rows, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").stat().st_size > 0
    console = Console(record=True, width=200)
    console.print(
        table_of(rows), verdicts_table(list(verdicts(rows_with(**{OURS: 1.0, "usual torch": 1.0}))))
    )
    assert "torch.cat, mul_" in console.export_text()


def test_large_models_are_left_out_where_memory_would_not_do() -> None:
    assert kernels.fits("gpt-124m", "chain", "cpu")
    assert not kernels.fits("llama-1.1b", "chain", "cpu")
    assert kernels.fits("llama-1.1b", "pack", "cpu")
    assert kernels.parse_options(["--quick"]).tensors == ("small",)
