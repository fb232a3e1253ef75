"""The `cpu:poplar` torch backend: collectives match gloo's, and DDP and FSDP2 run on it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import ranks as harness
import torch
import torch.distributed as dist
from ranks import Pool
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import poplar
import poplar.comm  # registers the backend
from poplar.comm import rendezvous, segment_pool

WORLD = 4

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def new_group(backend: str, seconds: float = 60.0) -> dist.ProcessGroup:
    """A process group of the ranks of the call, for any groups that earlier tests left.

    torch names such a group after the number of groups that a rank has. Ranks with different
    numbers would wait for each other forever, so they agree on the name here.
    """
    ranks, names = dist.get_process_group_ranks(harness.group()), [uuid.uuid4().hex]
    dist.broadcast_object_list(names, src=ranks[0], group=harness.group())
    with mock.patch.object(distributed_c10d, "_hash_ranks_to_str", return_value=names[0]):
        group = dist.new_group(
            ranks,
            timeout=timedelta(seconds=seconds),
            backend=backend,
            use_local_synchronization=True,
        )
    assert group is not None
    return group


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Multiples of 1/8, so that every order of addition gives the same bits."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return (torch.randint(-64, 64, shape, generator=generator) / 8).to(dtype)


def all_reduced(group: dist.ProcessGroup, dtype: torch.dtype, op: dist.ReduceOp) -> Tensor:
    data = values(3, 37, dtype=dtype)
    dist.all_reduce(data, op, group=group)
    return data


def all_reduced_noncontiguous(group: dist.ProcessGroup) -> Tensor:
    data = values(8, 6).t()
    dist.all_reduce(data, group=group)
    return data


def coalesced(group: dist.ProcessGroup) -> Tensor:
    counts, tokens = values(3).long(), values(3).long() + 100
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_reduce_coalesced([counts, tokens], group=group)
    return torch.cat([counts, tokens])


def all_reduced_sparse(group: dist.ProcessGroup) -> Tensor:
    rank = dist.get_rank(group)
    data = torch.sparse_coo_tensor([[rank]], values(1, 4), (WORLD, 4), check_invariants=True)
    dist.all_reduce(data, group=group)
    return data.to_dense()


def gathered(group: dist.ProcessGroup, dtype: torch.dtype) -> Tensor:
    whole = torch.empty(WORLD * 5, 3, dtype=dtype)
    all_gather(whole, values(5, 3, dtype=dtype), group=group)
    return whole


def gathered_in_a_list(group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty(7, 2) for _ in range(WORLD)]
    dist.all_gather(parts, values(7, 2), group=group)
    return torch.stack(parts)


def reduce_scattered(group: dist.ProcessGroup, dtype: torch.dtype, op: str = "SUM") -> Tensor:
    own = torch.empty(5, 3, dtype=dtype)
    reduce_scatter(own, values(WORLD * 5, 3, dtype=dtype), getattr(dist.ReduceOp, op), group=group)
    return own


def reduce_scattered_from_a_list(group: dist.ProcessGroup, dtype: torch.dtype, op: str) -> Tensor:
    own = torch.empty(3, dtype=dtype)
    parts = list(values(WORLD * 3, dtype=dtype).split(3))
    dist.reduce_scatter(own, parts, getattr(dist.ReduceOp, op), group=group)
    return own


def reduce_scattered_coalesced(group: dist.ProcessGroup) -> Tensor:
    owns = [torch.empty(3, dtype=torch.int64), torch.empty(2, dtype=torch.int64)]
    with dist._coalescing_manager(group=group):
        for own in owns:
            reduce_scatter(own, values(WORLD * own.numel()).long(), group=group)
    return torch.cat(owns)


def gathered_coalesced(group: dist.ProcessGroup) -> Tensor:
    outputs = [[torch.empty(2), torch.empty(3)] for _ in range(WORLD)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_gather_coalesced(outputs, [values(2), values(3)], group=group)
    return torch.stack([torch.cat(tensors) for tensors in outputs])


def reduce_scattered_from_an_uneven_list(group: dist.ProcessGroup) -> Tensor:
    own = torch.empty(dist.get_rank(group) + 1)
    parts = list(values(WORLD * (WORLD + 1) // 2).split([rank + 1 for rank in range(WORLD)]))
    dist.reduce_scatter(own, parts, group=group)
    return own


def broadcast(group: dist.ProcessGroup) -> Tensor:
    data = values(3, 5).t()
    dist.broadcast(data, 2, group=group)
    return data


def all_to_all(group: dist.ProcessGroup) -> Tensor:
    rank = dist.get_rank(group)
    leaving = [(rank + peer) % 3 for peer in range(WORLD)]
    received = torch.empty(sum(leaving), 2)
    # (rank + peer) % 3 is symmetric, so both ends expect the same number of rows.
    dist.all_to_all_single(received, values(sum(leaving), 2), leaving, leaving, group=group)
    return received


def all_to_all_even(group: dist.ProcessGroup) -> Tensor:
    received = torch.empty(WORLD * 3, dtype=torch.int64)
    dist.all_to_all_single(received, values(WORLD * 3).long(), group=group)
    return received


def all_gathered_objects(group: dist.ProcessGroup) -> Tensor:
    found: list[object] = [None] * WORLD
    dist.all_gather_object(found, {"rank": dist.get_rank(group)}, group=group)
    return torch.tensor([entry["rank"] for entry in found])  # type: ignore[index]


def run_by_gloo(group: dist.ProcessGroup) -> Tensor:
    """Collectives that shared memory does not support."""
    rank, seen = dist.get_rank(group), []
    data = values(4)
    dist.reduce(data, 1, group=group)
    seen.append(data if rank == 1 else torch.zeros(4))
    data = torch.zeros(4)
    if rank == 0:
        dist.send(torch.ones(4), 3, group=group)
    if rank == 3:
        dist.recv(data, 0, group=group)
    seen.append(data)
    return torch.stack(seen)


CALLS: dict[str, Callable[[dist.ProcessGroup], Tensor]] = {
    function.__name__: function
    for function in (
        all_reduced_noncontiguous,
        coalesced,
        gathered_coalesced,
        reduce_scattered_coalesced,
        all_reduced_sparse,
        gathered_in_a_list,
        reduce_scattered_from_an_uneven_list,
        broadcast,
        all_to_all,
        all_to_all_even,
        all_gathered_objects,
        run_by_gloo,
    )
}
FLOATING = (torch.float32, torch.bfloat16, torch.float16)
for dtype in FLOATING:
    CALLS[f"sum {dtype}"] = lambda group, dtype=dtype: all_reduced(group, dtype, dist.ReduceOp.SUM)
    CALLS[f"scatter {dtype}"] = lambda group, dtype=dtype: reduce_scattered(group, dtype)
for dtype in (*FLOATING, torch.int64, torch.float64):
    CALLS[f"gather {dtype}"] = lambda group, dtype=dtype: gathered(group, dtype)
for dtype in (torch.float32, torch.int64, torch.float64):
    for op in ("SUM", "MIN", "MAX", "PRODUCT"):
        CALLS[f"scatter {op} {dtype}"] = lambda g, d=dtype, op=op: reduce_scattered(g, d, op)
        CALLS[f"scatter a list {op} {dtype}"] = lambda g, d=dtype, op=op: (
            reduce_scattered_from_a_list(g, d, op)
        )
for dtype, op in ((torch.float32, "MAX"), (torch.int64, "SUM"), (torch.float64, "SUM")):
    CALLS[f"{op} {dtype}"] = lambda group, dtype=dtype, op=op: all_reduced(
        group, dtype, getattr(dist.ReduceOp, op)
    )


def calls_that_differ_from_gloo() -> list[str]:
    """The calls whose results differ from gloo's; all run on one group, one after the other."""
    ours, gloo = new_group("cpu:poplar"), new_group("gloo")
    wrong = [name for name, call in CALLS.items() if not torch.equal(call(ours), call(gloo))]
    dist.barrier(ours)
    return wrong


def test_all_collectives_match_gloo(ranks: Pool) -> None:
    assert ranks.run(calls_that_differ_from_gloo) == [[]] * WORLD


def gather_uneven_lists() -> list[list[float]]:
    """gloo does not support this."""
    group = new_group("cpu:poplar")
    rank = dist.get_rank(group)
    parts = [torch.empty(peer) for peer in range(WORLD)]
    dist.all_gather(parts, torch.full((rank,), float(rank)), group=group)
    return [part.tolist() for part in parts]


def test_uneven_lists_are_gathered(ranks: Pool) -> None:
    assert ranks.run(gather_uneven_lists) == [[[], [1.0], [2.0] * 2, [3.0] * 3]] * WORLD


def run_on_strided_tensors(numel: int) -> list[bool]:
    """Strided tensors get the results of contiguous ones, and the gaps are unchanged."""
    group, right = new_group("cpu:poplar"), []
    calls = {
        "all_reduce": lambda data: dist.all_reduce(data, group=group),
        "broadcast": lambda data: dist.broadcast(data, 1, group=group),
        "reduce_scatter": lambda data: reduce_scatter(data[: numel // WORLD], data, group=group),
        "all_gather": lambda data: all_gather(data, data[: numel // WORLD], group=group),
        "all_to_all": lambda data: dist.all_to_all_single(data, data.clone(), group=group),
    }
    for call in calls.values():
        wide = values(numel, 2)
        gaps, dense = wide[:, 1].clone(), wide[:, 0].clone()
        call(wide[:, 0])
        call(dense)
        right.append(torch.equal(wide[:, 0], dense) and torch.equal(wide[:, 1], gaps))
    return right


@pytest.mark.parametrize("numel", [WORLD * 3, WORLD << 20])
def test_strided_tensors_match_contiguous_ones(ranks: Pool, numel: int) -> None:
    assert ranks.run(run_on_strided_tensors, numel) == [[True] * 5] * WORLD


def average() -> float:
    group = new_group("cpu:poplar")
    data = torch.full((5,), float(dist.get_rank(group)))
    dist.all_reduce(data, dist.ReduceOp.AVG, group=group)
    return data.mean().item()


def test_all_reduce_average(ranks: Pool) -> None:
    assert ranks.run(average) == [1.5] * WORLD


def wait_in_different_orders() -> list[float]:
    """Works are waited for late, and in a different order on every rank."""
    group = new_group("cpu:poplar")
    rank = dist.get_rank(group)
    tensors = [torch.full((1000,), float(number + rank)) for number in range(6)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for number in range(6):
        works[(number + rank) % 6].wait()
    return [tensor.mean().item() for tensor in tensors]


def test_works_progress_in_any_order_of_waits(ranks: Pool) -> None:
    assert (
        ranks.run(wait_in_different_orders) == [[4.0 * number + 6.0 for number in range(6)]] * WORLD
    )


def use_what_reads_the_device_types() -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """torch asks a process group for its device types in `distributed.checkpoint`."""
    group = new_group("cpu:poplar")
    module = nn.Linear(3, 2)
    whole = {name: torch.full_like(p, 2.0) for name, p in module.named_parameters()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with mock.patch.object(distributed_c10d, "_get_default_group", return_value=group):
        set_model_state_dict(module, whole if dist.get_rank() == 0 else {}, options=options)
    device = str(distributed_c10d._get_pg_default_device(group))
    return device, module.state_dict(), whole


def test_torch_finds_the_device_type(ranks: Pool) -> None:
    for device, found, expected in ranks.run(use_what_reads_the_device_types):
        assert device == "cpu"
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def use_wrong_splits() -> list[str]:
    group, message = new_group("cpu:poplar"), []
    for splits in ([1, 1, 1], [1, 1, 1, 2], None):
        try:
            data = torch.ones(WORLD + (splits is None))
            dist.all_to_all_single(torch.empty_like(data), data, splits, splits, group=group)
        except ValueError as error:
            message.append(str(error))
    dist.barrier(group)
    return message


def test_wrong_splits_raise_and_the_group_stays_usable(ranks: Pool) -> None:
    for message in ranks.run(use_wrong_splits):
        assert len(message) == 3
        assert "one for each rank" in message[0]
        assert "add up to 4 rows" in message[1]
        assert "5 rows are not divisible by 4" in message[2]


def use_wrong_sizes() -> list[str]:
    group, message = new_group("cpu:poplar"), []
    calls = (
        lambda: all_gather(torch.empty(7), torch.ones(2), group=group),
        lambda: reduce_scatter(torch.empty(2), torch.ones(7), group=group),
        lambda: all_gather(torch.empty(2 * WORLD).half(), torch.ones(2), group=group),
    )
    for call in calls:
        try:
            call()
        except (ValueError, RuntimeError) as error:
            message.append(str(error))
    dist.barrier(group)
    return message


def test_wrong_sizes_raise_and_the_group_stays_usable(ranks: Pool) -> None:
    for message in ranks.run(use_wrong_sizes):
        assert len(message) == 3, message


def mean_of_large_values() -> float:
    group = new_group("cpu:poplar")
    data = torch.full((100,), 40_000.0, dtype=torch.float16)
    dist.all_reduce(data, dist.ReduceOp.AVG, group=group)
    return data.float().mean().item()


def test_average_does_not_overflow_float16(ranks: Pool) -> None:
    assert ranks.run(mean_of_large_values) == [40_000.0] * WORLD


def callbacks_that_wait() -> list[float]:
    """Like DDP's PowerSGD hook: the callback of one collective waits for the next."""
    group = new_group("cpu:poplar", seconds=20.0)

    def again(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        (tensor,) = future.value()
        return dist.all_reduce(tensor, group=group, async_op=True).get_future().wait()[0]

    works = [dist.all_reduce(torch.ones(8), group=group, async_op=True) for _ in range(3)]
    futures = []
    for work in works:
        futures.append(work.get_future().then(again))
        futures[-1].wait()  # all ranks must issue the second ones in the same order
    return [future.wait().mean().item() for future in futures]


def test_callbacks_may_wait_for_collectives(ranks: Pool) -> None:
    assert ranks.run(callbacks_that_wait) == [[16.0] * 3] * WORLD


def create_groups_in_opposite_orders() -> list[float]:
    """The first collective connects the ranks and must not block the store for this rank."""
    first, data = new_group("cpu:poplar", seconds=20.0), torch.ones(4)
    if dist.get_rank() == 0:
        work = dist.all_reduce(data, group=first, async_op=True)
        second = new_group("gloo", seconds=20.0)
        work.wait()
    else:
        second = new_group("gloo", seconds=20.0)
        dist.all_reduce(data, group=first)
    dist.all_reduce(data, group=second)
    return data.tolist()


def test_first_collective_does_not_block_the_store(ranks: Pool) -> None:
    assert ranks.run(create_groups_in_opposite_orders) == [[16.0] * 4] * WORLD


def use_a_destroyed_group() -> str:
    group = new_group("cpu:poplar")
    dist.barrier(group)
    destroyed = group  # torch drops its reference, users may keep theirs
    dist.destroy_process_group(group)
    try:
        destroyed.allreduce([torch.ones(1)])
    except RuntimeError as error:
        return str(error)
    return ""


def test_destroyed_group_is_refused():
    # On separate ranks: torch reuses the group's name, and gloo would find old addresses.
    for message in harness.one_off(2, use_a_destroyed_group, timeout=50.0):
        assert "was destroyed" in message


END_EARLY = """
import sys, torch, torch.distributed as dist
import poplar.comm
rank = int(sys.argv[1])
dist.init_process_group("cpu:poplar", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
dist.barrier()
if rank == 0:
    work = dist.all_reduce(torch.ones(1 << 20), async_op=True)  # the other rank never issues it
print("the end")
"""


def test_process_exits_with_a_collective_in_flight(tmp_path):
    command = [sys.executable, "-c", END_EARLY]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        message, _ = process.communicate(timeout=50)
        assert process.returncode == 0, message
        assert "the end" in message


def train_with_poplar(backend: str) -> tuple[str, list[float]]:
    group = new_group(backend)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = poplar.HeteroZeroOptimizer(
        model,
        torch.optim.AdamW,
        plan=poplar.Plan.manual("1,2,3,2", stage=2),
        process_group=group,
        lr=0.01,
    )
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    losses = []
    for _ in range(3):
        batch = torch.randn((1, 2, 3, 2)[dist.get_rank(group)], 16, generator=generator)
        result = optimizer.train_step(lambda model, batch: model(batch).square().mean(), batch)
        losses.append(result.loss)
    return type(optimizer._engine.comm).__name__, losses


def test_poplar_uses_shared_memory_on_cpu_poplar(ranks: Pool) -> None:
    ours = ranks.run(train_with_poplar, "cpu:poplar")
    assert ours == ranks.run(train_with_poplar, "gloo")
    assert {name for name, _ in ours} == {"SharedMemoryCommunicator"}


def fail_before_posting() -> list[str]:
    """Rank 0 has no memory for its first sum, and both ranks continue with the next."""
    group, message = new_group("cpu:poplar", seconds=20.0), []
    dist.barrier(group)
    real = segment_pool.SegmentPool.allocate
    if dist.get_rank() == 0:
        segment_pool.SegmentPool.allocate = raise_memory_error
    for _ in range(2):
        try:
            dist.all_reduce(torch.ones(1000), group=group)
        except (RuntimeError, MemoryError) as error:
            message.append(str(error))
        segment_pool.SegmentPool.allocate = real
    return message


def raise_memory_error(*_: object) -> None:
    raise MemoryError("no memory")


def test_collective_that_fails_before_posting_fails_on_all_ranks():
    for message in harness.one_off(2, fail_before_posting, timeout=50.0):
        assert len(message) == 2
        assert all("no memory" in text for text in message)


def interrupt_a_sum() -> str:
    """Ctrl-C during an in-place sum; the sum must not be resumed."""
    group = new_group("cpu:poplar", seconds=20.0)
    dist.barrier(group)
    real = rendezvous.Rendezvous.mark_written
    if dist.get_rank() == 0:
        rendezvous.Rendezvous.mark_written = interrupted
    data = torch.ones(1000)
    with contextlib.suppress(RuntimeError, KeyboardInterrupt):
        dist.all_reduce(data, group=group)
    rendezvous.Rendezvous.mark_written = real
    try:
        dist.all_reduce(torch.ones(1000), group=group)
    except RuntimeError as error:
        return str(error)
    return ""


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_interrupted_all_reduce_aborts_all_ranks():
    for message in harness.one_off(2, interrupt_a_sum, timeout=50.0):
        assert "KeyboardInterrupt" in message


def issue_from_two_threads() -> bool:
    """A thread that waits for its own collective must not run a later one of another thread."""
    group, other = new_group("cpu:poplar", seconds=20.0), new_group("gloo", seconds=20.0)
    rank, data, late = dist.get_rank(), torch.ones(1 << 20), torch.ones(4)
    works = []

    def issue() -> None:
        works.append(dist.all_reduce(late, group=group, async_op=True))

    dist.all_reduce(data, group=group)
    if rank == 0:
        thread = threading.Thread(target=issue)
        thread.start()
        thread.join()
        dist.barrier(other)  # the other ranks issue theirs after it
    else:
        dist.barrier(other)
        issue()
    works[0].wait()
    return bool((late == WORLD).all())


def test_wait_does_not_run_later_collectives_of_other_threads(ranks: Pool) -> None:
    assert all(ranks.run(issue_from_two_threads))


def issue_in_a_signal_handler() -> str:
    """A signal handler issues a collective while the main thread is inside one."""
    group, message = new_group("cpu:poplar", seconds=20.0), []

    def handle(*_: object) -> None:
        try:
            dist.all_reduce(torch.ones(4), group=group)
        except RuntimeError as error:
            message.append(str(error))

    dist.barrier(group)
    if dist.get_rank() == 0:
        old = signal.signal(signal.SIGUSR2, handle)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR2)).start()
    else:
        time.sleep(1.0)
    dist.barrier(group)
    if dist.get_rank() == 0:
        signal.signal(signal.SIGUSR2, old)
    return message[0] if message else ""


def test_nested_collective_is_refused(ranks: Pool) -> None:
    first, *others = ranks.run(issue_in_a_signal_handler)
    assert "a signal handler must not issue any" in first
    assert others == [""] * (WORLD - 1)


def run_with_another_default_dtype() -> list[float]:
    group = new_group("cpu:poplar")
    torch.set_default_dtype(torch.bfloat16)
    try:
        own = torch.empty(4)
        reduce_scatter(own, torch.ones(4 * WORLD), group=group)
        data = torch.ones(4)
        dist.all_reduce(data, dist.ReduceOp.AVG, group=group)
        return [own.mean().item(), data.mean().item()]
    finally:
        torch.set_default_dtype(torch.float32)


def test_default_dtype_does_not_change_results(ranks: Pool) -> None:
    assert ranks.run(run_with_another_default_dtype) == [[4.0, 1.0]] * WORLD


# Trainers


def train(kind: str, backend: str) -> list[float]:
    """The losses of a few steps."""
    group = new_group(backend)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model, process_group=group)
    else:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    losses = []
    for _ in range(5):
        inputs = torch.randn(8, 16, generator=generator)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ddp_and_fsdp2_have_the_same_losses_as_on_gloo(ranks: Pool, kind: str) -> None:
    ours, gloo = ranks.run(train, kind, "cpu:poplar"), ranks.run(train, kind, "gloo")
    for mine, theirs in zip(ours, gloo, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-5, atol=1e-6)


# Failures


IN_SHARED_MEMORY = {
    "all_reduce": CALLS["sum torch.float32"],
    "all_gather": CALLS["gather torch.float32"],
    "reduce_scatter": CALLS["scatter torch.float32"],
    "all_to_all": all_to_all,
    "broadcast": broadcast,
    "barrier": lambda group: dist.barrier(group) or torch.zeros(()),
}


def lose_a_rank(how: int, seconds: float) -> dict[str, str]:
    """Rank 2 is killed or stopped before these collectives, each on its own group.

    Rank 2 is also the source of the broadcast. Returns the errors.
    """
    groups = {name: new_group("cpu:poplar", seconds) for name in IN_SHARED_MEMORY}
    for group in groups.values():
        dist.barrier(group)
    if dist.get_rank() == 2:
        os.kill(os.getpid(), how)
    message = {}
    for name, call in IN_SHARED_MEMORY.items():
        try:
            call(groups[name])
        except RuntimeError as error:
            message[name] = str(error)
    return message


@pytest.mark.parametrize(("how", "seconds"), [(signal.SIGKILL, 60.0), (signal.SIGSTOP, 1.5)])
def test_killed_or_stopped_rank_is_named(how, seconds):
    answers = harness.one_off(WORLD, lose_a_rank, int(how), seconds, lost=[2], timeout=50.0)
    for rank in (0, 1, 3):
        assert answers[rank].keys() == IN_SHARED_MEMORY.keys()
        for name, message in answers[rank].items():
            assert f"rank {rank}: {name} failed, waiting for rank(s) 2" in message


def lose_a_rank_of_ddp() -> str:
    model = nn.parallel.DistributedDataParallel(
        nn.Linear(4, 4), process_group=new_group("cpu:poplar")
    )
    model(torch.ones(2, 4)).sum().backward()
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_ddp_names_a_killed_rank():
    answers = harness.one_off(WORLD, lose_a_rank_of_ddp, lost=[2], timeout=50.0)
    for rank in (0, 1, 3):
        assert "waiting for rank(s) 2" in answers[rank]
        assert "its process has exited" in answers[rank]


def kill_during_collectives(name: str, delay: float) -> str:
    """Rank 2 is killed during a loop of collectives."""
    group = new_group("cpu:poplar")
    dist.barrier(group)
    if dist.get_rank() == 2:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    data, own = torch.ones(WORLD << 18), torch.empty(1 << 18)
    calls = {
        "all_reduce": lambda: dist.all_reduce(data, group=group),
        "all_gather": lambda: all_gather(data, own, group=group),
        "reduce_scatter": lambda: reduce_scatter(own, data, group=group),
    }
    try:
        while True:
            calls[name]()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter"])
def test_all_surviving_ranks_raise_when_one_is_killed(name):
    delay = 0.1 + 0.1 * random.random()
    answers = harness.one_off(WORLD, kill_during_collectives, name, delay, lost=[2], timeout=50.0)
    for rank in (0, 1, 3):
        assert "waiting for rank(s) 2 " in answers[rank], f"after {delay} s"
        assert "its process has exited" in answers[rank], f"after {delay} s"
