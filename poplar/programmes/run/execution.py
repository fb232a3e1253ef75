"""Runs a programme on this rank: the nodes of a graph on local tensors, collectives in between.

All ranks run the same nodes in the same order, also those whose parts are empty, so they issue the
same collectives: forward, and in the opposite order backward. `programmes.rules` says what a
rank calls for a node.

Steps read and write numbered registers, one for each tensor of a node in each placement in which it
is read. On small models and fast devices, a step of training takes the host's time per node, so
whatever does not depend on values is done once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from poplar.comm.communicator import Communicator
from poplar.programmes.graph.graph import BUFFER, CONSTANT, GET_ITEM, LEAVES, PARAMETER, Graph, Node
from poplar.programmes.graph.placement import PARTIAL, Placement, local_shape
from poplar.programmes.graph.programme import Programme
from poplar.programmes.rules.local_call import ZEROS
from poplar.programmes.rules.registry import local_call
from poplar.programmes.run.collectives import convert, own_part
from poplar.programmes.run.local_execution import Registers, bound, zeros_of
from poplar.programmes.run.meta_execution import passed_inputs
from poplar.values.errors import CollectiveTimeout

_PARAMETERS, _BATCH, _BUFFERS = 0, 1, 2
"""Registers of what is given."""
_NONE: Mapping[str, Tensor] = MappingProxyType({})


class _Step(NamedTuple):
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


class Execution:
    """One rank's part of the forward and backward pass of a loss.

    Args:
        comm: the transport; its ranks are those of the programme.
        graph: of the loss on the whole batch.
        constants: by node, the graph's buffers and constants, whole and on `device`.

    Raises:
        ValueError: a programme for another number of ranks, without a placement that a node needs,
            or with placements in which an operator cannot be computed or that no collective makes.
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
        programme.collectives(graph)  # raises unless all placements are given and can be reached
        self._known: dict[tuple[str, Placement, int], int] = {}
        """Registers by node, placement, and number of the output."""
        self._steps: list[_Step] = []
        self._registers: Registers = [None, None, None]
        for node in graph.nodes.values():
            if node.operator == GET_ITEM:  # only this output is converted
                (name,), (target,) = node.inputs, programme.inputs[node.name]
                read = self._read(name, target, node.arguments[1])
                self._known[node.name, programme.placements[node.name], 0] = read
            elif node.operator in LEAVES:
                self._give(node)
            else:
                self._call(node)
        self._loss = self._read(graph.output, PARTIAL)
        self._freed = _freed_after(self._steps, kept=self._loss)

    def loss(
        self,
        parameters: Mapping[str, Tensor],
        batch: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor] = _NONE,
        errors: list[Exception] | None = None,
    ) -> Tensor:
        """This rank's contribution to the loss, which is the sum over ranks. Collective.

        Args:
            parameters: by name in the model, what this rank has by `Programme.parameters`.
            batch: by path, what this rank has in `Programme.placements` of the batch's nodes.
            buffers: by name in the model, whole; others have the values in `constants`.
            errors: receives errors of operators, whose results are zeros then, so that this rank
                issues the collectives of the others in forward and backward. None: the first error
                is raised, and the collectives of the other ranks raise.

        Raises:
            ValueError: a tensor is missing, or has not the shape of this rank's part.
            CollectiveTimeout: names the ranks that did not take part before the deadline.
        """
        values = self._registers.copy()
        values[_PARAMETERS], values[_BATCH], values[_BUFFERS] = parameters, batch, buffers
        for step, freed in zip(self._steps, self._freed, strict=True):
            try:
                step.run(values)
            except BaseException as error:  # a context manager would cost as much as a small call
                self._continue(step, values, error, errors)
            for register in freed:
                values[register] = None
        loss: Tensor = values[self._loss]
        return loss

    def _continue(
        self, step: _Step, values: Registers, error: BaseException, errors: list[Exception] | None
    ) -> None:
        """After an error of a step; raises it if the step cannot be replaced by zeros."""
        run = step.run_failed
        if errors is not None and run is not None and isinstance(error, Exception):
            with suppress(Exception):
                run(values)
                errors.append(error)
                return
        # All ranks have a timeout. Those on gloo find out about others at the latest at theirs.
        if not isinstance(error, CollectiveTimeout):
            what = f"node {step.node!r} of the programme"
            self._comm.abort(f"rank {self._rank}: {what} failed: {error!r}")
        raise error

    def _new(self, name: str, placement: Placement, number: int = 0) -> int:
        """A register for an output of a node."""
        self._known[name, placement, number] = len(self._registers)
        self._registers.append(None)
        return len(self._registers) - 1

    def _give(self, node: Node) -> None:
        """A leaf. Buffers may change between steps; constants do not."""
        name, source, rank = node.name, node.source, self._rank
        placement, ratios = self._programme.placements[name], self._programme.ratios
        register = self._new(name, placement)
        shape = local_shape(placement, node.output.shape, ratios, rank)
        given = _PARAMETERS if node.operator == PARAMETER else _BATCH
        own = None
        if node.operator in (BUFFER, CONSTANT):
            own = own_part(self._constants[name], placement, ratios, rank)
        if node.operator == CONSTANT:
            self._registers[register] = own
            return

        def run_buffer(values: Registers) -> None:
            whole = values[_BUFFERS].get(source)
            values[register] = own if whole is None else own_part(whole, placement, ratios, rank)

        def run(values: Registers) -> None:
            value = values[given].get(source)
            if value is None:
                raise ValueError(f"rank {rank}: the {node.operator} {source!r} is missing")
            if value.shape != shape:
                raise ValueError(
                    f"rank {rank}: the {node.operator} {source!r} must have the shape "
                    f"{shape}, its part in the placement {placement}, got {tuple(value.shape)}"
                )
            values[register] = value

        used = run if own is None else run_buffer
        self._steps.append(_Step(name, used, (), (register,)))

    def _call(self, node: Node) -> None:
        """What this rank computes for a node."""
        graph, programme = self._graph, self._programme
        placements, output = programme.inputs[node.name], programme.placements[node.name]
        # Collective, so also what this rank's own call does not read.
        inputs = [(n, self._read(n, p)) for n, p in zip(node.inputs, placements, strict=True)]
        following = iter(inputs)

        def register(name: str) -> int:
            """The register of the next input: a node may be read twice, in two placements."""
            return next(number for found, number in following if found == name)

        call = local_call(graph, node, placements, output, programme.ratios, self._rank)
        if call.operator == ZEROS:
            call = replace(call, passed=passed_inputs(graph, node))
        compute = bound(call, register, self._device)
        outputs = [self._new(node.name, output, number) for number in range(len(node.outputs))]
        read = tuple(number for _, number in inputs)

        def run_one(values: Registers, output: int = outputs[0]) -> None:
            values[output] = compute(values)

        def run_several(values: Registers) -> None:
            for output, value in zip(outputs, compute(values), strict=True):
                values[output] = value

        def run_failed(values: Registers) -> None:
            zeros = replace(call, passed=passed_inputs(graph, node))
            made = zeros_of(zeros, [values[number] for number in read], self._device)
            for output, value in zip(outputs, made, strict=True):
                values[output] = value

        run = run_several if node.returns_list else run_one
        self._steps.append(_Step(node.name, run, read, tuple(outputs), run_failed))

    def _read(self, name: str, target: Placement | None, number: int = 0) -> int:
        """The register of an output of a node in a placement; converted for the first reader."""
        comm, ratios = self._comm, self._programme.ratios
        source = self._programme.placements[name]
        target = target or source
        if (name, target, number) in self._known:
            return self._known[name, target, number]
        read = self._known[name, source, number]
        shape = self._graph.nodes[name].outputs[number].shape
        what = f"node {name!r} of the programme, from {source!r} to {target!r}"
        register = self._new(name, target, number)

        def run(values: Registers) -> None:
            x = values[read]
            values[register] = convert(comm, x, source, target, shape, ratios, what=what)

        self._steps.append(_Step(name, run, (read,), (register,)))
        return register


def _freed_after(steps: Sequence[_Step], kept: int) -> list[tuple[int, ...]]:
    """The registers that are not read after each step."""
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        last |= dict.fromkeys((*step.reads, *step.writes), number)
    freed: list[list[int]] = [[] for _ in steps]
    for register, number in last.items():
        if register != kept:
            freed[number].append(register)
    return list(map(tuple, freed))
