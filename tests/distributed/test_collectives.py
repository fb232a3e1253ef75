"""What a collective calls on a device, and waiting for collectives in any order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import ranks as harness
import torch
import torch.distributed as dist
from native_calls import native_calls
from ranks import Pool
from torch import Tensor

from poplar.comm import Group, connect, process_group
from poplar.comm.shard_layout import Layout

WORLD = 4


def gradient(rank: int, numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * seed + rank))


def broadcast_in_one_call(numel: int) -> bool:
    comm = connect(Group.of(harness.group(), None), "process_group")
    truth = gradient(0, numel, 1)
    received = truth * (comm.group.rank == 2)
    with native_calls():
        comm.broadcast(received, 2, what="a broadcast")
    return torch.equal(received, truth)


def test_a_broadcast_is_one_call(ranks: Pool) -> None:
    assert all(ranks.run(broadcast_in_one_call, 100))


def calls_of(operation: str) -> list[str]:
    """The functions of torch.distributed that one collective calls on a device backend."""
    comm = connect(Group.of(harness.group(), None), "process_group")
    uneven, even = Layout((0, 0, 64, 320, 640)), Layout.even(64 * WORLD, WORLD)
    calls: list[str] = []

    def count(module: object, name: str, real: Callable[..., Any]) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(name.lstrip("_"))
            return real(*arguments, **options)

        return mock.patch.object(module, name, call)

    with ExitStack() as patches:
        patches.enter_context(native_calls())
        patches.enter_context(count(dist, "all_to_all", dist.all_to_all))
        patches.enter_context(count(process_group, "_all_gather", process_group._all_gather))
        for name in ("all_to_all_single", "broadcast", "batch_isend_irecv", "isend", "irecv"):
            patches.enter_context(count(dist, name, getattr(dist, name)))
        low, high = uneven.bounds(comm.group.rank)
        if operation == "reduce_scatter":
            bucket = comm.buffer(uneven, torch.float32, torch.device("cpu"))
            out = torch.zeros(high - low)
            comm.reduce_scatter(bucket, out, accumulate=False, what=operation).wait()
        elif operation == "all_gather":
            comm.all_gather(torch.zeros(even.numel), even, what=operation).wait()
        elif operation == "uneven all_gather":
            comm.all_gather(torch.zeros(uneven.numel), uneven, what=operation).wait()
        elif operation == "broadcast":
            comm.broadcast(torch.zeros(100), 2, what=operation)
        else:
            new = Layout((0, 320, 320, 320, 640))
            comm.reshard(torch.zeros(high - low), uneven, new, what=operation)
    return calls


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        ("reduce_scatter", "all_to_all_single"),
        ("all_gather", "all_gather"),
        ("broadcast", "broadcast"),
        ("reshard", "all_to_all_single"),
    ],
)
@pytest.mark.every_combination
def test_a_collective_on_a_device_is_one_call(ranks: Pool, operation: str, call: str) -> None:
    assert ranks.run(calls_of, operation) == [[call]] * WORLD


def test_an_uneven_gather_on_a_device_is_one_call(ranks: Pool) -> None:
    stand_in = "all_to_all_single"  # gloo has no `all_to_all`
    assert ranks.run(calls_of, "uneven all_gather") == [["all_to_all", stand_in]] * WORLD


def test_one_rank_alone_needs_no_call(ranks: Pool) -> None:
    assert ranks.run(calls_of_one_rank, ranks=1) == [[]]


def calls_of_one_rank() -> list[str]:
    comm = connect(Group.of(harness.group(), None), "process_group")
    layout = Layout((0, 640))
    with native_calls(), mock.patch.object(dist, "all_to_all_single") as reduction:
        bucket = comm.buffer(layout, torch.float32, torch.device("cpu"))
        bucket.data.copy_(gradient(0, 640, 1))
        out = torch.zeros(640)
        comm.reduce_scatter(bucket, out, accumulate=False, what="a reduction").wait()
        comm.all_gather(out, layout, what="a gather").wait()
        assert torch.equal(out, bucket.data)
    return [str(call) for call in reduction.mock_calls]


def wait_in_opposite_orders(choice: str) -> list[float]:
    """Even ranks wait for the sum before they issue the gather; odd ranks wait for the gather
    first.
    """
    group = Group.of(harness.group(), timedelta(seconds=20))
    comm = connect(group, choice)
    layout = Layout.even(64 * WORLD, WORLD)
    bucket = comm.buffer(layout, torch.float32, torch.device("cpu"))
    bucket.pack([torch.ones(layout.numel)], [0], 1.0)
    data = torch.full((layout.numel,), 1.0)
    total = torch.empty(layout.size(group.rank))
    summed = comm.reduce_scatter(bucket, total, accumulate=False, what="the sum")
    if group.rank % 2 == 0:
        summed.wait()
    gathered = comm.all_gather(data, layout, what="the gather")
    gathered.wait()
    summed.wait()
    return [total.mean().item(), data.mean().item()]


@pytest.mark.parametrize("choice", ["shared_memory", "process_group", "staged"])
def test_ranks_may_wait_in_any_order(ranks: Pool, choice: str) -> None:
    assert ranks.run(wait_in_opposite_orders, choice) == [[4.0, 1.0]] * WORLD
