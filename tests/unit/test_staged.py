"""Staged collectives of a device that is behind the host: started in order, without blocking.

The device is the CPU with events that are reached when the test says so.
"""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_collectives_out_of_memory import OutOfMemoryAt
from torch import Tensor

from poplar.comm import Bucket, Codec, Work, staged
from poplar.comm.bucket import Reduction
from poplar.comm.communicator import Communicator
from poplar.comm.host_buffers import HostBuffers
from poplar.comm.shard_layout import Layout
from poplar.comm.staged import StagedCommunicator

CPU = torch.device("cpu")
LAYOUT = Layout((0, 64, 128))


class FakeEvent:
    """Reached when the test sets `reached`, or when the host waits for it (`waited_for`)."""

    def __init__(self, events: list[FakeEvent]) -> None:
        self.reached = self.waited_for = False
        events.append(self)

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.waited_for = self.waited_for or not self.reached
        self.reached = True


class OnHost(Communicator):
    """A transport of one rank that records what is started."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(rank=0, size=2))  # type: ignore[arg-type]
        self.started: list[str] = []
        self.buffers: list[int] = []
        self.broken = False

    def reduce(self, reduction: Reduction) -> Work:
        if self.broken:
            raise RuntimeError(f"{reduction.what} cannot start")
        self.started.append(reduction.what)
        data, out = reduction.bucket.data, reduction.out
        self.buffers.append(data.data_ptr())
        out.copy_(data[: out.numel()])
        return SimpleNamespace(wait=lambda: 1.0)

    def all_gather(self, data: Any, layout: Layout, *, what: str, own: Any = None) -> Work:
        self.started.append(what)
        return SimpleNamespace(wait=lambda: 0.0)

    abort = all_to_all = None  # type: ignore[assignment]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[FakeEvent]:
    made: list[FakeEvent] = []
    monkeypatch.setattr(staged, "record", lambda device: FakeEvent(made))
    return made


def reduce(comm: Communicator, what: str, value: float = 1.0) -> tuple[Work, torch.Tensor]:
    out = torch.zeros(64)
    bucket = Bucket(torch.full((128,), value), LAYOUT, Codec())
    return comm.reduce_scatter(bucket, out, accumulate=True, what=what), out


def test_issuing_does_not_wait_for_the_copy(events: list[FakeEvent]) -> None:
    on_host = OnHost()
    work, out = reduce(StagedCommunicator(on_host), "first", 3.0)
    assert on_host.started == []
    assert not events[0].waited_for
    assert work.wait() == 1.0
    assert events[0].waited_for
    assert (out == 3.0).all()


def test_a_later_call_starts_what_has_been_copied_and_keeps_the_order(
    events: list[FakeEvent],
) -> None:
    on_host = OnHost()
    comm = StagedCommunicator(on_host)
    reduce(comm, "first")
    reduce(comm, "second")
    events[1].reached = True
    reduce(comm, "third")
    assert on_host.started == [], "the second must not overtake the first"
    events[0].reached = True
    reduce(comm, "fourth")
    assert on_host.started == ["first", "second"]
    assert not any(event.waited_for for event in events)


def test_waiting_for_the_last_starts_all_before_it(events: list[FakeEvent]) -> None:
    on_host = OnHost()
    comm = StagedCommunicator(on_host)
    works = [reduce(comm, what)[0] for what in ("first", "second", "third")]
    works[1].wait()
    assert on_host.started == ["first", "second"]
    works[0].wait()
    works[2].wait()
    assert on_host.started == ["first", "second", "third"]


def test_a_broadcast_follows_what_was_issued_before(events: list[FakeEvent]) -> None:
    on_host = OnHost()
    comm = StagedCommunicator(on_host)
    reduce(comm, "a reduction")
    comm.broadcast(torch.ones(3), 0, what="a broadcast")
    assert on_host.started == ["a reduction", "a broadcast"]


def test_a_second_wait_changes_nothing(events: list[FakeEvent]) -> None:
    work, out = reduce(StagedCommunicator(OnHost()), "first")
    work.wait()
    work.wait()
    assert (out == 1.0).all()


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_copy_back_that_ran_out_of_memory_is_repeated(
    accumulate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum is added once, wherever memory runs out."""
    failures = 0
    copy = Tensor.to

    def copy_with_little_memory(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return copy(tensor, *arguments, **options).clone()  # as from the host to a device

    for number in range(5):
        comm, out, squares = StagedCommunicator(OnHost()), torch.ones(64), torch.zeros(1)
        bucket = Bucket(torch.full((128,), 3.0), LAYOUT, Codec())
        work = comm.reduce_scatter(bucket, out, accumulate=accumulate, what="it", squares=squares)
        monkeypatch.setattr(Tensor, "to", copy_with_little_memory)
        with suppress(torch.OutOfMemoryError), OutOfMemoryAt(number) as limit:
            work.wait()
        monkeypatch.undo()
        failures += limit.failed
        work.wait()
        work.wait()
        expected = 4.0 if accumulate else 3.0
        assert (out == expected).all()
        assert squares == 64 * expected**2
    assert failures > 0


def test_every_wait_raises_the_error_of_a_collective_that_could_not_start(
    events: list[FakeEvent],
) -> None:
    on_host = OnHost()
    on_host.broken = True
    work, _ = reduce(StagedCommunicator(on_host), "first")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="first cannot start"):
            work.wait()


def test_buffers_are_reused_once_the_device_has_read_them(
    events: list[FakeEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_host = OnHost()
    comm = StagedCommunicator(on_host)
    for number in range(10):
        reduce(comm, f"number {number}")[0].wait()
    assert len(set(on_host.buffers)) == 1
    allocated: list[int] = []
    monkeypatch.setattr(staged.torch, "empty", lambda *size, **_: allocated.append(size[0]))
    for number in range(10):
        reduce(comm, f"number {number}")[0].wait()
    assert allocated == []


def test_the_host_waits_before_it_overwrites_what_the_device_reads() -> None:
    buffers, events = HostBuffers(), list[FakeEvent]()
    buffer, other = (buffers.take(64, torch.float32, CPU) for _ in range(2))
    read: Any = FakeEvent(events)
    buffers.put_back(buffer, read)
    buffers.put_back(other)
    assert buffers.take(64, torch.float32, CPU) is buffer
    assert read.waited_for
    assert buffers.take(64, torch.float32, CPU) is other
    assert buffers.take(64, torch.bfloat16, CPU).dtype is torch.bfloat16


def test_buffers_of_a_size_that_is_no_longer_used_are_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffers = HostBuffers()
    small, large = (buffers.take(size, torch.float32, CPU) for size in (64, 128))
    buffers.put_back(small)
    buffers.put_back(large)
    buffers.release_unused()
    small = buffers.take(64, torch.float32, CPU)
    buffers.put_back(small)
    buffers.release_unused()
    assert buffers.take(64, torch.float32, CPU) is small
    assert buffers.take(128, torch.float32, CPU) is not large
    buffers.put_back(small)
    monkeypatch.setenv("POPLAR_MEMORY_CACHE", "off")
    buffers.trim()
    assert buffers.take(64, torch.float32, CPU) is not small


def test_memory_for_copies_of_gpus_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "empty", lambda *size, **given: options.append(given))
    HostBuffers().take(64, torch.float32, torch.device("cuda"))
    HostBuffers().take(64, torch.float32, CPU)
    assert [given["pin_memory"] for given in options] == [True, False]
    assert all(given["device"] == CPU for given in options)
