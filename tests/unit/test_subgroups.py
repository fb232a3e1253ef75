"""How process groups within a process group are made, where CPU ranks would not show it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from poplar.comm import subgroup

DEVICE = torch.device("cuda", 1)


class Work:
    """A broadcast on a device that is over."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        return True


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
    subgroup.subgroup(world, "gloo", ((0,),), timedelta(seconds=10))
    assert bound == [None]
    assert world.bound_device_id == DEVICE


def test_the_name_of_a_group_is_sent_from_the_device_that_the_process_group_is_bound_to(
    world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where NCCL is the only backend; the current device may be another."""
    moved = []

    def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        moved.append(device)
        return tensor

    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr(dist, "broadcast", lambda *_args, **_options: Work())
    with mock.patch.object(torch.Tensor, "to", move):
        subgroup._agree_on_name(world, timedelta(seconds=10), None)
    assert moved == [DEVICE]
