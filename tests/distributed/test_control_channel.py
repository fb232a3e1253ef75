"""The control channel over gloo: one native call per exchange, and errors that name the rank."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import ranks as harness
import torch
import torch.distributed as dist
from communicators import on_host
from ranks import Failure, Pool, one_off

from poplar import CollectiveTimeout
from poplar.comm import Control, Group, connect_control

WORLD = 4
TIMEOUT = timedelta(seconds=2)
LOST = 2
DTYPES = (torch.bool, torch.bfloat16, torch.int64, torch.float64)


class CountingGroup:
    """A process group that counts its all-gathers."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.all_gathers = 0

    def allgather(self, *arguments: Any) -> Any:
        self.all_gathers += 1
        return self._group.allgather(*arguments)


def control_and_count() -> tuple[Control, CountingGroup]:
    group = Group.of(harness.group(), None)
    counting: Any = CountingGroup(group.control_group)
    return Control(replace(group, control_group=counting)), counting


def calls_of_exchanges() -> tuple[int, int]:
    control, counting = control_and_count()
    control.exchange(torch.ones(3), what="values")()
    values = counting.all_gathers
    control.exchange_objects("x" * control.group.rank, what="objects")
    return values, counting.all_gathers - values


def test_an_exchange_is_one_native_call_and_no_message(ranks: Pool) -> None:
    assert ranks.run(calls_of_exchanges) == [(1, 1)] * WORLD


def exchange_long_values() -> tuple[list[int], list[int]]:
    """Some ranks' objects fit into the frame, others do not; the results in reverse order."""
    group = Group.of(harness.group(), None)
    control, sizes = Control(group), (10, 5000, 0, 100_000)
    first, second = (control.exchange(torch.arange(n) + group.rank, what="long") for n in (99, 999))
    sums = [int(rows.sum()) for collect in (second, first) for rows in collect()]
    texts = control.exchange_objects("x" * sizes[group.rank], what="objects")
    assert all(text == "x" * size for text, size in zip(texts, sizes, strict=True))
    return sums, [len(text) for text in texts]


def test_values_that_do_not_fit_into_a_frame_follow_it(ranks: Pool) -> None:
    sums = [sum(range(n)) + n * rank for n in (999, 99) for rank in range(WORLD)]
    assert ranks.run(exchange_long_values) == [(sums, [10, 5000, 0, 100_000])] * WORLD


class OnFourthGPU(torch.Tensor):
    """Says that it is on a device that no rank of these tests has."""

    device = torch.device("cuda:3")

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor)


def exchange_a_tensor_of_another_device() -> tuple[list[type], list[list[float]]]:
    control = Control(Group.of(harness.group(), None))
    own = torch.tensor([float(control.group.rank)]).as_subclass(OnFourthGPU)
    received = control.exchange_objects({"step": [own]}, what="tensors")
    values = [found["step"][0] for found in received]
    return [type(value) for value in values], [value.tolist() for value in values]


def test_tensors_of_any_device_arrive_on_the_cpu(ranks: Pool) -> None:
    expected = [torch.Tensor] * WORLD, [[float(rank)] for rank in range(WORLD)]
    assert ranks.run(exchange_a_tensor_of_another_device) == [expected] * WORLD


def exchange_rows() -> list[list[list[float]]]:
    """Rows of several dtypes, waited for in another order than they were issued."""
    group = Group.of(harness.group(), None)
    control = Control(group)
    started = [
        control.exchange(torch.tensor([group.rank % 2, 1]).to(dtype), what="rows")
        for dtype in DTYPES
    ]
    waited = [[[float(v) for v in row] for row in collect()] for collect in reversed(started)]
    return waited[::-1]


def test_rows_of_any_dtype_arrive_in_rank_order(ranks: Pool) -> None:
    rows = [[0.0, 1.0], [1.0, 1.0]] * 2
    assert ranks.run(exchange_rows) == [[rows] * len(DTYPES)] * WORLD


def exchange_beside_the_users_collectives() -> list[float]:
    """The ranks issue an exchange and a collective of their own in different orders."""
    group = Group.of(harness.group(), timedelta(seconds=30))
    control, own = Control(group), torch.tensor([float(group.rank)])
    total = own.clone()
    if group.rank % 2 == 0:
        collect = control.exchange(own, what="an exchange")
        work = dist.all_reduce(total, group=group.process_group, async_op=True)
    else:
        work = dist.all_reduce(total, group=group.process_group, async_op=True)
        collect = control.exchange(own, what="an exchange")
    assert work is not None
    received = collect()
    work.wait()
    return [float(total), *(float(row) for row in received)]


def test_collectives_of_the_user_are_not_mixed_up_with_exchanges(ranks: Pool) -> None:
    assert ranks.run(exchange_beside_the_users_collectives) == [[6.0, 0.0, 1.0, 2.0, 3.0]] * WORLD


def flat_bytes_on_hosts(hosts: int, numel: int) -> int | None:
    """The preferred size of flat parameters of ranks on so many hosts."""
    with on_host(f"host {harness.rank() % hosts}"):
        control = connect_control(Group.of(harness.group(), None))
    return control.max_flat_bytes(torch.device("cpu"), numel)


def test_between_hosts_gradients_are_sent_in_several_parts(ranks: Pool) -> None:
    mib = 1 << 20
    assert ranks.run(flat_bytes_on_hosts, 2, 16 * mib) == [8 * mib] * WORLD
    assert ranks.run(flat_bytes_on_hosts, 2, mib // 4) == [mib] * WORLD  # the least
    assert ranks.run(flat_bytes_on_hosts, 1, 16 * mib) == [None] * WORLD


def broadcast_from_every_rank() -> list[int]:
    control = Control(Group.of(harness.group(), None))
    rank, received = control.group.rank, []
    for source in range(WORLD):
        for number in range(5):
            if source == rank:
                control.broadcast_integer(10 * source + number)
            else:
                received.append(control.receive_integer(source))
    control.exchange(torch.zeros(1), what="the end")()
    assert not control._unflushed
    return received


def test_broadcast_integers_arrive_in_order(ranks: Pool) -> None:
    for rank, received in enumerate(ranks.run(broadcast_from_every_rank)):
        sources = [source for source in range(WORLD) if source != rank]
        assert received == [10 * source + number for source in sources for number in range(5)]


def exchange_until(lose: Callable[[], None]) -> Failure | None:
    """Exchange with a rank that is lost after the first exchange."""
    # Ranks need not wait for the deadline to learn that a process has exited.
    timeout = timedelta(minutes=2) if lose is kill else TIMEOUT
    control = Control(Group.of(harness.group(), timeout))
    control.exchange(torch.zeros(1), what="the first exchange")()
    with harness.catching() as caught:
        if control.group.rank == LOST:
            lose()
        control.exchange(torch.zeros(1), what="the second exchange")()
    return caught[0] if caught else None


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep() -> None:
    time.sleep(3 * TIMEOUT.total_seconds())


@pytest.mark.parametrize("lose", [kill, stop])
def test_the_survivors_of_an_exchange_name_the_lost_rank(lose: Callable[[], None]) -> None:
    answers = one_off(4, exchange_until, lose, lost=[LOST])
    for rank, failure in enumerate(answers):
        if rank != LOST:
            assert_names_lost_rank(failure)


def assert_names_lost_rank(failure: Failure | None) -> None:
    assert failure is not None, "the exchange returned"
    assert failure.is_a(CollectiveTimeout), failure
    assert re.search(rf"waiting for rank\(s\) {LOST} ", failure.message), failure.message


def test_a_slow_rank_is_named_and_learns_that_it_was_late() -> None:
    answers = one_off(3, exchange_until, sleep)
    for rank, failure in enumerate(answers):
        if rank != LOST:
            assert_names_lost_rank(failure)
    assert answers[LOST] is not None, "the exchange returned"
    assert "had stopped waiting" in answers[LOST].message, answers[LOST]


def fail_before_an_exchange() -> Failure | None:
    """One rank fails and stays alive; the others wait for it."""
    group = Group.of(harness.group(), timedelta(seconds=20))
    control = Control(group)
    control.exchange(torch.zeros(1), what="the first exchange")()
    if group.rank == LOST:
        group.abort(f"rank {LOST} is out of memory")
    with harness.catching() as caught:
        control.exchange(torch.zeros(1), what="the second exchange")()
    return caught[0] if caught else None


def test_the_reason_of_a_rank_that_gave_up_is_told_on_all_ranks_before_the_deadline() -> None:
    for failure in one_off(3, fail_before_an_exchange):
        assert failure is not None, "the exchange returned"
        assert failure.is_a(CollectiveTimeout), failure
        assert f"rank {LOST} is out of memory" in failure.message, failure


def make_a_group_alone() -> Failure | None:
    if harness.rank() == LOST:
        time.sleep(3 * TIMEOUT.total_seconds())
        return None
    with harness.catching() as caught:
        Group.of(harness.group(), TIMEOUT)
    return caught[0] if caught else None


def test_a_rank_that_does_not_build_an_optimizer_is_named() -> None:
    answers = one_off(3, make_a_group_alone)
    for rank in (0, 1):
        assert_names_lost_rank(answers[rank])
