"""Runs a programme on this rank: the nodes of a graph on local tensors, collectives in between.

All ranks run the same nodes in the same order, also those whose parts are empty, so they issue the
same collectives: forward, and in the opposite order backward. `planner.rules` says what a rank
calls for a node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from poplar.comm.communicator import Communicator
from poplar.planner.graph.graph import (
    BUFFER,
    CONSTANT,
    GET_ITEM,
    LEAVES,
    PARAMETER,
    Graph,
    Node,
)
from poplar.planner.graph.placement import PARTIAL, Placement, local_shape
from poplar.planner.graph.programme import Programme
from poplar.planner.rules.local_call import ZEROS, LocalCall
from poplar.planner.rules.registry import local_call
from poplar.spmd.conversion import convert, own_part
from poplar.spmd.failures import abort_on_error
from poplar.spmd.gradient_flow import passes_gradients
from poplar.spmd.local_execution import run_local

_Known = dict[tuple[Placement, int], Tensor]
"""A node's outputs, by placement and number of the output."""


class Execution:
    """One rank's part of the forward and backward pass of a loss.

    Args:
        comm: the transport; its ranks are those of the programme.
        graph: of the loss on the whole batch.
        programme: placements and collectives.
        constants: by node, the graph's buffers and constants, whole and on `device`.
        device: of all tensors.

    Raises:
        ValueError: a programme for another number of ranks, without a placement that a node needs,
            with placements in which an operator cannot be computed, or without a collective.
    """

    def __init__(
        self,
        comm: Communicator,
        graph: Graph,
        programme: Programme,
        constants: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        if programme.world_size != comm.group.size:
            raise ValueError(
                f"the programme is for {programme.world_size} ranks, the group has "
                f"{comm.group.size}"
            )
        self._comm, self._graph, self._programme = comm, graph, programme
        self._device = device
        self._sources = _sources(graph, programme)
        self._constants = {
            name: own_part(value, programme.placements[name], programme.ratios, comm.group.rank)
            for name, value in constants.items()
        }
        self._calls = {
            node.name: self._local_call(node)
            for node in graph.nodes.values()
            if node.operator not in LEAVES
        }
        self._last_reads = _last_reads(graph)

    def loss(self, parameters: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """This rank's contribution to the loss, which is the sum over ranks. Collective.

        Args:
            parameters: by name in the model, what this rank has in `Programme.parameters`.
            batch: by path, what this rank has in `Programme.placements` of the batch's nodes.

        Raises:
            ValueError: a tensor is missing, or has not the shape of this rank's part.
            CollectiveTimeout: names the ranks that did not take part before the deadline.
        """
        values: dict[str, _Known] = {}
        for node in self._graph.nodes.values():
            with abort_on_error(self._comm, f"node {node.name!r} of the programme"):
                if node.operator in LEAVES:
                    outputs = [self._leaf(node, parameters, batch)]
                else:
                    outputs = self._run(node, values)
            given = self._placement(node)
            values[node.name] = {(given, number): x for number, x in enumerate(outputs)}
            for name in self._last_reads[node.name]:
                del values[name]
        output = self._graph.nodes[self._graph.output]
        return self._converted(output, values[output.name], PARTIAL)

    def backward(self, loss: Tensor) -> None:
        """As `loss.backward()`. Collective; errors are reported to the other ranks.

        The gradient of a sharded parameter is that of this rank's part. That of a replicated one is
        this rank's contribution: the gradient is the sum over ranks.
        """
        with abort_on_error(self._comm, "the backward pass of the programme"):
            loss.backward()

    def _placement(self, node: Node) -> Placement:
        """Of the node's output."""
        return _placement(self._programme, node)

    def _local_call(self, node: Node) -> LocalCall:
        inputs = self._programme.inputs[node.name]
        ratios, rank = self._programme.ratios, self._comm.group.rank
        call = local_call(self._graph, node, inputs, self._placement(node), ratios, rank)
        is_called = node.operator != GET_ITEM
        if is_called and call.operator == ZEROS and not passes_gradients(self._graph, node):
            return replace(call, arguments=())
        return call

    def _leaf(
        self, node: Node, parameters: Mapping[str, Tensor], batch: Mapping[str, Tensor]
    ) -> Tensor:
        if node.operator in (BUFFER, CONSTANT):
            return self._constants[node.name]
        given = parameters if node.operator == PARAMETER else batch
        if node.source not in given:
            raise ValueError(
                f"rank {self._comm.group.rank}: the {node.operator} {node.source!r} is missing"
            )
        value, ratios = given[node.source], self._programme.ratios
        rank, placement = self._comm.group.rank, self._placement(node)
        shape = local_shape(placement, node.output.shape, ratios, rank)
        if tuple(value.shape) != shape:
            raise ValueError(
                f"rank {rank}: the {node.operator} {node.source!r} must have the shape {shape}, "
                f"its part in the placement {placement}, got {tuple(value.shape)}"
            )
        return value

    def _run(self, node: Node, values: Mapping[str, _Known]) -> list[Tensor]:
        """The outputs of a node."""
        if node.operator == GET_ITEM:  # only this output is converted
            (name,), (target,) = node.inputs, self._programme.inputs[node.name]
            return [self._read(name, target, values, number=node.arguments[1])]
        # Collective, so also what this rank's own call does not read.
        reads = zip(node.inputs, self._programme.inputs[node.name], strict=True)
        inputs = [(name, self._read(name, target, values)) for name, target in reads]

        def value(name: str) -> Tensor:
            """The next input: a node may be read twice, in two placements."""
            while inputs[0][0] != name:  # an argument that this rank's own call does not have
                inputs.pop(0)
            return inputs.pop(0)[1]

        result = run_local(self._calls[node.name], value, self._device)
        return list(result) if isinstance(result, list | tuple) else [result]

    def _read(
        self, name: str, target: Placement | None, values: Mapping[str, _Known], number: int = 0
    ) -> Tensor:
        node = self._graph.nodes[name]
        return self._converted(node, values[name], target or self._placement(node), number)

    def _converted(self, node: Node, known: _Known, target: Placement, number: int = 0) -> Tensor:
        """An output of a node in another placement, kept for the next reader."""
        if (target, number) not in known:
            source = self._sources[node.name][target]
            x = self._converted(node, known, source, number)
            shape, ratios = node.outputs[number].shape, self._programme.ratios
            what = f"node {node.name!r} of the programme, from {source!r} to {target!r}"
            known[target, number] = convert(self._comm, x, source, target, shape, ratios, what=what)
        return known[target, number]


def _placement(programme: Programme, node: Node) -> Placement:
    """Of a node's output."""
    if node.name not in programme.placements:
        raise ValueError(f"Programme.placements must have the graph's node {node.name!r}")
    return programme.placements[node.name]


def _sources(graph: Graph, programme: Programme) -> dict[str, dict[Placement, Placement]]:
    """By node and placement in which it is read: from which placement it is converted.

    Raises:
        ValueError: no collective leads to a placement in which a node is read.
    """
    sources: dict[str, dict[Placement, Placement]] = {}
    for name, node in graph.nodes.items():
        reached = {_placement(programme, node)}
        collectives = [c for c in programme.collectives if c.node == name]
        sources[name] = {}
        while new := [c for c in collectives if c.source in reached and c.target not in reached]:
            sources[name][new[0].target] = new[0].source
            reached.add(new[0].target)
        if node.operator in LEAVES:
            continue
        if name not in programme.inputs or len(programme.inputs[name]) != len(node.inputs):
            raise ValueError(
                f"Programme.inputs must have {len(node.inputs)} placements of the inputs of "
                f"{name!r}, got {programme.inputs.get(name)}"
            )
        for read, target in zip(node.inputs, programme.inputs[name], strict=True):
            available = {_placement(programme, graph.nodes[read]), *sources[read], None}
            if target not in available:
                raise ValueError(
                    f"{name!r} reads {read!r} in the placement {target}, and no collective of the "
                    "programme leads to it"
                )
    # The loss needs no collective to become the sum of the ranks' contributions.
    output = graph.nodes[graph.output]
    sources[graph.output].setdefault(PARTIAL, _placement(programme, output))
    return sources


def _last_reads(graph: Graph) -> dict[str, list[str]]:
    """By node: which others are not read after it."""
    last_reads: dict[str, list[str]] = {name: [] for name in graph.nodes}
    last_reader = {read: name for name, node in graph.nodes.items() for read in node.inputs}
    for read, name in last_reader.items():
        if read != graph.output:
            last_reads[name].append(read)
    return last_reads
