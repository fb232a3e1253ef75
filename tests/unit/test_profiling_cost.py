"""What profiling costs does not grow with the model, and with ranks only as far as it must.

Bytes, rounds and allocations are counted; nothing is timed.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sessions import fake_session
from torch import Tensor

from poplar.comm.host_topology import Hosts
from poplar.comm.shard_layout import ALIGNMENT, Layout
from poplar.profiler import collectives, element_costs, trial_runs
from poplar.profiler.cluster_profiler import STEPS, Profiler
from poplar.profiler.collectives import (
    MOST_ELEMENTS,
    MOST_ELEMENTS_AT_ONCE,
    REPETITIONS,
    SMALL_BUFFERS,
    Collectives,
    measure_network,
    sample_buffers,
)

LLAMA_7B = [131_072_000] + [8_388_608, 8_388_608, 8_388_608, 8_388_608] * 160 + [131_072_000]
LLAMA_1B = LLAMA_7B[:1] + LLAMA_7B[1:100] + LLAMA_7B[-1:]


@given(st.lists(st.integers(1, 1 << 28), min_size=1, max_size=400))
def test_sample_stands_for_the_model_and_is_bounded(numels):
    sample, scale = sample_buffers(numels)
    assert 0 < sum(sample) <= max(MOST_ELEMENTS, max(sample))
    assert max(sample) <= MOST_ELEMENTS_AT_ONCE
    assert scale * sum(sample) == pytest.approx(sum(numels))


def test_buffers_of_a_small_model_are_all_timed():
    assert sample_buffers([640, 64, 128]) == ([640, 64, 128], 1.0)


def test_sample_has_as_many_buffers_as_elements_in_proportion():
    """So latencies, which depend on the number of buffers, scale by the same factor."""
    sample, scale = sample_buffers(LLAMA_7B)
    parts = sum(-(-numel // MOST_ELEMENTS_AT_ONCE) for numel in LLAMA_7B)
    assert scale * len(sample) == pytest.approx(parts, rel=0.1)


@dataclass
class Counters:
    """What one rank sends, allocates and exchanges."""

    collectives: int = 0
    elements: int = 0
    largest: int = 0
    exchanges: int = 0
    allocations: int = 0


class CountedCommunicator:
    """A transport that only counts."""

    name = "counted"
    hosts = ()

    def __init__(self, group: Any, counters: Counters) -> None:
        self.group = group
        self._counters = counters

    def buffer(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> Any:
        self._counters.largest = max(self._counters.largest, layout.numel)
        return SimpleNamespace(layout=layout, pack=lambda *_: None)

    def reduce_scatter(self, bucket: Any, out: Tensor, **_: Any) -> Any:
        return self._count(bucket.layout)

    def all_gather(self, data: Tensor, layout: Layout, **_: Any) -> Any:
        return self._count(layout)

    def end_step(self) -> None:
        pass

    def _count(self, layout: Layout) -> Any:
        self._counters.collectives += 1
        self._counters.elements += layout.numel
        return SimpleNamespace(wait=lambda: 0.0)


def network_cost(
    monkeypatch: pytest.MonkeyPatch,
    numels: Sequence[int],
    hosts: Sequence[int],
    failing: int = 0,
) -> Counters:
    """Measure the network of `sum(hosts)` ranks on these hosts, on one rank that counts.

    The first `failing` allocations of the buffers do not fit on some rank.
    """
    counters = Counters()
    size = sum(hosts)

    def exchange(value: Any) -> list[Any]:
        counters.exchanges += 1
        return [value] * size

    def fits_on_all_ranks(work: Any, doing: str) -> bool:
        counters.allocations += 1
        return counters.allocations > failing

    group = SimpleNamespace(rank=0, size=size, supports=lambda device: True)
    group.split = lambda members: SimpleNamespace(rank=0, size=len(members[0]))
    session = fake_session(
        size,
        group=group,
        device=torch.device("meta"),
        exchange=exchange,
        fits_on_all_ranks=fits_on_all_ranks,
    )
    members, first = [], 0
    for ranks in hosts:
        members.append(tuple(range(first, first + ranks)))
        first += ranks
    comm = CountedCommunicator(group, counters)
    monkeypatch.setattr(collectives, "connect", lambda *_: comm)
    monkeypatch.setattr(collectives, "flat_numels", lambda session: list(numels))
    monkeypatch.setattr(collectives, "find_hosts", lambda session: Hosts(tuple(members)))
    measure_network(session, budget=1e9)
    return counters


RUNS = REPETITIONS + 1


@pytest.mark.parametrize("numels", [[1 << 16] * 8, LLAMA_1B, LLAMA_7B])
@pytest.mark.parametrize("hosts", [[2], [8], [64], [8] * 8, [1] * 64])
def test_network_is_measured_with_a_bounded_number_of_elements(monkeypatch, numels, hosts):
    counted = network_cost(monkeypatch, numels, hosts)
    owners = sum(hosts) if sum(hosts) <= collectives.MOST_RANKS_ONE_BY_ONE else len(hosts)
    owners = owners if owners > 1 else 0
    small = 4 * RUNS * SMALL_BUFFERS * sum(hosts) * ALIGNMENT
    within = len(hosts) > 1 and max(hosts) > 1
    assert counted.elements <= 2 * RUNS * (1 + within + owners) * MOST_ELEMENTS + small
    assert counted.largest <= MOST_ELEMENTS_AT_ONCE
    assert counted.exchanges <= 2 * 2 * RUNS * (3 + within + owners) + 2


@pytest.mark.parametrize("part", [1.0, 0.1])
def test_rates_of_ranks_show_the_network_that_they_share(monkeypatch, part):
    members, network = ((0, 1, 2, 3, 4, 5), (6, 7), (8,)), (1.0, 1.0, 4.0)

    def seconds(self: Collectives, issue: Any, shares: Sequence[float], budget: float) -> float:
        """Each host receives what it owns from every rank of the other hosts."""
        owned = [sum(shares[rank] for rank in own) for own in members]
        arriving = [(9 - len(own)) * share for own, share in zip(members, owned, strict=True)]
        slowest = max(rate * share for rate, share in zip(network, arriving, strict=True))
        return slowest * 4.0 * sum(self.numels)

    monkeypatch.setattr(Collectives, "seconds", seconds)
    comm = cast(Any, SimpleNamespace(hosts=()))
    measuring = Collectives(fake_session(9), comm, [1 << 20, 640])
    rates = [6 * 3 / 8] * 6 + [2 * 7 / 8] * 2 + [4.0]
    receiving, sending = zip(*measuring.rates(members, part, 1.0), strict=True)
    assert receiving == sending == pytest.approx(rates)
    assert measuring.rates([], part, 1.0) == [(1.0, 1.0)] * 9


@pytest.mark.parametrize("failing", [1, 3])
def test_buffers_of_the_network_are_halved_until_all_ranks_can_allocate_them(monkeypatch, failing):
    counted = network_cost(monkeypatch, LLAMA_1B, [2], failing)
    assert counted.largest == MOST_ELEMENTS_AT_ONCE >> failing
    assert counted.allocations == failing + 1


def test_ranks_that_can_allocate_no_buffer_raise_before_any_collective(monkeypatch):
    with pytest.raises(torch.OutOfMemoryError, match=r"768\.0 KiB for timing the collectives"):
        network_cost(monkeypatch, LLAMA_1B, [2], failing=99)


@pytest.mark.parametrize("stages", [(0,), (0, 1, 2, 3)])
@pytest.mark.parametrize("passes", [4, 10])
def test_one_turn_of_the_longest_calibration_passes_fits_its_time(stages, passes):
    measuring = Profiler.__new__(Profiler)
    job = SimpleNamespace(profile_seconds=45.0, stages=stages)
    measuring.session = SimpleNamespace(asynchronous=True, job=job)
    turn = measuring.longest_observed_pass(passes) * passes * len(stages) * (1 + trial_runs.STEPS)
    assert turn == pytest.approx((1 - trial_runs.PLAIN_PASSES) * STEPS * job.profile_seconds)
    measuring.session.asynchronous = False
    assert measuring.longest_observed_pass(passes) == 0.0


def counting(stepped: list[int], **options: Any) -> Any:
    """A session of an optimizer that adds the elements that it has."""

    class Counted(torch.optim.SGD):
        def __init__(self, groups: Any, **options: Any) -> None:
            super().__init__(groups, **options)
            stepped.append(sum(p.numel() for group in groups for p in group["params"]))

    cls = SimpleNamespace(
        shard_factory=Counted, options={"lr": 0.1, **options}, granularity="elements"
    )
    return fake_session(setup=SimpleNamespace(classes=[cls]), compute_dtype=torch.bfloat16)


@pytest.mark.parametrize("numels", [[1 << 12] * 8, LLAMA_7B])
def test_optimizer_is_timed_on_a_bounded_part_of_the_state(monkeypatch, numels):
    stepped: list[int] = []
    most = 1 << 16  # of the real limit, so that this test needs no GiB
    monkeypatch.setattr(element_costs, "MOST_STEPPED", most)
    monkeypatch.setattr(element_costs, "flat_numels", lambda session: list(numels))
    cost = element_costs.measure_update(counting(stepped, momentum=0.9))
    assert cost.state_bytes == 4.0
    assert max(stepped) <= most + len(numels)
    assert len(stepped) == 2


def test_update_in_host_memory_is_timed_on_a_bounded_part_of_the_state(monkeypatch):
    stepped: list[int] = []
    session = counting(stepped)
    monkeypatch.setattr(element_costs, "MOST_ON_HOST", 1 << 16)
    monkeypatch.setattr(element_costs, "flat_numels", lambda session: LLAMA_7B)
    monkeypatch.setattr(element_costs, "median_seconds", lambda step, device: (step(), 1.0)[1])
    seconds = element_costs.host_update_seconds(session)
    assert seconds == pytest.approx(sum(LLAMA_7B) / (1 << 16))
    assert stepped == [1 << 16]
    # Of a rank on the CPU, host memory is the memory that it has.
    assert element_costs.measure_host_update(session) == {}


def test_an_update_that_runs_out_of_memory_is_freed_before_a_smaller_one(monkeypatch):
    failed = []

    def new_optimizer(groups, **options):
        assert all(optimizer() is None for optimizer in failed)
        return torch.optim.SGD(groups, **options)

    def out_of_memory_once(steps, device):
        if failed:
            return [1.0, 0.5]
        failed.extend(weakref.ref(step.__self__) for step in steps)
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(element_costs, "medians_in_turns", out_of_memory_once)
    monkeypatch.setattr(element_costs, "_shapes", lambda session: [(1 << 16,)])
    cls = SimpleNamespace(granularity="elements", options={}, shard_factory=new_optimizer)
    element_costs.measure_update(fake_session(setup=SimpleNamespace(classes=[cls])))
    assert len(failed) == 2
