"""What the loader of a `PoplarTrainer` yields: this rank's samples, collated by micro-batch.

Micro-batches are collated one by one, as by `Trainer`: each is padded to its own longest sample,
and collators may pack several samples into one row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from poplar.data import pytree
from poplar.data.sampler import HeteroBatchSampler
from poplar.values.plan import Plan

Collate = Callable[[list[Any]], Any]


class Samples:
    """Samples of the dataset, and the micro-batches that have been collated from them."""

    def __init__(self, features: Sequence[Any]) -> None:
        self.features = list(features)
        self.collated: dict[tuple[int, ...], Any] = {}

    def micro_batch(self, positions: Sequence[int], collate: Collate) -> Any:
        """The collated samples at these positions.

        Micro-batches that share samples with it are dropped: they were collated for a plan that has
        changed because a rank ran out of memory.
        """
        key = tuple(positions)
        if key not in self.collated:
            self.collated = {k: v for k, v in self.collated.items() if not {*k} & {*key}}
            # Some collators change the samples, which may be collated again.
            parts = [self.features[at] for at in key]
            self.collated[key] = collate([dict(p) if isinstance(p, dict) else p for p in parts])
        return self.collated[key]


@dataclass(frozen=True)
class TrainerBatch:
    """Samples of one rank, or of one of its micro-batches; `pytree.split` makes these of those."""

    positions: Tensor
    """Of the samples in `samples`."""
    samples: Samples

    @staticmethod
    def of(features: Sequence[Any]) -> TrainerBatch:
        """A batch of these samples."""
        return TrainerBatch(torch.arange(len(features), device="cpu"), Samples(features))

    def inputs(self, collate: Collate) -> Any:
        """The inputs of the model for these samples, on the CPU."""
        return self.samples.micro_batch(self.positions.tolist(), collate)

    @property
    def starts_step(self) -> bool:
        """Whether it has the first sample, with which the passes of a step begin."""
        return bool(self.positions[0] == 0)

    def all_values(self, names: Sequence[str]) -> dict[str, Tensor]:
        """By name, the values of all collated micro-batches in a row, for counting them."""
        parts = list(self.samples.collated.values())
        found = [name for name in names if parts and name in parts[0]]
        return {name: torch.cat([part[name].reshape(-1) for part in parts]) for name in found}

    def pin_memory(self) -> TrainerBatch:
        """Put the collated micro-batches into pinned memory; `DataLoader` calls it."""
        collated = self.samples.collated
        for key, inputs in collated.items():
            collated[key] = pytree.map_tensors(torch.Tensor.pin_memory, inputs)
        return self


class CollateMicroBatches:
    """Collates the samples of this rank by the plan, in the workers of the loader."""

    def __init__(self, collate: Collate, plan: Plan, rank: int) -> None:
        self._collate, self._plan, self._rank = collate, plan, rank

    def __call__(self, features: Sequence[Any]) -> TrainerBatch:
        batch = TrainerBatch.of(features)
        if self._plan.samples(self._rank):  # else it is one sample, which the optimizer drops
            sizes = self._plan.micro_batch_sizes(self._rank, len(features))
            for start, stop in pairwise(accumulate(sizes, initial=0)):
                if stop > start:
                    batch.samples.micro_batch(range(start, stop), self._collate)
        return batch


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
