"""What is to be trained, and the trainings that a plan or a programme makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from poplar.comm import Communicator, Control, Group, connect
from poplar.data import pytree
from poplar.optimizer import HeteroZeroOptimizer
from poplar.programmes.graph.programme import Programme
from poplar.programmes.run.checked_export import CheckedExport
from poplar.programmes.run.data_parallel_training import DataParallelTraining
from poplar.programmes.run.programme_training import ProgrammeTraining, sampling_plan
from poplar.values.errors import NotExportable
from poplar.values.plan import Plan
from poplar.zero.agreement import raise_on_any_error
from poplar.zero.micro_batch_loss import LossFunction
from poplar.zero.micro_batches import Loss, Weight
from poplar.zero.update import OptimizerFactory


@dataclass(frozen=True, kw_only=True)
class Job:
    """The arguments of `distribute` that every training has."""

    group: Group
    control: Control
    model: nn.Module
    loss_fn: LossFunction
    example: Any
    global_batch: int
    optimizer_class: OptimizerFactory
    weight: Weight | None
    loss: Loss
    options: Mapping[str, Any]
    """Options of `HeteroZeroOptimizer` and `optimizer_class`."""

    @property
    def device(self) -> torch.device:
        """Where this rank trains."""
        return next(self.model.parameters()).device

    def example_part(self, plan: Plan) -> Any:
        """This rank's part of a global batch that repeats the example."""
        rank = self.group.rank
        start, samples = plan.offset(rank), plan.samples(rank)
        return self._repeated(range(start, start + samples)) if samples else None

    def exported(self, *, must: bool) -> tuple[CheckedExport | None, str]:
        """The graph of the loss of a global batch; None on all ranks if one has none. Collective.

        It computes what the model computes.

        Args:
            must: raise instead.

        Returns:
            The graph, or why there is none.
        """
        exported: CheckedExport | None = None
        error: Exception | None = None
        try:
            exported = self._export()
        except NotExportable as caught:
            error = caught
        if must:
            raise_on_any_error(self.control, error, doing="distribute()")
        own = None if error is None else str(error)
        reasons = self.control.exchange_objects(own, what="distribute()")
        found = next((f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text), "")
        return (exported, "") if not found else (None, f"No programme: {found}.")

    def by_plan(self, plan: Plan, *, reason: str) -> DataParallelTraining:
        """Every rank computes its samples with the whole model. Collective."""
        optimizer = HeteroZeroOptimizer(self.model, self.optimizer_class, plan=plan, **self.options)
        return DataParallelTraining(
            self.model,
            self.loss_fn,
            optimizer,
            plan,
            weight=self.weight,
            loss=self.loss,
            reason=reason,
        )

    def by_programme(
        self, comm: Communicator, exported: CheckedExport, programme: Programme, *, reason: str
    ) -> ProgrammeTraining:
        """The ranks compute the loss together. Collective."""
        plan = sampling_plan(programme, self.global_batch)
        return ProgrammeTraining(
            comm,
            exported,
            programme,
            plan,
            self.optimizer_class,
            reason=reason,
            **self.options,
        )

    def connected(self, checked: CheckedExport, planned: str | None) -> Communicator:
        """The transport of programmes; all ranks get the first rank's values. Collective."""
        comm = connect(self.group, "auto", self.device, planned=planned)
        _broadcast(comm, dict(chain(self.model.named_parameters(), self.model.named_buffers())))
        _broadcast(comm, checked.exported.constants)
        return comm

    def _export(self) -> CheckedExport:
        if self.loss != "mean":
            raise NotExportable(f"loss={self.loss!r}, but programmes need a loss that is a mean")
        return CheckedExport(self.model, self.loss_fn, self.example, self.global_batch)

    def _repeated(self, samples: range) -> Any:
        known = pytree.samples_in(self.example)
        return pytree.take(self.example, [index % known for index in samples])


@torch.no_grad()
def _broadcast(comm: Communicator, tensors: Mapping[str, Tensor]) -> None:
    """Give all ranks the first rank's values. Collective."""
    for name, tensor in tensors.items():
        values = tensor.detach().contiguous()
        comm.broadcast(values, 0, what=f"the broadcast of {name}")
        tensor.copy_(values)
