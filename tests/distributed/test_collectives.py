"""One rank calls nothing, and collectives may be waited for in any order."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import pytest
import ranks as harness
import torch
import torch.distributed as dist
from native_calls import native_calls
from ranks import Pool

from poplar.comm import Group, connect
from poplar.comm.shard_layout import Layout

WORLD = 4


def test_one_rank_alone_needs_no_call(ranks: Pool) -> None:
    assert ranks.run(calls_of_one_rank, ranks=1) == [[]]


def calls_of_one_rank() -> list[str]:
    comm = connect(Group.of(harness.group(), None), "process_group")
    layout = Layout((0, 640))
    with native_calls(), mock.patch.object(dist, "all_to_all_single") as reduction:
        bucket = comm.buffer(layout, torch.float32, torch.device("cpu"))
        bucket.data.copy_(torch.randn(640))
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
