"""Runs a rank's calls (`planner.rules.local_call`) with torch."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from poplar.planner.graph.graph import GET_ITEM, Reference, TensorType
from poplar.planner.rules.local_call import EMBEDDING_PART, ZEROS, LocalCall, Zeroed


def run_local(call: LocalCall, value: Callable[[str], Any], device: torch.device) -> Any:
    """The rank's part of a node's output.

    Args:
        call: of this rank.
        value: the rank's part of a node's output by the node's name, in the placement in which
            this call reads it.
        device: of tensors without inputs.
    """

    def converted(argument: Any) -> Any:
        if isinstance(argument, Reference):
            return value(argument.node)
        if isinstance(argument, Zeroed):
            tensor = value(argument.reference.node)
            return _connected_zeros(tensor.shape, tensor.dtype, tensor.device, tensor)
        if isinstance(argument, list | tuple):
            return [converted(element) for element in argument]
        return argument

    arguments = [converted(argument) for argument in call.arguments]
    if call.operator == ZEROS:
        zeros = _zeros(call.outputs, arguments, device)
        return zeros if call.returns_list else zeros[0]
    keywords = {key: converted(argument) for key, argument in call.keywords.items()}
    result = function(call.operator)(*arguments, **keywords)
    return result if call.scale == 1.0 else result * call.scale


def function(name: str) -> Callable[..., Any]:
    """What an operator's name stands for: one of torch's, or one of our own."""
    if name == EMBEDDING_PART:
        return embedding_part
    if name == GET_ITEM:
        return operator.getitem
    namespace, base, overload = name.split(".")
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), base), overload)
    return found


def embedding_part(part: Tensor, indices: Tensor, start: int, padding: int) -> Tensor:
    """Rows of a part of an embedding's table.

    Args:
        part: [entries, columns], the entries from `start` of the table.
        indices: [...], of the whole table.
        start: the first entry of the part.
        padding: the index that has no gradient, or -1.

    Returns:
        [..., columns]: zeros for indices that are not in the part.
    """
    entries = part.shape[0]
    is_own = (indices >= start) & (indices < start + entries)
    own = torch.where(is_own, indices - start, 0)
    own_padding = padding - start if start <= padding < start + entries else -1
    rows = torch.ops.aten.embedding.default(part, own, own_padding)
    # Not a product: rows that are not read may be infinite.
    return torch.where(is_own.unsqueeze(-1), rows, 0.0)


def _zeros(types: tuple[TensorType, ...], inputs: list[Any], device: torch.device) -> list[Tensor]:
    tensors = [
        tensor
        for value in inputs
        for tensor in (value if isinstance(value, list | tuple) else [value])
    ]
    if tensors:
        device = tensors[0].device
    return [
        _connected_zeros(kind.shape, getattr(torch, kind.dtype), device, *tensors) for kind in types
    ]


def _connected_zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *inputs: Tensor
) -> Tensor:
    """Zeros that autograd reaches like a result of the inputs, with gradients of zeros.

    Collectives in the backward pass then run on every rank.
    """
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=device)
    result: Tensor = _ConnectedZeros.apply(  # type: ignore[no-untyped-call]
        shape, dtype, device, *inputs
    )
    return result


class _ConnectedZeros(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        *inputs: Tensor,
    ) -> Tensor:
        ctx.inputs = [(x.shape, x.dtype, x.device, x.is_floating_point()) for x in inputs]
        return torch.zeros(shape, dtype=dtype, device=device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        zeros = (
            torch.zeros(shape, dtype=dtype, device=device) if is_floating else None
            for shape, dtype, device, is_floating in ctx.inputs
        )
        return (None, None, None, *zeros)
