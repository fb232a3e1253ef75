"""Runs a rank's calls (`rules.local_call`) with torch.

A rank with an empty part of a node computes zeros in its place. Autograd must reach an input from
an output there exactly if it does on the other ranks (`meta_execution.passed_inputs`); otherwise
the ranks issue different collectives in the backward pass.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from poplar.programmes.graph.graph import GET_ITEM, Reference
from poplar.programmes.rules.local_call import (
    EMBEDDING_PART,
    GROUPED_MM_PART,
    INDEX_PART,
    ZEROS,
    LocalCall,
    Zeroed,
)

Registers = list[Any]
"""Tensors of a rank, by number."""
_Read = Callable[[Registers], Any]


def bound(
    call: LocalCall, register: Callable[[str], int], device: torch.device
) -> Callable[[Registers], Any]:
    """A function of the registers that makes a rank's call.

    Args:
        register: the number of the tensor that is read, given the name of its node. Called in the
            order of the arguments, keywords last.
        device: of this rank; the call has its type.
    """
    arguments, reads = _bound_values(dict(enumerate(call.arguments)), register, device)
    if call.operator == ZEROS:

        def run_zeros(values: Registers) -> Any:
            made = zeros_of(call, [read(values) for read in reads.values()], device)
            return made if call.returns_list else made[0]

        return run_zeros
    keywords, keyword_reads = _bound_values(call.keywords, register, device)
    called, constant = function(call.operator), list(arguments.values())
    pairs, scale = tuple(reads.items()), call.scale

    def run(values: Registers) -> Any:
        given = constant.copy()
        for position, read in pairs:
            given[position] = read(values)
        if keyword_reads:
            named = keywords | {key: read(values) for key, read in keyword_reads.items()}
            return called(*given, **named)
        return called(*given, **keywords)

    return run if scale == 1.0 else lambda values: run(values) * scale


def run_local(call: LocalCall, value: Callable[[str], Any], device: torch.device) -> Any:
    """The rank's part of a node's output, computed once.

    Args:
        value: the rank's part of a node's output by the node's name, in the placement in which
            this call reads it.
        device: as in `bound`.
    """
    values: Registers = []

    def register(name: str) -> int:
        values.append(value(name))
        return len(values) - 1

    return bound(call, register, device)(values)


_Key = TypeVar("_Key")


def _bound_values(
    given: Mapping[_Key, Any], register: Callable[[str], int], device: torch.device
) -> tuple[dict[_Key, Any], dict[_Key, _Read]]:
    """Arguments that are the same in every step, and how the others are read."""
    reads = {key: read for key, value in given.items() if (read := _bound(value, register))}
    return {key: _on_device(value, device) for key, value in given.items()}, reads


def _on_device(argument: Any, device: torch.device) -> Any:
    """The rank's device, if the argument is a device of its type; on meta, whatever its type."""
    is_own = isinstance(argument, torch.device) and device.type in (argument.type, "meta")
    return device if is_own else argument


def _bound(argument: Any, register: Callable[[str], int]) -> _Read | None:
    """How to get an argument from the registers; None if it does not depend on them."""
    if isinstance(argument, Reference):
        return operator.itemgetter(register(argument.node))
    if isinstance(argument, Zeroed):
        read = operator.itemgetter(register(argument.reference.node))
        return lambda values: _zeros_like(read(values))
    if not isinstance(argument, list | tuple):
        return None
    elements = [_bound(element, register) for element in argument]
    if not any(elements):
        return None
    both = list(zip(argument, elements, strict=True))
    return lambda values: [element if read is None else read(values) for element, read in both]


def _zeros_like(tensor: Tensor) -> Tensor:
    return _connected_zeros(tuple(tensor.shape), tensor.dtype, tensor.device, tensor)


def function(name: str) -> Callable[..., Any]:
    """What an operator's name stands for: one of torch's, or one of our own."""
    if name in _OWN:
        return _OWN[name]
    if name == GET_ITEM:
        return operator.getitem
    namespace, base, overload = name.split(".")
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), base), overload)
    return found


def _check_indices(indices: Tensor, first: int, size: int) -> None:
    """Raise as torch does if not all indices are from `first` on and smaller than `size`.

    On CUDA, it is an assertion on the device that fails, as those in torch's kernels. On meta,
    there are no values.
    """
    are_inside = ((indices >= first) & (indices < size)).all()
    if indices.is_cuda or indices.is_meta:
        torch._assert_async(are_inside, f"index out of range of {size} entries")
    elif not are_inside:
        raise IndexError(
            f"index out of range: {size} entries are indexed with {int(indices.min())} to "
            f"{int(indices.max())}"
        )


def _own_entries(indices: Tensor, start: int, entries: int) -> tuple[Tensor, Tensor]:
    """Which indices are from `start` on of so many entries, and their places there, or 0."""
    is_own = (indices >= start) & (indices < start + entries)
    return is_own, torch.where(is_own, indices - start, 0)


def embedding_part(part: Tensor, indices: Tensor, start: int, padding: int, size: int) -> Tensor:
    """Rows of a part of an embedding's table; zeros for indices that are not in the part.

    Args:
        part: [entries, columns], the entries from `start` of the table.
        indices: [...], of the whole table.
        start: the first entry of the part.
        padding: the index that has no gradient, or -1.
        size: entries of the whole table.
    """
    _check_indices(indices, 0, size)
    entries = part.shape[0]
    is_own, own = _own_entries(indices, start, entries)
    own_padding = padding - start if start <= padding < start + entries else -1
    rows = torch.ops.aten.embedding.default(part, own, own_padding)
    # Not a product: rows that are not read may be infinite.
    return torch.where(is_own.unsqueeze(-1), rows, 0)


def index_part(part: Tensor, indices: Tensor, dim: int, start: int, size: int) -> Tensor:
    """`part[..., indices, ...]` where the indices are in the part, and zeros elsewhere.

    Args:
        part: the entries from `start` of dimension `dim` of a tensor.
        indices: of the whole dimension; negative ones count from its end.
        dim: the dimension that is indexed.
        start: the first entry of the part.
        size: of the whole dimension.
    """
    _check_indices(indices, -size, size)
    indices = torch.where(indices < 0, indices + size, indices)
    is_own, own = _own_entries(indices, start, part.shape[dim])
    read = torch.ops.aten.index.Tensor(part, [None] * dim + [own])
    after = part.dim() - dim - 1
    # The integer 0 leaves every dtype as it is; 0.0 would make floats of integers.
    return torch.where(is_own.view(*indices.shape, *(1,) * after), read, 0)


def grouped_mm_part(
    operator: str, rows: Tensor, experts: Tensor, ends: Tensor, start: int, stop: int
) -> Tensor:
    """A grouped product with the experts from `start` to `stop`; rows of others are zeros.

    Args:
        operator: of torch, or with the same arguments.
        rows: [rows, inner], those of an expert one after the other.
        experts: [stop - start, inner, columns].
        ends: of the rows of each expert, of all ranks.
        start, stop: the experts of this rank.
    """
    # The own rows come first, so that no others are computed, without waiting for their number.
    begin = ends[start - 1] if start else torch.zeros_like(ends[0])
    numbers = torch.arange(rows.shape[0], device=rows.device)
    is_own = (numbers < ends[stop - 1] - begin).unsqueeze(1)
    count = max(1, rows.shape[0])
    moved = torch.where(is_own, rows.index_select(0, (numbers + begin) % count), 0.0)
    own_ends = (ends[start:stop] - begin).to(ends.dtype)
    product = function(operator)(moved, experts, own_ends)
    return torch.where(is_own, product, 0.0).index_select(0, (numbers - begin) % count)


def copied(target: Tensor, source: Tensor) -> Tensor:
    """`aten.copy`, which has no derivative: the values of `source`, as `target.copy_` writes them.

    Args:
        target: [...], whose values are not used.
        source: is broadcast to it.
    """
    return source.to(target.dtype).expand_as(target)


_OWN: dict[str, Callable[..., Any]] = {
    "aten.copy.default": copied,
    EMBEDDING_PART: embedding_part,
    INDEX_PART: index_part,
    GROUPED_MM_PART: grouped_mm_part,
}


def zeros_of(call: LocalCall, inputs: list[Any], device: torch.device) -> list[Tensor]:
    """The outputs of a call of `ZEROS`."""
    tensors = [x for value in inputs for x in _several(value)]
    device = tensors[0].device if tensors else device
    passed = call.passed or (tuple(range(len(tensors))),) * len(call.outputs)
    return [
        _connected_zeros(
            kind.shape, getattr(torch, kind.dtype), device, *(tensors[at] for at in positions)
        )
        for kind, positions in zip(call.outputs, passed, strict=True)
    ]


def _several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _connected_zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *inputs: Tensor
) -> Tensor:
    """Zeros that autograd reaches like a result of the inputs, with gradients of zeros.

    Collectives in the backward pass then run on every rank.
    """
    if not is_differentiable(dtype):
        return torch.zeros(shape, dtype=dtype, device=device)
    result: Tensor = _ConnectedZeros.apply(  # type: ignore[no-untyped-call]
        shape, dtype, device, *inputs
    )
    return result


def is_differentiable(dtype: torch.dtype) -> bool:
    """Whether tensors can have a gradient."""
    return dtype.is_floating_point or dtype.is_complex


class _ConnectedZeros(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        *inputs: Tensor,
    ) -> Tensor:
        ctx.inputs = [(x.shape, x.dtype, x.device, is_differentiable(x.dtype)) for x in inputs]
        return torch.zeros(shape, dtype=dtype, device=device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        zeros = (
            torch.zeros(shape, dtype=dtype, device=device) if is_differentiable else None
            for shape, dtype, device, is_differentiable in ctx.inputs
        )
        return (None, None, None, *zeros)
