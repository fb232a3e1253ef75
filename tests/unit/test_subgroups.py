"""How process groups within a process group are made, where CPU ranks would not show it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from poplar.comm import subgroup

DEVICE = torch.device("cuda", 1)


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    """WORLD with one rank, bound to a device as by `init_process_group(device_id=...)`."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    group.bound_device_id = DEVICE
    yield group
    group.bound_device_id = None
    dist.destroy_process_group()


def test_a_group_is_not_split_off_a_world_that_is_bound_to_a_device(
    world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ncclCommSplit` would wait for ranks outside of the process group."""
    bound = []
    create = subgroup._new_process_group_helper

    def helper(*arguments: object, **options: object) -> object:
        bound.append(world.bound_device_id)
        world_id, world.bound_device_id = world.bound_device_id, None
        try:
            return create(*arguments, **options)
        finally:
            world.bound_device_id = world_id

    monkeypatch.setattr(subgroup, "_new_process_group_helper", helper)
    subgroup.Subgroups("a name").make(world, "gloo", ((0,),), timedelta(seconds=10))
    assert bound == [None]
    assert world.bound_device_id == DEVICE
