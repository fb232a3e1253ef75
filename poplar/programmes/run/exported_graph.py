"""Makes the graph of the forward pass of a loss function on a batch, by `torch.export`.

The graph is of this batch: its shapes, its strings and truth values, the modes of the modules.
Numbers in the batch are inputs, like tensors, where the operators take tensors. Composite
operators, such as attention, are kept whole. Operators that change tensors in place are replaced by
those that do not.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec
from torch.utils._pytree import SequenceKey, keystr, tree_flatten_with_path, tree_leaves, tree_map

from poplar.programmes.graph.graph import (
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
from poplar.programmes.run.function_modes import Exported
from poplar.programmes.run.meta_execution import with_fitting_rules
from poplar.values.errors import NotExportable

_ROOT = "model."
_KINDS = {
    InputKind.PARAMETER: PARAMETER,
    InputKind.BUFFER: BUFFER,
    InputKind.CONSTANT_TENSOR: CONSTANT,
    InputKind.USER_INPUT: INPUT,
}
_CHECKS = ("aten._assert_tensor_metadata.default", "aten._assert_scalar.default")
_SWITCHES = ("train", "training", "p", "dropout", "dropout_p")
"""Arguments of random operators: if one is 0 or False, no numbers are drawn."""
_IDENTITIES = ("aten.dropout.default", "aten.alias.default")
"""Operators that return their first argument unless they are random."""
_CREATED = {
    "aten.new_zeros.default": "aten.zeros.default",
    "aten.new_ones.default": "aten.ones.default",
    "aten.new_full.default": "aten.full.default",
    "aten.new_empty.default": "aten.empty.memory_format",
}
"""Operators that read only the type and device of their first argument, and those that take both
as keywords."""


@dataclass(frozen=True, slots=True)
class ExportedLoss:
    """The forward pass of `loss_fn(model, batch)`."""

    graph: Graph
    constants: Mapping[str, Tensor]
    """Values of the graph's constants and buffers, by the name of the node."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """What the batch has besides inputs, by path; the graph is of these values."""

    def tensors(self, batch: Any, device: torch.device) -> dict[str, Tensor]:
        """The inputs of the graph that a batch has, by path.

        Args:
            batch: as the example; None: this rank has no samples.
            device: of the tensors.

        Raises:
            ValueError: a value of the batch is not the one that the graph is of.
        """
        inputs = self.graph.batch
        tensors: dict[str, Tensor] = {}
        for path, value in ({} if batch is None else _leaves(batch)).items():
            if path in inputs:
                tensors[path] = _as_tensor(value, path, inputs[path].output.dtype, device)
            elif path in self.fixed and repr(value) != repr(self.fixed[path]):
                raise ValueError(
                    f"the batch has {value!r} at {path}, but the example batch had "
                    f"{self.fixed[path]!r}, which the programme keeps; give distribute() an "
                    "example with this value, or a tensor where it changes"
                )
        return tensors


class _Loss(nn.Module):
    def __init__(self, model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, batch: Any) -> Tensor:
        with Exported():
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
    module = _Loss(model, loss_fn)
    given = _with_numbers_as_tensors(model, batch)
    try:
        program = _exported(module, given)
    except NotExportable:
        if not any(map(_is_number, tree_leaves(batch))):
            raise
        given = batch
        program = _exported(module, given)
    _refuse_changes(program)
    graph, constants = _converted(program, model, given)
    return ExportedLoss(graph, constants, _fixed(given))


def _exported(module: nn.Module, batch: Any) -> ExportedProgram:
    try:
        with warnings.catch_warnings(), _python_random_refused():
            warnings.simplefilter("ignore")  # about torch's own use of pytrees
            program = torch.export.export(module, (batch,), strict=False)
            for node in _calls(program.graph_module):
                _refuse_random(node)
            decomposed: ExportedProgram = program.run_decompositions({})
            return decomposed
    except NotExportable:
        raise
    except Exception as error:  # torch.export raises errors of many unrelated classes
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise NotExportable(f"torch.export failed: {first_line}") from error


@contextmanager
def _python_random_refused() -> Iterator[None]:
    """A context in which Python and numpy draw no random numbers: a graph would keep them."""
    numpy_random = sys.modules["numpy"].random if "numpy" in sys.modules else None

    def states() -> tuple[Any, str]:
        return random.getstate(), repr(numpy_random.get_state()) if numpy_random else ""

    before = states()
    yield
    if states() != before:
        raise NotExportable(
            "the forward pass draws random numbers of Python or numpy, and each pass needs others"
        )


def _calls(module: fx.GraphModule) -> Iterator[fx.Node]:
    """The calls of the program and of its regions."""
    graphs = (found.graph for found in module.modules() if isinstance(found, fx.GraphModule))
    return (node for graph in graphs for node in graph.nodes if node.op == "call_function")


def _refuse_random(node: fx.Node) -> None:
    """Refuse operators that draw random numbers: ranks would not draw those of one process.

    Operators with dropout in them draw some only in training, and only if the probability is not 0.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return
    assert isinstance(node.target, torch._ops.OpOverload)
    arguments = node.target._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments}
    given |= dict(zip(given, node.args, strict=False)) | node.kwargs
    if any(given.get(name, True) in (False, 0.0) for name in _SWITCHES):
        return
    raise NotExportable(
        f"{node.target} draws random numbers, as dropout in training does; set its probability to 0"
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


def _converted(
    program: ExportedProgram, model: nn.Module, batch: Any
) -> tuple[Graph, dict[str, Tensor]]:
    """The graph and its constants."""
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    sources = _sources(program, model, batch)
    nodes: dict[str, Node] = {}
    constants: dict[str, Tensor] = {}
    known: dict[str, str] = {}  # node of the tensor, by the fx node's name
    leaves: dict[str, str] = {}  # node by the name of the parameter or buffer
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    for node in program.graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor):
            leaf = _leaf(node, specs[node.name], sources[node.name], trained)
            first = leaves.setdefault(f"{leaf.operator} {leaf.source}", leaf.name)
            known[node.name] = first
            if first == leaf.name:
                nodes[leaf.name] = leaf
                if leaf.operator in (BUFFER, CONSTANT):
                    constants[leaf.name] = _value(program, specs[node.name])
        elif node.op == "call_function" and _is_identity(node):
            known[node.name] = known[node.args[0].name]
        elif node.op == "call_function" and _operator(node) not in _CHECKS:
            nodes[node.name] = _call(node, known)
            known[node.name] = node.name
    outputs = program.graph_signature.user_outputs
    if len(outputs) != 1:
        raise NotExportable(f"loss_fn must return one tensor, got {len(outputs)}")
    loss = nodes[known[str(outputs[0])]]
    if loss.output.shape != () or not loss.output.is_floating:
        raise NotExportable(
            f"loss_fn must return a float tensor of no dimensions, got {loss.output}"
        )
    graph = with_fitting_rules(_needed(Graph(nodes, loss.name)))
    return graph, {k: v for k, v in constants.items() if k in graph.nodes}


def _is_identity(node: fx.Node) -> bool:
    """Whether a node returns its input: also a slice of all of it."""
    if _operator(node) == "aten.slice.Tensor":
        return node.meta["val"].shape == node.args[0].meta["val"].shape  # type: ignore[union-attr,no-any-return]
    return _operator(node) in _IDENTITIES


def _sources(program: ExportedProgram, model: nn.Module, batch: Any) -> dict[str, str]:
    """The name in the model, or the path in the batch, of each placeholder."""
    names = {id(p): name for name, p in model.named_parameters()}  # of tied ones, the first
    specs = program.graph_signature.input_specs
    sources: dict[str, str] = {}
    for spec in specs:
        source = str(spec.target).removeprefix(_ROOT)
        if spec.kind is InputKind.PARAMETER:
            source = names.get(id(program.state_dict[str(spec.target)]), source)
        sources[spec.arg.name] = source
    given = [spec.arg.name for spec in specs if spec.kind is InputKind.USER_INPUT]
    return sources | dict(zip(given, _leaves(batch), strict=True))


def _leaves(batch: Any) -> dict[str, Any]:
    """What a batch has, by path."""
    leaves, _ = tree_flatten_with_path(batch)
    return {keystr(path): leaf for path, leaf in leaves}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fixed(batch: Any) -> dict[str, Any]:
    """What a graph may depend on besides inputs, by path. Strings in lists name samples."""
    leaves, _ = tree_flatten_with_path(batch)
    return {
        keystr(path): leaf
        for path, leaf in leaves
        if leaf is None
        or isinstance(leaf, bool | int | float)
        or (isinstance(leaf, str) and not isinstance(path[-1], SequenceKey))
    }


def _with_numbers_as_tensors(model: nn.Module, batch: Any) -> Any:
    """The batch with tensors of no dimensions for its numbers."""
    is_double = any(p.dtype == torch.float64 for p in model.parameters())
    floating = torch.float64 if is_double else torch.float32

    def converted(leaf: Any) -> Any:
        if not _is_number(leaf):
            return leaf
        dtype = floating if isinstance(leaf, float) else torch.int64
        return torch.tensor(leaf, dtype=dtype, device="cpu")

    return tree_map(converted, batch)


def _as_tensor(value: Any, path: str, dtype: str, device: torch.device) -> Tensor:
    """An input of a graph from the batch."""
    if isinstance(value, Tensor):
        return value
    if not _is_number(value) or (isinstance(value, float) and not dtype.startswith("float")):
        raise ValueError(
            f"the batch has {value!r} at {path}, but the example batch had a {dtype} there; give "
            "distribute() an example with a value of this type"
        )
    return torch.tensor(value, dtype=getattr(torch, dtype), device=device)


def _leaf(node: fx.Node, spec: InputSpec, source: str, trained: Collection[str]) -> Node:
    if spec.kind not in _KINDS:
        raise NotExportable(f"the graph has an input of an unknown kind, {spec.kind}")
    return Node(
        name=node.name,
        operator=_KINDS[spec.kind],
        outputs=(_type(node.meta["val"], node.name),),
        source=source,
        is_trained=spec.kind is InputKind.PARAMETER and source in trained,
    )


def _value(program: ExportedProgram, spec: InputSpec) -> Tensor:
    """The value of a buffer or constant."""
    name = str(spec.target)
    value = program.state_dict.get(name, program.constants.get(name))
    assert isinstance(value, Tensor), name
    return value


def _call(node: fx.Node, known: Mapping[str, str]) -> Node:
    """The node of a call. It does not read tensors of which only the type and device matter."""

    def converted(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            if argument.name not in known:
                raise NotExportable(f"{node.target} takes {argument.name}, which is no tensor")
            return Reference(known[argument.name])
        if isinstance(argument, list | tuple):
            return [converted(element) for element in argument]
        if isinstance(argument, torch.device):  # each rank has its own
            return torch.device(argument.type)
        return argument

    value: Any = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else (value,)
    operator, arguments, keywords = _operator(node), node.args, node.kwargs
    if operator in _CREATED:
        operator, arguments = _CREATED[operator], arguments[1:]
        keywords = {**keywords, "dtype": value.dtype, "device": value.device}
    elif operator == "aten.type_as.default":
        operator, arguments = "aten.to.dtype_layout", arguments[:1]
        keywords = {"dtype": value.dtype, "device": value.device}
    return Node(
        name=node.name,
        operator=operator,
        arguments=tuple(converted(argument) for argument in arguments),
        keywords={key: converted(argument) for key, argument in keywords.items()},
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


def _needed(graph: Graph) -> Graph:
    """The graph without nodes on which the loss does not depend."""
    needed: set[str] = {graph.output}
    for name in reversed(list(graph.nodes)):
        if name in needed:
            needed.update(graph.nodes[name].inputs)
    return Graph({k: v for k, v in graph.nodes.items() if k in needed}, graph.output)
