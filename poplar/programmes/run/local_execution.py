"""Runs a rank's calls (`rules.local_call`) with torch.

A rank with an empty part of a node computes zeros in its place. Autograd must reach an input from
an output there exactly if it does on the other ranks (`meta_execution.passed_inputs`); otherwise
the ranks issue different collectives in the backward pass.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from poplar.programmes.graph.graph import GET_ITEM, Node, Reference
from poplar.programmes.rules.local_call import ZEROS


def arguments_of(
    call: Node, value: Callable[[str], Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call and its keywords.

    Args:
        value: what to pass for a tensor, by the name of its node. Called in the order of the
            arguments, keywords last.
        device: of this rank, used instead of a device of its type. On meta, of any type.
    """

    def converted(argument: Any) -> Any:
        if isinstance(argument, Reference):
            return value(argument.node)
        is_own = isinstance(argument, torch.device) and device.type in (argument.type, "meta")
        return device if is_own else argument

    arguments, keywords = tree_map(converted, (call.arguments, dict(call.keywords)))
    return arguments, keywords


def run_local(call: Node, value: Callable[[str], Any], device: torch.device) -> Any:
    """The rank's part of a node's output.

    Args:
        value: the rank's part of a node's output by the node's name, in the placement in which
            this call reads it.
        device: as in `arguments_of`.
    """
    arguments, keywords = arguments_of(call, value, device)
    if call.operator == ZEROS:
        return zeros_of(call, arguments, device)
    return function(call.operator)(*arguments, **keywords)


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


def scaled(factor: float, name: str, *arguments: Any, **keywords: Any) -> Any:
    """A factor times the result of the operator `name` of these arguments."""
    return factor * function(name)(*arguments, **keywords)


def with_zeros(position: int, name: str, *arguments: Any, **keywords: Any) -> Any:
    """The operator `name`, with zeros in the place of the tensor at `position`.

    The gradient of the tensor is zeros.
    """
    given = list(arguments)
    tensor = given[position]
    given[position] = _connected_zeros(tensor.shape, tensor.dtype, tensor.device, [tensor])
    return function(name)(*given, **keywords)


_PARTS = (embedding_part, index_part, grouped_mm_part, scaled, with_zeros)
_OWN: dict[str, Callable[..., Any]] = {
    "aten.copy.default": copied,
    **{own.__name__: own for own in _PARTS},
}


def zeros_of(
    call: Node,
    inputs: Any,
    device: torch.device,
    passed: Sequence[Sequence[int]] = (),
) -> Any:
    """Zeros of the shapes of a call's outputs; a list if it returns one.

    Args:
        inputs: a pytree with the tensors that the call reads.
        device: of zeros without inputs.
        passed: positions of the inputs that autograd reaches from each output; empty: all of them.
    """
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    device = tensors[0].device if tensors else device
    reached = passed or [range(len(tensors))] * len(call.outputs)
    made = [
        _connected_zeros(
            kind.shape, getattr(torch, kind.dtype), device, [tensors[at] for at in positions]
        )
        for kind, positions in zip(call.outputs, reached, strict=True)
    ]
    return made if call.returns_list else made[0]


def _connected_zeros(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, inputs: Sequence[Tensor]
) -> Tensor:
    """Zeros that autograd reaches like a result of the inputs, with gradients of zeros.

    Collectives in the backward pass then run on every rank.
    """
    zeros = torch.zeros(shape, dtype=dtype, device=device)
    for x in inputs:
        if x.requires_grad and is_differentiable(dtype):
            # No element, so neither infinity nor NaN; a view would be kept for the backward.
            none = x.unsqueeze(-1)[:0].clone()
            zeros += none.abs().sum().to(device, dtype)
    return zeros


def is_differentiable(dtype: torch.dtype) -> bool:
    """Whether tensors can have a gradient."""
    return dtype.is_floating_point or dtype.is_complex
