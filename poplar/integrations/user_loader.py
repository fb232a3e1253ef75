"""What is known of a DataLoader of the user, and kept if it is rebuilt for a rank."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

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
