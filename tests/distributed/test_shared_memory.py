"""Collectives in shared memory: the same bits as through sockets, and no deadlocks."""

from __future__ import annotations

import mmap
import os
import random
import select
import signal
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import ranks as harness
import torch
from communicators import memory_cache, on_host
from ranks import Pool

from poplar import HeteroZeroOptimizer, Plan, _core
from poplar.comm import Bucket, Codec, Control, Group, connect, connect_control
from poplar.comm.host_memory import rendezvous
from poplar.comm.host_memory.segment import (
    PAGE,
    PeerSegment,
    Segment,
    SegmentPool,
    segment_bytes,
    view,
)
from poplar.comm.host_memory.transport import SharedMemoryCommunicator
from poplar.comm.shard_layout import Layout
from poplar.system import host_limits
from poplar.values.errors import CollectiveTimeout

WORLD = 4
CPU = torch.device("cpu")


# The rendezvous


def rendezvous_of_threads(size: int = 2) -> list[_core.Rendezvous]:
    """The rendezvous of several ranks in one process."""
    memories = [mmap.mmap(-1, _core.RENDEZVOUS_BYTES) for _ in range(size)]
    return [_core.Rendezvous(memories, rank) for rank in range(size)]


def test_wait_returns_when_all_peers_have_posted():
    one, other = rendezvous_of_threads()
    poster = threading.Timer(0.05, other.post, (64, 8, False))
    poster.start()
    assert one.wait(_core.Event.POSTED, 0, 30.0) == []
    assert one.posted_range(1, 0) == (64, 8, False)
    poster.join()


def test_wait_returns_the_missing_ranks_after_the_timeout():
    first, second, _ = rendezvous_of_threads(3)
    second.post(0, 0, False)
    assert first.wait(_core.Event.POSTED, 0, 0.01) == [2]
    assert first.wait(_core.Event.POSTED, 1, -1.0) == [1, 2]


def test_marks_belong_to_one_collective():
    one, other = rendezvous_of_threads()
    for _ in range(_core.SLOTS + 2):
        other.post(0, 0, False)
    other.mark_written(1)
    assert one.wait(_core.Event.WRITTEN, 1, 0.0) == []
    assert one.wait(_core.Event.WRITTEN, _core.SLOTS + 1, 0.0) == [1]
    other.mark_written(_core.SLOTS + 1)
    assert one.wait(_core.Event.WRITTEN, _core.SLOTS + 1, 0.0) == []


def test_collective_is_over_when_all_earlier_ones_are():
    one, other = rendezvous_of_threads()
    other.finish(1)
    assert not one.is_over(1)
    other.finish(0)
    assert one.is_over(1)
    assert not one.is_over(2)


# Memory


def test_memory_that_peers_still_read_is_not_reused():
    over: set[int] = set()
    pool = SegmentPool(4096, 1 << 20, over.__contains__)
    first = pool.allocate(100)
    first.last_collective = 7
    pool.free(first)
    second = pool.allocate(100)
    assert second is not first
    over.add(7)
    assert pool.allocate(100) is first


def test_block_is_found_by_any_of_its_offsets():
    pool = SegmentPool(4096, 1 << 20, lambda collective: True)
    parts = [pool.allocate(size) for size in (1, 5000, 4097)]
    for part in parts:
        assert pool.block_at(part.offset) is part
        assert pool.block_at(part.offset + part.nbytes - 1) is part
    assert pool.block_at(0) is None


def test_idle_memory_without_readers_is_released():
    over: set[int] = set()
    pool = SegmentPool(4096, 1 << 20, over.__contains__)
    used, read, idle = (pool.allocate(100) for _ in range(3))
    read.last_collective = 7
    pool.free(read)
    pool.free(idle)
    assert list(pool.release_idle()) == [idle]
    over.add(7)
    assert list(pool.release_idle()) == [read]
    assert list(pool.release_idle()) == []
    again = pool.allocate(100)
    assert again in (read, idle)
    pool.free(again)
    pool.free(used)
    assert set(pool.release_idle()) == {again, used}


def test_memory_that_is_not_used_any_more_is_released():
    pool = SegmentPool(4096, 1 << 20, lambda collective: True)
    first, second, larger = pool.allocate(100), pool.allocate(100), pool.allocate(5000)
    for block in (second, larger, first):
        pool.free(block)
    assert list(pool.release_idle(unused=True)) == []
    for _ in range(3):
        again = pool.allocate(100)
        assert again is first, "memory that is in use is used again"
        pool.free(again)
    assert set(pool.release_idle(unused=True)) == {second, larger}
    assert pool.idle_bytes() == first.nbytes


def test_released_memory_reads_as_zeros_and_can_be_reused():
    segment = Segment(1 << 20)
    data = view(segment.memory, torch.float32, 4096, 3000)
    data.fill_(1.0)
    segment.release_memory(4096, 8192)
    assert data[:2048].tolist() == [0.0] * 2048
    assert data[2048:].tolist() == [1.0] * 952
    data.fill_(2.0)
    assert data.mean().item() == 2.0
    segment.close_descriptor()


def test_full_segment_raises():
    pool = SegmentPool(0, 8192, lambda collective: True)
    pool.allocate(8192)
    with pytest.raises(MemoryError, match=r"8192 of the segment.s 8192 bytes are in use"):
        pool.allocate(1)


# Collectives


def both(group: Group) -> tuple[SharedMemoryCommunicator, object]:
    shared = connect(group, "shared_memory")
    assert isinstance(shared, SharedMemoryCommunicator)
    return shared, connect(group, "process_group")


def gather_from_shares(seed: int, times: int) -> list[str]:
    """Gather from shared shards and overwrite them; returns the wrong results."""
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
                comm.wait_for_readers(shard)
                shard += 1  # a peer that still read it would see this
                if not torch.equal(data, whole + add):
                    wrong.append(f"{type(comm).__name__}, {turn}: {layout} {dtype}")
    return wrong


def test_all_gather_reads_shared_shards_in_place(ranks: Pool) -> None:
    for wrong in ranks.run(gather_from_shares, 5, 100):
        assert wrong == []


def blocks_allocated_by_a_gather(shared: bool) -> int:
    group = Group.of(harness.group(), None)
    comm, _ = both(group)
    layout = Layout.even(64 * WORLD, WORLD)
    shard = comm.share(torch.ones(64)) if shared else torch.ones(64)
    before = len(comm._rendezvous._pool._blocks)
    comm.all_gather(torch.zeros(layout.numel), layout, what="a gather", own=shard).wait()
    return len(comm._rendezvous._pool._blocks) - before


@pytest.mark.parametrize(("shared", "copies"), [(True, 0), (False, 1)])
def test_shared_tensors_are_gathered_without_a_copy(ranks: Pool, shared: bool, copies: int) -> None:
    assert ranks.run(blocks_allocated_by_a_gather, shared) == [copies] * WORLD


def reduce_slice_of_a_late_rank() -> bool:
    """Rank 0 owns the whole bucket and is late; returns whether the others reduced its slice."""
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
        done = comm._rendezvous._counters.wait_for_chunks(0, 0, chunks, 30.0)
    else:
        pending.wait()
        done = True
    torch.distributed.barrier(group.process_group)
    pending.wait()
    return done and bool((out == 6.0).all())


def test_idle_ranks_reduce_chunks_of_the_largest_slice(ranks: Pool) -> None:
    assert ranks.run(reduce_slice_of_a_late_rank) == [True] * WORLD


def kill_rank_after_claiming_a_chunk() -> str:
    """Rank 2 takes a chunk of rank 0's slice and is killed."""
    processes = [0] * WORLD
    torch.distributed.all_gather_object(processes, os.getpid(), harness.group())
    lost = os.pidfd_open(processes[2])
    group = Group.of(harness.group(), timedelta(seconds=60))
    comm, _ = both(group)
    numel = 4 * _core.CHUNK
    layout = Layout((0, *[numel] * WORLD))
    bucket = comm.buffer(layout, torch.float32, CPU)
    out = bucket.data[slice(*layout.bounds(group.rank))]
    pending = comm.reduce_scatter(bucket, out, accumulate=False, what="a sum")
    if group.rank == 2:
        comm._rendezvous.wait_until_posted(0, "a sum")
        comm._rendezvous.work_counters(0, 0).view(torch.int32)[0] += 1
        os.kill(os.getpid(), signal.SIGKILL)
    select.select([lost], [], [])  # else the others might take all chunks before rank 2 has one
    try:
        pending.wait()
    except CollectiveTimeout as error:
        return str(error)
    return ""


def test_rank_killed_after_claiming_a_chunk_is_named():
    answers = harness.one_off(WORLD, kill_rank_after_claiming_a_chunk, lost=[2])
    assert "a sum failed, waiting for rank(s) 2" in answers[0]
    assert "its process has exited" in answers[0]


def blocks_cached_after_a_gather(setting: str) -> list[bool]:
    """The first rank to finish cannot free its block at once, because the others still read it."""
    with memory_cache(setting):
        group = Group.of(harness.group(), None)
        comm, _ = both(group)
        data = torch.zeros(4 * 4096)
        comm.all_gather(data, Layout.even(data.numel(), WORLD), what="a gather").wait()
        torch.distributed.barrier(group.process_group)
        comm.trim()
        return [not block.is_released for block in comm._rendezvous._pool._blocks]


@pytest.mark.parametrize(("setting", "cached"), [("off", False), ("on", True)])
def test_trim_releases_memory_when_caching_is_off(ranks: Pool, setting: str, cached: bool) -> None:
    for parts in ranks.run(blocks_cached_after_a_gather, setting):
        assert parts == [cached]


def reuse_a_bucket(steps: int) -> list[float]:
    """Pack a bucket again as soon as this rank has its sum; peers may be slower."""
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


def test_bucket_is_not_overwritten_while_peers_read_it(ranks: Pool) -> None:
    expected = [float(4 * step + 6) for step in range(100) for _ in range(2)]
    for seen in ranks.run(reuse_a_bucket, 100):
        assert seen == expected


def pack_again_without_waiting() -> list[float]:
    group = Group.of(harness.group(), None)
    comm, _ = both(group)
    layout = Layout.even(64 * WORLD, WORLD)
    bucket, out = comm.buffer(layout, torch.float32, CPU), torch.empty(64)
    bucket.pack([torch.ones(layout.numel)], [0], 1.0)
    comm.reduce_scatter(bucket, out, accumulate=False, what="without a wait")
    bucket.pack([torch.ones(layout.numel)], [0], 2.0)
    comm.reduce_scatter(bucket, out, accumulate=False, what="with a wait").wait()
    return out.unique().tolist()


def test_collective_without_a_wait_does_not_block_later_ones(ranks: Pool) -> None:
    assert ranks.run(pack_again_without_waiting) == [[8.0]] * WORLD


def exchange_many_values(times: int) -> bool:
    group = Group.of(harness.group(), None)
    shared, sockets = connect_control(group), Control(group)
    generator = random.Random(5)
    for turn in range(times):
        values = torch.full((generator.randint(1, 40),), group.rank + 10 * turn)
        collect = shared.exchange(values, what="values")
        expected = sockets.exchange(values, what="values")()
        if turn % 7 == 0:
            continue  # never collected
        assert all(map(torch.equal, collect(), expected))
        message = shared.exchange_objects("x" * turn * group.rank, what="objects")
        assert message == ["x" * turn * rank for rank in range(WORLD)]
    return True


def test_control_exchanges_in_shared_memory_match_gloo(ranks: Pool) -> None:
    assert all(ranks.run(exchange_many_values, 400))


# Failures


def lose_a_rank(seconds: float, how: int) -> str | None:
    """Rank 2 is killed or stopped; the others return the error."""
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
        (signal.SIGKILL, 60.0, "its process has exited"),
        (signal.SIGSTOP, 3.0, "no answer"),
    ],
)
def test_killed_or_stopped_rank_is_named(how, seconds, cause):
    answers = harness.one_off(WORLD, lose_a_rank, seconds, int(how), lost=[2])
    for rank in (0, 1, 3):
        assert f"rank {rank}: the second failed, waiting for rank(s) 2" in answers[rank]
        assert cause in answers[rank]


def continue_after_a_timeout(seconds: float) -> list[str]:
    """Rank 1 is late for a collective, and then all ranks continue with the next one."""
    group = Group.of(harness.group(), timedelta(seconds=seconds))
    control, comm = connect_control(group), connect(group, "shared_memory")
    layout = Layout.even(64 * WORLD, WORLD)
    data = torch.full((layout.numel,), float(group.rank))
    comm.all_gather(data, layout, what="the first").wait()
    message = []
    for what in ("the second", "the third"):
        if group.rank == 1 and what == "the second":
            time.sleep(3 * seconds)
        try:
            comm.all_gather(data, layout, what=what).wait()
            control.exchange_objects(what, what="an agreement")
        except CollectiveTimeout as error:
            message.append(str(error))
    return message


def test_no_collective_runs_after_a_failed_one():
    answers = harness.one_off(WORLD, continue_after_a_timeout, 2.0)
    for rank in (0, 2, 3):
        first, second = answers[rank]
        assert f"rank {rank}: the second failed, waiting for rank(s) 1" in first
        assert "an earlier collective did not finish" in second
        assert "the second failed" in second
    assert len(answers[1]) == 2, "the second gather finds the others' data, but the exchange fails"


def use_different_layouts(operation: str) -> list[str]:
    """Rank 3 uses another layout than the others, and all continue with the next collective."""
    group = Group.of(harness.group(), timedelta(seconds=120))
    comm, _ = both(group)
    cuts = (0, 64, 128, 192, 256) if group.rank != 3 else (0, 128, 192, 256, 320)
    layout = Layout(cuts)
    bucket = Bucket(torch.zeros(layout.numel), layout, Codec())
    out = torch.zeros(layout.size(group.rank))
    calls = {
        "all_gather": lambda: comm.all_gather(bucket.data, layout, what="the first"),
        "reduce_scatter": lambda: comm.reduce_scatter(
            bucket, out, accumulate=False, what="the first"
        ),
    }
    message = []
    for call in (calls[operation], calls["reduce_scatter"]):
        try:
            call().wait()
        except RuntimeError as error:
            message.append(str(error))
    return message


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter"])
def test_tensors_of_different_sizes_raise_on_all_ranks(operation):
    answers = harness.one_off(WORLD, use_different_layouts, operation)
    assert "the two are at different collectives, or their tensors differ" in answers[3][0]
    assert "an earlier collective did not finish" in answers[3][1]
    for rank in (0, 1, 2):
        assert "their tensors differ" in " ".join(answers[rank])


def test_more_memory_than_the_host_has_raises_with_sizes(monkeypatch):
    monkeypatch.setattr(host_limits, "free_memory", lambda: 1 << 20)
    pool = SegmentPool(0, 1 << 40, lambda _: True)
    pool.allocate(1 << 20)
    with pytest.raises(MemoryError, match=r"2097152 bytes.* only 1048576 bytes of free memory"):
        pool.allocate(2 << 20)


@pytest.mark.parametrize("ranks", [1, 2, 8, 64, 1024])
def test_segments_of_all_ranks_fit_into_the_address_space(ranks: int, monkeypatch) -> None:
    for memory in (1 << 31, 24 << 30, 2 << 40):
        monkeypatch.setattr(host_limits, "total_memory", lambda memory=memory: memory)
        each = segment_bytes(ranks)
        assert each % PAGE == 0
        assert ranks * each <= 4 * memory + ranks * (1 << 30)
        assert each >= min(memory, 1 << 30)


def reuse_freed_memory() -> list[int]:
    """A bucket is freed with its last tensor; a view of it keeps the memory."""
    group = Group.of(harness.group(), None)
    comm, _ = both(group)
    layout = Layout.even(64 * WORLD, WORLD)
    bucket = comm.buffer(layout, torch.float32, CPU)
    seen = [bucket.data.data_ptr()]
    cached = bucket.data[64:65]
    del bucket
    bucket = comm.buffer(layout, torch.float32, CPU)
    seen.append(bucket.data.data_ptr())
    del cached
    third = comm.buffer(layout, torch.float32, CPU)
    seen.append(third.data.data_ptr())
    return seen


def test_memory_is_freed_with_its_last_view(ranks: Pool) -> None:
    for first, second, third in ranks.run(reuse_freed_memory):
        assert second != first
        assert third == first


def choose_different_transports() -> str:
    group = Group.of(harness.group(), None)
    try:
        connect_control(group, "process_group" if group.rank == 2 else "auto")
    except ValueError as error:
        return str(error)
    return ""


def test_different_transports_raise_on_all_ranks(ranks: Pool) -> None:
    for message in ranks.run(choose_different_transports):
        assert "rank 1 has 'auto', rank 2 has 'process_group'" in message


def read_data_of_an_exited_rank() -> float:
    """Rank 0 posts its data and exits; the others read it later."""
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


def test_data_of_an_exited_rank_can_be_read():
    answers = harness.one_off(WORLD, read_data_of_an_exited_rank, lost=[0])
    assert answers[1:] == [1.0] * (WORLD - 1)


def count_files_in_dev_shm() -> int:
    group = Group.of(harness.group(), None)
    comm, _ = both(group)
    comm.buffer(Layout.even(64 * WORLD, WORLD), torch.float32, CPU)
    # Folders are those of memory checkpoints, which other tests may make.
    return sum(path.is_file() for path in Path("/dev/shm").glob("poplar*"))


def test_no_files_are_left_in_dev_shm(ranks: Pool) -> None:
    assert ranks.run(count_files_in_dev_shm) == [0] * WORLD


def connect_with_one_rank_elsewhere() -> tuple[str, str]:
    """Rank 0 reports another host, so no rank can share memory with it."""
    group = Group.of(harness.group(), None)
    with on_host("another host" if group.rank == 0 else "a host"):
        automatic = type(connect(group, "auto")).__name__
        try:
            connect(group, "shared_memory")
        except rendezvous.NotOneHost as error:
            return automatic, str(error)
        return automatic, ""


def test_ranks_of_two_hosts_use_hierarchical_or_raise(ranks: Pool) -> None:
    for automatic, message in ranks.run(connect_with_one_rank_elsewhere):
        assert automatic == "HierarchicalCommunicator"
        assert "cannot read the memory of rank" in message
        assert "another host" in message


def connect_as_clones(nbytes: int) -> tuple[str, str]:
    """Each rank opens a segment of its own host in which another process has a rank's number."""
    real, others = rendezvous.PeerSegment, []

    def open_another(_: int, __: int, size: int) -> PeerSegment:
        others.append(Segment(nbytes))
        return real(os.getpid(), others[-1].descriptor, size)

    group = Group.of(harness.group(), timedelta(seconds=5))
    with mock.patch.object(rendezvous, "PeerSegment", open_another):
        automatic = type(connect(group, "auto")).__name__
        with pytest.raises(rendezvous.NotOneHost) as raised:
            connect(group, "shared_memory")
    for other in others:
        other.close_descriptor()
    return automatic, str(raised.value)


@pytest.mark.parametrize("nbytes", [segment_bytes(WORLD), PAGE])
def test_ranks_in_clones_of_a_virtual_machine_do_not_share_memory(ranks: Pool, nbytes: int) -> None:
    for automatic, message in ranks.run(connect_as_clones, nbytes):
        assert automatic == "ProcessGroupCommunicator"
        assert "cannot read the memory of rank" in message


def connect_to_unknown_transport() -> str:
    try:
        connect(Group.of(harness.group(), None), "pigeons")
    except ValueError as error:
        return str(error)
    return ""


def use_a_plan_of_other_hosts() -> str:
    """A plan for ranks on one host, used on ranks of several hosts."""
    plan = replace(Plan.even(WORLD, WORLD, 1, stage=1), transport="shared_memory")
    model = torch.nn.Linear(4, 4)
    with on_host(f"host {harness.rank()}"), pytest.raises(ValueError, match="transport") as raised:
        HeteroZeroOptimizer(
            model, torch.optim.SGD, plan=plan, lr=0.1, process_group=harness.group()
        )
    return str(raised.value)


def test_unavailable_planned_transport_raises_with_a_fix(ranks: Pool) -> None:
    for message in ranks.run(use_a_plan_of_other_hosts):
        assert "the plan's transport 'shared_memory' is not available here" in message
        assert "communicator='process_group'" in message


def test_unknown_transport_raises_with_the_known_ones(ranks: Pool) -> None:
    for message in ranks.run(connect_to_unknown_transport):
        assert "'auto', 'process_group', 'shared_memory'" in message
