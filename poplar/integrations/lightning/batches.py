"""The user's DataLoaders, rebuilt for the ranks: by the plan to train, evenly to evaluate."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, Sampler

from poplar.data import CollateMicroBatches, HeteroBatchSampler, StreamSplit
from poplar.integrations.user_loader import kept_options, unknown_iteration, unknown_order
from poplar.values.plan import Plan

Lengths = Sequence[float] | Tensor | None
"""Of the samples of the training dataset; None: not known."""


class EpochLoader(DataLoader[Any]):
    """Yields this rank's part of one global batch per step. Its state is the place in the epoch.

    Lightning sets the epoch of `loader.sampler`.

    Args:
        loader: the user's loader.
        sampler: this rank's samples of each step.
        trainer: whose epochs and steps count.
        changes: arguments instead of the loader's own.
    """

    def __init__(
        self, loader: DataLoader[Any], sampler: HeteroBatchSampler, trainer: Any, **changes: Any
    ) -> None:
        options = kept_options(loader) | changes
        super().__init__(loader.dataset, batch_sampler=sampler, **options)
        self._trainer = trainer
        # Workers draw batches before Lightning sets the epoch of a resumed training.
        sampler.set_epoch(trainer.fit_loop.epoch_progress.current.processed)

    @property
    def sampler(self) -> Any:
        """What draws the batches."""
        return self.batch_sampler

    @sampler.setter
    def sampler(self, unused: Any) -> None:
        """What torch sets, which `batch_sampler` replaces."""

    def state_dict(self) -> dict[str, Any]:
        """For `load_state_dict` with any plan of the same global batch.

        An epoch that `limit_train_batches` has ended is over.
        """
        # The trainer's count may still be of the epoch before.
        done = min(_steps_done(self._trainer), self.sampler.drawn)
        is_over = done == self._trainer.num_training_batches
        state: dict[str, Any] = self.sampler.state_dict(len(self.sampler) if is_over else done)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration the rest of a saved epoch."""
        self.sampler.load_state_dict(state)


class StreamLoader(DataLoader[Any]):
    """A loader of a `split_stream`. Its state is the place in the stream.

    Args:
        loader: the user's loader.
        trainer: whose steps count.
    """

    def __init__(self, loader: DataLoader[Any], trainer: Any) -> None:
        super().__init__(
            loader.dataset, loader.batch_size, drop_last=loader.drop_last, **kept_options(loader)
        )
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """For `load_state_dict` with any plan of the same global batch."""
        stream: Any = self.dataset
        done = _steps_done(self._trainer)
        is_over = done == self._trainer.num_training_batches
        state: dict[str, Any] = stream.state_dict(0 if is_over else done)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration the rest of a saved epoch."""
        stream: Any = self.dataset
        stream.load_state_dict(state)


class EvenBatchSampler(Sampler[list[int]]):
    """This rank's batches of a dataset in order: every sample once, no rank without samples.

    All ranks have the same number of batches, which differ by at most one sample, so that ranks
    with sharded parameters run the same forwards.

    Args:
        length: samples in the dataset; at least one per rank.
        batch_size: of one rank. One more sample where ranks would have none otherwise.
        rank: whose batches.
        world_size: number of ranks.

    Raises:
        ValueError: there are more ranks than samples.
    """

    def __init__(self, length: int, batch_size: int, rank: int, world_size: int) -> None:
        if length < world_size:
            raise ValueError(
                f"a dataset of {length} samples cannot be evaluated on {world_size} ranks, because "
                "every rank needs a sample; evaluate it in one process"
            )
        self.batch_size, self.drop_last = batch_size, False
        self._length, self._rank, self._world_size = length, rank, world_size
        self._batches = min(-(-length // (batch_size * world_size)), length // world_size)

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[list[int]]:
        for batch in range(self._batches):
            start = batch * self._length // self._batches
            size = (batch + 1) * self._length // self._batches - start
            bounds = (size * part // self._world_size for part in (self._rank, self._rank + 1))
            yield list(range(*(start + bound for bound in bounds)))


def follows_a_plan(loader: Any) -> bool:
    """Whether the user has built the loader by a plan."""
    return isinstance(getattr(loader, "batch_sampler", None), HeteroBatchSampler) or isinstance(
        getattr(loader, "dataset", None), StreamSplit
    )


def check_train_loader(loader: Any) -> None:
    """Check that a loader can be rebuilt: by a plan, or with a state if it follows one.

    Raises:
        TypeError: it chooses samples in a way that a plan cannot follow, or iterates in its own.
    """
    problem = unknown_iteration(loader) if follows_a_plan(loader) else _unknown_order(loader)
    if problem is not None:
        raise TypeError(
            f"PoplarStrategy cannot rebuild the training loader: {problem}. Use "
            "DataLoader(dataset, batch_size, shuffle=...), or pass PoplarStrategy(plan=...) and a "
            "DataLoader with batch_sampler=HeteroBatchSampler(len(dataset), plan) or a dataset of "
            "poplar.split_stream"
        )


def planned(
    loader: DataLoader[Any], plan: Plan, rank: int, trainer: Any, lengths: Lengths
) -> EpochLoader:
    """The training loader by the plan, with the order of the seed of `seed_everything`.

    With `lengths`, each micro-batch is collated on its own.
    """
    dataset: Any = loader.dataset
    chosen: Any = loader.batch_sampler
    sampler = HeteroBatchSampler(
        len(dataset),
        plan,
        seed=int(os.environ.get("PL_GLOBAL_SEED", "0")),
        shuffle=isinstance(chosen.sampler, RandomSampler) and not trainer.overfit_batches,
        drop_last=bool(chosen.drop_last),
        rank=rank,
        lengths=lengths,
    )
    changes: dict[str, Any] = {}
    if lengths is not None:
        changes["collate_fn"] = CollateMicroBatches(loader.collate_fn, plan, rank)
    return EpochLoader(loader, sampler, trainer, **changes)


def following(loader: Any, trainer: Any) -> DataLoader[Any]:
    """The user's loader by a plan, in the epoch of Lightning and with a state."""
    if isinstance(loader.dataset, StreamSplit):
        return StreamLoader(loader, trainer)
    return EpochLoader(loader, loader.batch_sampler, trainer)


def even(loader: Any, rank: int, world_size: int, *, predicting: bool) -> DataLoader[Any]:
    """A loader for evaluation, with the samples in the order of the dataset.

    Raises:
        TypeError: it chooses samples in a way that cannot be split evenly.
    """
    if (problem := _unknown_order(loader)) is not None:
        raise TypeError(
            f"PoplarStrategy cannot split this loader evenly: {problem}. Use "
            "DataLoader(dataset, batch_size), or pass Trainer(use_distributed_sampler=False) and "
            "give every rank its own loader; all ranks then need the same number of batches"
        )
    length, batch_size = len(loader.dataset), loader.batch_sampler.batch_size
    if loader.batch_sampler.drop_last and not predicting:
        length -= length % batch_size
    batches: Any = EvenBatchSampler(length, batch_size, rank, world_size)
    if predicting:
        batches = _IndexBatchSamplerWrapper(batches)  # by which Lightning knows the indices
    return DataLoader(loader.dataset, batch_sampler=batches, **kept_options(loader))


def _steps_done(trainer: Any) -> int:
    """Steps of the epoch, without one whose passes run or have failed."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.processed)


def _unknown_order(loader: Any) -> str | None:
    """Why the order of the samples of a loader is not known; None if it is."""
    return unknown_order(loader, [_IndexBatchSamplerWrapper])
