"""Transport selection: measured once, stored in profile and plan, and used by the next run."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ranks as harness
import torch
from ranks import Pool

from poplar.comm import Control, Group, connect, host_topology
from poplar.comm.host_buffers import HostBuffers
from poplar.profiler.collectives import (
    MOST_NUMEL,
    Collectives,
    ranked,
    sample_numels,
    time_transports,
)
from poplar.profiler.memory_budget import PassMemory
from poplar.values.profile import NetworkProfile

WORLD = 4
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("numels", "sample"),
    [
        ([64], [64]),
        ([64, 64, 128], [64, 128]),
        ([640, 64, 128, 256, 512], [64, 256, 640]),
        ([MOST_NUMEL, 3 * MOST_NUMEL], [MOST_NUMEL]),
    ],
)
def test_few_sizes_represent_a_model(numels: list[int], sample: list[int]) -> None:
    assert sample_numels(numels) == sample


def session(group: Any, control: Any, device: torch.device = CPU) -> Any:
    """What collectives read from the session of a profiler."""
    job = SimpleNamespace(reduce_dtype=torch.float32)
    return SimpleNamespace(
        group=group,
        control=control,
        device=device,
        compute_dtype=torch.float32,
        job=job,
        memory=PassMemory.unlimited(group.size),
    )


def time_all_transports(choice: str) -> tuple[tuple[tuple[str, float], ...], list[str], float]:
    """The timed transports, their reduction orders, and the seconds that this took."""
    group = Group.of(harness.group(), None)
    sample = Collectives(session(group, Control(group)), connect(group, choice), [64, 99_968])
    start = time.monotonic()
    found = time_transports(sample)
    seconds = time.monotonic() - start
    return found, [connect(group, name).reduction_order for name, _ in found], seconds


def test_transports_of_equal_reduction_order_are_ranked_on_all_ranks(ranks: Pool) -> None:
    answers = ranks.run(time_all_transports, "shared_memory")
    found, orders, _ = answers[0]
    assert all(other[0] == found for other in answers)
    assert [seconds for _, seconds in found] == sorted(seconds for _, seconds in found)
    assert set(orders) == {"rank"}
    assert {name for name, _ in found} == {"shared_memory", "process_group"}


def test_one_transport_alone_is_not_timed(ranks: Pool) -> None:
    for found, _, _ in ranks.run(time_all_transports, "process_group"):
        assert found == ()


def time_transports_of_hosts(names: str) -> tuple[tuple[tuple[str, float], ...], list[str], float]:
    """As `time_all_transports`, with ranks on the hosts named by letters."""
    real = host_topology.host_id
    host_topology.host_id = lambda: (names[harness.rank()],)
    try:
        return time_all_transports("auto")
    finally:
        host_topology.host_id = real


def test_hierarchical_transports_compete_with_the_process_group(ranks: Pool) -> None:
    answers = ranks.run(time_transports_of_hosts, "aabb")
    found, _, _ = answers[0]
    assert all(other[0] == found for other in answers)
    assert {"hierarchical", "hierarchical:process_group"} <= {name for name, _ in found}


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"hierarchical": 1.0, "process_group": 0.95}, ["hierarchical"]),
        ({"hierarchical": 1.0, "process_group": 0.8}, ["process_group", "hierarchical"]),
        (
            {"hierarchical": 1.0, "hierarchical:process_group": 0.95, "process_group": 0.9},
            ["hierarchical:process_group", "hierarchical"],
        ),
        ({"hierarchical": math.inf, "process_group": 5.0}, ["process_group"]),
        ({"hierarchical": math.inf, "process_group": math.inf}, []),
    ],
)
def test_other_bits_need_a_clear_advantage(seconds: dict[str, float], expected: list[str]) -> None:
    orders = {name: "rank" if name == "process_group" else "host" for name in seconds}
    assert [name for name, _ in ranked(seconds, orders, "host")] == expected


def test_process_group_that_cannot_carry_the_tensors_is_not_timed() -> None:
    """GPUs beside gloo: handing CUDA pointers to gloo would abort the process."""
    group = SimpleNamespace(size=2, supports=lambda device: device.type == "cpu")
    comm: Any = SimpleNamespace(reduction_order="rank")
    usual = Collectives(session(group, None, torch.device("cuda")), comm, [64])
    assert time_transports(usual) == ()


def test_default_device_does_not_affect_timing() -> None:
    """`torch.set_default_device("cuda")` must not move tensors of the control channel."""
    group = SimpleNamespace(rank=0, size=2)
    control = SimpleNamespace(exchange=lambda own, what: lambda: [own, own])
    comm: Any = SimpleNamespace(group=group, trim=lambda: None)
    work: Any = SimpleNamespace(wait=lambda: 0.0)
    collectives = Collectives(session(group, control), comm, [64])
    torch.set_default_device("meta")  # reading a tensor on this device raises
    try:
        seconds = collectives.seconds(lambda own, layout: work, (0.5, 0.5), budget=0.0)
    finally:
        torch.set_default_device(None)
    assert seconds >= 0.0


def test_network_profile_names_the_fastest_transport() -> None:
    rates = {"send_seconds_per_byte": (0.0,), "receive_seconds_per_byte": (0.0,)}
    network = NetworkProfile(
        reduce_scatter_seconds=1.0,
        all_gather_seconds=1.0,
        transports=[["shared_memory", 1], ["process_group", 2]],  # type: ignore[arg-type]
        **rates,
    )
    assert network.transport == "shared_memory"
    assert hash(network)


def test_receive_buffers_are_cached_while_their_size_is_used() -> None:
    pool, size = HostBuffers(), (100, torch.float32, CPU)
    first = pool.take(*size)
    pool.put_back(first)
    assert pool.take(*size).data_ptr() == first.data_ptr()
    pool.put_back(first)
    pool.trim(caches_memory=True)
    assert pool.take(*size).data_ptr() == first.data_ptr(), "it was used since the last trim"
    pool.put_back(first)
    pool.trim(caches_memory=True)
    pool.trim(caches_memory=True)
    assert not pool._idle
    pool.put_back(pool.take(*size))
    pool.trim(caches_memory=False)
    assert not pool._idle
