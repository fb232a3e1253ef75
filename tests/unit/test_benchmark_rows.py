"""`benchmarks/rows.py`: the one schema of rows, its file format, tables and targets."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from rows import (
    Column,
    Kind,
    Row,
    Target,
    markdown_of,
    new_parser,
    print_targets,
    read_rows,
    report,
    table_of,
    write_rows,
)

TARGET = Target(case="a", what="b", value=2.0, wanted=1.0)


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


def test_cells_show_values_and_what_is_missing():
    rows = [new_row(seconds=0.25, way="a|b"), new_row(seconds=None, way="")]
    columns = (
        Column("stage", "stage"),
        Column("way", "way"),
        Column("ms", lambda row: row["seconds"] and 1e3 * row["seconds"], "{:.1f}"),
        Column("shares", lambda row: tuple(row["shares"]), "{:.0%} and {:.0%}"),
    )
    assert list(markdown_of(rows, columns)) == [
        "| stage | way | ms | shares |",
        "|---|---|---|---|",
        "| 1 | a\\|b | 250.0 | 50% and 50% |",
        "| 1 | – | – | 50% and 50% |",
    ]
    assert table_of(rows, columns).row_count == 2


@pytest.mark.parametrize(
    ("value", "at_most", "met"),
    [(1.0, False, True), (0.9, False, False), (1.1, True, False), (0.9, True, True)],
)
def test_target_is_met_or_short(value, at_most, met):
    target = Target(case="a", what="b", value=value, wanted=1.0, at_most=at_most)
    assert target.met is met
    assert target.cells[-1] == ("✓" if met else "short")


def test_missing_value_misses_its_target(capsys):
    print_targets([Target(case="a", what="b", value=None, wanted=1.0)], Console())
    printed = capsys.readouterr().out
    assert "not measured" in printed
    assert "0 of 1 targets met" in printed


def test_rows_are_saved_one_by_one_and_shown_without_measuring(tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    kinds = (
        Kind("made", (Column("seconds", "seconds"),), lambda rows: [TARGET], "of the one"),
        Kind("other", (Column("hours", "hours"),)),
    )

    def measured() -> Iterator[Row]:
        yield new_row(seconds=1.5)
        assert read_rows(output) == [new_row(seconds=1.5)]
        yield Row.of("other", {}, {"hours": 2.5})

    found = report(new_parser("Made.").parse_args(["--output", str(output)]), measured(), *kinds)
    first = capsys.readouterr().out
    assert all(text in first for text in ("of the one", "1.5", "hours", "2.5", "1 of 1 targets"))
    show = new_parser("Made.").parse_args(["--show", str(output)])
    assert report(show, (1 / 0 for _ in [0]), *kinds) == found == read_rows(output)
    assert capsys.readouterr().out == first


@pytest.mark.parametrize("failure", [OSError, ValueError])
def test_rows_before_a_failure_are_printed(capsys, failure):
    def measured() -> Iterator[Row]:
        yield new_row(seconds=1.5)
        raise failure("no second row")

    kind = Kind("made", (Column("seconds", "seconds"),), lambda rows: [TARGET])
    with pytest.raises(SystemExit if failure is OSError else failure, match="no second row"):
        report(new_parser("Made.").parse_args([]), measured(), kind, expected=(OSError,))
    printed = capsys.readouterr().out
    assert "1.5" in printed
    assert "targets" not in printed


def test_file_of_another_benchmark_is_not_shown(tmp_path):
    path = tmp_path / "rows.jsonl"
    write_rows(path, [new_row()])
    show = new_parser("Made.").parse_args(["--show", str(path)])
    with pytest.raises(SystemExit, match="no row of 'other' in this file; it has rows of 'made'"):
        report(show, (), Kind("other", ()))
