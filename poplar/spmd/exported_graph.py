"""From a model, a loss function and a batch to the graph of the forward pass, by `torch.export`.

The graph is of this batch: its shapes, its values that are no tensors, the mode of the model. It
keeps composite operators, such as attention, whole. Operators that change tensors in place are
replaced by those that do not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec
from torch.utils._pytree import keystr, tree_flatten_with_path

from poplar.errors import NotExportable
from poplar.planner.graph.global_means import with_global_means
from poplar.planner.graph.graph import (
    BUFFER,
    CONSTANT,
    GET_ITEM,
    INPUT,
    PARAMETER,
    Graph,
    Node,
    Reference,
    TensorType,
)

_ROOT = "model."
_KINDS = {
    InputKind.PARAMETER: PARAMETER,
    InputKind.BUFFER: BUFFER,
    InputKind.CONSTANT_TENSOR: CONSTANT,
    InputKind.USER_INPUT: INPUT,
}
_CHECKS = ("aten._assert_tensor_metadata.default", "aten._assert_scalar.default")
_DROPOUT_ARGUMENT = {"aten.scaled_dot_product_attention.default": 4}
"""Position of the probability, in operators that are random only where it is not 0."""


@dataclass(frozen=True, slots=True)
class ExportedLoss:
    """The forward pass of `loss_fn(model, batch)`."""

    graph: Graph
    constants: Mapping[str, Tensor]
    """Of the graph's constants and buffers, by the name of the node."""


class _Loss(nn.Module):
    def __init__(self, model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, batch: Any) -> Tensor:
        return self.loss_fn(self.model, batch)


def export_loss(
    model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any
) -> ExportedLoss:
    """The graph of one forward pass, with the shapes of this batch.

    Args:
        model: not changed. A checkpointed block is exported as if it were not checkpointed.
        loss_fn: as for `train_step`: returns a loss of no dimensions.
        batch: an example, with as many samples as a step has on all ranks.

    Raises:
        NotExportable: the model has control flow that depends on values, changes buffers (such as
            BatchNorm in training), draws random numbers (such as dropout), or has operators that
            `torch.export` does not know.
    """
    program = _exported(_Loss(model, loss_fn), batch)
    _refuse_changes(program)
    return _converted(program, model, batch)


def _exported(module: nn.Module, batch: Any) -> ExportedProgram:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about torch's own use of pytrees
            program = torch.export.export(module, (batch,), strict=False)
            for node in _calls(program.graph):
                _refuse_random(node)
            decomposed: ExportedProgram = program.run_decompositions({})
            return decomposed
    except NotExportable:
        raise
    except Exception as error:  # torch.export raises errors of many unrelated classes
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise NotExportable(f"torch.export failed: {first_line}") from error


def _calls(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if node.op == "call_function")


def _refuse_random(node: fx.Node) -> None:
    """Refuse operators that draw random numbers: ranks would not draw those of one process."""
    name = _operator(node)
    if name in ("aten.dropout.default", "aten.dropout_.default"):
        _, probability, is_training = node.args
        is_random = bool(is_training) and probability != 0.0
    elif name in _DROPOUT_ARGUMENT:
        position = _DROPOUT_ARGUMENT[name]
        at_position = node.args[position] if len(node.args) > position else 0.0
        is_random = node.kwargs.get("dropout_p", at_position) != 0.0
    else:
        is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    if is_random:
        raise NotExportable(
            f"{name} draws random numbers, as dropout in training does; set its probability to 0"
        )


def _refuse_changes(program: ExportedProgram) -> None:
    signature = program.graph_signature
    changed = [
        *signature.buffers_to_mutate.values(),
        *signature.parameters_to_mutate.values(),
        *signature.user_inputs_to_mutate.values(),
    ]
    if changed:
        names = ", ".join(sorted(name.removeprefix(_ROOT) for name in changed))
        raise NotExportable(
            f"the forward pass changes {names}, as BatchNorm in training does; use another norm, "
            "or model.eval() for it"
        )


def _converted(program: ExportedProgram, model: nn.Module, batch: Any) -> ExportedLoss:
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    sources = _sources(program, model, batch)
    nodes: dict[str, Node] = {}
    constants: dict[str, Tensor] = {}
    known: dict[str, str] = {}  # node of the tensor, by the fx node's name
    leaves: dict[str, str] = {}  # node by the name of the parameter or buffer
    for node in program.graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor):
            leaf = _leaf(node, specs[node.name], sources[node.name])
            first = leaves.setdefault(f"{leaf.operator} {leaf.source}", leaf.name)
            known[node.name] = first
            if first == leaf.name:
                nodes[leaf.name] = leaf
                if leaf.operator in (BUFFER, CONSTANT):
                    constants[leaf.name] = _value(program, specs[node.name])
        elif node.op == "call_function" and _operator(node) not in _CHECKS:
            nodes[node.name] = _call(node, known)
            known[node.name] = node.name
    loss = nodes[known[_loss_name(program)]]
    if loss.output.shape != () or not loss.output.is_floating:
        raise NotExportable(
            f"loss_fn must return a float tensor of no dimensions, got {loss.output}"
        )
    graph = with_global_means(_needed(Graph(nodes, loss.name)))
    return ExportedLoss(graph, {k: v for k, v in constants.items() if k in graph.nodes})


def _sources(program: ExportedProgram, model: nn.Module, batch: Any) -> dict[str, str]:
    """By placeholder: the name in the model, or the path in the batch."""
    names = {id(p): name for name, p in model.named_parameters()}  # of tied ones, the first
    specs = program.graph_signature.input_specs
    sources: dict[str, str] = {}
    for spec in specs:
        source = str(spec.target).removeprefix(_ROOT)
        if spec.kind is InputKind.PARAMETER:
            source = names.get(id(program.state_dict[str(spec.target)]), source)
        sources[spec.arg.name] = source
    given = [spec.arg.name for spec in specs if spec.kind is InputKind.USER_INPUT]
    leaves, _ = tree_flatten_with_path(batch)
    sources |= {name: keystr(path) for name, (path, _) in zip(given, leaves, strict=True)}
    return sources


def _leaf(node: fx.Node, spec: InputSpec, source: str) -> Node:
    if spec.kind not in _KINDS:
        raise NotExportable(f"the graph has an input of an unknown kind, {spec.kind}")
    return Node(
        name=node.name,
        operator=_KINDS[spec.kind],
        outputs=(_type(node.meta["val"], node.name),),
        source=source,
    )


def _value(program: ExportedProgram, spec: InputSpec) -> Tensor:
    """Of a buffer or constant."""
    name = str(spec.target)
    value = program.state_dict.get(name, program.constants.get(name))
    assert isinstance(value, Tensor), name
    return value


def _call(node: fx.Node, known: Mapping[str, str]) -> Node:
    _refuse_random(node)

    def converted(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            if argument.name not in known:
                raise NotExportable(f"{node.target} takes {argument.name}, which is no tensor")
            return Reference(known[argument.name])
        if isinstance(argument, list | tuple):
            return [converted(element) for element in argument]
        return argument

    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else (value,)
    return Node(
        name=node.name,
        operator=_operator(node),
        arguments=tuple(converted(argument) for argument in node.args),
        keywords={key: converted(argument) for key, argument in node.kwargs.items()},
        outputs=tuple(_type(output, node.name) for output in values),
        returns_list=isinstance(value, list | tuple),
    )


def _operator(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if getattr(target, "__name__", "") == "getitem":
        return GET_ITEM
    raise NotExportable(f"the graph has {target}, which is no operator on tensors")


def _type(value: Any, name: str) -> TensorType:
    if not isinstance(value, Tensor):
        raise NotExportable(f"{name} is no tensor but {type(value).__name__}")
    if not all(isinstance(size, int) for size in value.shape):
        raise NotExportable(f"{name} has a shape that depends on values, {tuple(value.shape)}")
    dtype = str(value.dtype).removeprefix("torch.")
    return TensorType(tuple(value.shape), dtype, value.dtype.itemsize)


def _loss_name(program: ExportedProgram) -> str:
    outputs = program.graph_signature.user_outputs
    if len(outputs) != 1:
        raise NotExportable(f"loss_fn must return one tensor, got {len(outputs)}")
    return str(outputs[0])


def _needed(graph: Graph) -> Graph:
    """Without nodes on which the loss does not depend."""
    needed: set[str] = {graph.output}
    for name in reversed(list(graph.nodes)):
        if name in needed:
            needed.update(graph.nodes[name].inputs)
    return Graph({k: v for k, v in graph.nodes.items() if k in needed}, graph.output)
