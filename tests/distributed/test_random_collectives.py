"""Random collectives against a float64 sum, and bit by bit against a sum in rank order and each
other.

`POPLAR_COLLECTIVES=10000 pytest tests/distributed/test_random_collectives.py` runs that many,
but those by the calls of devices.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from unittest import mock

import pytest
import ranks as harness
import torch
import torch.distributed as dist
from communicators import memory_cache, on_host
from native_calls import native_calls
from ranks import Pool
from subset import choose
from torch import Tensor

from poplar import ops
from poplar.comm import (
    Bucket,
    Codec,
    Communicator,
    Group,
    Work,
    connect,
    process_group,
)
from poplar.comm.shard_layout import Layout

WORLD = 4
BLOCKS = (0, 1, 3, 20, 200, 2000, 2000, 9000)
"""Of 64 elements: sizes of a buffer."""
TIMES = int(os.environ.get("POPLAR_COLLECTIVES", choose(quick=60, full=400)))
MAX_IN_FLIGHT = 4
RANK_ORDER = ("shared_memory", "process_group", "staged")
HOST_ORDER = ("hierarchical", "hierarchical:process_group")
CPU = torch.device("cpu")
OPERATIONS = ("reduce_scatter", "all_gather")
EPSILON = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-10}


@dataclass(frozen=True)
class Case:
    """One random collective, the same on all ranks."""

    number: int
    operation: str
    layout: Layout
    dtype: torch.dtype
    weights: tuple[float, ...]
    accumulate: bool
    is_shared: bool
    """Tensors are in the transport's memory; otherwise they are ordinary tensors."""

    @classmethod
    def draw(cls, number: int, generator: random.Random, blocks: Sequence[int]) -> Case:
        numel = 64 * generator.choice(blocks)
        cuts = sorted(64 * generator.randint(0, numel // 64) for _ in range(WORLD - 1))
        kind = generator.random()
        if kind < 0.2:  # one rank has it all
            cuts = [0] * generator.randint(0, WORLD - 1)
            cuts += [numel] * (WORLD - 1 - len(cuts))
        elif kind < 0.4:  # all have as much, if that is possible
            cuts = list(Layout.even(numel, WORLD).offsets[1:-1])
        return cls(
            number=number,
            operation=generator.choice(OPERATIONS),
            layout=Layout((0, *cuts, numel)),
            dtype=generator.choice((torch.float32, torch.bfloat16, torch.float16)),
            weights=tuple(generator.choice((0.0, 1.0, generator.random())) for _ in range(WORLD)),
            accumulate=generator.random() < 0.5,
            is_shared=generator.random() < 0.5,
        )

    def values(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.number * WORLD + rank)
        return torch.randn(self.layout.numel, generator=generator)

    def packed(self, rank: int) -> Tensor:
        """The values in the wire dtype: weighted and rounded once."""
        weight = torch.tensor(self.weights[rank], dtype=torch.float32)
        return (self.values(rank) * weight).to(self.dtype)

    def expected(self, rank: int) -> Tensor:
        """The result in float64; gathers have no arithmetic."""
        if self.operation == "all_gather":
            bounds = map(self.layout.bounds, range(WORLD))
            return torch.cat(
                [self.values(r)[slice(*b)].to(self.dtype) for r, b in enumerate(bounds)]
            )
        total = sum((self.packed(r).double() for r in range(WORLD)), torch.zeros(()).double())
        return total[slice(*self.layout.bounds(rank))] + float(self.accumulate)

    def in_rank_order(self, rank: int) -> Tensor:
        """The bits of one host: fp32 sums in rank order, to which the result is added last."""
        if self.operation == "all_gather":
            return self.expected(rank)
        total = self.packed(0).float()
        for other in range(1, WORLD):
            total = total + self.packed(other).float()
        return total[slice(*self.layout.bounds(rank))] + float(self.accumulate)

    def bound(self, rank: int, hosts: int) -> Tensor:
        """The rounding error: `WORLD` fp32 additions, one rounding to the result's dtype and, with
        several hosts, one rounding of each host's sum to the wire dtype.
        """
        if self.operation == "all_gather":
            return torch.zeros(())
        size = 1.0 + sum(self.packed(r).double().abs() for r in range(WORLD))
        bound = size * (WORLD + 1) * EPSILON[torch.float32]
        bound += size * EPSILON[self.dtype] * (hosts > 1)
        low, high = self.layout.bounds(rank)
        return bound[low:high]


def issue(case: Case, comm: Communicator) -> tuple[Work, Callable[[], Tensor]]:
    """Start the collective; the second value returns the result once the first has finished."""
    rank, layout, what = comm.group.rank, case.layout, f"number {case.number}"
    low, high = layout.bounds(rank)
    if case.operation == "all_gather":
        mine = case.values(rank)[low:high].to(case.dtype)
        data = torch.zeros(layout.numel, dtype=case.dtype)
        if case.is_shared:
            return comm.all_gather(data, layout, what=what, own=comm.share(mine)), lambda: data
        if case.accumulate:  # in place, in shared memory
            data = comm.buffer(layout, case.dtype, CPU).data
            data[low:high] = mine
            return comm.all_gather(data, layout, what=what, own=data[low:high]), lambda: data
        data[low:high] = mine
        return comm.all_gather(data, layout, what=what), lambda: data
    if case.is_shared:
        bucket = comm.buffer(layout, case.dtype, CPU, Codec(case.dtype))
    else:
        bucket = Bucket(torch.empty(layout.numel, dtype=case.dtype), layout, Codec(case.dtype))
    bucket.pack([case.values(rank)], [0], case.weights[rank])
    in_place = case.is_shared and case.dtype is torch.float32 and not case.accumulate
    out = bucket.data[low:high] if in_place else torch.ones(high - low)
    squares = torch.full(((high - low) // 64,), -1.0)

    def result() -> Tensor:
        assert torch.equal(squares, ops.block_sums_of_squares(out)), case
        return out

    pending = comm.reduce_scatter(
        bucket, out, accumulate=case.accumulate, what=what, squares=squares
    )
    return pending, result


def run(
    seed: int,
    times: int,
    choices: tuple[str, ...] = RANK_ORDER,
    hosts: int = 1,
    blocks: Sequence[int] = BLOCKS,
) -> list[str]:
    """Draw, issue and wait, in a different order on every rank; returns the wrong results.

    All transports must give the same bits.
    """
    # A group of its own for each: they would take each other's messages.
    transports = [connect(Group.of(harness.group(), None), choice) for choice in choices]
    group = transports[0].group
    draw, own_order = random.Random(seed), random.Random(seed + 1 + group.rank)
    wrong: list[str] = []
    in_flight = []
    for number in range(times):
        case = Case.draw(number, draw, blocks)
        in_flight.append((case, [issue(case, comm) for comm in transports]))
        if len(in_flight) > draw.randint(0, MAX_IN_FLIGHT - 1) or number == times - 1:
            own_order.shuffle(in_flight)
            for transport in range(len(transports)):
                for _, started in in_flight:
                    started[transport][0].wait()
            for case, started in in_flight:
                first, *others = (result() for _, result in started)
                off = (first.double() - case.expected(group.rank).double()).abs()
                is_right = not (off > case.bound(group.rank, hosts)).any()
                is_right &= hosts > 1 or torch.equal(first, case.in_rank_order(group.rank))
                if not is_right or not all(torch.equal(first, other) for other in others):
                    wrong.append(f"rank {group.rank}: {case}")
            in_flight = []
    return wrong


def test_all_transports_give_the_same_correct_bits(ranks: Pool) -> None:
    for seed in range(max(1, TIMES // 400)):  # each call has a deadline
        for wrong in ranks.run(run, 1 + 10 * seed, min(TIMES, 400)):
            assert wrong == []


def run_natively(seed: int, received_bytes: int) -> list[str]:
    """As on devices; a bucket of more bytes is sent in several calls."""
    with native_calls(), mock.patch.object(process_group, "RECEIVED_BYTES", received_bytes):
        return run(seed, 60, ("process_group",), blocks=range(60))


@pytest.mark.parametrize("received_bytes", [process_group.RECEIVED_BYTES, 1, 3000, 20_000])
@pytest.mark.every_combination
def test_native_calls_add_in_rank_order(ranks: Pool, received_bytes: int) -> None:
    for wrong in ranks.run(run_natively, 7, received_bytes):
        assert wrong == []


def run_without_a_cache(seed: int, times: int) -> list[str]:
    with memory_cache("off"):
        return run(seed, times)


def test_results_are_correct_without_a_memory_cache(ranks: Pool) -> None:
    for wrong in ranks.run(run_without_a_cache, 2, TIMES // 4):
        assert wrong == []


def run_on_hosts(seed: int, times: int, names: str) -> list[str]:
    """As `run` with the hierarchical transports; each rank reports the host named for it."""
    # On one host it stages over shared memory, which adds in rank order.
    staged = ("staged",) if len(set(names)) > 1 else ()
    with on_host(names[harness.rank()]):
        return run(seed, times, HOST_ORDER + staged, hosts=2)


@pytest.mark.parametrize("names", ["aabb", "abab", "abbb", "aaaa", "abcc", "abcd"])
def test_hierarchical_transports_give_the_same_correct_bits(ranks: Pool, names: str) -> None:
    for wrong in ranks.run(run_on_hosts, 3, TIMES // 4, names):
        assert wrong == []


def gather_after_creating_other_groups(names: str) -> bool:
    """Ranks that have created different numbers of process groups before."""
    mine = dist.new_group([harness.rank()], use_local_synchronization=True)
    more = [
        dist.new_group([harness.rank()], use_local_synchronization=True)
        for _ in range(harness.rank())
    ]
    with on_host(names[harness.rank()]):
        comm = connect(Group.of(harness.group(), None), "hierarchical:process_group")
        layout = Layout.even(64 * WORLD, WORLD)
        data = torch.full((64 * WORLD,), float(harness.rank()))
        comm.all_gather(data, layout, what="a gather").wait()
    for group in (mine, *more):
        dist.destroy_process_group(group)
    return bool((data.view(WORLD, -1) == torch.arange(WORLD).view(-1, 1)).all())


@pytest.mark.parametrize("names", ["aabb", "abba"])
def test_subgroups_do_not_depend_on_other_process_groups(ranks: Pool, names: str) -> None:
    assert all(ranks.run(gather_after_creating_other_groups, names))


def broadcast_and_reshard(choice: str, names: str) -> list[bool]:
    """Broadcasts from every rank, and reshards between several layouts."""
    native = choice == "native"
    calls = native_calls() if native else nullcontext()
    with on_host(names[harness.rank()]), calls:
        group = Group.of(harness.group(), None)
        comm = connect(group, "process_group" if native else choice)
        right = []
        for source in range(WORLD):
            data = torch.full((5, 3), float(group.rank))
            comm.broadcast(data, source, what="a broadcast")
            right.append(bool((data == source).all()))
        whole = torch.arange(64.0 * 20)
        cuts = ((0, 320, 320, 640, 1280), (0, 64, 128, 1216, 1280), (0, 0, 0, 0, 1280))
        for old, new in itertools.permutations(map(Layout, cuts), 2):
            shard = whole[slice(*old.bounds(group.rank))].clone()
            own = comm.reshard(shard, old, new, what="a move")
            right.append(torch.equal(own, whole[slice(*new.bounds(group.rank))]))
        nothing = Layout((0,) * (WORLD + 1))
        right.append(comm.reshard(whole[:0], nothing, nothing, what="a move").numel() == 0)
        return right


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("process_group", "aaaa"),
        ("native", "aaaa"),
        ("shared_memory", "aaaa"),
        ("staged", "aaaa"),
        ("staged", "abba"),
        ("hierarchical", "abba"),
        ("hierarchical:process_group", "abba"),
    ],
)
def test_broadcast_and_reshard_are_correct(ranks, choice, names):
    for right in ranks.run(broadcast_and_reshard, choice, names):
        assert all(right)
