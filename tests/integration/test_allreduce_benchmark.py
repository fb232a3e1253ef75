"""`benchmarks/allreduce.py`: every provider in every case, and the check of results."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import pytest
import ranks as harness
import torch
from ranks import Pool

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from collectives import floor, timing
from collectives.case import OPERATIONS, Case
from collectives.measure import Request, measure
from collectives.targets import SKEWED

EVEN = (0.25,) * 4


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
        "poplar shared_memory",
        "poplar shared_memory, zero-copy",
    }
    # Two sizes, two uneven cuts (not for an all-reduce, which has none), one more dtype.
    assert found[0].count(("all_gather", "gloo")) == 5
    assert found[0].count(("all_reduce", "gloo")) == 3
