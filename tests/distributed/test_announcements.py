"""Messages to ranks that are left out: which waits end, what is kept, and when threads end."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from dataclasses import replace
from datetime import timedelta
from unittest import mock

import pytest
import ranks as harness
from ranks import Failure, Pool, RanksFailed, one_off
from torch.distributed.distributed_c10d import _get_process_group_store

from poplar import CollectiveTimeout
from poplar.comm import Group, announcements
from poplar.comm.announcements import Announcements


def announced(seconds: float) -> tuple[Group, Announcements]:
    """The messages of rank 0 to rank 1, with this deadline."""
    made = Group.of(harness.group(), timedelta(minutes=1))  # may take longer than the deadline
    group = replace(made, timeout=timedelta(seconds=seconds))
    return group, Announcements(group, (1,), 0)


def write_each(messages: Announcements, count: int) -> None:
    """Send numbers, each in a write of its own."""
    for number in range(count):
        taken = threading.Event()
        messages.send(lambda number=number, taken=taken: taken.set() or number)
        taken.wait()


def wait_for_a_long_call() -> str | None:
    group, messages = announced(3.0)
    if group.rank == 1:
        return messages.next("a long call")
    time.sleep(3.6)
    messages.send(lambda: "over")
    return None


def test_a_call_may_last_longer_than_the_deadline(ranks: Pool) -> None:
    assert ranks.run(wait_for_a_long_call, ranks=2) == [None, "over"]


def wait_for_a_stopped_rank() -> Failure | None:
    group, messages = announced(1.0)
    if group.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    with harness.catching() as caught:
        messages.next("a call")
    return caught[0] if caught else None


def test_a_sender_that_is_stopped_is_missed() -> None:
    _, failure = one_off(2, wait_for_a_stopped_rank, lost=[0])
    assert failure.is_a(CollectiveTimeout)
    assert "in a call (deadline 1 s). Cause: no answer" in failure.message


def read_late(count: int, most_kept: int) -> list[int]:
    """Read when all has been written, each number by itself."""
    with (
        mock.patch.object(announcements, "_LOOK_SECONDS", 0.0),
        mock.patch.object(announcements, "_REPLY_SECONDS", 0.0),
        mock.patch.object(announcements, "MOST_KEPT", most_kept),
    ):
        group, messages = announced(5.0)
        if group.rank == 0:
            write_each(messages, count)
        group.process_group.barrier().wait()
        return [messages.next("a call") for _ in range(count)] if group.rank == 1 else []


def test_a_reader_that_was_away_reads_all(ranks: Pool) -> None:
    count = 4200
    assert ranks.run(read_late, count, announcements.MOST_KEPT, ranks=2)[1] == list(range(count))


def test_a_reader_that_was_away_too_long_learns_it_at_once(ranks: Pool) -> None:
    with pytest.raises(RanksFailed) as raised:
        ranks.run(read_late, 8, 3, ranks=2)
    (failure,) = raised.value.failures
    assert failure.is_a(CollectiveTimeout)
    assert "messages behind, of which 3 are kept" in failure.message


def count_kept() -> int:
    """The writes that the store has when the reader has read four of five."""
    with mock.patch.object(announcements, "_REPLY_SECONDS", 0.0):
        group, messages = announced(5.0)
        if group.rank == 0:
            write_each(messages, 4)
        else:
            assert [messages.next("a call") for _ in range(4)] == [0, 1, 2, 3]
        group.process_group.barrier().wait()
        if group.rank == 1:
            return 0
        looked = threading.Event()
        write_each(messages, 1)
        messages.send(looked.set)  # after the look that follows the fifth write
        looked.wait()
        store = _get_process_group_store(group.process_group)
        prefix = f"poplar/announcements/{group.process_group.group_name}/{group.index}/0"
        return sum(store.check([f"{prefix}/{number}"]) for number in range(1, 6))


def test_what_all_have_read_is_deleted(ranks: Pool) -> None:
    assert ranks.run(count_kept, ranks=2) == [1, 0]


def end_beside_a_reader(read: int) -> float:
    """When the sender may end, or when the reader begins to read the last of these messages."""
    with mock.patch.object(announcements, "_EXIT_SECONDS", 2.5):
        group, messages = announced(60.0)
        if group.rank == 0:
            write_each(messages, 10)
        group.process_group.barrier().wait()
        if group.rank == 0:
            announcements._finish_all()
        last = time.monotonic()
        for _ in range(read if group.rank == 1 else 0):
            time.sleep(0.3)
            last = time.monotonic()
            messages.next("a call")
        return last


@pytest.mark.parametrize("read", [10, 0])
def test_a_sender_waits_at_its_end_for_readers_that_go_on_reading(ranks: Pool, read: int) -> None:
    ended, last_read = ranks.run(end_beside_a_reader, read, ranks=2)
    assert ended > last_read


def accesses_in_a_fork() -> int:
    """How often a forked process looks at the store at its exit."""
    group, messages = announced(60.0)
    if group.rank == 1:
        group.process_group.barrier().wait()
        return messages.next("a call")
    write_each(messages, 1)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        store, seen = type(_get_process_group_store(group.process_group)), []
        store.check = lambda *_: bool(seen.append(1))
        announcements._finish_all()
        os.write(writer, pickle.dumps(len(seen)))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        count: int = pickle.loads(answers.read())
    os.waitpid(child, 0)
    group.process_group.barrier().wait()
    return count


def test_a_forked_process_leaves_the_store_alone(ranks: Pool) -> None:
    assert ranks.run(accesses_in_a_fork, ranks=2) == [0, 0]
