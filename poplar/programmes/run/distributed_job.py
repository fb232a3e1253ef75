"""What is to be trained."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from poplar.comm import Communicator, Control, Group, connect
from poplar.comm.group import first_line
from poplar.data import pytree
from poplar.planner.search import Choice
from poplar.programmes.run.checked_export import CheckedExport, check_computation
from poplar.system.storage import separate_elements
from poplar.tuning.autotune import TuningJob
from poplar.values.errors import NotExportable, agreed
from poplar.values.plan import Plan
from poplar.zero.agreement import raise_on_any_error
from poplar.zero.optimizers.granularity import known_granularity


@dataclass(frozen=True, kw_only=True)
class DistributedJob(TuningJob):
    """A job of `distribute`, with what its ranks communicate by."""

    group: Group
    control: Control
    leave_out: Choice = "never"  # programmes run on all ranks

    @property
    def own_device(self) -> torch.device:
        """Where this rank trains."""
        return next(self.model.parameters()).device

    def example_part(self, plan: Plan) -> Any:
        """This rank's part of a global batch that repeats the example; at least one sample."""
        rank, known = self.group.rank, pytree.samples_in(self.example)
        start, samples = plan.offset(rank), plan.samples(rank)
        indices = [index % known for index in range(start, start + samples)]
        return pytree.select(self.example, indices or [0])

    def exported(self, cast_to: torch.dtype | None = None, *, must: bool = False) -> CheckedExport:
        """The graph of the loss of a global batch, which computes what the model does. Collective.

        Args:
            cast_to: dtype that the plan computes in; None: not known, or that of the parameters.
            must: an error of the user's code, or of memory that runs out, is raised as it is.

        Raises:
            NotExportable: on all ranks, if one has no such graph, or the ranks have different ones.
        """
        exported: CheckedExport | None = None
        error: Exception | None = None
        try:
            exported = self._checked_export(cast_to)
        except Exception as caught:  # also of the user's code, which a plan runs in another way
            error = caught
        graph = "" if exported is None else exported.fingerprint
        by_rank = self.control.exchange_objects((_described(error), graph), what="distribute()")
        if must:
            raise_on_any_error(self.control, error, doing="distribute()")
        found = next((f"rank {rank}: {why}" for rank, (why, _) in enumerate(by_rank) if why), "")
        others = [rank for rank, (_, graph) in enumerate(by_rank) if graph != by_rank[0][1]]
        if others and not found:
            found = (
                f"the model has other operators, dtypes or shapes on rank(s) {others} than on rank "
                "0, as code that depends on the kind of the GPU chooses them"
            )
        if exported is None or found:
            raise agreed(NotExportable(found)) from error
        return exported

    def _checked_export(self, cast_to: torch.dtype | None) -> CheckedExport:
        if self.device is not None and torch.device(self.device).type != self.own_device.type:
            raise NotExportable(
                f"device={str(self.device)!r}, but the parameters are on {self.own_device}, where "
                "programmes compute; move the model first"
            )
        given = self.compute_dtype
        dtype = given if isinstance(given, torch.dtype) else cast_to
        options = self.optimizer_options
        needs = self.granularity or known_granularity(self.optimizer_class, options)
        check_computation(self.model, self.loss, dtype, needs)
        return CheckedExport(self.model, self.loss_fn, self.example, self.global_batch)

    @torch.no_grad()
    def connected(self, checked: CheckedExport, planned: str | None) -> Communicator:
        """The transport of programmes; all ranks get the first rank's values. Collective."""
        comm = connect(self.group, "auto", self.own_device, planned=planned)
        tensors: chain[tuple[str, Tensor]] = chain(
            self.model.named_parameters(),
            self.model.named_buffers(),
            checked.exported.constants.items(),
        )
        for name, tensor in tensors:
            values = tensor.detach().contiguous()
            comm.broadcast(values, 0, what=f"the broadcast of {name}")
            if values.data_ptr() != tensor.data_ptr():
                separate_elements(tensor)
                tensor.copy_(values)
        return comm


def _described(error: Exception | None) -> str:
    if isinstance(error, NotExportable):
        return error.reason
    return "" if error is None else f"{type(error).__name__}: {first_line(error)}"
