"""`benchmarks/allreduce.py`: cases, result checks, rows and targets."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import ranks as harness
import torch
from ranks import Pool
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from collectives import floor, timing
from collectives.case import OPERATIONS, Case
from collectives.measure import Request, measure
from collectives.provider import Prepared, Provider
from collectives.row import rows_of
from collectives.targets import HEADLINE, SKEWED, targets
from rows import Row

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


def met_targets(found: Sequence[Row]) -> dict[str, bool]:
    return {target.what: target.met for target in targets(found)}


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


def test_rows_across_a_link_are_compared_with_its_rate():
    case = Case("all_gather", HEADLINE, "fp32", EVEN)
    names = ("poplar process_group", "poplar hierarchical")
    seconds = {Named(name): [value] for name, value in zip(names, (0.6, 0.29), strict=True)}
    across = rows_of(case, seconds, speeds=[35e9], link_gigabits=1.0)
    bound = 8 * HEADLINE / 2 / 1e9
    assert [row["ratio_to_link"] for row in across] == [0.6 / bound, 0.29 / bound]
    assert met_targets([*rows(case, gloo=100.0, ours=20.0), *across]) == {
        **met_targets(rows(case, gloo=100.0, ours=20.0)),
        "poplar hierarchical over the link": True,
        "poplar hierarchical over poplar process_group": True,
    }


def measured() -> list[tuple[str, str]]:
    request = Request(
        providers=("gloo", "all-to-all", "process_group", "shared_memory", "parts", "streams"),
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
        return [(row["operation"], row["provider"]) for row in measure(request, lambda text: None)]


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
        "poplar process_group, 8 parts",
        "poplar process_group, 8 parts, 4 streams",
        "poplar shared_memory",
        "poplar shared_memory, zero-copy",
    }
    # Two sizes, two uneven cuts (not for an all-reduce, which has none), one more dtype.
    assert found[0].count(("all_gather", "gloo")) == 5
    assert found[0].count(("all_reduce", "gloo")) == 3
