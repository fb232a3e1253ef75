"""A rank with an empty part is connected to the inputs that autograd reaches on other ranks."""

from __future__ import annotations

import pytest
import torch

from poplar.programmes.graph.graph import INPUT, Graph, Node, Reference, TensorType
from poplar.programmes.run.meta_execution import passed_inputs

FLOATS = TensorType((3, 4), "float32", 4)
INDICES = TensorType((3, 4), "int64", 8)
A, B = Reference("a"), Reference("b")


@pytest.mark.parametrize(
    ("operator", "arguments", "kinds", "outputs", "expected"),
    [
        ("aten.broadcast_tensors.default", ([A, B],), (FLOATS, FLOATS), 2, ((0,), (1,))),
        ("aten.add.Tensor", (A, B), (FLOATS, FLOATS), 1, ((0, 1),)),
        ("aten.type_as.default", (A, B), (FLOATS, FLOATS), 1, ((0,),)),
        ("aten.detach.default", (A,), (FLOATS,), 1, ((),)),
        ("aten.gather.default", (A, 1, B), (FLOATS, INDICES), 1, ((0,),)),
        ("aten.sort.default", (A,), (FLOATS,), 2, ((0,), ())),
    ],
)
def test_gradients_pass_through_these_inputs(operator, arguments, kinds, outputs, expected):
    leaves = [
        Node(name=name, operator=INPUT, outputs=(kind,))
        for name, kind in zip("ab", kinds, strict=False)
    ]
    node = Node(name="node", operator=operator, arguments=arguments, outputs=(FLOATS,) * outputs)
    graph = Graph({n.name: n for n in (*leaves, node)}, node.name)
    assert passed_inputs(graph, node) == expected
    assert torch.is_grad_enabled()
