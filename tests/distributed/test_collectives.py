"""The direct algorithm against arithmetic in one process: random layouts, dtypes, empty slices."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import ranks as harness
import torch
import torch.distributed as dist
from native_calls import native_calls
from ranks import Pool
from torch import Tensor

from poplar import ops
from poplar.comm import Codec, Communicator, Control, Group, connect, process_group
from poplar.comm.shard_layout import Layout

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WORLD = 4


def random_layout(generator: random.Random, numel: int) -> Layout:
    cuts = sorted(64 * generator.randint(0, numel // 64) for _ in range(WORLD - 1))
    return Layout((0, *cuts, numel))


def gradient(rank: int, numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * seed + rank))


def sum_in_rank_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


def reduce_scatter_many(seed: int, times: int, depth: int, native: bool = False) -> list[str]:
    """Random buckets, several in flight; returns the wrong results."""
    group = Group.of(harness.group(), None)
    comm = connect(group, "process_group" if native else "auto")
    with native_calls() if native else nullcontext():
        return reduce_scatter_with(comm, seed, times, depth)


def reduce_scatter_with(comm: Communicator, seed: int, times: int, depth: int) -> list[str]:
    group = comm.group
    generator = random.Random(seed)
    wrong, in_flight = [], []
    for turn in range(times):
        numel = 64 * generator.randint(0, 60)
        layout = random_layout(generator, numel)
        dtype = generator.choice(DTYPES)
        weights = [generator.random() for _ in range(WORLD)]
        accumulate = generator.random() < 0.5
        packed = []
        for rank in range(WORLD):
            bucket = comm.buffer(layout, dtype, torch.device("cpu"), Codec(dtype))
            bucket.pack([gradient(rank, numel, turn)], [0], weights[rank])
            packed.append(bucket)
        mine = packed[group.rank]
        low, high = layout.bounds(group.rank)
        out = torch.full((high - low,), 0.5)
        expected = sum_in_rank_order([bucket.data for bucket in packed])[low:high]
        expected = expected + 0.5 if accumulate else expected
        pending = comm.reduce_scatter(mine, out, accumulate=accumulate, what=f"turn {turn}")
        in_flight.append((pending, out, expected, f"{turn}: {layout} {dtype}"))
        if len(in_flight) == depth or turn == times - 1:
            for pending, out, expected, text in in_flight:
                pending.wait()
                if not torch.equal(out, expected):
                    wrong.append(text)
            in_flight = []
    return wrong


@pytest.mark.parametrize("depth", [1, 5])
def test_reduce_scatter_adds_in_rank_order_bit_for_bit(ranks: Pool, depth: int) -> None:
    for wrong in ranks.run(reduce_scatter_many, 7, 60, depth):
        assert wrong == []


@pytest.mark.parametrize("depth", [1, 5])
def test_one_all_to_all_gives_the_same_bits(ranks: Pool, depth: int) -> None:
    for wrong in ranks.run(reduce_scatter_many, 7, 60, depth, native=True):
        assert wrong == []


def reduce_scatter_in_pieces(received_bytes: int) -> list[str]:
    with mock.patch.object(process_group, "RECEIVED_BYTES", received_bytes):
        return reduce_scatter_many(11, 60, 3, native=True)


@pytest.mark.parametrize("received_bytes", [1, 3000, 20_000])
def test_several_all_to_alls_of_a_large_bucket_give_the_same_bits(
    ranks: Pool, received_bytes: int
) -> None:
    for wrong in ranks.run(reduce_scatter_in_pieces, received_bytes):
        assert wrong == []


def sums_of_squares_in_pieces() -> bool:
    """Block sums of squares of a reduction in pieces equal those of its result."""
    comm = connect(Group.of(harness.group(), None), "process_group")
    layout = Layout((0, 64, 64, 1024, 1280))
    low, high = layout.bounds(comm.group.rank)
    bucket = comm.buffer(layout, torch.float32, torch.device("cpu"))
    bucket.pack([gradient(comm.group.rank, layout.numel, 0)], [0], 0.25)
    out, squares = torch.empty(high - low), torch.full((-(-(high - low) // 64),), torch.nan)
    with native_calls(), mock.patch.object(process_group, "RECEIVED_BYTES", 2000):
        comm.reduce_scatter(bucket, out, accumulate=False, what="x", squares=squares).wait()
    return torch.equal(squares, ops.block_sums_of_squares(out))


def test_sums_of_squares_of_a_large_bucket(ranks: Pool) -> None:
    assert all(ranks.run(sums_of_squares_in_pieces))


def broadcast_in_one_call(numel: int) -> bool:
    comm = connect(Group.of(harness.group(), None), "process_group")
    truth = gradient(0, numel, 1)
    received = truth * (comm.group.rank == 2)
    with native_calls():
        comm.broadcast(received, 2, what="a broadcast")
    return torch.equal(received, truth)


def test_a_broadcast_is_one_call(ranks: Pool) -> None:
    assert all(ranks.run(broadcast_in_one_call, 100))


def calls_of(operation: str) -> list[str]:
    """The functions of torch.distributed that one collective calls on a device backend."""
    comm = connect(Group.of(harness.group(), None), "process_group")
    uneven, even = Layout((0, 0, 64, 320, 640)), Layout.even(64 * WORLD, WORLD)
    calls: list[str] = []

    def count(module: object, name: str, real: Callable[..., Any]) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(name.lstrip("_"))
            return real(*arguments, **options)

        return mock.patch.object(module, name, call)

    with ExitStack() as patches:
        patches.enter_context(native_calls())
        patches.enter_context(count(dist, "all_to_all", dist.all_to_all))
        patches.enter_context(count(process_group, "_all_gather", process_group._all_gather))
        for name in ("all_to_all_single", "broadcast", "batch_isend_irecv", "isend", "irecv"):
            patches.enter_context(count(dist, name, getattr(dist, name)))
        low, high = uneven.bounds(comm.group.rank)
        if operation == "reduce_scatter":
            bucket = comm.buffer(uneven, torch.float32, torch.device("cpu"))
            out = torch.zeros(high - low)
            comm.reduce_scatter(bucket, out, accumulate=False, what=operation).wait()
        elif operation == "all_gather":
            comm.all_gather(torch.zeros(even.numel), even, what=operation).wait()
        elif operation == "uneven all_gather":
            comm.all_gather(torch.zeros(uneven.numel), uneven, what=operation).wait()
        elif operation == "broadcast":
            comm.broadcast(torch.zeros(100), 2, what=operation)
        else:
            new = Layout((0, 320, 320, 320, 640))
            comm.reshard(torch.zeros(high - low), uneven, new, what=operation)
    return calls


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        ("reduce_scatter", "all_to_all_single"),
        ("all_gather", "all_gather"),
        ("broadcast", "broadcast"),
        ("reshard", "all_to_all_single"),
    ],
)
@pytest.mark.every_combination
def test_a_collective_on_a_device_is_one_call(ranks: Pool, operation: str, call: str) -> None:
    assert ranks.run(calls_of, operation) == [[call]] * WORLD


def test_an_uneven_gather_on_a_device_is_one_call(ranks: Pool) -> None:
    stand_in = "all_to_all_single"  # gloo has no `all_to_all`
    assert ranks.run(calls_of, "uneven all_gather") == [["all_to_all", stand_in]] * WORLD


def test_one_rank_alone_needs_no_call(ranks: Pool) -> None:
    assert ranks.run(calls_of_one_rank, ranks=1) == [[]]


def calls_of_one_rank() -> list[str]:
    comm = connect(Group.of(harness.group(), None), "process_group")
    layout = Layout((0, 640))
    with native_calls(), mock.patch.object(dist, "all_to_all_single") as reduction:
        bucket = comm.buffer(layout, torch.float32, torch.device("cpu"))
        bucket.data.copy_(gradient(0, 640, 1))
        out = torch.zeros(640)
        comm.reduce_scatter(bucket, out, accumulate=False, what="a reduction").wait()
        comm.all_gather(out, layout, what="a gather").wait()
        assert torch.equal(out, bucket.data)
    return [str(call) for call in reduction.mock_calls]


def gather_many(seed: int, times: int, native: bool = False) -> list[str]:
    group = Group.of(harness.group(), None)
    comm = connect(group, "process_group" if native else "auto")
    with native_calls() if native else nullcontext():
        return gather_with(comm, seed, times)


def gather_with(comm: Communicator, seed: int, times: int) -> list[str]:
    group = comm.group
    generator = random.Random(seed)
    wrong = []
    for turn in range(times):
        numel = 64 * generator.randint(0, 60)
        layout = random_layout(generator, numel)
        if turn % 4 == 0:
            layout = Layout.even(numel, WORLD)
        truth = gradient(0, numel, turn).to(generator.choice(DTYPES))
        low, high = layout.bounds(group.rank)
        data = torch.full_like(truth, float("nan"))
        data[low:high] = truth[low:high]
        comm.all_gather(data, layout, what=f"turn {turn}").wait()
        if not torch.equal(data, truth):
            wrong.append(f"{turn}: {layout}")
    return wrong


@pytest.mark.parametrize("native", [False, True])
def test_all_gather_completes_the_buffer_in_place(ranks: Pool, native: bool) -> None:
    for wrong in ranks.run(gather_many, 8, 60, native):
        assert wrong == []


def reshard_many(seed: int, times: int, native: bool = False) -> list[str]:
    group = Group.of(harness.group(), None)
    comm = connect(group, "process_group" if native else "auto")
    with native_calls() if native else nullcontext():
        return reshard_with(comm, seed, times)


def reshard_with(comm: Communicator, seed: int, times: int) -> list[str]:
    group = comm.group
    generator = random.Random(seed)
    wrong = []
    for turn in range(times):
        numel = 64 * generator.randint(0, 60)
        old, new = random_layout(generator, numel), random_layout(generator, numel)
        truth = gradient(0, numel, turn)
        before = truth[slice(*old.bounds(group.rank))].clone()
        after = comm.reshard(before, old, new, what=f"turn {turn}")
        if not torch.equal(after, truth[slice(*new.bounds(group.rank))]):
            wrong.append(f"{turn}: {old} -> {new}")
    return wrong


@pytest.mark.parametrize("native", [False, True])
def test_reshard_moves_every_element_to_its_new_owner(ranks: Pool, native: bool) -> None:
    for wrong in ranks.run(reshard_many, 9, 60, native):
        assert wrong == []


def exchange_values_objects_and_integers() -> tuple[list[object], list[list[float]], list[int]]:
    group = Group.of(harness.group(), None)
    control = Control(group)
    objects = control.exchange_objects({"rank": group.rank, "text": "x" * group.rank}, what="test")
    later = [control.exchange(torch.tensor([float(group.rank), k]), what="test") for k in range(3)]
    values = [[float(part[0]) for part in collect()] for collect in later]
    received = []
    for leader in range(group.size):
        if leader == group.rank:
            control.broadcast_integer(100 + leader)
        else:
            received.append(control.receive_integer(leader))
    control.flush()
    return objects, values, received


def test_control_exchanges_values_objects_and_integers(ranks: Pool) -> None:
    for rank, (objects, values, received) in enumerate(
        ranks.run(exchange_values_objects_and_integers)
    ):
        assert objects == [{"rank": r, "text": "x" * r} for r in range(WORLD)]
        assert values == [[0.0, 1.0, 2.0, 3.0]] * 3
        assert received == [100 + leader for leader in range(WORLD) if leader != rank]


def wait_in_opposite_orders(choice: str) -> list[float]:
    """Even ranks wait for the sum before they issue the gather; odd ranks wait for the gather
    first.
    """
    group = Group.of(harness.group(), timedelta(seconds=20))
    comm = connect(group, choice)
    layout = Layout.even(64 * WORLD, WORLD)
    bucket = comm.buffer(layout, torch.float32, torch.device("cpu"))
    bucket.pack([torch.ones(layout.numel)], [0], 1.0)
    data = torch.full((layout.numel,), 1.0)
    total = torch.empty(layout.size(group.rank))
    summed = comm.reduce_scatter(bucket, total, accumulate=False, what="the sum")
    if group.rank % 2 == 0:
        summed.wait()
    gathered = comm.all_gather(data, layout, what="the gather")
    gathered.wait()
    summed.wait()
    return [total.mean().item(), data.mean().item()]


@pytest.mark.parametrize("choice", ["shared_memory", "process_group", "staged"])
def test_ranks_may_wait_in_any_order(ranks: Pool, choice: str) -> None:
    assert ranks.run(wait_in_opposite_orders, choice) == [[4.0, 1.0]] * WORLD
