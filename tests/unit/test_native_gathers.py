"""The calls of a gather on devices: one, also if the slices are unequal, and each byte once."""

from __future__ import annotations

import pytest
import torch
from issued_calls import Call, RecordCalls, fake_group, of_ranks

from poplar.comm import Group
from poplar.comm.hierarchy.transport import HierarchicalCommunicator
from poplar.comm.host_topology import Hosts
from poplar.comm.process_group import ProcessGroupCommunicator
from poplar.comm.shard_layout import Layout

GPT2 = {"block": 7_087_872, "embeddings": 39_383_808, "last norm": 1_536}
"""Elements of the units of GPT-2 with 124M parameters."""


def gather(comm: ProcessGroupCommunicator, layout: Layout) -> list[Call]:
    data = torch.empty(layout.numel, dtype=torch.bfloat16)
    with RecordCalls() as recorded:
        comm.all_gather(data, layout, what="it").wait()
    return recorded.calls


@pytest.mark.parametrize("numel", GPT2.values(), ids=GPT2)
@pytest.mark.parametrize("size", [3, 6, 8])
def test_a_gather_is_one_call(size: int, numel: int) -> None:
    skewed = Layout.from_shares(numel, [rank / sum(range(size)) for rank in range(size)])
    with fake_group(1, size) as group:
        comm = ProcessGroupCommunicator(group)
        for layout in (Layout.even(numel, size), skewed):
            name = "_allgather_base_" if layout.is_even else "alltoall_"
            own = layout.size(1)
            peers = dict.fromkeys(set(range(size)) - {1}, own)
            assert gather(comm, layout) == [Call(name, peers)], layout


def test_a_gather_within_a_host_is_one_call() -> None:
    with fake_group(1, 5, Group) as group:
        comm = HierarchicalCommunicator(group, Hosts.of("aaabb"), of_ranks((0, 1, 2)))
        layout = Layout.from_shares(GPT2["block"], (0.1, 0.2, 0.3, 0.2, 0.2))
        with RecordCalls() as recorded:
            comm.all_gather(torch.empty(layout.numel), layout, what="it").wait()
    assert [call.name for call in recorded.calls] == ["alltoall_base_", "alltoall_"]
