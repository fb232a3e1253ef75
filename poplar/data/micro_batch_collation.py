"""`CollateMicroBatches`: each micro-batch is collated, so padded, on its own.

Collate functions may also pack the samples of a micro-batch into one row, because samples are
counted before they are collated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any
from uuid import uuid4
from weakref import WeakValueDictionary

import torch

from poplar.data import pytree
from poplar.data.global_batch import resolve_rank
from poplar.values.plan import Plan

Collate = Callable[[list[Any]], Any]


class MicroBatches(pytree.SplitsItself):
    """The samples of one rank in a global batch, collated by micro-batch.

    A batch for `train_step` and `micro_batches`. Micro-batches of other sizes than the planned
    ones, such as after running out of memory, are collated when they are needed.
    """

    def __init__(self, samples: Sequence[Any], sizes: Sequence[int], collate: Collate) -> None:
        """
        Args:
            samples: of the dataset.
            sizes: of the micro-batches that are collated now.
            collate: makes a batch of a list of samples.
        """
        self._samples = list(samples)
        self._collate = collate
        self._changes: tuple[Callable[[Any], Any], ...] = ()
        """Of what `collate` returns, one after the other."""
        self._collated: dict[tuple[int, int], Any] = {}
        self.split(sizes)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._samples)

    def split(self, sizes: Sequence[int]) -> list[Any]:
        """Batches of consecutive samples; None for a size of 0. Others are dropped."""
        bounds = list(pairwise(accumulate(sizes, initial=0)))
        before = self._collated
        self._collated = {
            (start, stop): before[start, stop]
            if (start, stop) in before
            else self._collate_samples(start, stop)
            for start, stop in bounds
            if stop > start
        }
        # A loss may take something out of them, and be run again.
        return [pytree.copied(self._collated.get(each)) for each in bounds]

    def select(self, indices: Sequence[int]) -> MicroBatches:
        """The samples at these positions, of which none are collated yet."""
        selected = MicroBatches([self._samples[at] for at in indices], (), self._collate)
        selected._changes = self._changes
        return selected

    def _collate_samples(self, start: int, stop: int) -> Any:
        samples = self._samples[start:stop]  # which some collate functions change
        batch = self._collate([dict(s) if isinstance(s, dict) else s for s in samples])
        for change in self._changes:
            batch = change(batch)
        return batch

    def parts(self) -> list[Any]:
        """The micro-batches that have been collated."""
        return list(self._collated.values())

    def changed(self, change: Callable[[Any], Any]) -> MicroBatches:
        """The batch whose micro-batches, also later ones, are `change(micro_batch)`."""
        changed = self.select(range(len(self)))
        changed._changes += (change,)
        changed._collated = {bounds: change(batch) for bounds, batch in self._collated.items()}
        return changed

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MicroBatches:
        """The same micro-batches on `device`: all tensors, and objects that have a method `to`."""
        return self.changed(partial(pytree.to, device=device, non_blocking=non_blocking))

    def pin_memory(self) -> MicroBatches:
        """The same micro-batches in pinned memory; `DataLoader` calls it."""
        return self.changed(pytree.pinned)


class _Shared:
    """A collate function that is pickled as its key, and found where the batch is unpickled.

    So no function is sent with each batch of a `DataLoader` worker: it may be as large as a
    vocabulary. If it could not be pickled, the main process would wait for the batch forever.
    """

    def __init__(self, collate: Collate, key: str) -> None:
        self.collate, self.key = collate, key
        _SHARED[key] = self

    def __call__(self, samples: list[Any]) -> Any:
        return self.collate(samples)

    def __reduce__(self) -> tuple[Callable[[str], Collate], tuple[str]]:
        return _shared, (self.key,)


_SHARED: WeakValueDictionary[str, _Shared] = WeakValueDictionary()
"""By key, those of this process."""


def _shared(key: str) -> Collate:
    return _SHARED.get(key, _missing)


def _missing(samples: list[Any]) -> Any:
    raise RuntimeError(
        "this batch was unpickled in a process without the CollateMicroBatches that made it, so "
        "only the micro-batches of the plan are known, and none of other sizes can be collated; "
        "keep the CollateMicroBatches while its batches are read, or pass it to this process"
    )


class CollateMicroBatches:
    """A `collate_fn` for `DataLoader` that collates the planned micro-batches one by one.

        sampler = HeteroBatchSampler(len(dataset), plan, lengths=lengths)
        loader = DataLoader(
            dataset, batch_sampler=sampler, collate_fn=CollateMicroBatches(collate, plan)
        )
        for batch in loader:
            optimizer.train_step(loss_fn, batch.to(device), weight=poplar.tokens())

    Each micro-batch is then padded to its own longest sample; otherwise all samples of the rank are
    padded to the longest one of them. `loss_fn` and `weight` get what `collate` returns, also those
    of `optimizer.evaluate`.

    Without a plan, all samples are collated as one micro-batch, and others when they are needed.
    So it makes the example of samples that are not rows of tensors, and batches to evaluate:

        example = CollateMicroBatches(collate)([dataset[index] for index in range(8)])
        plan = poplar.autotune(model, loss_fn, example.to(device), global_batch=64)

    After a change of the plan (`optimizer.apply_plan`), the micro-batches are collated by the
    training step instead.

    Args:
        collate: makes a batch of a list of samples, such as Hugging Face's
            `DataCollatorWithPadding`, or `DataCollatorWithFlattening`, which packs them.
        plan: the plan of the sampler; None: there is none.
        rank: None: this process's rank in `torch.distributed`.
    """

    def __init__(self, collate: Collate, plan: Plan | None = None, rank: int | None = None) -> None:
        self._plan, self._rank = plan, 0 if plan is None else resolve_rank(plan, rank)
        self._collate = _Shared(collate, uuid4().hex)

    def __getstate__(self) -> dict[str, Any]:
        shared = self._collate
        return {**self.__dict__, "_collate": (shared.collate, shared.key)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        collate, key = state["_collate"]
        self.__dict__.update(state, _collate=_SHARED.get(key) or _Shared(collate, key))

    def __call__(self, samples: Sequence[Any]) -> MicroBatches:
        return MicroBatches(samples, self._sizes(len(samples)), self._collate)

    def _sizes(self, samples: int) -> tuple[int, ...]:
        if self._plan is None:
            return (samples,)
        planned = self._plan.samples(self._rank)  # 0: the only sample is a placeholder
        return self._plan.micro_batch_sizes(self._rank, samples) if samples <= planned else ()
