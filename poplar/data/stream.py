"""`split_stream`: this rank's samples of each global batch, from data without a length.

Every rank reads the whole stream and keeps its own samples, so nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count, islice
from typing import Any, TypeVar

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from poplar.data.drawn_batches import DrawnBatches
from poplar.data.global_batch import (
    STATE_VERSION,
    check_last_batch,
    check_state,
    rank_slice,
    resolve_rank,
)
from poplar.values.plan import Plan

T = TypeVar("T")


class StreamSplit(DrawnBatches, IterableDataset[list[T]]):
    """This rank's samples of each global batch; made by `split_stream`."""

    def __init__(self, iterable: Iterable[T], plan: Plan, rank: int, drop_last: bool) -> None:
        super().__init__(plan, rank)
        self._iterable = iterable
        self._drop_last = drop_last
        self._position = _StreamPosition()
        self.set_last()  # also if workers read it

    def __iter__(self) -> Iterator[list[T]]:
        worker = get_worker_info()
        turn, turns = (0, 1) if worker is None else (worker.id, worker.num_workers)
        start = self._position.begin()
        ahead = self._begin()
        with _outside_of_workers():
            samples = iter(self._iterable)
            self._skip(samples, start)
        for step in count(start):
            with _outside_of_workers():
                batch = list(islice(samples, self._plan.global_batch))
            short = len(batch) < self._plan.global_batch
            if not batch or (short and self._drop_last):
                break
            # DataLoader reads its workers in turn, so giving every worker each `turns`-th step
            # keeps the order.
            if (step - start) % turns == turn:
                self._position.drawn = step + 1
                plan = self._draw()
                if short:
                    check_last_batch(len(batch), plan, "the stream ended")
                try:
                    yield batch[slice(*rank_slice(plan, self._rank, len(batch)))]
                except GeneratorExit:  # what was drawn ahead will not be trained
                    ahead.clear()
                    raise
        self._position.drawn = 0

    @property
    def drawn_by_workers(self) -> bool:
        return self._position.read_by_workers

    def check_plan(self, plan: Plan) -> None:
        super().check_plan(plan)
        if self.drawn_by_workers:
            raise ValueError(
                "DataLoader workers read a split_stream, which then cannot follow a change of the "
                "plan; use num_workers=0, or leave the loop, split the stream again from "
                "state_dict(steps_done=...) by the new plan, and then call apply_plan()"
            )

    def state_dict(self, steps_done: int | None = None) -> dict[str, Any]:
        """The position in the data, for `load_state_dict` with any plan of the same global batch.

        Args:
            steps_done: steps that were trained, counted from the start of the stream; 0 after its
                end. None: the steps that were drawn in this process.

        Raises:
            RuntimeError: without `steps_done`, if `DataLoader` workers read the stream: they read
                ahead, so only the trainer knows how many steps it has done.
        """
        if steps_done is None:
            if self.drawn_by_workers:
                raise RuntimeError(
                    "DataLoader workers read this stream ahead of training, so its position is not "
                    "the trainer's; pass steps_done=, the trainer's own count"
                )
            steps_done = self._position.drawn
        if steps_done < 0:
            raise ValueError(f"steps_done must be at least 0, got {steps_done}")
        return {"version": STATE_VERSION, "step": steps_done, **self._state_identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`: the next iteration reads and drops the finished samples.

        Only the first iteration after this call skips samples, even if it ends early.

        Raises:
            ValueError: the state has another global batch size, or is not from a stream.
        """
        check_state(state, {"step"}, self._state_identity(), "split_stream")
        self._position.resume_at(state["step"])

    def _state_identity(self) -> dict[str, Any]:
        return {"global_batch": self._plan.global_batch}

    def _skip(self, samples: Iterator[T], steps: int) -> None:
        wanted = steps * self._plan.global_batch
        found = sum(1 for _ in islice(samples, wanted))
        if wanted - found >= self._plan.global_batch:
            raise ValueError(
                f"resuming at step {steps} skips {wanted} samples, but the stream ended after "
                f"{found}; use the stream from which the state was saved"
            )


def split_stream(
    iterable: Iterable[T], plan: Plan, *, rank: int | None = None, drop_last: bool = True
) -> StreamSplit[T]:
    """Split data without a length by a plan: a list of this rank's samples for each global batch.

        stream = poplar.split_stream(records, plan)
        loader = DataLoader(stream, batch_size=None, collate_fn=collate, num_workers=2)

    Use `batch_size=None`, because every item is already a batch; `collate_fn` gets the list. The
    order is that of the stream, with any number of workers.

    Args:
        iterable: the samples, in the same order on every rank. Each rank and each worker reads all
            samples and keeps its own, so do expensive work (decoding, tokenizing) in `collate_fn`.
            `torch.utils.data.get_worker_info()` is None in it, so that a dataset that takes a part
            in each worker, as those of Hugging Face, gives all samples. It must not take a part in
            each rank. For more than one epoch it must start again at every `iter()`.
        plan: how a global batch is split. A change by `optimizer.apply_plan` is followed, except in
            `DataLoader` workers.
        rank: the rank whose part is read; None: this process's rank in `torch.distributed`.
        drop_last: True drops the samples that do not fill a global batch. False splits them by the
            same plan; if they are fewer than the plan's ranks with samples, the iteration ends with
            a ValueError on every rank.

    Raises:
        ValueError: the plan does not have this rank.
    """
    return StreamSplit(iterable, plan, resolve_rank(plan, rank), drop_last)


@contextmanager
def _outside_of_workers() -> Iterator[None]:
    """A context in which `get_worker_info()` returns None, as in the trainer's process."""
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        yield
    finally:
        torch_worker._worker_info = info


class _StreamPosition:
    """The start of the next iteration over a stream; copies in `DataLoader` workers agree on it.

    A resumed position applies only to the first iteration after it was set, regardless of how far
    workers and ranks have read. Workers of one iteration share a seed, which identifies them.
    Persistent workers keep the seed, so each also remembers whether it has used the position.
    """

    def __init__(self) -> None:
        self.drawn = 0
        # start; how often it was set; seed of the iteration that used it (0: unused); has workers
        self._shared = torch.zeros(4, dtype=torch.int64, device="cpu").share_memory_()
        self._begun = 0  # the setting that this copy has used

    @property
    def read_by_workers(self) -> bool:
        return bool(self._shared[3])

    def resume_at(self, step: int) -> None:
        self.drawn = step
        setting = int(self._shared[1]) + 1
        self._shared.copy_(torch.tensor([step, setting, 0, 0], device="cpu"))

    def begin(self) -> int:
        worker = get_worker_info()
        reader = 1 if worker is None else worker.seed - worker.id
        start, setting, owner, _ = self._shared.tolist()
        if self._begun == setting or owner not in (0, reader):
            start = 0
        else:
            self._begun = setting
            self._shared[2] = reader
        self._shared[3] = worker is not None
        self.drawn = start
        return int(start)
