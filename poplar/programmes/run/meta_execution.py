"""Runs operators on tensors without values: for which inputs autograd runs, and which rules fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from poplar.programmes.graph.graph import GET_ITEM, LEAVES, Graph, Node, TensorType
from poplar.programmes.graph.placement import local_shape
from poplar.programmes.rules.registry import (
    COMPUTED_BY_ALL,
    local_call,
    rule_of,
    strategies_of,
    whole_call,
)
from poplar.programmes.rules.strategy import Strategy
from poplar.programmes.run.local_execution import is_differentiable, run_local

_META = torch.device("meta")
_RATIOS, _RANK = (1, 2), 1
"""A rank whose part of a dimension is neither the first, nor empty, nor, with several indices, all
of them."""


def passed_inputs(graph: Graph, node: Node) -> tuple[tuple[int, ...], ...]:
    """The positions of the inputs that the gradient of each output of an operator reaches.

    It runs the operator once for each input.
    """
    by_input = [_have_gradient(graph, node, trained) for trained in range(len(node.inputs))]
    return tuple(
        tuple(trained for trained, outputs in enumerate(by_input) if outputs[output])
        for output in range(len(node.outputs))
    )


def _have_gradient(graph: Graph, node: Node, trained: int) -> list[bool]:
    """Whether each output has a gradient, if only one of the inputs has one."""
    kinds = enumerate(graph.types(node))

    def value(name: str) -> Tensor:
        position, kind = next(kinds)
        tensor = _without_values(kind)
        return tensor.requires_grad_(position == trained and is_differentiable(tensor.dtype))

    with torch.enable_grad():
        return [result.requires_grad for result in _run(whole_call(graph, node), value)]


def with_fitting_rules(graph: Graph) -> Graph:
    """The graph with a `Node.misfit` in calls whose rule does not fit.

    Rules are for names of operators. Overloads of these names and unusual arguments may do
    something else: a rule fits if the outputs of a rank have the shapes and dtypes that it says.
    """
    nodes = {name: replace(node, misfit=_misfit(graph, node)) for name, node in graph.nodes.items()}
    return Graph(nodes, graph.output)


def _misfit(graph: Graph, node: Node) -> str:
    if node.operator in (*LEAVES, GET_ITEM) or rule_of(node) is COMPUTED_BY_ALL:
        return ""
    try:
        for strategy in strategies_of(graph, node):
            made, claimed = _outputs(graph, node, strategy)
            if made != claimed:
                return f"a part of it returns {made}, and not {claimed}"
    except Exception as error:  # of the rule or the operator; `explain` shows it
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return ""


def _outputs(graph: Graph, node: Node, strategy: Strategy) -> tuple[list[str], list[str]]:
    """The dtypes and shapes that a rank's part of a call returns, and those that its rule says."""
    call = local_call(graph, node, strategy.inputs, strategy.output, _RATIOS, _RANK)
    kinds = {
        name: replace(kind, shape=local_shape(placement, kind.shape, _RATIOS, _RANK))
        for name, kind, placement in zip(
            node.inputs, graph.types(node), strategy.inputs, strict=True
        )
    }
    made = _run(call, lambda name: _without_values(kinds[name]))
    return list(map(_described, made)), [_described(_without_values(kind)) for kind in call.outputs]


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _run(call: Node, value: Callable[[str], Tensor]) -> list[Tensor]:
    results = run_local(call, value, _META)
    return list(results) if isinstance(results, list | tuple) else [results]


def _without_values(kind: TensorType) -> Tensor:
    return torch.empty(kind.shape, dtype=getattr(torch, kind.dtype), device=_META)
