"""The choice of a transport: measured once, kept in profile and plan, and taken by the next run."""

from __future__ import annotations

import time

import pytest
import ranks as harness
import torch
from ranks import Pool

from poplar.comm import Communicator, Control, Group, connect
from poplar.comm.buffer_pool import BufferPool
from poplar.profile import NetworkProfile
from poplar.profiler.collectives import Collectives
from poplar.profiler.transports import MOST_NUMEL, sample_numels, time_transports

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
def test_a_few_sizes_stand_for_a_model(numels: list[int], sample: list[int]) -> None:
    assert sample_numels(numels) == sample


def timed(choice: str) -> tuple[tuple[tuple[str, float], ...], list[str], float]:
    """What was timed; the orders in which the transports found add; seconds that it took."""
    group = Group.of(harness.group(), None)

    def sample(comm: Communicator) -> Collectives:
        return Collectives(
            comm=comm,
            control=Control(group),
            numels=[64, 99_968],
            wire_dtype=torch.float32,
            value_dtype=torch.float32,
            device=CPU,
        )

    began = time.monotonic()
    found = time_transports(group, connect(group, choice), sample)
    seconds = time.monotonic() - began
    return found, [connect(group, name).reduction_order for name, _ in found], seconds


@pytest.mark.parametrize("choice", ["shared_memory", "process_group"])
def test_transports_of_one_order_compete_and_all_ranks_hear_the_same(
    ranks: Pool, choice: str
) -> None:
    answers = ranks.run(timed, choice)
    found, orders, _ = answers[0]
    assert all(other[0] == found for other in answers)
    assert [seconds for _, seconds in found] == sorted(seconds for _, seconds in found)
    assert set(orders) == {"rank"}
    names = [name for name, _ in found]
    assert ("shared_memory" in names) == (choice == "shared_memory")
    assert any(name.startswith("process_group:") for name in names)


def test_where_no_other_adds_in_the_same_order_there_is_nothing_to_choose(ranks: Pool) -> None:
    for found, _, _ in ranks.run(timed, "hierarchical"):
        assert found == ()


def test_a_profile_names_the_fastest() -> None:
    rates = {"send_seconds_per_byte": (0.0,), "receive_seconds_per_byte": (0.0,)}
    network = NetworkProfile(
        reduce_scatter_seconds=1.0,
        all_gather_seconds=1.0,
        transports=[["shared_memory", 1], ["process_group:direct+direct", 2]],  # type: ignore[arg-type]
        **rates,
    )
    assert network.transport == "shared_memory"
    assert hash(network)


def test_memory_to_receive_in_is_kept_while_its_size_is_used() -> None:
    spare, like = BufferPool(), torch.empty(0)
    first = spare.take(100, like)
    spare.give_back(first)
    assert spare.take(100, like).data_ptr() == first.data_ptr()
    spare.give_back(first)
    spare.trim(keeps_memory=True)
    assert spare.take(100, like).data_ptr() == first.data_ptr(), "it was used since the last time"
    spare.give_back(first)
    spare.trim(keeps_memory=True)
    spare.trim(keeps_memory=True)
    assert not spare._idle
    spare.give_back(spare.take(100, like))
    spare.trim(keeps_memory=False)
    assert not spare._idle
