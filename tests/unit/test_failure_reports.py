"""Which ranks an error names, from the reports of the ranks that noticed a failure."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from poplar.comm import failure_reports
from poplar.comm.failure_reports import FailureReports

SIZE = 4


@pytest.fixture(autouse=True)
def a_short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_reports, "GRACE_SECONDS", 1.0)
    monkeypatch.setattr(failure_reports, "_WATCH_SECONDS", 0.01)


def reports_of(store: Any, size: int = SIZE) -> list[FailureReports]:
    return [FailureReports(store, "a group", rank, size) for rank in range(size)]


def diagnoses(
    reports: Sequence[FailureReports],
    suspects: dict[int, list[int]],
    what: Callable[[int], str] = lambda _rank: "a sum",
) -> list[tuple[list[int], str]]:
    """What the ranks find that wait for `suspects`, all at the same time."""

    def diagnose(rank: int) -> tuple[list[int], str]:
        return reports[rank].diagnose(suspects[rank], "no answer", what(rank))

    with ThreadPoolExecutor(len(suspects)) as ranks:
        return list(ranks.map(diagnose, suspects))


def peers(rank: int, size: int = SIZE) -> list[int]:
    return [peer for peer in range(size) if peer != rank]


def test_ranks_that_do_not_report_are_named() -> None:
    found = diagnoses(reports_of(dist.HashStore()), {rank: peers(rank) for rank in (0, 2, 3)})
    assert found == [([1], "no answer")] * 3


def test_ranks_that_wait_in_different_collectives_name_them() -> None:
    """Only collectives of tensors: exchanges of the control channel are compared at once."""
    reports, all_ranks = reports_of(dist.HashStore()), {rank: peers(rank) for rank in range(SIZE)}
    found = diagnoses(reports, all_ranks, lambda rank: "a gather" if rank == 2 else "a sum")
    for rank, (_, cause) in enumerate(found):
        assert "they had stopped waiting: " in cause
        assert rank == 2 or "rank 2 waited for other ranks in 'a gather' (no answer)" in cause
        assert rank == 0 or "rank 0 waited for other ranks in 'a sum' (no answer)" in cause


def nested(store: Any) -> tuple[list[FailureReports], list[FailureReports]]:
    """The reports of a call's group, and of a group that is made in the call."""
    inner = [
        FailureReports(store, "an inner group", rank, SIZE, outer=["a group"])
        for rank in range(SIZE)
    ]
    return reports_of(store), inner


def test_a_rank_that_fails_before_a_nested_group_is_the_cause_in_it() -> None:
    outer, inner = nested(dist.HashStore())
    inner[0].watch()
    outer[1].publish("rank 1 failed before", is_cause=True)
    assert inner[0].seen.wait(5.0)
    found = diagnoses(inner, {rank: peers(rank) for rank in (0, 2, 3)})
    assert found == [([1], "rank 1 failed before")] * 3


def test_a_cause_is_not_hidden_by_a_later_wait_in_another_group() -> None:
    outer, inner = nested(dist.HashStore())
    inner[1].publish("rank 1 failed inside", is_cause=True)
    outer[1].publish("rank 1 waited for other ranks")
    found = diagnoses(inner, {rank: peers(rank) for rank in (0, 2, 3)})
    assert found == [([1], "rank 1 failed inside")] * 3


def test_a_cause_is_not_replaced_by_what_follows_from_it() -> None:
    reports = reports_of(dist.HashStore())
    reports[1].publish("rank 1 is out of memory", is_cause=True)
    reports[1].publish("rank 1: an earlier collective did not finish")
    assert reports[0].causes() == {1: "rank 1 is out of memory"}
    reports[1].publish("rank 1 failed again", is_cause=True)
    assert reports[0].causes() == {1: "rank 1 failed again"}


def test_two_missing_ranks_of_64_are_named() -> None:
    alive = [rank for rank in range(64) if rank not in (5, 63)]
    reports = reports_of(dist.HashStore(), 64)
    found = diagnoses(reports, {rank: peers(rank, 64) for rank in alive})
    assert found == [([5, 63], "no answer")] * 62


def test_a_rank_that_another_waited_for_is_not_blamed_if_it_reports() -> None:
    found = diagnoses(reports_of(dist.HashStore()), {0: [1], 2: [1], 3: [2]})
    assert [ranks for ranks, _ in found] == [[1]] * 3


def test_a_rank_outside_the_wait_is_not_blamed_if_the_missing_one_is_known() -> None:
    """A rank that is busy elsewhere has nothing to report yet."""
    (found,) = diagnoses(reports_of(dist.HashStore()), {0: [1]})
    assert found == ([1], "no answer")


def test_the_reason_of_a_rank_that_failed_itself_is_passed_on() -> None:
    reports = reports_of(dist.HashStore())
    reports[2].publish("rank 2 is out of memory", is_cause=True)
    found = diagnoses(reports, {0: peers(0), 1: [0, 2]})
    assert found == [([2], "rank 2 is out of memory")] * 2


def test_a_late_rank_learns_that_the_others_have_stopped_waiting() -> None:
    reports = reports_of(dist.HashStore(), 2)
    reports[0].publish("rank 0 waited for rank(s) 1")
    ranks, cause = reports[1].diagnose([0], "the connection is closed", "a sum")
    assert ranks == [0]
    assert cause == "they had stopped waiting: rank 0 waited for rank(s) 1"


class Gone:
    """A store whose process has ended."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("connection reset\nand more")


class Silent:
    """A store whose process has been stopped."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.over.wait(30)


def test_without_its_store_a_rank_names_those_that_it_waited_for() -> None:
    ranks, cause = reports_of(Gone())[1].diagnose([0, 2], "no answer", "a sum")
    assert ranks == [0, 2]
    assert "no answer" in cause
    assert "connection reset" in cause
    assert "usually rank 0's" in cause


def test_a_store_that_does_not_answer_delays_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_reports, "_ANSWER_SECONDS", 0.3)
    store = Silent()
    ranks, cause = reports_of(store)[1].diagnose([0], "no answer", "a sum")
    store.over.set()
    assert ranks == [0]
    assert "no answer in 1.3 s" in cause


def wait_until(condition: Any) -> bool:
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


class Notified:
    def __init__(self) -> None:
        self.times = 0

    def notify(self) -> None:
        self.times += 1


def test_a_watching_rank_sees_the_failure_of_another() -> None:
    reports, notified = reports_of(dist.HashStore(), 2), Notified()
    reports[0].watch(notified.notify)
    assert not reports[0].seen.is_set()
    reports[1].publish("rank 1 failed", is_cause=True)
    assert wait_until(lambda: reports[0].seen.is_set() and notified.times == 1)


class Looking:
    def __init__(self) -> None:
        self.times = 0

    def look(self) -> None:
        self.times += 1


def test_a_watching_rank_looks_at_its_own_collectives_even_without_a_store() -> None:
    reports, looking = reports_of(Gone(), 2)[0], Looking()
    reports.watch(look=looking.look)
    assert wait_until(lambda: looking.times > 2)
    assert not reports.seen.is_set()


def test_a_watch_ends_with_its_reports() -> None:
    (reports,) = reports_of(dist.HashStore(), 1)
    others = set(failure_reports._WATCHES)
    reports.watch()
    (watch,) = set(failure_reports._WATCHES) - others
    del reports
    assert watch._ended.wait(20)


def test_a_forked_process_does_not_wait_for_watches_at_its_exit() -> None:
    (reports,) = reports_of(dist.HashStore(), 1)
    reports.watch()
    child = os.fork()
    if child == 0:
        start = time.monotonic()
        failure_reports._stop_watches()
        os._exit(time.monotonic() - start > 0.5)
    assert os.waitpid(child, 0)[1] == 0


def test_a_rank_without_memory_for_a_thread_reports_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reports = reports_of(dist.HashStore(), 2)

    def fail(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(failure_reports._thread, "start_new_thread", fail)
        reports[0].watch()
        reports[0].publish("rank 0 is out of memory", is_cause=True)
    assert reports[1].diagnose([0], "no answer", "a sum") == ([0], "rank 0 is out of memory")
