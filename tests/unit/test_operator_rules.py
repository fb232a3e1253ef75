"""Rules of operators: parts computed by ranks are, together, what one process computes.

Every strategy of every operator runs on virtual ranks in float64: values and gradients, with
ratios that leave ranks without any part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from virtual_ranks import adjoint, as_list, assembled, parts, random_like

from poplar.programmes.graph.graph import INPUT, Graph, Node, Reference, TensorType
from poplar.programmes.graph.placement import PARTIAL, REPLICATED, Sharded, local_shape
from poplar.programmes.rules.registry import RULES, base_name, local_call, pattern_of, whole_call
from poplar.programmes.rules.strategy import Strategy, strategies
from poplar.programmes.run.local_execution import function, run_local
from poplar.programmes.run.meta_execution import with_fitting_rules
from poplar.programmes.search.step_terms import divided_units, parts_of

CPU = torch.device("cpu")
RATIOS = ((1,), (2, 1), (0, 1, 0), (1, 3, 2), (5, 0, 1, 1))


@dataclass(frozen=True)
class Floats:
    """A random tensor."""

    shape: tuple[int, ...]
    is_trained: bool = True
    dtype: torch.dtype = torch.float64


@dataclass(frozen=True)
class Indices:
    """Random integers from 0 to `below`; or booleans."""

    shape: tuple[int, ...]
    below: int
    dtype: torch.dtype = torch.int64


class Ends(Indices):
    """Numbers that do not fall, up to the largest one."""


@dataclass(frozen=True)
class Case:
    operator: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any] = field(default_factory=dict)
    axes: int | None = None
    """Along which the operator can be divided; None: not counted."""

    def __str__(self) -> str:
        shapes = [str(list(a.shape)) for a in self.arguments if isinstance(a, Floats | Indices)]
        return f"{self.operator.removeprefix('aten.')}-{'-'.join(shapes)}"


F, I = Floats, Indices  # noqa: E741
MASK = Indices((4, 6), 2, torch.bool)
ENDS = Ends((3,), 7, torch.int32)
GROUPED = F((6, 4), dtype=torch.float32), F((3, 4, 8), dtype=torch.float32)
CASES = [
    Case("aten.linear.default", (F((3, 5, 6)), F((8, 6)), F((8,))), axes=4),
    Case("aten.linear.default", (F((4, 6)), F((8, 6))), axes=3),
    Case("aten.matmul.default", (F((3, 2, 4, 6)), F((3, 2, 6, 5))), axes=5),
    Case("aten.matmul.default", (F((3, 1, 4, 6)), F((2, 6, 5))), axes=5),
    Case("aten.matmul.default", (F((4, 6)), F((6,))), axes=2),
    Case("aten.mm.default", (F((4, 6)), F((6, 5))), axes=3),
    Case("aten.bmm.default", (F((3, 4, 6)), F((3, 6, 5))), axes=4),
    Case("aten.addmm.default", (F((5,)), F((4, 6)), F((6, 5))), axes=3),
    Case(
        "aten.baddbmm.default", (F((3, 4, 5)), F((3, 4, 6)), F((3, 6, 5))), {"alpha": 0.5}, axes=4
    ),
    Case("aten.dot.default", (F((6,)), F((6,))), axes=1),
    Case("aten.outer.default", (F((4,)), F((6,))), axes=2),
    Case("aten.einsum.default", ("btec,btw->ebcw", [F((2, 3, 4, 2)), F((2, 3, 5))]), axes=5),
    Case("aten.einsum.default", ("ebcw,ewh->ebch", [F((4, 2, 3, 5)), F((4, 5, 6))]), axes=5),
    Case("aten.einsum.default", ("bt,bte,btc->btec", [F((2, 3)), F((2, 3, 4)), F((2, 3, 5))])),
    Case("aten.einsum.default", ("ab,ac->b", [F((2, 3)), F((2, 4))]), axes=3),
    Case("aten.einsum.default", ("aab,ac->b", [F((2, 2, 3)), F((2, 4))]), axes=0),
    Case(
        "aten.conv2d.default", (F((3, 4, 6, 6)), F((5, 4, 3, 3)), F((5,)), [1, 1], [1, 1]), axes=3
    ),
    Case(
        "aten.conv2d.default", (F((3, 4, 6, 6)), F((6, 2, 3, 3)), None, [2, 2], [0, 0], [1, 1], 2)
    ),
    Case("aten.conv1d.default", (F((3, 4, 6)), F((5, 4, 3))), axes=3),
    Case("aten.scaled_dot_product_attention.default", (F((2, 4, 5, 6)),) * 3, axes=2),
    Case(
        "aten.scaled_dot_product_attention.default",
        (F((2, 6, 5, 4)), F((2, 3, 5, 4)), F((2, 3, 5, 4)), None, 0.0, True),
        {"enable_gqa": True},
        axes=2,
    ),
    Case("aten.scaled_dot_product_attention.default", (*(F((2, 4, 5, 6)),) * 3, F((2, 1, 5, 5)))),
    Case("aten.embedding.default", (F((7, 4)), I((3, 5), 7)), axes=4),
    Case("aten.embedding.default", (F((7, 4)), I((3, 5), 7), 2), axes=4),
    Case("aten.gather.default", (F((3, 7, 4)), 1, I((3, 5, 4), 7)), axes=3),
    Case("aten.gather.default", (F((3, 7, 4)), -2, I((2, 7, 4), 7)), axes=2),
    Case("aten.index_select.default", (F((3, 7, 4)), 1, I((5,), 7)), axes=3),
    Case("aten.one_hot.default", (I((3, 5), 4), 4), axes=2),
    Case("aten.add.Tensor", (F((3, 5, 4)), F((5, 4))), axes=3),
    Case("aten.add.Tensor", (F((3, 1, 4)), F((3, 5, 1))), {"alpha": 2}, axes=3),
    Case("aten.add.Tensor", (F((3, 4)), 1.5), axes=2),
    Case("aten.sub.Tensor", (F((3, 4)), F((3, 4))), axes=2),
    Case("aten.mul.Tensor", (F((3, 4)), F((4,))), axes=2),
    Case("aten.mul.Tensor", (F((3, 4)), 0.5), axes=2),
    Case("aten.div.Tensor", (F((3, 4)), F((3, 1))), axes=2),
    Case("aten.div.Tensor", (F(()), 7), axes=0),
    Case("aten.neg.default", (F((3, 4)),), axes=2),
    Case("aten.gelu.default", (F((3, 4)),), axes=2),
    Case("aten.copy.default", (F((3, 4), False), F((4,))), axes=2),
    Case("aten.pow.Scalar", (2.0, F((3, 4))), axes=2),
    Case("aten.ne.Scalar", (I((3, 4), 3), 1), axes=2),
    Case("aten.where.self", (MASK, F((4, 6)), F((6,))), axes=2),
    Case("aten.masked_fill.Scalar", (F((2, 3, 4, 6)), MASK, -math.inf), axes=4),
    Case("aten._to_copy.default", (F((3, 4)),), {"dtype": torch.float32}, axes=2),
    Case("aten._to_copy.default", (I((3, 4), 3),), {"dtype": torch.float64}, axes=2),
    Case("aten._to_copy.default", (F((3, 4)),), {"dtype": torch.int64}, axes=2),
    Case("aten._to_copy.default", (I((3, 4), 3),), {"dtype": torch.bool}, axes=2),
    Case("aten.sum.default", (F((3, 4)),), axes=2),
    Case("aten.sum.default", (I((3, 4), 2, torch.bool),), axes=2),
    Case("aten.sum.dim_IntList", (F((3, 4, 5)), [1, -1], True), axes=3),
    Case("aten.mean.default", (F((3, 4)),), axes=2),
    Case("aten.mean.dim", (F((3, 4, 5)), [1]), axes=3),
    Case("aten.amax.default", (F((3, 4, 5)), [-1]), axes=2),
    Case("aten.argmax.default", (F((3, 4, 5)), -1), axes=2),
    Case("aten.softmax.int", (F((3, 4, 5)), -1), axes=2),
    Case("aten.cumsum.default", (F((3, 4, 5)), 1), axes=2),
    Case("aten.topk.default", (F((3, 4, 5)), 2), axes=2),
    Case("aten.sort.default", (F((3, 4, 5)), 1), axes=2),
    Case("aten.layer_norm.default", (F((3, 4, 5)), [5], F((5,)), F((5,))), axes=2),
    Case("aten.layer_norm.default", (F((3, 4, 5)), [4, 5]), axes=1),
    Case("aten.rms_norm.default", (F((3, 4, 5)), [5], F((5,)), 1e-5), axes=2),
    Case("aten.group_norm.default", (F((3, 4, 5)), 2, F((4,)), F((4,))), axes=1),
    Case("aten.max_pool2d.default", (F((3, 4, 6, 6)), [2, 2]), axes=2),
    Case("aten.avg_pool1d.default", (F((3, 4, 6)), [2]), axes=2),
    Case("aten.adaptive_avg_pool2d.default", (F((3, 4, 6, 6)), [2, 2]), axes=2),
    Case("aten.pad.default", (F((3, 4, 5)), [0, 1]), axes=2),
    Case("aten.triu.default", (F((3, 4, 4)), 1), axes=1),
    Case("aten.cross_entropy_loss.default", (F((5, 4)), I((5,), 4), None, 0, 1), axes=1),
    Case("aten.cross_entropy_loss.default", (F((5, 4, 3)), I((5, 3), 4), None, 2, 1), axes=2),
    Case("aten.cross_entropy_loss.default", (F((5, 4)), I((5,), 4), F((4,), False), 2), axes=1),
    Case("aten.cross_entropy_loss.default", (F((5, 4)), I((5,), 4)), axes=0),
    Case("aten.nll_loss_nd.default", (F((5, 4)), I((5,), 4), None, 2, -100), axes=1),
    Case("aten.mse_loss.default", (F((5, 4)), F((5, 4))), axes=2),
    Case("aten.mse_loss.default", (F((5, 4)), F((5, 4)), 0), axes=2),
    Case("aten.smooth_l1_loss.default", (F((5, 4)), F((5, 4)), 2), axes=2),
    Case("aten.view.default", (F((3, 4, 6)), [3, 4, 2, 3]), axes=3),
    Case("aten.view.default", (F((3, 4, 6)), [12, 6]), axes=2),
    Case("aten.view.default", (F((3, 4, 6)), [-1]), axes=1),
    Case("aten.view.default", (F((4, 6)), [6, 4]), axes=1),
    Case("aten.view.default", (F((2, 3)), [3, 2]), axes=0),
    Case("aten.view.default", (F((2, 1, 3)), [6]), axes=1),
    Case("aten.view.default", (F((1, 4, 6)), [1, 4, 1, 2, 3]), axes=3),
    Case("aten.view.default", (F((4, 6, 5)), [2, 12, 5]), axes=2),
    Case("aten.unsqueeze.default", (F((3, 4)), -1), axes=2),
    Case("aten.squeeze.dim", (F((3, 1, 4)), 1), axes=2),
    Case("aten.flatten.using_ints", (F((3, 4, 6)), 1), axes=2),
    Case("aten.transpose.int", (F((3, 4, 6)), -1, 1), axes=3),
    Case("aten.permute.default", (F((3, 4, 6)), [2, 0, 1]), axes=3),
    Case("aten.t.default", (F((3, 4)),), axes=2),
    Case("aten.expand.default", (F((3, 1)), [2, -1, 4]), axes=3),
    Case("aten.broadcast_tensors.default", ([F((3, 4)), F((4,)), F((3, 1))],), axes=2),
    Case("aten.select.int", (F((3, 4, 5)), 1, 2), axes=2),
    Case("aten.slice.Tensor", (F((3, 4, 5)), 1, 1, 3), axes=2),
    Case("aten.split.Tensor", (F((3, 7, 5)), 3, 1), axes=2),
    Case("aten.split_with_sizes.default", (F((3, 4)), [1, 3], -1), axes=1),
    Case("aten.split.Tensor", (F((3, 4)), 4, 1), axes=1),
    Case("aten.unbind.int", (F((3, 4)), 1), axes=1),
    Case("aten.cat.default", ([F((3, 4)), F((3, 2))], -1), axes=1),
    Case("aten.stack.default", ([F((3, 4)), F((3, 4))], 1), axes=2),
    Case("aten.zeros.default", ([3, 4],), {"dtype": torch.float64, "device": CPU}, axes=2),
    Case("aten.full.default", ([3, 4], 2.5), {"dtype": torch.float64, "device": CPU}, axes=2),
    Case("aten.arange.default", (6,), {"device": CPU}, axes=0),
    Case("aten.flip.default", (F((3, 4)), [0]), axes=1),
    Case("aten.roll.default", (F((3, 4, 5)), [1], [-1]), axes=2),
    Case("aten.roll.default", (F((3, 4)), [1]), axes=0),
    Case("aten.repeat.default", (F((3, 4, 5)), [2, 1, 2, 1]), axes=2),
    Case("aten.repeat_interleave.self_int", (F((3, 4)), 2, 0), axes=2),
    Case("aten.repeat_interleave.self_int", (F((3, 4)), 2, 1), axes=2),
    Case("aten.slice_scatter.default", (F((3, 4, 5)), F((3, 2, 5)), 1, 1, 3), axes=2),
    Case("aten.select_scatter.default", (F((3, 4, 5)), F((3, 5)), 1, 2), axes=2),
    Case("aten.index.Tensor", (F((6, 4)), [I((5,), 6)]), axes=3),
    Case("aten.index.Tensor", (F((3, 6, 4)), [None, I((5, 2), 6)]), axes=5),
    Case("aten.index.Tensor", (F((3, 6, 4)), [I((5, 1), 3), I((2,), 6)]), axes=3),
    Case("aten.index.Tensor", (F((3, 6, 4)), [I((5,), 3), None, I((5,), 4)]), axes=0),
    Case("aten.index.Tensor", (I((6, 4), 9), [I((5,), 6)]), axes=3),
    Case("aten.index.Tensor", (I((6,), 9, torch.int32), [I((5,), 6)]), axes=2),
    Case("aten.index.Tensor", (MASK, [I((5,), 4)]), axes=2),
    Case("aten.index_put.default", (F((6, 4)), [I((3,), 2)], F((3, 4)), True), axes=1),
    Case("aten.index_put.default", (F((6, 4)), [I((1,), 2)], F(()))),
    Case("aten.scatter.value", (F((3, 7, 4)), 1, I((3, 1, 4), 7), 0.5), axes=2),
    Case("aten.scatter.src", (F((3, 7)), 1, I((2, 1), 7), F((2, 1))), axes=0),
    Case("aten.scatter_add.default", (F((3, 7, 4)), -2, I((3, 5, 4), 7), F((3, 5, 4))), axes=2),
    Case("aten.histc.default", (F((5, 3), False), 4, -2, 2), axes=2),
    Case("aten.histc.default", (F((5, 3), False), 4), axes=0),
    Case("aten._grouped_mm.default", (*GROUPED, ENDS), axes=1),
    Case("aten._grouped_mm.default", GROUPED, {"offs": ENDS}, axes=1),
    Case("aten.floor_divide.default", (I((3, 4), 9), 2), axes=2),
    Case("aten.__and__.Tensor", (MASK, MASK), axes=2),
    Case("aten.max.default", (F((3, 4)),), axes=0),
    Case("aten.max.dim", (F((3, 4, 5)), 1), axes=2),
    Case("aten.max.other", (F((3, 4)), F((4,))), axes=2),
    Case("aten.prod.dim_int", (F((3, 4, 5)), 1), axes=2),
    Case("aten.linalg_vector_norm.default", (F((3, 4, 5)), 2, [-1], True), axes=2),
    Case("aten.cosine_similarity.default", (F((3, 4)), F((3, 4)), -1), axes=1),
    Case("aten.cosine_similarity.default", (F((3, 4)), F((3, 4))), axes=1),
    Case("aten.std.default", (F((3, 4)), True), axes=0),
    Case("aten.chunk.default", (F((3, 4)), 2, 1), axes=1),
    Case("aten.glu.default", (F((3, 4, 6)),), axes=2),
    Case("aten.upsample_nearest2d.vec", (F((3, 4, 2, 2)), None, [2.0, 2.0]), axes=2),
    Case("aten.view_as_complex.default", (F((3, 4, 2)),), axes=2),
    Case("aten.view_as_real.default", (F((3, 4), dtype=torch.complex128),), axes=2),
    Case("aten.kl_div.default", (F((5, 4)), I((5, 4), 2, torch.float64), 2), axes=2),
    Case("aten.binary_cross_entropy.default", (I((5, 4), 2, torch.float64),) * 2, axes=2),
    Case("aten.binary_cross_entropy_with_logits.default", (F((5, 4)), F((5, 4))), axes=2),
]


@dataclass(frozen=True)
class Called:
    """A node of a case, with its tensors."""

    graph: Graph
    node: Node
    tensors: dict[str, Tensor]
    trained: set[str]
    result: list[Tensor]


def called(case: Case, draws: torch.Generator) -> Called:
    tensors: dict[str, Tensor] = {}
    trained: set[str] = set()

    def converted(argument: Any, make: Any) -> Any:
        if isinstance(argument, Floats | Indices):
            return make(argument)
        if isinstance(argument, list):
            return [converted(element, make) for element in argument]
        return argument

    def reference(spec: Floats | Indices) -> Reference:
        name = f"input{len(tensors)}"
        if isinstance(spec, Floats):
            trained.update({name} if spec.is_trained else ())
            tensors[name] = torch.randn(spec.shape, generator=draws, dtype=spec.dtype)
        else:
            drawn = torch.randint(spec.below, spec.shape, generator=draws)
            if isinstance(spec, Ends):
                drawn = drawn.sort().values
                drawn[-1] = spec.below - 1
            tensors[name] = drawn.to(spec.dtype)
        return Reference(name)

    arguments = tuple(converted(argument, reference) for argument in case.arguments)
    keywords = {key: converted(value, reference) for key, value in case.keywords.items()}
    names = iter(tensors)
    values = [converted(argument, lambda _: tensors[next(names)]) for argument in case.arguments]
    named = {key: converted(v, lambda _: tensors[next(names)]) for key, v in case.keywords.items()}
    returned = function(case.operator)(*values, **named)
    result = as_list(returned)
    leaves = [Node(name=name, operator=INPUT, outputs=(type_of(x),)) for name, x in tensors.items()]
    node = Node(
        name="node",
        operator=case.operator,
        arguments=arguments,
        keywords=keywords,
        outputs=tuple(map(type_of, result)),
        returns_list=isinstance(returned, list | tuple),
    )
    graph = Graph({n.name: n for n in (*leaves, node)}, node.name)
    return Called(graph, node, tensors, trained, result)


def type_of(tensor: Tensor) -> TensorType:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorType(tuple(tensor.shape), dtype, tensor.dtype.itemsize)


def strategies_of(call: Called) -> list[Strategy]:
    pattern = pattern_of(call.graph, call.node)
    return list(strategies(pattern, lambda axis: [1, 2, pattern.sizes[axis] // 2 or 1]))


@pytest.mark.every_combination
@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_are_together_what_one_process_computes(case):
    draws = torch.Generator().manual_seed(0)
    call = called(case, draws)
    for strategy in strategies_of(call):
        for ratios in RATIOS:
            check_values_and_gradients(call, strategy, ratios, draws)


def check_values_and_gradients(call, strategy, ratios, draws):
    inputs = dict(zip(call.node.inputs, strategy.inputs, strict=True))
    own_inputs = {name: parts(x, inputs[name], ratios, draws) for name, x in call.tensors.items()}
    own_outputs = []
    for rank in range(len(ratios)):
        own = {name: tensors[rank] for name, tensors in own_inputs.items()}
        for name in call.trained:
            own[name].requires_grad_()
        local = local_call(call.graph, call.node, strategy.inputs, strategy.output, ratios, rank)
        outputs = as_list(run_local(local, own.__getitem__, CPU))
        assert [tuple(x.shape) for x in outputs] == [kind.shape for kind in local.outputs]
        own_outputs.append(outputs)
    message = f"{strategy} with ratios {ratios}"
    for index, expected in enumerate(call.result):
        whole = assembled([outputs[index].detach() for outputs in own_outputs], strategy.output)
        assert whole.dtype == expected.dtype, message
        close(whole, expected, message)
    check_gradients(call, strategy, ratios, draws, own_inputs, own_outputs)


def check_gradients(call, strategy, ratios, draws, own_inputs, own_outputs):
    leaves = {
        name: tensor.clone().requires_grad_(name in call.trained)
        for name, tensor in call.tensors.items()
    }
    whole = as_list(run_local(whole_call(call.graph, call.node), leaves.__getitem__, CPU))
    differentiable = [index for index, x in enumerate(whole) if x.requires_grad]
    if not differentiable:
        return
    seeds = {index: random_like(whole[index].detach(), draws) for index in differentiable}
    torch.autograd.backward([whole[i] for i in differentiable], list(seeds.values()))
    placed = {i: parts(seeds[i], adjoint(strategy.output), ratios, draws) for i in differentiable}
    for rank, outputs in enumerate(own_outputs):
        torch.autograd.backward(
            [outputs[i] for i in differentiable], [placed[i][rank] for i in differentiable]
        )
    inputs = dict(zip(call.node.inputs, strategy.inputs, strict=True))
    for name, leaf in leaves.items():
        if leaf.grad is None:
            continue
        gradients = [x.grad for x in own_inputs[name]]
        assert all(gradient is not None for gradient in gradients), name
        whole_gradient = assembled(gradients, adjoint(inputs[name]))
        message = f"gradient of {name}, {strategy} with ratios {ratios}"
        close(whole_gradient, leaf.grad, message, seeds[differentiable[0]].dtype)


def close(actual, expected, message, computed=torch.float64):
    tolerance = 1e-5 if torch.float32 in (expected.dtype, computed) else 1e-11
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{message}: {m}"
    )


@pytest.mark.parametrize("case", [case for case in CASES if case.axes is not None], ids=str)
def test_number_of_axes_along_which_an_operator_is_divided(case):
    call = called(case, torch.Generator().manual_seed(0))
    assert len(list(pattern_of(call.graph, call.node).divisible_axes())) == case.axes


# On meta, as in an export, rows are aligned.
ALIGNED = F((6, 8), dtype=torch.bfloat16), F((3, 8, 16), dtype=torch.bfloat16), ENDS
ON_META = [
    replace(case, arguments=ALIGNED, keywords={}) if "_grouped_mm" in case.operator else case
    for case in CASES
]


@pytest.mark.parametrize("case", ON_META, ids=str)
def test_rules_fit_all_cases(case):
    call = called(case, torch.Generator().manual_seed(0))
    assert not with_fitting_rules(call.graph).nodes["node"].misfit


def test_every_rule_has_a_case():
    operators = {base_name(case.operator) for case in CASES}
    tested = {id(RULES[name]) for name in operators if name in RULES}
    assert {name for name, rule in RULES.items() if id(rule) not in tested} == {"getitem"}


@pytest.mark.parametrize("index", [7, -8, -100])
@pytest.mark.parametrize(
    "case",
    [
        Case("aten.embedding.default", (F((7, 4)), I((3, 5), 7))),
        Case("aten.index.Tensor", (F((7, 4)), [I((5,), 7)])),
    ],
    ids=str,
)
def test_indices_outside_of_a_divided_table_are_an_error_as_in_torch(case, index):
    draws = torch.Generator().manual_seed(0)
    call = called(case, draws)
    table, indices = call.tensors.values()
    indices.view(-1)[1] = index
    with pytest.raises(IndexError):
        function(case.operator)(table, indices if case.operator[5] == "e" else [indices])
    divided = next(s for s in strategies_of(call) if s.output is PARTIAL and s.axis)
    inputs = dict(zip(call.node.inputs, divided.inputs, strict=True))
    ratios = (2, 1)
    own = {name: parts(x, inputs[name], ratios, draws) for name, x in call.tensors.items()}
    for rank in range(2):
        local = local_call(call.graph, call.node, divided.inputs, PARTIAL, ratios, rank)
        values = {name: tensors[rank] for name, tensors in own.items()}
        with pytest.raises(IndexError, match=rf"7 entries are indexed with .*{index}"):
            run_local(local, values.__getitem__, CPU)


def test_placements_without_a_strategy_are_refused():
    call = called(CASES[0], torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=r"node 'node', aten.linear.default: no strategy reads"):
        local_call(call.graph, call.node, (Sharded(2), REPLICATED, REPLICATED), PARTIAL, (2, 1), 0)


def test_flops_of_the_ranks_are_those_of_the_whole_operator():
    call = called(CASES[0], torch.Generator().manual_seed(0))
    pattern = pattern_of(call.graph, call.node)
    assert pattern.flops == 2 * 3 * 5 * 6 * 8
    for strategy in strategies_of(call):
        shares = parts_of(divided_units(pattern, strategy), (2, 0, 1))
        assert sum(shares) == pytest.approx(1.0 if strategy.axis else 3.0)


def test_parts_of_shared_heads_stay_together():
    """Query heads are cut where key and value heads are."""
    case = next(case for case in CASES if case.keywords.get("enable_gqa"))
    call = called(case, torch.Generator().manual_seed(0))
    by_heads = next(s for s in strategies_of(call) if s.axis == "heads")
    assert by_heads.inputs[:2] == (Sharded(1, unit=2), Sharded(1))
    assert local_shape(by_heads.output, (2, 6, 5, 4), (2, 1), 0) == (2, 4, 5, 4)
