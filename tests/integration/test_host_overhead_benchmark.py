"""`benchmarks/host_overhead.py` on a small model: what it counts, and when its limits are met."""

from __future__ import annotations

import json
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
from host.row import Row
from host.scaled_model import SHAPES, check_units

from poplar.zero.unit import Unit


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    output = tmp_path_factory.mktemp("host") / "rows.jsonl"
    options = [
        "--models",
        "llama-1.1b",
        "--ranks",
        "4",
        "--layers",
        "3",
        "--rounds",
        "1",
        "--steps",
        "2",
    ]
    ran = torchrun.run([host_overhead.__file__, *options, "--output", output], timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert "limits met" in ran.stdout
    return [Row(**json.loads(line)) for line in output.read_text(encoding="utf-8").splitlines()]


def test_each_stage_has_a_row_of_poplar_and_one_of_fsdp2(rows: list[Row]) -> None:
    assert [(row.stage, row.provider) for row in rows] == [
        *((2, "poplar"), (2, "fsdp2"), (3, "poplar"), (3, "fsdp2"))
    ]
    assert all(row.p50_seconds > 0 and row.commit for row in rows)


def test_fsdp2_gathers_each_unit_in_the_forward_and_blocks_again_in_the_backward(
    rows: list[Row],
) -> None:
    blocks, root = 3, 1
    for row in rows[1::2]:
        again = blocks if row.stage == 3 else 0
        assert row.calls == {
            "allgather_base": blocks + root + again,
            "reduce_scatter_base": blocks + root,
        }


def test_poplar_sends_the_bytes_of_the_cost_model(rows: list[Row]) -> None:
    for row in rows[::2]:
        for kind, expected in row.modelled_bytes.items():
            assert row.sent_bytes[kind] == pytest.approx(expected, rel=0.01)


def test_limits_are_ratios_to_fsdp2(rows: list[Row]) -> None:
    theirs = replace(rows[1], calls={"allgather_base": 10}, p50_seconds=1.0)
    good = replace(rows[0], calls={"allgather_base": 14, "allgather": 1}, p50_seconds=1.2)
    assert list(host_overhead.verdict([(good, theirs)])) == ["2 of 2 limits met"]
    bad = replace(good, calls={"allgather_base": 16})
    first, summary = host_overhead.verdict([(bad, theirs)])
    assert "collective calls 1.60x FSDP2" in first
    assert summary == "1 of 2 limits met"


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
