"""`CollateMicroBatches`: collates each micro-batch on its own, so that it is padded to its own length.

Collate functions may also pack the samples of a micro-batch into one row: samples are counted
before they are collated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from poplar.data.global_batch import resolve_rank
from poplar.plan import Plan

Collate = Callable[[list[Any]], Any]


class MicroBatches:
    """The samples of one rank in a global batch, collated by micro-batch.

    A batch for `train_step`, `micro_batches` and `verify`. Micro-batches of other sizes than the
    planned ones, such as after running out of memory, are collated when they are needed.
    """

    def __init__(self, samples: Sequence[Any], sizes: Sequence[int], collate: Collate) -> None:
        """
        Args:
            samples: of the dataset.
            sizes: of the micro-batches that are collated now.
            collate: makes a batch of a list of samples.
        """
        self.samples = list(samples)
        self._collate = collate
        self._device: torch.device | None = None
        self._collated: dict[tuple[int, int], Any] = {}
        self.split(sizes)

    def split(self, sizes: Sequence[int]) -> list[Any]:
        """Batches of consecutive samples; a size of 0 gives None."""
        bounds = pairwise(accumulate(sizes, initial=0))
        return [self._part(start, stop) if stop > start else None for start, stop in bounds]

    def take(self, indices: Sequence[int]) -> Any:
        """One batch of the samples at these positions."""
        return self._placed(self._collate([self.samples[at] for at in indices]))

    @property
    def collated(self) -> list[Any]:
        """The micro-batches that have been collated so far."""
        return list(self._collated.values())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MicroBatches:
        """These micro-batches, on `device`, where later ones are put too."""
        moved = MicroBatches(self.samples, (), self._collate)
        moved._device = torch.device(device)
        moved._collated = {
            bounds: moved._placed(batch, non_blocking) for bounds, batch in self._collated.items()
        }
        return moved

    def pin_memory(self) -> MicroBatches:
        """Put the micro-batches into pinned memory; `DataLoader` calls it."""
        from poplar.data import pytree

        for bounds, batch in self._collated.items():
            self._collated[bounds] = pytree.map_tensors(torch.Tensor.pin_memory, batch)
        return self

    def _part(self, start: int, stop: int) -> Any:
        if (start, stop) not in self._collated:
            self._collated[start, stop] = self.take(range(start, stop))
        return self._collated[start, stop]

    def _placed(self, batch: Any, non_blocking: bool = False) -> Any:
        from poplar.data import pytree

        device = self._device
        if device is None:
            return batch
        return pytree.map_tensors(lambda t: t.to(device, non_blocking=non_blocking), batch)


class CollateMicroBatches:
    """A `collate_fn` for `DataLoader` that collates the planned micro-batches one by one.

        sampler = HeteroBatchSampler(len(dataset), plan, lengths=lengths)
        loader = DataLoader(
            dataset, batch_sampler=sampler, collate_fn=CollateMicroBatches(collate, plan)
        )

    Without it, the samples of a rank are padded to the longest one of the whole step.

    Args:
        collate: makes a batch of a list of samples, such as Hugging Face's
            `DataCollatorWithPadding` or `DataCollatorWithFlattening`.
        plan: of the sampler.
        rank: None: this process's rank in `torch.distributed`.
    """

    def __init__(self, collate: Collate, plan: Plan, rank: int | None = None) -> None:
        self._collate, self._plan, self._rank = collate, plan, resolve_rank(plan, rank)

    def __call__(self, samples: Sequence[Any]) -> MicroBatches:
        planned = self._plan.samples(self._rank)  # 0: the only sample is a placeholder
        sizes = self._plan.micro_batch_sizes(self._rank, len(samples)) if planned else ()
        return MicroBatches(samples, sizes, self._collate)
