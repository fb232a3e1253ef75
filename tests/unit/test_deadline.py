"""Poplar's deadline comes before that of torch's watchdog, which ends the process."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from poplar import CollectiveTimeout
from poplar.comm import Group, subgroup
from poplar.comm.deadline import deadline_of, deadline_within
from poplar.pair.ranks import TIMEOUT, Ranks

MINUTE = timedelta(minutes=1)


def process_group(minutes: float) -> Any:
    backend = SimpleNamespace(options=SimpleNamespace(_timeout=minutes * MINUTE))
    return SimpleNamespace(_get_backend=lambda _device: backend)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda _group: "cpu:gloo,cuda:nccl")


@pytest.mark.parametrize(("watchdog", "minutes"), [(60, 5), (10, 5), (5, 3), (3, 1.5), (1, 0.5)])
def test_the_default_ends_before_the_watchdog(nccl: None, watchdog: int, minutes: float) -> None:
    assert deadline_of(process_group(watchdog), None) == minutes * MINUTE


def test_without_a_watchdog_the_default_is_five_minutes(
    nccl: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    assert deadline_of(process_group(1), None) == 5 * MINUTE
    assert deadline_of(process_group(1), 9 * MINUTE) == 9 * MINUTE


def test_a_deadline_that_the_watchdog_does_not_allow_is_refused(nccl: None) -> None:
    assert deadline_of(process_group(10), 9 * MINUTE) == 9 * MINUTE
    for given in (10 * MINUTE, 30 * MINUTE):
        with pytest.raises(ValueError, match=rf"at least {given + 2 * MINUTE} to init_process_gr"):
            deadline_of(process_group(10), given)


@pytest.mark.parametrize(("watchdog", "minutes"), [(120, 118), (60, 58), (3, 1.5)])
def test_a_wanted_deadline_is_shortened_to_end_before_the_watchdog(
    nccl: None, watchdog: int, minutes: float
) -> None:
    assert deadline_within(process_group(watchdog), 120 * MINUTE) == minutes * MINUTE


def test_without_a_watchdog_a_wanted_deadline_stays(world: dist.ProcessGroup) -> None:
    assert deadline_within(world, 120 * MINUTE) == 120 * MINUTE


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()


@pytest.mark.parametrize("given", [timedelta(0), timedelta(seconds=-5), timedelta.max])
def test_a_deadline_that_torch_cannot_count_is_refused(
    world: dist.ProcessGroup, given: timedelta
) -> None:
    with pytest.raises(ValueError, match="timeout must be positive and at most 36500 days"):
        Group.of(None, given)


def test_a_rank_outside_of_the_process_group_is_told(world: dist.ProcessGroup) -> None:
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(ValueError, match="rank 0 is not in process_group"):
        Group.of(outside, None)


def test_what_to_set_is_said_if_the_control_channel_cannot_be_made(
    world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> dist.ProcessGroup:
        raise RuntimeError("Connection refused\nin gloo")

    monkeypatch.setattr("poplar.comm.group.Group._control_group_of", refuse)
    with pytest.raises(CollectiveTimeout, match=r"Connection refused\. .*GLOO_SOCKET_IFNAME"):
        Group.of(None, MINUTE)


@pytest.mark.parametrize(("watchdog", "minutes"), [(10, 10), (5, 6), (None, 6)])
def test_subgroups_of_devices_have_time_for_the_error(
    world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, watchdog: int | None, minutes: int
) -> None:
    """They are shared by groups with other deadlines, so they have at least the parent's."""
    given = []

    def make(*_arguments: object, timeout: timedelta) -> tuple[dist.ProcessGroup, None]:
        given.append(timeout)
        return world, None

    found = None if watchdog is None else watchdog * MINUTE
    monkeypatch.setattr("poplar.comm.deadline._watchdog_timeout", lambda _group: found)
    monkeypatch.setattr(subgroup, "_new_process_group_helper", make)
    subgroups = subgroup.Subgroups("a name")
    subgroups.make(world, "cuda:nccl", ((0,),), 4 * MINUTE)
    subgroups.make(world, "gloo", ((0,),), 4 * MINUTE)
    assert given == [minutes * MINUTE, 4 * MINUTE]


def test_groups_of_a_comparison_of_engines_have_time_for_the_error(
    world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `poplar pair` makes them on GPUs, again and again."""

    def own(process_group: dist.ProcessGroup) -> timedelta:
        timeout = process_group._get_backend(torch.device("cpu")).options._timeout
        assert isinstance(timeout, timedelta)
        return timeout

    monkeypatch.setattr("poplar.comm.deadline._watchdog_timeout", own)
    ranks = Ranks()
    assert deadline_of(ranks.process_group, None) == TIMEOUT, "of Poplar's engines"
    first = ranks.process_group
    ranks.renew()
    assert ranks.process_group is not first


def test_the_timeout_of_a_backend_can_be_read(world: dist.ProcessGroup) -> None:
    """`_timeout` is no public attribute."""
    options = world._get_backend(torch.device("cpu")).options
    assert options._timeout == dist.distributed_c10d._get_default_timeout("gloo")
