"""Two hosts as network namespaces: the bytes sent between them, counted at their interfaces."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import ranks as harness
from communicators import connect_natively
from launch import run_ranks
from native_calls import all_to_all_of_parts
from network import EmulatedNetwork, EmulationUnavailable, Hosts

from poplar.comm import Bucket, Codec, Communicator, Group, connect, host_topology
from poplar.comm.host_memory.rendezvous import Rendezvous
from poplar.comm.shard_layout import Layout
from poplar.values.errors import CollectiveTimeout

RANKS, NUMEL = 5, 1 << 20
RANKS_ON_FIRST_HOST = 3
"""Uneven: three ranks on one host, two on the other."""
GIGABITS = 4.0
OVERHEAD = 1.1
"""The factor for headers and acknowledgments; sending anything twice would exceed it."""


def enter(hosts: Hosts, rank: int) -> None:
    hosts.enter(int(rank >= RANKS_ON_FIRST_HOST))


def run_and_count(hosts: Hosts, choice: str, operation: str, folder: str) -> None:
    """Rank 0 stores the bytes that each host has sent in one collective."""
    group = Group.of(None, None)
    if choice == "native calls":  # what devices issue, here on gloo
        dist.all_to_all = all_to_all_of_parts
        names = [rank >= RANKS_ON_FIRST_HOST for rank in range(RANKS)]
        comm: Communicator = connect_natively(group, host_topology.Hosts.of(names))
    else:
        comm = connect(group, choice)
    layout = Layout.even(NUMEL, RANKS)
    bucket = Bucket(torch.full((NUMEL,), float(group.rank)), layout, Codec())
    low, high = layout.bounds(group.rank)
    dist.barrier()
    before = [hosts.sent_bytes(host) for host in (0, 1)]
    dist.barrier()
    if operation == "reduce_scatter":
        out = torch.empty(high - low)
        comm.reduce_scatter(bucket, out, accumulate=False, what=operation).wait()
        assert (out == sum(range(RANKS))).all()
    else:
        comm.all_gather(bucket.data, layout, what=operation).wait()
        for rank in range(RANKS):
            assert (bucket.data[slice(*layout.bounds(rank))] == rank).all()
    dist.barrier()
    if group.rank == 0:
        after = [hosts.sent_bytes(host) for host in (0, 1)]
        Path(folder, "sent").write_text(f"{after[0] - before[0]} {after[1] - before[1]}")
    dist.barrier()


def bytes_sent(choice: str, operation: str, folder: Path) -> tuple[float, float]:
    """Bytes sent by each host, relative to the whole buffer."""
    try:
        with EmulatedNetwork(bits_per_second=1e9 * GIGABITS) as hosts:
            run_ranks(
                run_and_count,
                RANKS,
                hosts,
                choice,
                operation,
                str(folder),
                before=partial(enter, hosts),
            )
    except EmulationUnavailable as why:
        pytest.skip(f"no network namespaces here: {why}")
    first, second = map(int, (folder / "sent").read_text().split())
    return first / (4 * NUMEL), second / (4 * NUMEL)


@pytest.mark.parametrize(
    ("operation", "first", "second"),
    [
        ("reduce_scatter", 2 / 5, 3 / 5),  # sums of slices of the other host
        ("all_gather", 3 / 5, 2 / 5),  # slices of this host
    ],
)
@pytest.mark.parametrize("choice", ["auto", "hierarchical:process_group", "native calls"])
def test_data_of_the_other_host_is_sent_once(operation, first, second, choice, tmp_path):
    found = bytes_sent(choice, operation, tmp_path)
    assert first <= found[0] <= OVERHEAD * first
    assert second <= found[1] <= OVERHEAD * second


def test_direct_algorithm_sends_it_once_per_rank(tmp_path):
    first, second = bytes_sent("process_group", "reduce_scatter", tmp_path)
    assert first >= 3 * 2 / 5
    assert second >= 2 * 3 / 5


def lose_a_rank(operation: str, how: int, seconds: float) -> str:
    """Rank 3, on the second host, is killed or stopped; the others return the error."""
    host_topology.host_id = lambda: ("aabb"[harness.rank()],)
    group = Group.of(harness.group(), timedelta(seconds=seconds))
    comm = connect(group, "hierarchical")
    layout = Layout.even(64 * 4, 4)
    bucket = Bucket(torch.ones(layout.numel), layout, Codec())
    comm.all_gather(bucket.data, layout, what="the first").wait()
    if group.rank == 3:
        os.kill(os.getpid(), how)
    calls = {
        "reduce_scatter": lambda: comm.reduce_scatter(
            bucket, torch.empty(layout.size(group.rank)), accumulate=False, what="it"
        ).wait(),
        "all_gather": lambda: comm.all_gather(bucket.data, layout, what="it").wait(),
        "broadcast": lambda: comm.broadcast(bucket.data, 3, what="it"),
    }
    try:
        calls[operation]()
    except CollectiveTimeout as error:
        return str(error)
    return ""


LOST = [
    ("reduce_scatter", signal.SIGSTOP, 2.0),
    ("all_gather", signal.SIGKILL, 10.0),
    ("broadcast", signal.SIGKILL, 10.0),
]
"""The operation, how rank 3 is lost, and the deadline in seconds. An exit is usually found at once.
But a peer that finds it before it has sent to rank 2 does not send, and rank 2 waits so long."""


@pytest.mark.parametrize(("operation", "how", "seconds"), LOST)
def test_killed_or_stopped_rank_of_another_host_is_found(operation, how, seconds):
    answers = harness.one_off(4, lose_a_rank, operation, int(how), seconds, lost=[3])
    # Rank 2 shares a host with rank 3 and names it, unless it does not wait for it. The others may
    # wait for rank 2 instead and name that one.
    assert "waiting for rank(s) 3" in answers[2] or operation == "broadcast"
    for rank in (0, 1):
        names = [f"waiting for rank(s) {lost}" for lost in ("2", "3", "2, 3")]
        assert any(text in answers[rank] for text in names), answers[rank]


def run_out_of_memory_on_a_rank(host: str) -> str:
    """Rank 2 gets no shared memory for its bucket; all return their error."""
    host_topology.host_id = lambda: (host[harness.rank()],)
    # The ranks of the other host wait for messages until the deadline.
    group = Group.of(harness.group(), timedelta(seconds=4))
    comm = connect(group, "hierarchical")
    layout = Layout.even(64 * 4, 4)
    bucket = Bucket(torch.ones(layout.numel), layout, Codec())
    if group.rank == 2:
        Rendezvous.allocate = mock.Mock(side_effect=MemoryError("no memory"))
    out = torch.empty(layout.size(group.rank))
    try:
        comm.reduce_scatter(bucket, out, accumulate=False, what="it").wait()
    except (CollectiveTimeout, MemoryError) as error:
        return str(error)
    return ""


def test_ranks_of_another_host_get_the_reason_of_a_rank_that_failed_itself():
    answers = harness.one_off(4, run_out_of_memory_on_a_rank, "aabb")
    reason = "rank 2: a collective failed: MemoryError('no memory')"
    assert answers[2] == "no memory"
    assert "waiting for rank(s) 2 " in answers[3]
    assert answers[3].endswith(f"Cause: it aborted: {reason}")
    for answer in answers[:2]:  # rank 1 waits for a part from rank 3
        assert "waiting for rank(s) 2 " in answer
        assert answer.endswith(f"Cause: {reason}")
