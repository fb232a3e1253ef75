"""The order in which `Trainer` reads a dataset, as batches of this rank's samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from poplar.data.sampler import HeteroBatchSampler
from poplar.values.plan import Plan


class EpochSampler(HeteroBatchSampler):
    """A `HeteroBatchSampler` in the order that `Trainer` gives to an epoch on one process."""

    def __init__(
        self,
        length: int,
        plan: Plan,
        order: Callable[[int], Sequence[int]],
        *,
        drop_last: bool,
        lengths: Sequence[int] | None,
    ) -> None:
        """
        Args:
            length: number of samples in the dataset.
            plan: how a global batch is split.
            order: the indices of an epoch; the same on all ranks.
            drop_last, lengths: as for `HeteroBatchSampler`.
        """
        super().__init__(length, plan, drop_last=drop_last, lengths=lengths)
        self._order_of = order

    def _order(self) -> Tensor:
        return torch.tensor(list(self._order_of(self.epoch)), device="cpu")


class EpochLoader(DataLoader[Any]):
    """A loader that tells its sampler, or the source of its stream, which epoch is next."""

    source: Any = None

    def set_epoch(self, epoch: int) -> None:
        """As of samplers."""
        part: Any
        for part in (self.batch_sampler, self.source):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
