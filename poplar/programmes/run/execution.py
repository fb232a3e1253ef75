"""Runs a programme on this rank: the nodes of a graph on local tensors, collectives in between.

All ranks run the same nodes in the same order, also those whose parts are empty, so they issue the
same collectives: forward, and in the opposite order backward. `programmes.rules` says what a
rank calls for a node.

On small models and fast devices, a step of training takes the host's time per node, so whatever
does not depend on values is done once: `torch.fx` makes one function of all calls, which drops
each tensor after its last use.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from poplar.comm.communicator import Communicator
from poplar.programmes.graph.graph import BUFFER, GET_ITEM, LEAVES, PARAMETER, Graph, Node
from poplar.programmes.graph.placement import REPLICATED, Placement
from poplar.programmes.graph.programme import Programme
from poplar.programmes.rules.local_call import ZEROS
from poplar.programmes.rules.registry import local_call
from poplar.programmes.run.collectives import convert, own_part
from poplar.programmes.run.local_execution import arguments_of, function, zeros_of
from poplar.programmes.run.meta_execution import passed_inputs
from poplar.values.errors import CollectiveTimeout


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
        self._device, self._rank = device, comm.group.rank
        programme.collectives(graph)  # raises unless all placements are given and can be reached
        self._constants = {name: self._own(name, value) for name, value in constants.items()}
        self._errors: list[Exception] = []
        self._calls = fx.Graph()
        self._known: dict[tuple[str, Placement, int], fx.Node] = {}
        """Tensors by node, placement, and number of the output."""
        self._leaves = [node for node in graph.nodes.values() if node.operator in LEAVES]
        for leaf in self._leaves:
            given = self._calls.placeholder(leaf.name)
            self._known[leaf.name, programme.placements[leaf.name], 0] = given
        for node in graph.nodes.values():
            if node.operator == GET_ITEM:  # only this output is converted
                (name,), (target,) = node.inputs, programme.inputs[node.name]
                read = self._read(name, target, node.arguments[1])
                self._known[node.name, programme.placements[node.name], 0] = read
            elif node.operator not in LEAVES:
                self._call(node)
        placement = programme.placements[graph.output]
        loss = self._read(graph.output, placement)
        if placement is REPLICATED and self._rank:  # the first rank contributes it

            def none(loss: Tensor) -> Any:
                return zeros_of(graph.nodes[graph.output], loss, device)

            loss = self._calls.call_function(none, (loss,))
        self._calls.output(loss)
        self._forward = fx.GraphModule(nn.Module(), self._calls).forward

    def loss(
        self,
        parameters: Mapping[str, Tensor],
        batch: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        errors: list[Exception],
    ) -> Tensor:
        """This rank's contribution to the loss, which is the sum over ranks. Collective.

        Args:
            parameters: by name in the model, what this rank has by `Programme.parameters`.
            batch: by path, what this rank has in `Programme.placements` of the batch's nodes.
            buffers: by name in the model, whole; others have the values in `constants`.
            errors: receives errors of operators, whose results are zeros then, so that this rank
                issues the collectives of the others in forward and backward.

        Raises:
            CollectiveTimeout: names the ranks that did not take part before the deadline.
        """

        def value(leaf: Node) -> Tensor:
            if leaf.operator == BUFFER and leaf.source in buffers:
                return self._own(leaf.name, buffers[leaf.source])
            if leaf.name in self._constants:
                return self._constants[leaf.name]
            return (parameters if leaf.operator == PARAMETER else batch)[leaf.source]

        self._errors = errors
        try:
            loss: Tensor = self._forward(*map(value, self._leaves))
        except BaseException as error:
            # All ranks have a timeout. Those on gloo find out about others at the latest at theirs.
            if not isinstance(error, CollectiveTimeout):
                self._comm.abort(f"rank {self._rank}: the programme failed: {error!r}")
            raise
        finally:
            self._errors = []  # which refer to the tensors of the step
        return loss

    def _own(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a leaf."""
        programme = self._programme
        return own_part(whole, programme.placements[name], programme.ratios, self._rank)

    def _call(self, node: Node) -> None:
        """Add what this rank computes for a node."""
        graph, programme, device = self._graph, self._programme, self._device
        placements, output = programme.inputs[node.name], programme.placements[node.name]
        # Collective, so also what this rank's own call does not read.
        inputs = [(n, self._read(n, p)) for n, p in zip(node.inputs, placements, strict=True)]
        following = iter(inputs)

        def tensor(name: str) -> fx.Node:
            """The next input: a node may be read twice, in two placements."""
            return next(read for found, read in following if found == name)

        call = local_call(graph, node, placements, output, programme.ratios, self._rank)
        passed = cache(partial(passed_inputs, graph, node))

        def zeros(*arguments: Any, **keywords: Any) -> Any:
            return zeros_of(call, (arguments, keywords), device, passed())

        called = zeros if call.operator == ZEROS else function(call.operator)

        def run(*arguments: Any, **keywords: Any) -> Any:
            try:
                return called(*arguments, **keywords)
            except Exception as error:
                # The ranks that did not fail find this one in all collectives.
                with suppress(Exception):
                    result = zeros(*arguments, **keywords)
                    self._errors.append(error)
                    return result
                raise

        run.__name__ = node.name  # in the code that fx makes, which tracebacks show
        result = self._calls.call_function(run, *arguments_of(call, tensor, device))
        for number in range(len(node.outputs)):
            one = result
            if node.returns_list:
                one = self._calls.call_function(operator.getitem, (result, number))
            self._known[node.name, output, number] = one

    def _read(self, name: str, target: Placement, number: int = 0) -> fx.Node:
        """An output of a node in a placement; it is converted for the first reader."""
        comm, ratios = self._comm, self._programme.ratios
        source = self._programme.placements[name]
        if (name, target, number) not in self._known:
            shape = self._graph.nodes[name].outputs[number].shape
            what = f"node {name!r} of the programme, from {source!r} to {target!r}"

            def moved(x: Tensor) -> Tensor:
                return convert(comm, x, source, target, shape, ratios, what=what)

            given = self._known[name, source, number]
            self._known[name, target, number] = self._calls.call_function(moved, (given,))
        return self._known[name, target, number]
