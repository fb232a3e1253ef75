"""The steps of a programme on this rank: tensors given, converted and computed, in order.

Steps read and write numbered registers, one for each tensor of a node in each placement in which it
is read. On small models and fast devices, a step of training takes the host's time per node, so
whatever does not depend on values is done once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from poplar.comm.communicator import Communicator
from poplar.programmes.graph.graph import (
    BUFFER,
    CONSTANT,
    GET_ITEM,
    LEAVES,
    PARAMETER,
    Graph,
    Node,
)
from poplar.programmes.graph.placement import PARTIAL, Placement, local_shape
from poplar.programmes.graph.programme import Programme
from poplar.programmes.rules.local_call import ZEROS, LocalCall
from poplar.programmes.rules.registry import local_call
from poplar.programmes.run.conversion import convert, own_part
from poplar.programmes.run.gradient_flow import passed_inputs
from poplar.programmes.run.local_execution import Registers, bound, zeros_of

PARAMETERS, BATCH, BUFFERS = 0, 1, 2
"""Registers of what is given."""


class Step(NamedTuple):
    """One tensor given, converted or computed."""

    node: str
    run: Callable[[Registers], None]
    reads: tuple[int, ...]
    """Registers."""
    writes: tuple[int, ...]
    """Registers."""
    run_failed: Callable[[Registers], None] | None = None
    """Computes zeros instead, so that the ranks that did not fail find this one in all collectives
    of forward and backward. None: that is not possible."""


class BoundProgramme:
    """The steps of a programme on this rank, and the registers before the first one.

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
        self._constants, self._device = constants, device
        self._rank = comm.group.rank
        self._sources = _sources(graph, programme)
        self._known: dict[tuple[str, Placement, int], int] = {}
        """Registers by node, placement, and number of the output."""
        self.steps: list[Step] = []
        self.registers: Registers = [None, None, None]
        for node in graph.nodes.values():
            if node.operator == CONSTANT:
                self.registers[self._new(node)] = self._own_constant(node)
            elif node.operator == BUFFER:
                self._give_buffer(node)
            elif node.operator in LEAVES:
                self._give(node)
            elif node.operator == GET_ITEM:  # only this output is converted
                (name,), (target,) = node.inputs, programme.inputs[node.name]
                read = self._read(name, target, node.arguments[1])
                self._known[node.name, self._placement(node), 0] = read
            else:
                self._call(node)
        self.loss_register = self._read(graph.output, PARTIAL)
        self._freed = _freed_after(self.steps, kept=self.loss_register)

    def _placement(self, node: Node) -> Placement:
        """The placement of the node's output."""
        return _placement(self._programme, node)

    def _new(self, node: Node, placement: Placement | None = None, number: int = 0) -> int:
        """A register for an output of a node."""
        self._known[node.name, placement or self._placement(node), number] = len(self.registers)
        self.registers.append(None)
        return len(self.registers) - 1

    def _own_constant(self, node: Node) -> Tensor:
        whole, placement = self._constants[node.name], self._placement(node)
        return own_part(whole, placement, self._programme.ratios, self._rank)

    def _give_buffer(self, node: Node) -> None:
        """A buffer, which may change between steps."""
        register, placement, rank = self._new(node), self._placement(node), self._rank
        ratios, constant = self._programme.ratios, self._own_constant(node)

        def run(values: Registers) -> None:
            whole = values[BUFFERS].get(node.source)
            own = constant if whole is None else own_part(whole, placement, ratios, rank)
            values[register] = own

        self.steps.append(Step(node.name, run, (), (register,)))

    def _give(self, node: Node) -> None:
        """A parameter or a tensor of the batch."""
        given = PARAMETERS if node.operator == PARAMETER else BATCH
        register, placement, rank = self._new(node), self._placement(node), self._rank
        shape = local_shape(placement, node.output.shape, self._programme.ratios, rank)

        def run(values: Registers) -> None:
            value = values[given].get(node.source)
            if value is None:
                raise ValueError(f"rank {rank}: the {node.operator} {node.source!r} is missing")
            if value.shape != shape:
                raise ValueError(
                    f"rank {rank}: the {node.operator} {node.source!r} must have the shape "
                    f"{shape}, its part in the placement {placement}, got {tuple(value.shape)}"
                )
            values[register] = value

        self.steps.append(Step(node.name, run, (), (register,)))

    def _call(self, node: Node) -> None:
        """What this rank computes for a node."""
        # Collective, so also what this rank's own call does not read.
        reads = zip(node.inputs, self._programme.inputs[node.name], strict=True)
        inputs = [(name, self._read(name, target)) for name, target in reads]
        following = iter(inputs)

        def register(name: str) -> int:
            """The register of the next input: a node may be read twice, in two placements."""
            return next(number for found, number in following if found == name)

        call = self._local_call(node)
        compute = bound(call, register, self._device)
        outputs = [self._new(node, number=number) for number in range(len(node.outputs))]

        def run_one(values: Registers, output: int = outputs[0]) -> None:
            values[output] = compute(values)

        def run_several(values: Registers) -> None:
            for output, value in zip(outputs, compute(values), strict=True):
                values[output] = value

        run = run_several if node.returns_list else run_one
        read = tuple(number for _, number in inputs)

        def run_failed(values: Registers) -> None:
            zeros = replace(call, passed=passed_inputs(self._graph, node))
            made = zeros_of(zeros, [values[number] for number in read], self._device)
            for output, value in zip(outputs, made, strict=True):
                values[output] = value

        self.steps.append(Step(node.name, run, read, tuple(outputs), run_failed))

    def _local_call(self, node: Node) -> LocalCall:
        inputs, ratios = self._programme.inputs[node.name], self._programme.ratios
        call = local_call(self._graph, node, inputs, self._placement(node), ratios, self._rank)
        if call.operator == ZEROS:
            return replace(call, passed=passed_inputs(self._graph, node))
        return call

    def _read(self, name: str, target: Placement | None, number: int = 0) -> int:
        """The register of an output of a node in a placement; converted for the first reader."""
        node = self._graph.nodes[name]
        target = target or self._placement(node)
        if (name, target, number) not in self._known:
            source = self._sources[name][target]
            self._convert(node, self._read(name, source, number), source, target, number)
        return self._known[name, target, number]

    def _convert(
        self, node: Node, read: int, source: Placement, target: Placement, number: int
    ) -> None:
        comm, ratios, shape = self._comm, self._programme.ratios, node.outputs[number].shape
        what = f"node {node.name!r} of the programme, from {source!r} to {target!r}"
        register = self._new(node, target, number)

        def run(values: Registers) -> None:
            x = values[read]
            values[register] = convert(comm, x, source, target, shape, ratios, what=what)

        self.steps.append(Step(node.name, run, (read,), (register,)))


def _freed_after(steps: Sequence[Step], kept: int) -> list[tuple[int, ...]]:
    """The registers that are not read after each step."""
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        last |= dict.fromkeys((*step.reads, *step.writes), number)
    freed: list[list[int]] = [[] for _ in steps]
    for register, number in last.items():
        if register != kept:
            freed[number].append(register)
    return list(map(tuple, freed))


def _placement(programme: Programme, node: Node) -> Placement:
    """The placement of a node's output."""
    if node.name not in programme.placements:
        raise ValueError(f"Programme.placements must have the graph's node {node.name!r}")
    return programme.placements[node.name]


def _sources(graph: Graph, programme: Programme) -> dict[str, dict[Placement, Placement]]:
    """The placement from which a node is converted to each placement in which it is read.

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
