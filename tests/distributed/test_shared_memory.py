"""Ranks of one host read each other's memory: the same bits as by sockets, and nobody is stuck."""

from __future__ import annotations

import mmap
import os
import random
import signal
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import ranks as harness
import torch
from ranks import Pool

from poplar import HeteroZeroOptimizer, Plan, _core
from poplar.comm import Bucket, Codec, Control, Group, connect, control_of, host_topology
from poplar.comm.segment_pool import Pool as Segments
from poplar.comm.shard_layout import Layout
from poplar.comm.shared_memory import SharedMemoryCommunicator
from poplar.comm.shared_segment import PAGE, Segment, addresses, view
from poplar.errors import CollectiveTimeout
from poplar.system import host_limits

WORLD = 4
CPU = torch.device("cpu")


# Boards


def boards(size: int = 2) -> list[_core.Rendezvous]:
    """Of ranks that live in one process."""
    memories = [mmap.mmap(-1, _core.RENDEZVOUS_BYTES) for _ in range(size)]
    return [_core.Rendezvous(memories, rank) for rank in range(size)]


def test_a_wait_is_over_as_soon_as_all_others_have_posted():
    one, other = boards()
    poster = threading.Timer(0.05, other.post, (64, 8, False))
    poster.start()
    assert one.late(_core.Event.POSTED, 0, 30.0) == []
    assert one.part_of(1, 0) == (64, 8, False)
    poster.join()


def test_a_wait_ends_without_an_answer_and_says_whose():
    first, second, _ = boards(3)
    second.post(0, 0, False)
    assert first.late(_core.Event.POSTED, 0, 0.01) == [2]
    assert first.late(_core.Event.POSTED, 1, -1.0) == [1, 2]


def test_marks_are_of_one_collective():
    one, other = boards()
    for _ in range(_core.PLACES + 2):
        other.post(0, 0, False)
    other.mark(1)
    assert one.late(_core.Event.MARKED, 1, 0.0) == []
    assert one.late(_core.Event.MARKED, _core.PLACES + 1, 0.0) == [1]
    other.mark(_core.PLACES + 1)
    assert one.late(_core.Event.MARKED, _core.PLACES + 1, 0.0) == []


def test_a_collective_is_over_when_all_before_it_are():
    one, other = boards()
    other.finish(1)
    assert not one.is_over(1)
    other.finish(0)
    assert one.is_over(1)
    assert not one.is_over(2)


@pytest.mark.parametrize("nbytes", [mmap.PAGESIZE, 2 * mmap.PAGESIZE])
def test_memory_without_room_for_a_board_is_refused(nbytes):
    with pytest.raises(ValueError, match="a board needs"):
        _core.Rendezvous([mmap.mmap(-1, nbytes)], 0)


def test_a_rank_that_there_is_not_is_refused():
    (board,) = boards(1)
    with pytest.raises(ValueError, match="rank 2 of 1"):
        _core.Rendezvous([mmap.mmap(-1, _core.RENDEZVOUS_BYTES)], 2)
    with pytest.raises(ValueError, match="no place of rank 1"):
        board.part_of(1, 0)


# Memory


def test_memory_that_is_still_read_is_not_handed_out():
    over: set[int] = set()
    pool = Segments(4096, 1 << 20, over.__contains__)
    first = pool.take(100)
    first.read_in = 7
    pool.give_back(first)
    second = pool.take(100)
    assert second is not first
    over.add(7)
    assert pool.take(100) is first


def test_a_part_is_found_by_any_byte_of_it():
    pool = Segments(4096, 1 << 20, lambda collective: True)
    parts = [pool.take(size) for size in (1, 5000, 4097)]
    for part in parts:
        assert pool.holder_of(part.offset) is part
        assert pool.holder_of(part.offset + part.nbytes - 1) is part
    assert pool.holder_of(0) is None


def test_memory_goes_back_once_it_is_idle_and_nobody_reads_it():
    over: set[int] = set()
    pool = Segments(4096, 1 << 20, over.__contains__)
    used, read, idle = (pool.take(100) for _ in range(3))
    read.read_in = 7
    pool.give_back(read)
    pool.give_back(idle)
    assert list(pool.blank()) == [idle]
    over.add(7)
    assert list(pool.blank()) == [read]
    assert list(pool.blank()) == []
    again = pool.take(100)
    assert again in (read, idle)
    pool.give_back(again)
    pool.give_back(used)
    assert set(pool.blank()) == {again, used}


def test_memory_that_went_back_reads_as_zeros_and_can_be_written_again():
    segment = Segment(1 << 20)
    data = view(segment.memory, torch.float32, 4096, 3000)
    data.fill_(1.0)
    segment.give_back(4096, 8192)
    assert data[:2048].tolist() == [0.0] * 2048
    assert data[2048:].tolist() == [1.0] * 952
    data.fill_(2.0)
    assert data.mean().item() == 2.0
    segment.shut()


def test_a_segment_that_is_used_up_says_so():
    pool = Segments(0, 8192, lambda collective: True)
    pool.take(8192)
    with pytest.raises(MemoryError, match="do not fit"):
        pool.take(1)


# Collectives


def both(group: Group) -> tuple[SharedMemoryCommunicator, object]:
    shared = connect(group, "shared_memory")
    assert isinstance(shared, SharedMemoryCommunicator)
    return shared, connect(group, "process_group")


def gather_from_shares(seed: int, times: int) -> list[str]:
    """Shards that are gathered from where they lie, and written again; returns what was wrong."""
    group = Group.of(harness.group(), None)
    generator = random.Random(seed)
    wrong = []
    for comm in both(group):
        for turn in range(times):
            numel = 64 * generator.randint(0, 200)
            cuts = sorted(64 * generator.randint(0, numel // 64) for _ in range(WORLD - 1))
            layout = Layout((0, *cuts, numel))
            dtype = generator.choice((torch.float32, torch.bfloat16))
            low, high = layout.bounds(group.rank)
            whole = torch.arange(numel).remainder(128).to(dtype)
            mine = whole[low:high].clone()
            shard = comm.share(mine)
            assert mine.numel() == 0 or shard.data_ptr() != mine.data_ptr()
            for add in range(generator.randint(1, 3)):
                data = torch.full((numel,), -1.0, dtype=dtype)
                comm.all_gather(data, layout, what=f"gather {turn}", own=shard).wait()
                comm.guard(shard)
                shard += 1  # a peer that still read it would see this
                if not torch.equal(data, whole + add):
                    wrong.append(f"{type(comm).__name__}, {turn}: {layout} {dtype}")
    return wrong


def test_a_gather_takes_shards_from_where_they_lie(ranks: Pool) -> None:
    for wrong in ranks.run(gather_from_shares, 5, 100):
        assert wrong == []


def parts_taken_by_a_gather(shared: bool) -> int:
    group = Group.of(harness.group(), None)
    comm, _ = both(group)
    layout = Layout.even(64 * WORLD, WORLD)
    shard = comm.share(torch.ones(64)) if shared else torch.ones(64)
    before = len(comm._board._pool._parts)
    comm.all_gather(torch.zeros(layout.numel), layout, what="a gather", own=shard).wait()
    return len(comm._board._pool._parts) - before


@pytest.mark.parametrize(("shared", "copies"), [(True, 0), (False, 1)])
def test_what_is_shared_is_gathered_without_a_copy(ranks: Pool, shared: bool, copies: int) -> None:
    assert ranks.run(parts_taken_by_a_gather, shared) == [copies] * WORLD


def done_before_its_owner_comes() -> bool:
    """Rank 0 owns all of a bucket and takes its time; returns whether the others did its work."""
    group = Group.of(harness.group(), None)
    comm, _ = both(group)
    numel = 64 * _core.CHUNK // 16
    layout = Layout((0, *[numel] * WORLD))
    bucket = comm.buffer(layout, torch.float32, CPU)
    bucket.pack([torch.full((numel,), float(group.rank))], [0], 1.0)
    out = bucket.data[slice(*layout.bounds(group.rank))]
    pending = comm.reduce_scatter(bucket, out, accumulate=False, what="a sum")
    if group.rank == 0:
        chunks = numel // _core.CHUNK
        done = comm._board._counters.wait_for_chunks(0, 0, chunks, 30.0)
    else:
        pending.wait()
        done = True
    torch.distributed.barrier(group.process_group)
    pending.wait()
    return done and bool((out == 6.0).all())


def test_whoever_has_time_helps_with_the_largest_slice(ranks: Pool) -> None:
    assert ranks.run(done_before_its_owner_comes) == [True] * WORLD


def killed_while_it_helps() -> str:
    """Rank 2 claims a chunk of rank 0's slice, and is never heard of again."""
    group = Group.of(harness.group(), timedelta(seconds=60))
    comm, _ = both(group)
    numel = 4 * _core.CHUNK
    layout = Layout((0, *[numel] * WORLD))
    bucket = comm.buffer(layout, torch.float32, CPU)
    out = bucket.data[slice(*layout.bounds(group.rank))]
    pending = comm.reduce_scatter(bucket, out, accumulate=False, what="a sum")
    if group.rank == 2:
        comm._board.wait_until_posted(0, "a sum")
        comm._board.claims(0, 0).view(torch.int32)[0] += 1
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    try:
        pending.wait()
    except CollectiveTimeout as error:
        return str(error)
    return ""


def test_a_rank_that_is_gone_with_what_it_claimed_is_named():
    answers = harness.one_off(WORLD, killed_while_it_helps, lost=[2], timeout=50.0)
    assert "a sum failed, waiting for rank(s) 2" in answers[0]
    assert "its process has ended" in answers[0]


def parts_kept_after_a_gather(setting: str) -> list[bool]:
    """A rank that is done first can't give its part back at once: the others still read it."""
    os.environ["POPLAR_MEMORY_CACHE"] = setting
    try:
        group = Group.of(harness.group(), None)
        comm, _ = both(group)
        data = torch.zeros(4 * 4096)
        comm.all_gather(data, Layout.even(data.numel(), WORLD), what="a gather").wait()
        torch.distributed.barrier(group.process_group)
        comm.trim()
        return [not part.is_blank for part in comm._board._pool._parts]
    finally:
        del os.environ["POPLAR_MEMORY_CACHE"]


@pytest.mark.parametrize(("setting", "kept"), [("off", False), ("on", True)])
def test_between_steps_no_memory_is_kept_where_none_shall_be(
    ranks: Pool, setting: str, kept: bool
) -> None:
    for parts in ranks.run(parts_kept_after_a_gather, setting):
        assert parts == [kept]


def sums_written_again(steps: int) -> list[float]:
    """A bucket that stays is packed as soon as this rank has its sum; peers may be slower."""
    group = Group.of(harness.group(), None)
    comm, _ = both(group)
    layout = Layout.even(64 * 4 * 50, WORLD)
    bucket = comm.buffer(layout, torch.float32, CPU)
    seen = []
    for step in range(steps):
        bucket.pack([torch.full((layout.numel,), float(step + group.rank))], [0], 1.0)
        out = torch.empty(layout.size(group.rank))
        pending = comm.reduce_scatter(bucket, out, accumulate=False, what=f"step {step}")
        if (step + group.rank) % 3 == 0:
            time.sleep(0.002)
        pending.wait()
        seen += [out.min().item(), out.max().item()]
    return seen


def test_a_bucket_is_not_written_while_a_peer_reads_it(ranks: Pool) -> None:
    expected = [float(4 * step + 6) for step in range(100) for _ in range(2)]
    for seen in ranks.run(sums_written_again, 100):
        assert seen == expected


def given_up_and_packed_again() -> list[float]:
    group = Group.of(harness.group(), None)
    comm, _ = both(group)
    layout = Layout.even(64 * WORLD, WORLD)
    bucket, out = comm.buffer(layout, torch.float32, CPU), torch.empty(64)
    bucket.pack([torch.ones(layout.numel)], [0], 1.0)
    comm.reduce_scatter(bucket, out, accumulate=False, what="nobody waits for this")
    bucket.pack([torch.ones(layout.numel)], [0], 2.0)
    comm.reduce_scatter(bucket, out, accumulate=False, what="but for this").wait()
    return out.unique().tolist()


def test_a_collective_that_nobody_waited_for_holds_nobody_up(ranks: Pool) -> None:
    assert ranks.run(given_up_and_packed_again) == [[8.0]] * WORLD


def many_agreements(times: int) -> bool:
    group = Group.of(harness.group(), None)
    shared, sockets = control_of(group), Control(group)
    generator = random.Random(5)
    for turn in range(times):
        values = torch.full((generator.randint(1, 40),), group.rank + 10 * turn)
        collect = shared.exchange(values, what="values")
        expected = sockets.exchange(values, what="values")()
        if turn % 7 == 0:
            continue  # never collected
        assert all(map(torch.equal, collect(), expected))
        said = shared.exchange_objects("x" * turn * group.rank, what="objects")
        assert said == ["x" * turn * rank for rank in range(WORLD)]
    return True


def test_agreements_by_shared_memory_say_the_same(ranks: Pool) -> None:
    assert all(ranks.run(many_agreements, 400))


# Trouble


def lose_a_rank(seconds: float, how: int) -> str | None:
    """Rank 2 goes in the middle; the others say whom they waited for."""
    group = Group.of(harness.group(), timedelta(seconds=seconds))
    comm, _ = both(group)
    layout = Layout.even(64 * WORLD, WORLD)
    data = torch.zeros(layout.numel)
    comm.all_gather(data, layout, what="the first").wait()
    if group.rank == 2:
        os.kill(os.getpid(), how)
    began = time.monotonic()
    try:
        comm.all_gather(data, layout, what="the second").wait()
    except CollectiveTimeout as error:
        return f"{time.monotonic() - began:.1f} s: {error}"
    return None


@pytest.mark.parametrize(
    ("how", "seconds", "cause"),
    [
        (signal.SIGKILL, 60.0, "its process has ended"),
        (signal.SIGSTOP, 1.5, "no answer"),
    ],
)
def test_a_rank_that_is_gone_or_stopped_is_named(how, seconds, cause):
    answers = harness.one_off(WORLD, lose_a_rank, seconds, int(how), lost=[2], timeout=50.0)
    for rank in (0, 1, 3):
        assert f"rank {rank}: the second failed, waiting for rank(s) 2" in answers[rank]
        assert cause in answers[rank]


def go_on_after_a_deadline(seconds: float) -> list[str]:
    """Rank 1 comes too late, and then all of them go on as if nothing had been."""
    group = Group.of(harness.group(), timedelta(seconds=seconds))
    control, comm = control_of(group), connect(group, "shared_memory")
    layout = Layout.even(64 * WORLD, WORLD)
    data = torch.full((layout.numel,), float(group.rank))
    comm.all_gather(data, layout, what="the first").wait()
    said = []
    for what in ("the second", "the third"):
        if group.rank == 1 and what == "the second":
            time.sleep(3 * seconds)
        try:
            comm.all_gather(data, layout, what=what).wait()
            control.exchange_objects(what, what="an agreement")
        except CollectiveTimeout as error:
            said.append(str(error))
    return said


def test_nothing_follows_a_collective_that_came_to_no_end():
    answers = harness.one_off(WORLD, go_on_after_a_deadline, 1.0, timeout=50.0)
    for rank in (0, 2, 3):
        first, second = answers[rank]
        assert f"rank {rank}: the second failed, waiting for rank(s) 1" in first
        assert "an earlier collective came to no end" in second
        assert "the second failed" in second
    assert len(answers[1]) == 2, "the others' old values are there, their agreement never comes"


def take_others_for_larger(operation: str) -> list[str]:
    """Rank 3 believes in another cut than the others, and all of them go on."""
    group = Group.of(harness.group(), timedelta(seconds=120))
    comm, _ = both(group)
    cuts = (0, 64, 128, 192, 256) if group.rank != 3 else (0, 128, 192, 256, 320)
    layout = Layout(cuts)
    bucket = Bucket(torch.zeros(layout.numel), layout, Codec())
    calls = {
        "all_gather": lambda: comm.all_gather(bucket.data, layout, what="the first"),
        "all_reduce": lambda: comm.all_reduce(bucket, what="the first"),
    }
    said = []
    for call in (calls[operation], lambda: comm.all_reduce(bucket, what="the second")):
        try:
            call().wait()
        except RuntimeError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("operation", ["all_gather", "all_reduce"])
def test_ranks_whose_tensors_differ_in_size_all_hear_of_it_at_once(operation):
    answers = harness.one_off(WORLD, take_others_for_larger, operation, timeout=50.0)
    assert "the two are at different collectives, or their tensors differ" in answers[3][0]
    assert "an earlier collective came to no end" in answers[3][1]
    for rank in (0, 1, 2):
        assert "their tensors differ" in " ".join(answers[rank])


def test_more_than_the_host_has_is_refused_with_figures(monkeypatch):
    monkeypatch.setattr(host_limits, "free_memory", lambda: 1 << 20)
    pool = Segments(0, 1 << 40, lambda _: True)
    pool.take(1 << 20)
    with pytest.raises(MemoryError, match=r"2097152 bytes.* of which 1048576 are free"):
        pool.take(2 << 20)


@pytest.mark.parametrize("ranks", [1, 2, 8, 64, 1024])
def test_all_ranks_of_a_host_fit_into_the_addresses_of_each(ranks: int, monkeypatch) -> None:
    for memory in (1 << 31, 24 << 30, 2 << 40):
        monkeypatch.setattr(host_limits, "total_memory", lambda memory=memory: memory)
        each = addresses(ranks)
        assert each % PAGE == 0
        assert ranks * each <= 4 * memory + ranks * (1 << 30)
        assert each >= min(memory, 1 << 30)


def memory_comes_back() -> list[int]:
    """Buckets go as their last tensor goes; a view is enough to keep the memory."""
    group = Group.of(harness.group(), None)
    comm, _ = both(group)
    layout = Layout.even(64 * WORLD, WORLD)
    bucket = comm.buffer(layout, torch.float32, CPU)
    seen = [bucket.data.data_ptr()]
    kept = bucket.data[64:65]
    del bucket
    bucket = comm.buffer(layout, torch.float32, CPU)
    seen.append(bucket.data.data_ptr())
    del kept
    third = comm.buffer(layout, torch.float32, CPU)
    seen.append(third.data.data_ptr())
    return seen


def test_memory_is_lent_until_its_last_view_is_gone(ranks: Pool) -> None:
    for first, second, third in ranks.run(memory_comes_back):
        assert second != first
        assert third == first


def chosen_differently() -> str:
    group = Group.of(harness.group(), None)
    try:
        control_of(group, "process_group" if group.rank == 2 else "auto")
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_that_chose_differently_all_hear_of_it(ranks: Pool) -> None:
    for said in ranks.run(chosen_differently):
        assert "rank 1 says 'auto', rank 2 says 'process_group'" in said


def read_of_a_rank_that_has_ended() -> float:
    """Rank 0 posts its part and ends at once; the others read it whenever they come to it."""
    group = Group.of(harness.group(), timedelta(seconds=30))
    comm, _ = both(group)
    layout = Layout((0, 64, 64, 64, 64))
    data = torch.full((64,), float(group.rank == 0))
    pending = comm.all_gather(data, layout, what="the last one")
    if group.rank == 0:
        os._exit(0)
    time.sleep(0.5)
    pending.wait()
    return data.mean().item()


def test_what_a_rank_posted_can_be_read_after_it_has_ended():
    answers = harness.one_off(WORLD, read_of_a_rank_that_has_ended, lost=[0], timeout=50.0)
    assert answers[1:] == [1.0] * (WORLD - 1)


def leave_something_behind() -> int:
    group = Group.of(harness.group(), None)
    comm, _ = both(group)
    comm.buffer(Layout.even(64 * WORLD, WORLD), torch.float32, CPU)
    return len(list(Path("/dev/shm").glob("poplar*")))


def test_nothing_is_left_in_the_file_system(ranks: Pool) -> None:
    assert ranks.run(leave_something_behind) == [0] * WORLD


def in_a_room_of_its_own() -> tuple[str, str]:
    """Rank 0 says that it runs elsewhere: nobody can share with it."""
    from poplar.comm import host_topology, rendezvous

    group = Group.of(harness.group(), None)
    real = host_topology.place
    if group.rank == 0:
        host_topology.place = lambda: ("another host",)
    try:
        automatic = type(connect(group, "auto")).__name__
        try:
            connect(group, "shared_memory")
        except rendezvous.NotOneHost as error:
            return automatic, str(error)
        return automatic, ""
    finally:
        host_topology.place = real


def test_ranks_of_two_hosts_go_the_hierarchical_way_or_are_told(ranks: Pool) -> None:
    for automatic, said in ranks.run(in_a_room_of_its_own):
        assert automatic == "HierarchicalCommunicator"
        assert "cannot read the memory of rank" in said
        assert "another host" in said


def an_unknown_transport(choice: str = "pigeons") -> str:
    try:
        connect(Group.of(harness.group(), None), choice)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("process_group:fast+direct", "how to add (direct, padded, grouped, library)"),
        ("process_group:direct", "as in 'process_group:padded+grouped'"),
        ("shared_memory:direct+direct", "use one of 'auto', 'process_group'"),
    ],
)
def test_an_unknown_algorithm_is_refused_with_those_there_are(ranks: Pool, choice, said) -> None:
    for answer in ranks.run(an_unknown_transport, choice):
        assert said in answer


def planned_elsewhere() -> str:
    """The plan is from where all ranks were on one host."""
    real, host_topology.place = host_topology.place, lambda: (f"host {harness.rank()}",)
    try:
        plan = replace(Plan.even(WORLD, WORLD, 1, stage=1), transport="shared_memory")
        model = torch.nn.Linear(4, 4)
        HeteroZeroOptimizer(
            model, torch.optim.SGD, plan=plan, lr=0.1, process_group=harness.group()
        )
    except ValueError as error:
        return str(error)
    finally:
        host_topology.place = real
    return ""


def test_a_plan_whose_transport_is_not_to_be_had_is_refused_with_what_to_do(ranks: Pool) -> None:
    for said in ranks.run(planned_elsewhere):
        assert "the plan's transport, 'shared_memory', can't be had here" in said
        assert "communicator='process_group'" in said


def test_an_unknown_transport_is_refused_with_those_there_are(ranks: Pool) -> None:
    for said in ranks.run(an_unknown_transport):
        assert "'auto', 'process_group', 'shared_memory'" in said
