"""Two hosts as network namespaces: what crosses between them, counted at their interfaces."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from launch import run_ranks
from network import EmulatedNetwork, EmulationUnavailable, Hosts

from poplar.comm import Bucket, Codec, Group, connect
from poplar.planning.layout import Layout

RANKS, NUMEL = 5, 1 << 20
ON_THE_FIRST = 3
"""Uneven: three ranks on one host, two on the other."""
GIGABITS = 4.0
FRAMES = 1.1
"""What headers and acknowledgements may add; a second copy of anything would be far above."""


def enter(hosts: Hosts, rank: int) -> None:
    hosts.enter(int(rank >= ON_THE_FIRST))


def run_and_count(hosts: Hosts, choice: str, operation: str, folder: str) -> None:
    """Rank 0 writes down the bytes that either host has sent in one collective."""
    group = Group.of(None, None)
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
    elif operation == "all_gather":
        comm.all_gather(bucket.data, layout, what=operation).wait()
        for rank in range(RANKS):
            assert (bucket.data[slice(*layout.bounds(rank))] == rank).all()
    else:
        comm.all_reduce(bucket, what=operation).wait()
        assert (bucket.data == sum(range(RANKS))).all()
    dist.barrier()
    if group.rank == 0:
        after = [hosts.sent_bytes(host) for host in (0, 1)]
        Path(folder, "sent").write_text(f"{after[0] - before[0]} {after[1] - before[1]}")
    dist.barrier()


def sent(choice: str, operation: str, folder: Path) -> tuple[float, float]:
    """By each host, as parts of the whole buffer."""
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
        ("reduce_scatter", 2 / 5, 3 / 5),  # sums of what the other host owns
        ("all_gather", 3 / 5, 2 / 5),  # what this host owns
        ("all_reduce", 1.0, 1.0),
    ],
)
def test_what_belongs_to_the_other_host_crosses_once(operation, first, second, tmp_path):
    found = sent("auto", operation, tmp_path)
    assert first <= found[0] <= FRAMES * first
    assert second <= found[1] <= FRAMES * second


def test_the_direct_algorithm_sends_it_once_for_each_rank(tmp_path):
    first, second = sent("process_group", "reduce_scatter", tmp_path)
    assert first >= 3 * 2 / 5
    assert second >= 2 * 3 / 5
