"""Runs a programme on this rank: the nodes of a graph on local tensors, collectives in between.

All ranks run the same nodes in the same order, also those whose parts are empty, so they issue the
same collectives: forward, and in the opposite order backward. `planner.rules` says what a rank
calls for a node.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from poplar.comm.communicator import Communicator
from poplar.planner.graph.graph import Graph
from poplar.planner.graph.programme import Programme
from poplar.spmd.bound_programme import BATCH, PARAMETERS, BoundProgramme, freed_after
from poplar.spmd.failures import abort_on_error, report


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
        self._comm = comm
        bound = BoundProgramme(comm, graph, programme, constants, device)
        self._steps, self._registers, self._loss = bound.steps, bound.registers, bound.loss
        self._freed = freed_after(bound.steps, kept=bound.loss)

    def loss(self, parameters: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """This rank's contribution to the loss, which is the sum over ranks. Collective.

        Args:
            parameters: by name in the model, what this rank has in `Programme.parameters`.
            batch: by path, what this rank has in `Programme.placements` of the batch's nodes.

        Raises:
            ValueError: a tensor is missing, or has not the shape of this rank's part.
            CollectiveTimeout: names the ranks that did not take part before the deadline.
        """
        values = self._registers.copy()
        values[PARAMETERS], values[BATCH] = parameters, batch
        for step, freed in zip(self._steps, self._freed, strict=True):
            try:
                step.run(values)
            except BaseException as error:  # a context manager would cost as much as a small call
                report(self._comm, f"node {step.node!r} of the programme", error)
                raise
            for register in freed:
                values[register] = None
        loss: Tensor = values[self._loss]
        return loss

    def backward(self, loss: Tensor) -> None:
        """As `loss.backward()`. Collective; errors are reported to the other ranks.

        The gradient of a sharded parameter is that of this rank's part. That of a replicated one is
        this rank's contribution: the gradient is the sum over ranks.
        """
        with abort_on_error(self._comm, "the backward pass of the programme"):
            loss.backward()
