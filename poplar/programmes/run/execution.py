"""Runs a programme on this rank: the nodes of a graph on local tensors, collectives in between.

All ranks run the same nodes in the same order, also those whose parts are empty, so they issue the
same collectives: forward, and in the opposite order backward. `programmes.rules` says what a
rank calls for a node.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType

from torch import Tensor

from poplar.programmes.run.bound_programme import BATCH, BUFFERS, PARAMETERS, BoundProgramme, Step
from poplar.programmes.run.failures import abort_on_error, report
from poplar.programmes.run.local_execution import Registers

_NONE: Mapping[str, Tensor] = MappingProxyType({})


class Execution(BoundProgramme):
    """One rank's part of the forward and backward pass of a loss."""

    def loss(
        self,
        parameters: Mapping[str, Tensor],
        batch: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor] = _NONE,
        errors: list[Exception] | None = None,
    ) -> Tensor:
        """This rank's contribution to the loss, which is the sum over ranks. Collective.

        Args:
            parameters: by name in the model, what this rank has in `Programme.parameters`.
            batch: by path, what this rank has in `Programme.placements` of the batch's nodes.
            buffers: by name in the model, whole; others have the values in `constants`.
            errors: receives errors of operators, whose results are zeros then, so that this rank
                issues the collectives of the others in forward and backward. None: the first error
                is raised, and the collectives of the other ranks raise.

        Raises:
            ValueError: a tensor is missing, or has not the shape of this rank's part.
            CollectiveTimeout: names the ranks that did not take part before the deadline.
        """
        values = self.registers.copy()
        values[PARAMETERS], values[BATCH], values[BUFFERS] = parameters, batch, buffers
        for step, freed in zip(self.steps, self._freed, strict=True):
            try:
                step.run(values)
            except BaseException as error:  # a context manager would cost as much as a small call
                self._continue(step, values, error, errors)
            for register in freed:
                values[register] = None
        loss: Tensor = values[self.loss_register]
        return loss

    def _continue(
        self, step: Step, values: Registers, error: BaseException, errors: list[Exception] | None
    ) -> None:
        """After an error of a step; raises it if the step cannot be replaced by zeros."""
        run = step.run_failed
        if errors is not None and run is not None and isinstance(error, Exception):
            with suppress(Exception):
                run(values)
                errors.append(error)
                return
        report(self._comm, f"node {step.node!r} of the programme", error)
        raise error

    def backward(self, loss: Tensor) -> None:
        """Run `loss.backward()`. Collective; errors are reported to the other ranks.

        The gradient of a sharded parameter is that of this rank's part. That of a replicated one is
        this rank's contribution: the gradient is the sum over ranks.
        """
        with abort_on_error(self._comm, "the backward pass of the programme"):
            loss.backward()
