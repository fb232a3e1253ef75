"""A DataLoader of the user, rebuilt for a rank: for trainers whose loaders have equal batches."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from poplar.data.sampler import HeteroBatchSampler

_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)


def kept_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """The arguments of a loader that do not choose samples."""
    return {name: getattr(loader, name) for name in _KEPT}


class PlannedLoader(DataLoader[Any]):
    """Yields this rank's part of one global batch per step. Its state is the place in the epoch.

    Args:
        loader: the user's loader.
        sampler: this rank's samples of each step.
        steps_done: returns the trained steps of the epoch; workers draw batches ahead of them.
        collate: instead of the loader's own function.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        sampler: HeteroBatchSampler,
        steps_done: Callable[[], int],
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        kept = kept_options(loader)
        if collate is not None:
            kept["collate_fn"] = collate
        super().__init__(loader.dataset, batch_sampler=sampler, **kept)
        self._steps_done = steps_done

    def state_dict(self) -> dict[str, Any]:
        """For `load_state_dict` with any plan of the same global batch."""
        sampler: Any = self.batch_sampler
        # The trainer's count may still be of the epoch before.
        state: dict[str, Any] = sampler.state_dict(min(self._steps_done(), sampler.drawn))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration the rest of a saved epoch."""
        sampler: Any = self.batch_sampler
        sampler.load_state_dict(state)


def unknown_iteration(loader: Any) -> str | None:
    """Why a loader cannot be built again as torch's `DataLoader`; None if it can."""
    if not isinstance(loader, DataLoader):
        return f"it is a {type(loader).__name__}, not a DataLoader"
    if type(loader).__iter__ is not DataLoader.__iter__:
        name = type(loader).__name__
        return f"its class {name} iterates in its own way, unlike torch's DataLoader"
    return None


def unknown_order(loader: Any, batch_samplers: Collection[type] = ()) -> str | None:
    """Why the order of the samples of a loader is not known; None if it is.

    Args:
        loader: the user's loader.
        batch_samplers: classes that are known beside torch's own.
    """
    if (problem := unknown_iteration(loader)) is not None:
        return problem
    if isinstance(loader.dataset, IterableDataset):
        return "its dataset is an IterableDataset"
    batch_sampler = loader.batch_sampler
    if type(batch_sampler) not in (BatchSampler, *batch_samplers):
        return f"its batch_sampler is a {type(batch_sampler).__name__}"
    sampler: Any = getattr(batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, RandomSampler) and (
        sampler.replacement or sampler.num_samples != len(loader.dataset)
    ):
        return "its RandomSampler does not draw every sample once"
    if type(sampler) not in (RandomSampler, SequentialSampler):
        return f"its sampler is a {type(sampler).__name__}"
    return None
