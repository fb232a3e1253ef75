"""The graph of a model's loss on a global batch, compared with the model itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from poplar.data import pytree
from poplar.programmes.run.eager_comparison import EagerComparison
from poplar.programmes.run.exported_graph import ExportedLoss, export_loss
from poplar.system.out_of_memory import is_out_of_memory
from poplar.values.errors import NotExportable
from poplar.zero.micro_batch_loss import LossFunction
from poplar.zero.preserved_state import model_preserved

_SAMPLES = (2, 8)
"""Fewest and most samples in a compared batch; within them, as many as the example has."""
_BATCHES = 3
"""Batches compared after the export. Python code may choose something else in each."""
_MOST_ELEMENTS = 1 << 20
"""Most elements of the parameters whose gradients are compared in a step."""
_EVERY_STEP = 256
"""Steps from one comparison to the next; the first ones are after 0, 1, 2, 4, 8, ... steps."""


class CheckedExport:
    """A graph that has the loss and the gradients of the model, in the modes of its modules.

    Args:
        model: with its whole parameters; not changed.
        loss_fn: `loss_fn(model, batch)` -> mean loss.
        example: a batch of any number of samples.
        global_batch: samples of the graph's batch.

    Raises:
        NotExportable: as `export_loss`, or the graph computes something else than the model.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction, example: Any, global_batch: int
    ) -> None:
        self.model = model
        self._loss_fn, self._example, self._global_batch = loss_fn, example, global_batch
        least, most = _SAMPLES
        self._few = min(max(least, pytree.samples_in(example)), most, global_batch)
        if any(t.is_meta for t in chain(model.parameters(), model.buffers())):
            raise NotExportable("the model is on meta, and a programme divides real values")
        with torch.enable_grad(), model_preserved(model, self._device):
            self.exported: ExportedLoss = self._export(range(global_batch))
            self._comparison = EagerComparison(model, loss_fn, self._export(range(self._few)))
            self._compare()

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def again(self) -> CheckedExport:
        """The export in other modes of the modules."""
        return CheckedExport(self.model, self._loss_fn, self._example, self._global_batch)

    def check(self, batch: Any, step: int) -> None:
        """Compare the graph with the model, in a few steps of a training.

        Args:
            batch: at least one sample, of this step.
            step: number of the steps before.

        Raises:
            NotExportable: they differ.
        """
        if step & (step - 1) and step % _EVERY_STEP:
            return
        if pytree.samples_in(batch) < self._few:  # equal samples would make ties, as in routing
            few = self._samples(range(step, step + self._few))
        else:
            few = pytree.take(batch, range(self._few))
        few = pytree.map_tensors(lambda tensor: tensor.to(self._device), few)
        with model_preserved(self.model, self._device):
            self._comparison.check(few, most_elements=_MOST_ELEMENTS)

    def _compare(self) -> None:
        try:
            for first in range(_BATCHES):
                self._comparison.check(self._samples(range(first, first + self._few)))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise NotExportable(
                f"this rank has too little memory to compare its graph with the model, on "
                f"{self._few} samples"
            ) from error

    def _export(self, samples: Sequence[int]) -> ExportedLoss:
        return export_loss(self.model, self._loss_fn, self._samples(samples))

    def _samples(self, indices: Sequence[int]) -> Any:
        known = pytree.samples_in(self._example)
        return pytree.take(self._example, [index % known for index in indices])
