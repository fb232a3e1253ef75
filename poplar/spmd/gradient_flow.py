"""Whether autograd passes through an operator.

A rank with an empty part of a node computes zeros in its place. Autograd must reach its inputs from
there exactly if it does on the other ranks; otherwise the ranks issue different collectives in the
backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from poplar.planner.graph.graph import Graph, Node, Reference, TensorType
from poplar.spmd.local_execution import function


def passes_gradients(graph: Graph, node: Node) -> bool:
    """Whether a result of the operator has a gradient if all its inputs have one.

    It runs the operator on tensors without values.
    """
    types = iter(graph.types(node))

    def converted(argument: Any) -> Any:
        if isinstance(argument, Reference):
            return _without_values(next(types))
        if isinstance(argument, list | tuple):
            return [converted(element) for element in argument]
        return torch.device("meta") if isinstance(argument, torch.device) else argument

    arguments = [converted(argument) for argument in node.arguments]
    keywords = {key: converted(argument) for key, argument in node.keywords.items()}
    with torch.enable_grad():
        results = function(node.operator)(*arguments, **keywords)
    results = results if isinstance(results, list | tuple) else [results]
    return any(result.requires_grad for result in results)


def _without_values(kind: TensorType) -> Tensor:
    dtype = getattr(torch, kind.dtype)
    return torch.empty(kind.shape, dtype=dtype, device="meta", requires_grad=kind.is_floating)
