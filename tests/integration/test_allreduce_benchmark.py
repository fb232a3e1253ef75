"""`benchmarks/allreduce.py`: cases, result checks, rows and targets."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import ranks as harness
import torch
from ranks import Pool
from rich.console import Console
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import allreduce
from collectives import floor, timing
from collectives.case import OPERATIONS, Case, size_of
from collectives.measure import Request, measure, shares_of
from collectives.provider import Prepared, Provider
from collectives.row import Row, read_rows, rows_of
from collectives.table import tables_of, verdicts_table
from collectives.targets import HEADLINE, SKEWED, verdicts
from rows import write_rows

EVEN = (0.25,) * 4


class Named(Provider):
    """Nothing but a name."""

    transport = "none"

    def __init__(self, name: str, *, zero_copy: bool = False) -> None:
        self.name, self.zero_copy = name, zero_copy

    def prepare(self, case: Case, mine: Tensor) -> Prepared | None:
        return None


def rows(case: Case, **milliseconds: float) -> list[Row]:
    names = {
        "gloo": "gloo",
        "all_to_all": "gloo all-to-all + sum",
        "mpi": "Open MPI v4.1.4",
        "ours": "poplar shared_memory",
        "zero_copy": "poplar shared_memory, zero-copy",
    }
    seconds = {Named(names[key]): [1e-3 * value] * 3 for key, value in milliseconds.items()}
    return rows_of(case, seconds, speeds=[35e9] * 3)


# Cases


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("shares", [EVEN, SKEWED, (0.5, 0.5, 0.0, 0.0)])
def test_check_accepts_right_and_refuses_wrong_results(operation, shares):
    case = Case(operation, 40_000, "fp32", shares)
    inputs = [case.input_of(rank) for rank in range(4)]
    for rank in range(4):
        low, high = case.layout.bounds(rank)
        if operation == "all_gather":
            result = torch.cat(inputs)
        else:
            result = torch.stack(inputs).sum(0)
            result = result[low:high] if operation == "reduce_scatter" else result
        case.check(result, rank)
        if result.numel():
            result[-1] += 1.0
            with pytest.raises(ValueError, match=f"rank {rank} has"):
                case.check(result, rank)
        with pytest.raises(ValueError, match="elements, not"):
            case.check(torch.zeros(result.numel() + 1), rank)


@pytest.mark.parametrize("nbytes", [1, 4096, 40_000, 64 << 20])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_even_shares_are_exactly_equal(nbytes, dtype):
    sizes = Case("all_reduce", nbytes, dtype, EVEN).layout.sizes
    assert len(set(sizes)) == 1
    assert sum(sizes) >= nbytes // (4 if dtype == "fp32" else 2)


def test_least_bytes_of_each_collective():
    whole = 64 << 20
    least = {op: Case(op, whole, "fp32", EVEN).least_bytes / whole for op in OPERATIONS}
    assert least == {"all_reduce": 8, "reduce_scatter": 5, "all_gather": 6}


def test_sizes_and_shares_are_parsed():
    assert [allreduce.bytes_of(text) for text in ("4KiB", "64MiB", "1GiB", "100B", "7")] == [
        4096,
        64 << 20,
        1 << 30,
        100,
        7,
    ]
    assert size_of(4096) == "4 KiB"
    assert size_of(64 << 20) == "64 MiB"
    assert shares_of("70/10/10/10") == SKEWED
    for wrong in ("64 miles", "-3MiB", "0MiB", "MiB"):
        with pytest.raises(argparse.ArgumentTypeError, match="such as 4KiB"):
            allreduce.bytes_of(wrong)
    with pytest.raises(ValueError, match="add up to 100, got 90"):
        shares_of("50/40")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "1"], "--ranks must be at least 2, got 1"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--shares", "50/40"], "add up to 100, got 90"),
        (["--sizes", "big"], "such as 4KiB"),
    ],
)
def test_invalid_command_line_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        allreduce.parse_options(arguments)
    assert message in capsys.readouterr().err


# Rows and verdicts


def test_ratios_to_gloo_and_to_the_floor():
    case = Case("reduce_scatter", HEADLINE, "fp32", EVEN)
    gloo, ours = rows(case, gloo=100.0, ours=20.0)
    assert (gloo.ratio_to_gloo, ours.ratio_to_gloo) == (1.0, 5.0)
    floor = 1e3 * case.least_bytes / 35e9
    assert ours.ratio_to_floor == pytest.approx(20.0 / floor)
    (alone,) = rows(case, ours=20.0)
    assert alone.ratio_to_gloo is None


def test_quantiles_of_few_rounds_are_within_the_measured_range():
    case = Case("all_gather", 4096, "fp32", EVEN)
    (row,) = rows_of(case, {Named("gloo"): [0.001, 0.009]}, speeds=[35e9] * 2)
    assert 0.001 <= row.p20_seconds <= row.p50_seconds <= row.p80_seconds <= 0.009


def met_targets(found: Sequence[Row]) -> dict[str, bool]:
    return {verdict.what: verdict.met for verdict in verdicts(found)}


def test_targets_apply_to_the_headline_size_and_the_measured_providers():
    case = Case("reduce_scatter", HEADLINE, "fp32", EVEN)
    found = rows(case, gloo=100.0, all_to_all=45.0, mpi=50.0, ours=19.0, zero_copy=12.0)
    assert met_targets(found) == {
        "poplar shared_memory faster than gloo": True,
        "poplar shared_memory faster than gloo all-to-all + sum": True,
        "poplar shared_memory faster than Open MPI": False,
        "poplar shared_memory, zero-copy faster than gloo": False,
        "poplar shared_memory, zero-copy faster than gloo all-to-all + sum": False,
        "poplar shared_memory, zero-copy faster than Open MPI": False,
        "poplar shared_memory, zero-copy over the floor": True,
    }
    assert met_targets(rows(replace(case, nbytes=1 << 20), gloo=100.0, ours=90.0)) == {}
    assert met_targets(rows(replace(case, nbytes=4096), gloo=1.0, ours=0.5)) == {
        "poplar shared_memory faster than gloo": False
    }


def test_skewed_shares_are_compared_with_even_ones():
    even = Case("reduce_scatter", HEADLINE, "fp32", EVEN)
    found = rows(even, ours=20.0) + rows(replace(even, shares=SKEWED), ours=24.0)
    assert met_targets(found) == {"poplar shared_memory, time over even's": False}


def test_tables_show_every_row():
    case = Case("all_gather", HEADLINE, "fp32", EVEN)
    found = rows(case, gloo=100.0, ours=20.0)
    console = Console(width=160, file=io.StringIO())
    for table in (*tables_of(found), verdicts_table(list(verdicts(found)))):
        console.print(table)
    text = console.file.getvalue()
    assert "poplar shared_memory" in text
    assert "5.00" in text


def test_rows_across_a_link_have_their_own_table_and_are_not_plotted(tmp_path):
    from collectives.plot import draw  # imports matplotlib, which ranks need not

    case = Case("all_gather", HEADLINE, "fp32", EVEN)
    here = rows(case, gloo=100.0, ours=20.0) + rows(replace(case, nbytes=4096), gloo=1.0, ours=0.2)
    names = ("poplar process_group", "poplar hierarchical")
    seconds = {Named(name): [value] for name, value in zip(names, (0.6, 0.29), strict=True)}
    across = rows_of(case, seconds, speeds=[35e9], link_gigabits=1.0)
    assert len(tables_of(here + across)) == 2
    bound = 8 * HEADLINE / 2 / 1e9
    assert [row.ratio_to_link for row in across] == [0.6 / bound, 0.29 / bound]
    assert met_targets(across) == {
        "poplar hierarchical over the link": True,
        "poplar hierarchical over poplar process_group": True,
    }
    draw(here + across, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="nothing to draw"):
        draw(across, tmp_path / "picture.png")


def test_rows_round_trip_through_a_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    found = rows(Case("all_gather", 4096, "bf16", SKEWED), gloo=1.0, ours=0.1)
    write_rows(path, found)
    with path.open("a") as output:
        output.write(json.dumps({"benchmark": "train"}) + "\n")
    assert read_rows(path) == found


# On ranks


def measured() -> list[tuple[str, str]]:
    request = Request(
        providers=("gloo", "all-to-all", "process_group", "shared_memory"),
        operations=OPERATIONS,
        sizes=(4096, 100_000),
        dtypes=("fp32", "bf16"),
        shares=(SKEWED, (0.5, 0.5, 0.0, 0.0)),
        headline=100_000,
        rounds=1,
    )
    torch.distributed.barrier()
    with (
        mock.patch.object(floor, "MOST_BYTES", 1 << 20),
        mock.patch.object(timing, "TURN_SECONDS", 1e-3),
    ):
        return [(row.operation, row.provider) for row in measure(request, lambda text: None)]


def test_every_provider_is_correct_and_has_a_row(ranks: Pool) -> None:
    if harness.device().type == "cuda":
        pytest.skip("the benchmark's tensors are on the CPU")
    found = ranks.run(measured)
    assert all(rank == found[0] for rank in found)
    names = {provider for _, provider in found[0]}
    assert names == {
        "gloo",
        "gloo all-to-all + sum",
        "poplar process_group",
        "poplar shared_memory",
        "poplar shared_memory, zero-copy",
    }
    # Two sizes, two uneven cuts (not for an all-reduce, which has none), one more dtype.
    assert found[0].count(("all_gather", "gloo")) == 5
    assert found[0].count(("all_reduce", "gloo")) == 3
