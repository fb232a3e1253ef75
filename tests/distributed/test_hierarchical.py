"""The hierarchical transport: ranks that are lost or fail on another host are named."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from unittest import mock

import pytest
import ranks as harness
import torch

from poplar.comm import Bucket, Codec, Group, connect, host_topology
from poplar.comm.host_memory.rendezvous import Rendezvous
from poplar.comm.shard_layout import Layout
from poplar.values.errors import CollectiveTimeout


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
