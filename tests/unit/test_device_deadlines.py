"""A wait for a device on the host has a deadline, names ranks and aborts what is pending."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from poplar.comm import Group, failure_reports, stream_work
from poplar.comm.failure_reports import FailureReports
from poplar.comm.stream_work import StreamWork
from poplar.values.errors import CollectiveTimeout

DEADLINE = timedelta(seconds=0.3)


class FakeEvent:
    """An event that the device reaches after so many queries; None: never."""

    def __init__(self, queries: int | None) -> None:
        self.left = queries

    def query(self) -> bool:
        if self.left is None:
            return False
        self.left -= 1
        return self.left < 0


class FakeProcessGroup:
    """A process group of three ranks over a device backend."""

    def __init__(self) -> None:
        self.aborts = 0

    def abort(self) -> None:
        self.aborts += 1


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """The group as its ranks see it, in one process."""
    monkeypatch.setattr(failure_reports, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(failure_reports, "_WATCH_SECONDS", 0.01)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    store, made = dist.HashStore(), []
    for rank in range(3):
        process_group: Any = FakeProcessGroup()
        reports = FailureReports(store, "a group", rank, 3)
        group = Group((0, 1, 2), process_group, process_group, DEADLINE, reports=reports)
        group.__dict__["rank"] = rank  # a cached property
        made.append(group)
    return made


@pytest.fixture
def grace(groups: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    """Time for threads to report, where several wait."""
    monkeypatch.setattr(failure_reports, "GRACE_SECONDS", 3.0)


def wait_until(condition: Callable[[], Any]) -> bool:
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


@pytest.mark.parametrize("follows", [False, True])
def test_a_group_uses_no_process_group_that_another_group_has_aborted(
    groups: list[Group], follows: bool
) -> None:
    """Its error has the cause, also if a thread that knows no cause has aborted first."""
    failing = groups[0]
    other = replace(failing, failures=[], in_flight={}, on_abort={}, reports=None)
    other.__dict__["rank"] = 0
    other.check()
    if follows:
        failing.follow_failure()
    failing.abort("rank 0 failed")
    with pytest.raises(CollectiveTimeout, match=r"another optimizer .* failed.*rank 0 failed"):
        other.check()


def aborts(group: Group) -> int:
    process_group: Any = group.process_group
    return int(process_group.aborts)


def test_an_event_that_is_reached_ends_the_wait(groups: list[Group]) -> None:
    group = replace(groups[0], timeout=timedelta(minutes=1))  # longer than any pause of the host
    group.__dict__["rank"] = 0
    assert group.wait_for_event(FakeEvent(0), "the loss") >= 0.0
    assert group.wait_for_event(FakeEvent(5), "the loss") >= 0.0
    assert aborts(group) == 0


@pytest.mark.usefixtures("grace")
def test_at_the_deadline_the_error_names_the_ranks_that_do_not_wait(groups: list[Group]) -> None:
    caught: list[str] = []

    def wait(group: Group) -> None:
        with pytest.raises(CollectiveTimeout) as error:
            group.wait_for_event(FakeEvent(None), "the loss")
        caught.append(str(error.value))

    threads = [threading.Thread(target=wait, args=(group,)) for group in groups[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank, message in enumerate(sorted(caught)):
        assert f"rank {rank}: the loss failed, waiting for rank(s) 2 (deadline 0.3 s)" in message
        assert "pass a longer timeout= to what built the optimizer or made this call" in message
    assert [aborts(group) for group in groups] == [1, 1, 0]


def test_the_failure_of_another_rank_ends_the_wait_and_is_told(groups: list[Group]) -> None:
    waiting, failed = replace(groups[0], timeout=timedelta(days=1)), groups[2]
    waiting.__dict__["rank"] = 0
    assert waiting.reports is not None
    waiting.reports.watch(waiting.follow_failure)
    failed.abort("rank 2 is out of memory")
    with pytest.raises(CollectiveTimeout, match=r"rank\(s\) 2 .*rank 2 is out of memory"):
        waiting.wait_for_event(FakeEvent(None), "the gradient norm")
    assert aborts(failed) == 1
    assert aborts(waiting) >= 1, "so that a stream that waits for rank 2 continues"


class FakeWork:
    """A collective that a device has issued."""

    def __init__(self) -> None:
        self.is_over = False

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return self.is_over


def issue(group: Group, work: Any) -> StreamWork:
    return StreamWork(group, lambda: work, torch.device("cuda", 0), "a reduction")


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> list[FakeEvent]:
    """The events that are recorded on the current stream, which is never done."""
    events: list[FakeEvent] = []

    def record(_device: torch.device) -> FakeEvent:
        events.append(FakeEvent(None))
        return events[-1]

    monkeypatch.setattr(stream_work, "record", record)
    return events


@pytest.mark.usefixtures("grace")
def test_a_collective_that_the_device_does_not_finish_is_aborted_while_the_host_is_blocked(
    groups: list[Group],
) -> None:
    """As in a read of the device in the user's loss function, on all ranks but the lost one."""
    works = [issue(group, FakeWork()) for group in groups[:2]]
    for group in groups[:2]:
        assert group.reports is not None
        group.reports.watch(group.follow_failure, group.abort_late_collectives)
    for rank, group in enumerate(groups[:2]):
        assert wait_until(lambda group=group: aborts(group))
        with pytest.raises(CollectiveTimeout, match=rf"rank {rank}: .* waiting for rank\(s\) 2 "):
            issue(group, FakeWork())
    assert len(works) == 2


@pytest.mark.usefixtures("grace")
def test_a_wait_of_a_stream_that_does_not_end_is_aborted_while_the_host_is_blocked(
    groups: list[Group], stream: list[FakeEvent]
) -> None:
    """As of an unshard that is needed at once: the host has waited, the device has not."""
    for group in groups[:2]:
        issue(group, FakeWork()).wait()
        assert group.reports is not None
        group.reports.watch(group.follow_failure, group.abort_late_collectives)
    assert len(stream) == 2
    for rank, group in enumerate(groups[:2]):
        assert wait_until(lambda group=group: aborts(group))
        with pytest.raises(CollectiveTimeout, match=rf"rank {rank}: .* waiting for rank\(s\) 2 "):
            group.check()


def test_a_rank_whose_stream_waits_is_not_taken_for_the_cause(
    groups: list[Group], stream: list[FakeEvent]
) -> None:
    issue(groups[0], FakeWork()).wait()
    assert stream
    groups[0].follow_failure()
    with pytest.raises(CollectiveTimeout, match=r"rank 1: the loss failed, .* rank\(s\) 2 "):
        groups[1].wait_for_event(FakeEvent(None), "the loss")


def test_collectives_that_are_over_or_abandoned_are_not_late(
    groups: list[Group], stream: list[FakeEvent]
) -> None:
    group = replace(groups[0], timeout=timedelta(0))
    group.__dict__["rank"] = 0
    over, abandoned = FakeWork(), FakeWork()
    over.is_over = True
    kept = issue(group, over)
    issue(group, FakeWork()).wait()
    issue(group, abandoned)
    stream[0].left = 0  # the device has got there
    assert len(group.in_flight) == 2
    group.abort_late_collectives()
    assert not group.failures
    assert list(group.in_flight) == [id(kept._issued)]  # a failed one is completed, too
    assert kept.wait() == 0.0


def test_the_first_collective_that_cannot_be_issued_says_what_it_needs(groups: list[Group]) -> None:
    """NCCL refuses two ranks on one device, which is that of a program without `set_device`."""

    def refuse() -> Any:
        raise RuntimeError("NCCL error: invalid usage\nDuplicate GPU detected")

    for group, is_first in ((groups[0], True), (groups[1], False)):
        if not is_first:
            issue(group, FakeWork())
        with pytest.raises(CollectiveTimeout, match="NCCL error: invalid usage") as error:
            StreamWork(group, refuse, torch.device("cuda", 0), "a reduction")
        assert ("torch.cuda.set_device(local_rank)" in str(error.value)) == is_first


class OtherThread:
    """A thread whose current device is 0 until `torch.cuda.device` is entered."""

    def __init__(self) -> None:
        self.devices: list[torch.device | None] = [None]

    @contextmanager
    def enter(self, device: torch.device) -> Iterator[None]:
        self.devices.append(device)
        yield
        self.devices.pop()

    def look(self) -> bool:
        assert self.devices[-1] == torch.device("cuda", 3)
        return False


def test_no_call_from_another_thread_makes_a_context_on_the_first_device(
    groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    thread, group = OtherThread(), replace(groups[0], timeout=timedelta(0))
    group.__dict__["rank"] = 0
    looks = mock.Mock(side_effect=thread.look)
    waiting, event = mock.Mock(is_completed=looks), mock.Mock(query=looks)
    process_group: Any = group.process_group
    monkeypatch.setattr(process_group, "abort", looks)
    monkeypatch.setattr(torch.cuda, "device", thread.enter)
    monkeypatch.setattr(stream_work, "record", lambda _device: event)
    device = torch.device("cuda", 3)
    kept = [StreamWork(group, lambda: waiting, device, "a sum") for _ in range(2)]
    kept[0].wait()
    group.abort_late_collectives()
    group.follow_failure()
    assert looks.call_count == 5  # both, and aborts; once more for the failure of another rank


def test_a_wait_frees_the_tensors_of_a_collective(
    groups: list[Group], stream: list[FakeEvent]
) -> None:
    """torch's work refers to its outputs until the device has finished it."""
    issued = FakeWork()
    alive = weakref.ref(issued)
    issue(groups[0], issued).wait()
    del issued
    assert stream
    assert alive() is None


def test_values_of_an_aborted_collective_are_not_used(groups: list[Group]) -> None:
    """After an abort the device reaches its events, with any values."""
    waiting, failed = groups[:2]
    assert waiting.reports is not None
    waiting.reports.watch()
    failed.abort("rank 1 failed")
    assert waiting.reports.seen.wait(20)
    with pytest.raises(CollectiveTimeout, match="rank 1 failed"):
        waiting.wait_for_event(FakeEvent(0), "the loss")


def test_after_a_failure_no_collective_is_issued(groups: list[Group]) -> None:
    groups[0].abort("rank 0 failed")
    with pytest.raises(CollectiveTimeout, match=r"an earlier collective did not finish.*rank 0"):
        groups[0].check()
    with pytest.raises(CollectiveTimeout, match="an earlier collective did not finish"):
        groups[0].wait_for_event(FakeEvent(0), "the loss")


def test_an_error_of_the_device_is_not_taken_for_a_timeout(groups: list[Group]) -> None:
    event = mock.Mock()
    event.query.side_effect = RuntimeError("CUDA error: an illegal memory access")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        groups[0].wait_for_event(event, "the loss")
    assert not groups[0].failures
