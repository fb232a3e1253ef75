"""`benchmarks/rows.py`: the one schema of rows and its file format."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from rows import Row, read_rows, write_rows


def new_row(**figures: object) -> Row:
    return Row.of("made", {"stage": 1, "shares": [0.5, 0.5]}, figures)


def test_rows_are_read_back_and_those_of_other_benchmarks_are_left_out(tmp_path):
    path = tmp_path / "folder" / "rows.jsonl"
    write_rows(path, [new_row(seconds=1.5), Row.of("other", {}, {})])
    write_rows(path, [new_row(seconds=None)])
    assert read_rows(path, "made") == [new_row(seconds=1.5), new_row(seconds=None)]


@pytest.mark.parametrize("line", ["{}", "1", '{"benchmark": "made", "stage": 1}', "not JSON"])
def test_line_that_is_no_row_is_an_error_with_its_number(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    write_rows(path, [new_row()])
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match="line 2 is not a row"):
        read_rows(path, "made")


def test_value_is_found_in_case_figures_and_provenance():
    row = new_row(seconds=2.0)
    assert (row["stage"], row["seconds"], row.get("absent")) == (1, 2.0, None)
    assert row["commit"]
    with pytest.raises(KeyError, match="'made' has no 'hours'"):
        row["hours"]
