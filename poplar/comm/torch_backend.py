"""`cpu:poplar`, a backend of torch.distributed: shared memory between the ranks of one host.

    import poplar.comm
    torch.distributed.init_process_group("cpu:poplar")

It can't be one of several in a process group (`cpu:poplar,cuda:nccl`): torch would drop the others.
DDP, FSDP2 and DeepSpeed run on it as they are. Sums of floating tensors, gathers, broadcasts,
all-to-alls and barriers go through shared memory; gloo carries the rest: other reductions (maximum,
integers), reduce, gather, scatter, send and receive.
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
from poplar.comm.worker_thread import Job, Ranks, WorkerThread

_ProcessGroup: Any = dist.ProcessGroup
"""Its type stubs show methods as users call them; torch calls them in another way."""
_FLOATING = (torch.float32, torch.bfloat16, torch.float16)


class PoplarProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """What `init_process_group("cpu:poplar")` and `new_group` make; users never call it.

    Collectives run one after the other (`Jobs`); the ranks meet in shared memory at the first one.
    """

    def __init__(self, ranks: Ranks, name: str) -> None:
        super().__init__(ranks.rank, ranks.size)
        self._ranks, self._name = ranks, name
        store = c10d.PrefixStore("gloo", ranks.store)
        self._gloo: Any = c10d.ProcessGroupGloo(
            store, ranks.rank, ranks.size, timeout=ranks.timeout
        )
        self._jobs = WorkerThread(ranks)
        weakref.finalize(self, self._jobs.stop)  # also when the interpreter ends

    # What torch asks of a process group. Names in camel case are those of its C++ class.

    def getBackendName(self) -> str:  # noqa: N802
        return POPLAR

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def shutdown(self) -> None:
        self._jobs.stop()

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
            # Not its `allreduce`, to which several tensors are several inputs of one reduction.
            return self._gloo.allreduce_coalesced(tensors, opts or c10d.AllreduceCoalescedOptions())
        return self.allreduce(tensors, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, mine in zip(outputs, inputs, strict=True):
            _check("all_gather", output, mine, self._ranks.size)

        def run(comm: SharedMemoryCommunicator) -> None:
            for output, mine in zip(outputs, inputs, strict=True):
                _all_gather(comm, output, mine)

        return self._submit("all_gather", run, outputs, opts)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        (parts,), (mine,) = outputs, inputs
        _check("all_gather", parts[self._ranks.rank], mine)

        def run(comm: SharedMemoryCommunicator) -> None:
            whole = torch.empty(sum(part.numel() for part in parts), dtype=mine.dtype)
            _all_gather(comm, whole, mine, [part.numel() for part in parts])
            _spread(whole, parts)

        return self._submit("all_gather", run, parts, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        divisor = self._scattered_divisor(opts, inputs)
        for output, mine in zip(outputs, inputs, strict=True):
            _check("reduce_scatter", mine, output, self._ranks.size)

        def run(comm: SharedMemoryCommunicator) -> None:
            for output, mine in zip(outputs, inputs, strict=True):
                _reduce_scatter(comm, output, _flat(mine), None, divisor)

        return self._submit("reduce_scatter", run, outputs, opts)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        (output,), (parts,) = outputs, inputs
        divisor = self._scattered_divisor(opts, parts)
        _check("reduce_scatter", parts[self._ranks.rank], output)

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
                _bring_back(tensor, flat)

        return self._submit("broadcast", run, tensors, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> dist.Work:
        size = self._ranks.size
        arriving = _elements(output, output_splits, size)
        leaving = _elements(input, input_splits, size)

        def run(comm: SharedMemoryCommunicator) -> None:
            received = _flat(output)
            comm.all_to_all(received, _flat(input), arriving, leaving)
            _bring_back(output, received)

        return self._submit("all_to_all", run, [output], opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        arriving, leaving = ([t.numel() for t in tensors] for tensors in (outputs, inputs))

        def run(comm: SharedMemoryCommunicator) -> None:
            received = torch.empty(sum(arriving), dtype=outputs[0].dtype)
            mine = torch.cat([tensor.reshape(-1) for tensor in inputs])
            comm.all_to_all(received, mine, arriving, leaving)
            _spread(received, outputs)

        return self._submit("all_to_all", run, outputs, opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._submit("barrier", SharedMemoryCommunicator.barrier, [], opts)

    # Until torch 2.12 they had other names; 2.13 asks for both.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # gloo's.

    def reduce(self, *arguments: Any) -> Any:
        return self._gloo.reduce(*arguments)

    def gather(self, *arguments: Any) -> Any:
        return self._gloo.gather(*arguments)

    def scatter(self, *arguments: Any) -> Any:
        return self._gloo.scatter(*arguments)

    def send(self, *arguments: Any) -> Any:
        return self._gloo.send(*arguments)

    def recv(self, *arguments: Any) -> Any:
        return self._gloo.recv(*arguments)

    def recv_anysource(self, *arguments: Any) -> Any:
        return self._gloo.recv_anysource(*arguments)

    def _divisor(self, opts: Any, tensors: Sequence[Tensor]) -> int | None:
        """What a sum of floating tensors is divided by; None for any other reduction."""
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        if any(t.dtype not in _FLOATING or t.layout is not torch.strided for t in tensors):
            return None
        if op == dist.ReduceOp.SUM:
            return 1
        return self._ranks.size if op == dist.ReduceOp.AVG else None

    def _scattered_divisor(self, opts: Any, tensors: Sequence[Tensor]) -> int:
        """As `_divisor`.

        Raises:
            ValueError: another reduction, which gloo doesn't scatter either.
        """
        divisor = self._divisor(opts, tensors)
        if divisor is None:
            dtypes = sorted({str(tensor.dtype) for tensor in tensors})
            raise ValueError(
                "reduce_scatter on cpu:poplar gives sums or means of float32, bfloat16 and float16 "
                f"tensors; this is another reduction, or one of {', '.join(dtypes)}. all_reduce "
                "takes any"
            )
        return divisor

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
        job = Job(what, run, results)
        self._jobs.put(job, wait=not getattr(opts, "asyncOp", True))
        return job


def _all_reduce(comm: SharedMemoryCommunicator, tensor: Tensor, divisor: int) -> None:
    flat = _flat(tensor)
    step = -(-flat.numel() // (comm.group.size * ALIGNMENT)) * ALIGNMENT
    cuts = (min(rank * step, flat.numel()) for rank in range(comm.group.size + 1))
    layout = Layout(tuple(cuts))
    bucket = Bucket(flat, layout, Codec(flat.dtype))
    if divisor == 1:
        comm.all_reduce(bucket, what="all_reduce").wait()
    else:
        # Divided before it is rounded: a sum may be too large for 16 bits where the mean is not.
        mine = own_slice(flat, layout, comm.group.rank)
        total = torch.empty(mine.numel(), dtype=torch.float32)
        comm.reduce_scatter(bucket, total, accumulate=False, what="all_reduce").wait()
        mine.copy_(total.div_(divisor))
        comm.all_gather(flat, layout, what="all_reduce").wait()
    _bring_back(tensor, flat)


def _all_gather(
    comm: SharedMemoryCommunicator, output: Tensor, mine: Tensor, sizes: list[int] | None = None
) -> None:
    sizes = sizes or [mine.numel()] * comm.group.size
    whole = _flat(output)
    comm.all_gather(whole, _layout(sizes), what="all_gather", own=_flat(mine)).wait()
    _bring_back(output, whole)


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
    total = output.view(-1) if in_place else torch.empty(output.numel(), dtype=torch.float32)
    comm.reduce_scatter(bucket, total, accumulate=False, what="reduce_scatter").wait()
    if divisor != 1:
        total /= divisor
    if not in_place:
        output.copy_(total.view(output.shape))


def _check(what: str, whole: Tensor, part: Tensor, count: int = 1) -> None:
    """Refuse tensors of which `count` parts don't make the whole, before any rank is asked."""
    if whole.numel() != count * part.numel() or whole.dtype is not part.dtype:
        raise ValueError(
            f"{what} on cpu:poplar: {count} x {part.numel()} elements of {part.dtype} on one side, "
            f"{whole.numel()} of {whole.dtype} on the other; they must be the same"
        )


def _layout(sizes: Sequence[int]) -> Layout:
    return Layout((0, *itertools.accumulate(sizes)))


def _elements(tensor: Tensor, splits: list[int], size: int) -> list[int]:
    """Rows for each rank, as elements; without splits they are even."""
    if not splits:
        if tensor.shape[0] % size:
            raise ValueError(
                f"all_to_all on cpu:poplar: {tensor.shape[0]} rows are not divisible by {size} "
                "ranks; give the sizes of splits"
            )
        return [tensor.numel() // size] * size
    if len(splits) != size or sum(splits) != tensor.shape[0]:
        raise ValueError(
            f"all_to_all on cpu:poplar: splits {splits} must be {size}, one for each rank, and add "
            f"up to {tensor.shape[0]} rows"
        )
    row = tensor.numel() // tensor.shape[0] if tensor.shape[0] else 0
    return [row * split for split in splits]


def _flat(tensor: Tensor) -> Tensor:
    """1-D and contiguous: the tensor's own memory if it is that already, else a copy."""
    return tensor.reshape(-1).contiguous()


def _bring_back(tensor: Tensor, flat: Tensor) -> None:
    """After `flat` was written: the tensor of which it is a copy, if it is one, has it too."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))


def _spread(flat: Tensor, parts: Sequence[Tensor]) -> None:
    for part, own in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        part.copy_(own.view(part.shape))


def _make(options: Any, _: object) -> PoplarProcessGroup:
    ranks = Ranks(options.group_rank, options.group_size, options.timeout, options.store)
    return PoplarProcessGroup(ranks, options.group_id)


def register() -> None:
    """Make `cpu:poplar` known to torch.distributed; again and again does no harm."""
    if dist.is_available() and POPLAR not in dist.Backend.backend_list:
        dist.Backend.register_backend(POPLAR, _make, extended_api=True, devices=["cpu"])
