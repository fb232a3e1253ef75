"""The inputs of an operator that autograd reaches from each of its outputs.

A rank with an empty part of a node computes zeros in its place. Autograd must reach an input from
an output there exactly if it does on the other ranks; otherwise the ranks issue different
collectives in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from poplar.programmes.graph.graph import Graph, Node, Reference, TensorType
from poplar.programmes.run.local_execution import function


def passed_inputs(graph: Graph, node: Node) -> tuple[tuple[int, ...], ...]:
    """The positions of the inputs that the gradient of each output of an operator reaches.

    It runs the operator on tensors without values, once for each input.
    """
    by_input = [_have_gradient(graph, node, trained) for trained in range(len(node.inputs))]
    return tuple(
        tuple(trained for trained, outputs in enumerate(by_input) if outputs[output])
        for output in range(len(node.outputs))
    )


def _have_gradient(graph: Graph, node: Node, trained: int) -> list[bool]:
    """Whether each output has a gradient, if only one of the inputs has one."""
    kinds = enumerate(graph.types(node))
    arguments = [_converted(argument, kinds, trained) for argument in node.arguments]
    keywords = {key: _converted(value, kinds, trained) for key, value in node.keywords.items()}
    with torch.enable_grad():
        results = function(node.operator)(*arguments, **keywords)
    results = results if isinstance(results, list | tuple) else [results]
    return [result.requires_grad for result in results]


def _converted(argument: Any, kinds: Iterator[tuple[int, TensorType]], trained: int) -> Any:
    if isinstance(argument, Reference):
        position, kind = next(kinds)
        return _without_values(kind, has_gradient=position == trained)
    if isinstance(argument, list | tuple):
        return [_converted(element, kinds, trained) for element in argument]
    return torch.device("meta") if isinstance(argument, torch.device) else argument


def _without_values(kind: TensorType, *, has_gradient: bool) -> Tensor:
    dtype = getattr(torch, kind.dtype)
    requires_grad = has_gradient and (dtype.is_floating_point or dtype.is_complex)
    return torch.empty(kind.shape, dtype=dtype, device="meta", requires_grad=requires_grad)
