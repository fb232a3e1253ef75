"""The `cpu:poplar` backend of torch.distributed: shared memory between the ranks of one host.

    import poplar.comm
    torch.distributed.init_process_group("cpu:poplar")

DDP, FSDP2 and DeepSpeed run on it unchanged. Sums of floating-point tensors, gathers, broadcasts,
all-to-alls and barriers use shared memory. Gloo runs the rest: other reductions and dtypes
(maximum, integers, float64), reduce, gather, scatter, send and receive. It cannot be one of several
backends of a process group (`cpu:poplar,cuda:nccl`): torch would drop the others.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from poplar.comm.bucket import Bucket, Codec
from poplar.comm.communicator import own_slice
from poplar.comm.group import POPLAR
from poplar.comm.shard_layout import ALIGNMENT, Layout
from poplar.comm.shared_memory import SharedMemoryCommunicator
from poplar.comm.worker_thread import QueuedWork, StoreGroup, WorkerThread

_ProcessGroup: Any = dist.ProcessGroup
"""`Any`: its type stubs have the methods that users call, not those that torch calls."""
_FLOATING = (torch.float32, torch.bfloat16, torch.float16)


class PoplarProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """The process group that `init_process_group("cpu:poplar")` and `new_group` create.

    Collectives run one after the other (`WorkerThread`); the first one connects the ranks.
    """

    def __init__(self, group: StoreGroup, name: str) -> None:
        super().__init__(group.rank, group.size)
        self._group, self._name = group, name
        store = c10d.PrefixStore("gloo", group.store)
        self._gloo: Any = c10d.ProcessGroupGloo(
            store, group.rank, group.size, timeout=group.timeout
        )
        # Runs all methods that this class does not override, and tells torch the device type.
        kind = dist.ProcessGroup.BackendType.CUSTOM
        self._register_backend(torch.device("cpu"), kind, self._gloo)
        self._worker = WorkerThread(group)
        weakref.finalize(self, self._worker.stop)  # also when the interpreter ends

    # The interface that torch requires. Camel-case names are those of its C++ class.

    def getBackendName(self) -> str:  # noqa: N802
        return POPLAR

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def shutdown(self) -> None:
        self._worker.stop()

    abort = shutdown

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        divisor = self._divisor(opts, tensors)
        if divisor is None:
            return self._gloo.allreduce(tensors, opts or c10d.AllreduceOptions())

        def run(comm: SharedMemoryCommunicator) -> None:
            for tensor in tensors:
                _all_reduce(comm, tensor, divisor)

        return self._submit("all_reduce", run, tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        if self._divisor(opts, tensors) is None:
            # Not `allreduce`, which treats several tensors as inputs of one reduction.
            return self._gloo.allreduce_coalesced(tensors, opts or c10d.AllreduceCoalescedOptions())
        return self.allreduce(tensors, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, mine in zip(outputs, inputs, strict=True):
            _check_sizes("all_gather", output, mine, self._group.size)

        def run(comm: SharedMemoryCommunicator) -> None:
            for output, mine in zip(outputs, inputs, strict=True):
                _all_gather(comm, output, mine)

        return self._submit("all_gather", run, outputs, opts)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        (parts,), (mine,) = outputs, inputs
        _check_sizes("all_gather", parts[self._group.rank], mine)

        def run(comm: SharedMemoryCommunicator) -> None:
            whole = torch.empty(sum(part.numel() for part in parts), dtype=mine.dtype, device="cpu")
            _all_gather(comm, whole, mine, [part.numel() for part in parts])
            _copy_to_parts(whole, parts)

        return self._submit("all_gather", run, parts, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        for output, mine in zip(outputs, inputs, strict=True):
            _check_sizes("reduce_scatter", mine, output, self._group.size)
        divisor = self._divisor(opts, inputs)
        if divisor is None:
            opts = opts or c10d.ReduceScatterOptions()
            pairs = zip(outputs, inputs, strict=True)
            works = [self._gloo._reduce_scatter_base(output, own, opts) for output, own in pairs]
            if len(works) == 1:
                return works[0]
            return self._submit("reduce_scatter", lambda _: _wait_for(works), outputs, opts)

        def run(comm: SharedMemoryCommunicator) -> None:
            for output, mine in zip(outputs, inputs, strict=True):
                _reduce_scatter(comm, output, _flat(mine), None, divisor)

        return self._submit("reduce_scatter", run, outputs, opts)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> Any:
        (output,), (parts,) = outputs, inputs
        _check_sizes("reduce_scatter", parts[self._group.rank], output)
        divisor = self._divisor(opts, parts)
        if divisor is None:
            return self._gloo.reduce_scatter(outputs, inputs, opts or c10d.ReduceScatterOptions())

        def run(comm: SharedMemoryCommunicator) -> None:
            mine = torch.cat([part.reshape(-1) for part in parts])
            _reduce_scatter(comm, output, mine, [part.numel() for part in parts], divisor)

        return self._submit("reduce_scatter", run, outputs, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        source = opts.rootRank if opts is not None else 0

        def run(comm: SharedMemoryCommunicator) -> None:
            for tensor in tensors:
                flat = _flat(tensor)
                comm.broadcast(flat, source, what="broadcast")
                _copy_back(tensor, flat)

        return self._submit("broadcast", run, tensors, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> dist.Work:
        size = self._group.size
        received_sizes = _split_numels(output, output_splits, size)
        sent_sizes = _split_numels(input, input_splits, size)

        def run(comm: SharedMemoryCommunicator) -> None:
            received = _flat(output)
            sizes = received_sizes, sent_sizes
            comm.all_to_all(received, _flat(input), *sizes, what="all_to_all").wait()
            _copy_back(output, received)

        return self._submit("all_to_all", run, [output], opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        received_sizes, sent_sizes = ([t.numel() for t in tensors] for tensors in (outputs, inputs))

        def run(comm: SharedMemoryCommunicator) -> None:
            received = torch.empty(sum(received_sizes), dtype=outputs[0].dtype, device="cpu")
            mine = torch.cat([tensor.reshape(-1) for tensor in inputs])
            comm.all_to_all(received, mine, received_sizes, sent_sizes, what="all_to_all").wait()
            _copy_to_parts(received, outputs)

        return self._submit("all_to_all", run, outputs, opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._submit("barrier", SharedMemoryCommunicator.barrier, [], opts)

    # Names until torch 2.12; torch 2.13 calls both.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _divisor(self, opts: Any, tensors: Sequence[Tensor]) -> int | None:
        """The divisor of a sum or mean of floating-point tensors; None for any other reduction."""
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        if any(t.dtype not in _FLOATING or t.layout is not torch.strided for t in tensors):
            return None
        if op == dist.ReduceOp.SUM:
            return 1
        return self._group.size if op == dist.ReduceOp.AVG else None

    def _submit(
        self,
        what: str,
        run: Callable[[SharedMemoryCommunicator], None],
        results: Sequence[Tensor],
        opts: Any,
    ) -> dist.Work:
        for tensor in results:
            if tensor.device.type != "cpu":
                raise ValueError(f"{what} on cpu:poplar takes CPU tensors, got {tensor.device}")
        work = QueuedWork(what, run, results)
        self._worker.submit(work, wait=not getattr(opts, "asyncOp", True))
        return work


def _all_reduce(comm: SharedMemoryCommunicator, tensor: Tensor, divisor: int) -> None:
    flat = _flat(tensor)
    step = -(-flat.numel() // (comm.group.size * ALIGNMENT)) * ALIGNMENT
    cuts = (min(rank * step, flat.numel()) for rank in range(comm.group.size + 1))
    layout = Layout(tuple(cuts))
    bucket = Bucket(flat, layout, Codec(flat.dtype))
    if divisor == 1:
        comm.all_reduce(bucket, what="all_reduce").wait()
    else:
        # Divided before rounding: the sum may overflow 16 bits where the mean does not.
        mine = own_slice(flat, layout, comm.group.rank)
        total = torch.empty(mine.numel(), dtype=torch.float32, device="cpu")
        comm.reduce_scatter(bucket, total, accumulate=False, what="all_reduce").wait()
        mine.copy_(total.div_(divisor))
        comm.all_gather(flat, layout, what="all_reduce").wait()
    _copy_back(tensor, flat)


def _all_gather(
    comm: SharedMemoryCommunicator, output: Tensor, mine: Tensor, sizes: list[int] | None = None
) -> None:
    sizes = sizes or [mine.numel()] * comm.group.size
    whole = _flat(output)
    comm.all_gather(whole, _layout(sizes), what="all_gather", own=_flat(mine)).wait()
    _copy_back(output, whole)


def _reduce_scatter(
    comm: SharedMemoryCommunicator,
    output: Tensor,
    mine: Tensor,
    sizes: list[int] | None,
    divisor: int,
) -> None:
    sizes = sizes or [output.numel()] * comm.group.size
    bucket = Bucket(mine, _layout(sizes), Codec(mine.dtype))
    in_place = output.dtype is torch.float32 and output.is_contiguous()
    total = (
        output.view(-1)
        if in_place
        else torch.empty(output.numel(), dtype=torch.float32, device="cpu")
    )
    comm.reduce_scatter(bucket, total, accumulate=False, what="reduce_scatter").wait()
    if divisor != 1:
        total /= divisor
    if not in_place:
        output.copy_(total.view(output.shape))


def _wait_for(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _check_sizes(what: str, whole: Tensor, part: Tensor, count: int = 1) -> None:
    """Raise if `count` parts do not make up the whole, before the collective is issued."""
    if whole.numel() != count * part.numel() or whole.dtype is not part.dtype:
        raise ValueError(
            f"{what} on cpu:poplar: {count} x {part.numel()} elements of {part.dtype} on one side, "
            f"{whole.numel()} of {whole.dtype} on the other; both must be equal"
        )


def _layout(sizes: Sequence[int]) -> Layout:
    return Layout((0, *itertools.accumulate(sizes)))


def _split_numels(tensor: Tensor, splits: list[int], size: int) -> list[int]:
    """Elements for each rank from its number of rows; without splits, all ranks get the same."""
    if not splits:
        if tensor.shape[0] % size:
            raise ValueError(
                f"all_to_all on cpu:poplar: {tensor.shape[0]} rows are not divisible by {size} "
                "ranks; give the sizes of splits"
            )
        return [tensor.numel() // size] * size
    if len(splits) != size or sum(splits) != tensor.shape[0]:
        raise ValueError(
            f"all_to_all on cpu:poplar: splits must be {size} numbers, one for each rank, that add "
            f"up to {tensor.shape[0]} rows, got {splits}"
        )
    row = tensor.numel() // tensor.shape[0] if tensor.shape[0] else 0
    return [row * split for split in splits]


def _flat(tensor: Tensor) -> Tensor:
    """A 1-D contiguous view of the tensor, or a copy if there is no such view."""
    return tensor.reshape(-1).contiguous()


def _copy_back(tensor: Tensor, flat: Tensor) -> None:
    """Copy `flat` back into the tensor if `_flat` returned a copy."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))


def _copy_to_parts(flat: Tensor, parts: Sequence[Tensor]) -> None:
    for part, own in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        part.copy_(own.view(part.shape))


def _create(options: Any, _: object) -> PoplarProcessGroup:
    group = StoreGroup(options.group_rank, options.group_size, options.timeout, options.store)
    return PoplarProcessGroup(group, options.group_id)


def register() -> None:
    """Register `cpu:poplar` with torch.distributed. Repeated calls do nothing."""
    if dist.is_available() and POPLAR not in dist.Backend.backend_list:
        dist.Backend.register_backend(POPLAR, _create, extended_api=True, devices=["cpu"])
