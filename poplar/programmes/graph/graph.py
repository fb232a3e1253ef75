"""The forward pass of a loss as a graph of operators on tensors of known shapes.

`run.exported_graph` makes it with `torch.export`. Operators have the names of torch's, such as
`aten.linear.default`. Shapes are those of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

INPUT = "input"
"""Operator of a node that is a tensor of the batch."""
PARAMETER = "parameter"
BUFFER = "buffer"
CONSTANT = "constant"
"""Operator of a node that is a tensor made while the model was exported."""
LEAVES = (INPUT, PARAMETER, BUFFER, CONSTANT)
GET_ITEM = "getitem"
"""Operator of a node that is one output of an operator with several."""


@dataclass(frozen=True, slots=True)
class Reference:
    """An argument that is the output of another node."""

    node: str


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and element type of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    """Such as `float32`."""
    itemsize: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.itemsize

    @property
    def is_floating(self) -> bool:
        """Whether the tensor can have a gradient."""
        return self.dtype.startswith(("float", "bfloat"))

    @property
    def has_sum(self) -> bool:
        """Whether sums of values have the same type; truth values have none."""
        return self.dtype != "bool"


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One call of an operator, or a tensor that is given (`LEAVES`).

    On the whole batch, or on one rank: then with the rank's own sizes (`rules.local_call`).
    """

    name: str
    operator: str
    outputs: tuple[TensorType, ...]
    """One, but for operators that return several tensors."""
    arguments: tuple[Any, ...] = ()
    """Tensors are `Reference`s, also inside lists. Devices have no index: each rank uses its own of
    the type. Other values are as torch wants them."""
    keywords: Mapping[str, Any] = field(default_factory=dict)
    returns_list: bool = False
    """The operator returns a list or tuple, of which `GET_ITEM` takes one."""
    source: str = ""
    """A leaf's name in the model, or its path in the batch."""
    is_trained: bool = False
    """A parameter with a gradient and optimizer state."""
    misfit: str = ""
    """Why the rule of the operator does not fit this call, which every rank computes whole then."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the nodes that the arguments refer to, in order, with repetitions."""
        return tuple(_references((*self.arguments, *self.keywords.values())))

    @property
    def output(self) -> TensorType:
        """The type of the only output, or of the first one."""
        return self.outputs[0]


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, Reference):
        yield value.node
    elif isinstance(value, list | tuple):
        for element in value:
            yield from _references(element)


@dataclass(frozen=True)
class Graph:
    """Nodes in an order in which they can be computed."""

    nodes: Mapping[str, Node]
    output: str
    """The node that is the loss."""
    derived: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    """The pattern of each node, once it is known."""

    def types(self, node: Node) -> tuple[TensorType, ...]:
        """The types of the tensors that a node reads."""
        if node.operator == GET_ITEM:
            return (self.nodes[node.inputs[0]].outputs[node.arguments[1]],)
        return tuple(self.nodes[name].output for name in node.inputs)

    def depending(self, on: Callable[[Node], bool]) -> frozenset[str]:
        """Names of the nodes for which `on` holds, and of all that depend on them."""
        found: set[str] = set()
        for name, node in self.nodes.items():
            if on(node) or found.intersection(node.inputs):
                found.add(name)
        return frozenset(found)

    @cached_property
    def parameters(self) -> dict[str, Node]:
        """Nodes of parameters by the parameter's name in the model."""
        return {n.source: n for n in self.nodes.values() if n.operator == PARAMETER}

    @cached_property
    def batch(self) -> dict[str, Node]:
        """Nodes of the batch's tensors by their paths."""
        return {n.source: n for n in self.nodes.values() if n.operator == INPUT}
