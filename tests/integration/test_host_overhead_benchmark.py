"""`benchmarks/host_overhead.py` on a small model: what it counts, and when its limits are met."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torchrun

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import host_overhead
from host.collective_count import CollectiveCount
from host.fake_ranks import fake_ranks
from host.scaled_model import SHAPES, check_units
from rows import Row, read_rows

from poplar.zero.unit import Unit


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    output = tmp_path_factory.mktemp("host") / "rows.jsonl"
    options = ["--models", "llama-1.1b", "--ranks", "4", "--layers", "3"]
    options += ["--rounds", "1", "--steps", "2"]
    ran = torchrun.run([host_overhead.__file__, *options, "--output", output], timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert "targets met" in ran.stdout
    return read_rows(output, "host_overhead")


def test_fsdp2_gathers_each_unit_in_the_forward_and_blocks_again_in_the_backward(
    rows: list[Row],
) -> None:
    blocks, root = 3, 1
    for row in rows[1::2]:
        again = blocks if row["stage"] == 3 else 0
        assert row["calls"] == {
            "allgather_base": blocks + root + again,
            "reduce_scatter_base": blocks + root,
        }


def test_poplar_sends_the_bytes_of_the_cost_model(rows: list[Row]) -> None:
    for row in rows[::2]:
        for kind, expected in row["modelled_bytes"].items():
            assert row["sent_bytes"][kind] == pytest.approx(expected, rel=0.01)


def test_targets_are_ratios_to_fsdp2(rows: list[Row]) -> None:
    def changed(row: Row, calls: int, seconds: float) -> Row:
        figures = {**row.figures, "total_calls": calls, "p50_seconds": seconds}
        return replace(row, figures=figures)

    theirs = changed(rows[1], 10, 1.0)
    for calls, seconds, met in ((15, 1.2, [True, True]), (16, 1.21, [False, False])):
        found = host_overhead.targets([changed(rows[0], calls, seconds), theirs])
        assert [target.met for target in found] == met
    assert not list(host_overhead.targets(rows[:1])), "FSDP2 was not measured"


def test_bytes_are_those_that_this_rank_sends() -> None:
    with fake_ranks(4), CollectiveCount(4) as counted:
        dist.all_to_all_single(torch.empty(8), torch.empty(7), [2] * 4, [1, 2, 2, 2])
        dist.all_gather(list(torch.empty(7).split([1, 2, 2, 2])), torch.empty(1))
        dist.all_gather(list(torch.empty(4, dtype=torch.int64).split(1)), torch.zeros(1).long())
    assert counted.calls == {"alltoall_base": 1, "allgather": 2}
    assert counted.sent == {"reduce": 4 * 6, "gather": 4 * 3, "other": 8 * 3}


def test_units_that_differ_from_full_size_are_an_error() -> None:
    shape = replace(SHAPES["llama-1.1b"], layers=2)

    def units(max_flat_bytes: int) -> list[Unit]:
        return shape.full_units(shards_parameters=True, max_flat_bytes=max_flat_bytes)

    check_units(shape, units(1 << 20), units(1 << 20), ranks=8)
    with pytest.raises(ValueError, match="units differ from full size"):
        check_units(shape, units(1 << 20), units(1 << 30), ranks=8)
