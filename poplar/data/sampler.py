"""Every rank its own part of the same global batch.

What a step trains on depends on the seed and the step, never on the plan: step `k` is the same
global batch however it is cut, so plans can be compared, changed and resumed without another order
of the data. Nothing here communicates. Ranks agree because each computes the same cut of the same
order and takes its own piece.

A rank without samples in the plan still draws one sample per step, because an empty list breaks
every collate function; the optimizer drops it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, count, islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, Sampler, get_worker_info

from poplar.plan import Plan

T = TypeVar("T")

_STATE_VERSION = 1


class HeteroBatchSampler(Sampler[list[int]]):
    """Batches of indices for a map-style dataset: this rank's part of one global batch per step.

        loader = DataLoader(dataset, batch_sampler=HeteroBatchSampler(len(dataset), plan, seed=0))

    Epochs: an iteration that begins after a finished one is the next epoch, in another order; one
    that begins after an unfinished one is the same epoch again, from where it started. `set_epoch`
    overrides both. With `DataLoader` workers batches are drawn ahead of training, so a loop that
    leaves an epoch early should call `set_epoch` before the next, on every rank: how far ahead
    they were drawn may differ between ranks.

    Args:
        length: samples in the dataset.
        plan: how a global batch is cut.
        seed: order of the samples, together with the epoch; the same on all ranks.
        shuffle: False keeps the order of the dataset.
        drop_last: True leaves out the samples that fill no whole global batch. False cuts them by
            the same plan, every rank with samples getting at least one.
        rank: whose part; None: this process's rank in `torch.distributed`.

    Raises:
        ValueError: a dataset that gives no step at all; with `drop_last=False` a last global batch
            with fewer samples than there are ranks to share it; a rank that the plan does not have.
    """

    def __init__(
        self,
        length: int,
        plan: Plan,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        rank: int | None = None,
    ) -> None:
        self._rank = _resolved_rank(plan, rank)
        self._plan = plan
        self._length = length
        self._seed = seed
        self._shuffle = shuffle
        self._steps, tail = divmod(length, plan.global_batch)
        if tail and not drop_last:
            _check_tail(tail, plan, f"the dataset has {length} samples")
            self._steps += 1
        if self._steps == 0:
            raise ValueError(
                f"a dataset of {length} samples gives no step: the global batch is "
                f"{plan.global_batch}; plan for a smaller one"
                + (", or pass drop_last=False" if length > 0 else "")
            )
        self._epoch = 0
        self._start = 0  # where an iteration of this epoch begins: not 0 after load_state_dict
        self._drawn = 0  # steps of this epoch that were handed out, those before `_start` included

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or that was the last to be."""
        return self._epoch

    def __len__(self) -> int:
        """Steps in a whole epoch, wherever this one was resumed."""
        return self._steps

    def __iter__(self) -> Iterator[list[int]]:
        if self._drawn == self._steps:
            self.set_epoch(self._epoch + 1)
        size = self._plan.global_batch
        order = self._order()
        self._drawn = self._start
        for step in range(self._start, self._steps):
            self._drawn = step + 1
            first, stop = _part(self._plan, self._rank, min(size, self._length - step * size))
            yield order[step * size + first : step * size + stop].tolist()

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch `epoch`.

        The epoch that is under way keeps the place where it was resumed, so the usual
        `for epoch in range(...): sampler.set_epoch(epoch)` works after `load_state_dict` too.
        """
        if epoch != self._epoch or self._drawn == self._steps:
            self._epoch, self._start, self._drawn = epoch, 0, 0

    def state_dict(self, steps_done: int | None = None) -> dict[str, Any]:
        """Where training is, for `load_state_dict`: under any plan with the same global batch.

        Args:
            steps_done: steps of this epoch that were trained on, counted from the epoch's first.
                None: the batches that were drawn; with `DataLoader` workers that is ahead of
                training by what they prefetch, so pass the trainer's own count there.
        """
        steps = self._drawn if steps_done is None else steps_done
        if not 0 <= steps <= self._steps:
            raise ValueError(
                f"steps_done must be between 0 and the {self._steps} steps of an epoch, got "
                f"{steps}; count from the start of the epoch, not of the training"
            )
        finished = steps == self._steps
        return {
            "version": _STATE_VERSION,
            "epoch": self._epoch + finished,
            "step": 0 if finished else steps,
            **self._what_steps_mean(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken: next comes what is left of its epoch.

        Raises:
            ValueError: a state from another dataset length, seed, order or global batch: its step
                would be other samples here.
        """
        _check_state(state, {"epoch", "step"}, self._what_steps_mean(), "HeteroBatchSampler")
        if not 0 <= state["step"] < self._steps:
            raise ValueError(
                f"the state is at step {state['step']} of an epoch, but an epoch has {self._steps} "
                "steps here; use the same drop_last as when it was saved"
            )
        self._epoch = state["epoch"]
        self._start = self._drawn = state["step"]

    def _what_steps_mean(self) -> dict[str, Any]:
        return {
            "length": self._length,
            "global_batch": self._plan.global_batch,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def _order(self) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self._length)
        # Hashed rather than added: seed 0 in epoch 1 must not be seed 1 in epoch 0.
        mixed = hashlib.sha256(f"{self._seed}:{self._epoch}".encode()).digest()[:4]
        generator = torch.Generator().manual_seed(int.from_bytes(mixed, "little"))
        return torch.randperm(self._length, generator=generator)


class StreamSplit(IterableDataset[list[T]]):
    """This rank's samples of one global batch after the other, from data without a length.

    Made by `split_stream`, which explains it.
    """

    def __init__(self, iterable: Iterable[T], plan: Plan, rank: int, drop_last: bool) -> None:
        self._iterable = iterable
        self._plan = plan
        self._rank = rank
        self._drop_last = drop_last
        self._position = _StreamPosition()

    def __iter__(self) -> Iterator[list[T]]:
        worker = get_worker_info()
        turn, turns = (0, 1) if worker is None else (worker.id, worker.num_workers)
        start = self._position.begin()
        samples = iter(self._iterable)
        self._skip(samples, start)
        for step in count(start):
            batch = list(islice(samples, self._plan.global_batch))
            short = len(batch) < self._plan.global_batch
            if not batch or (short and self._drop_last):
                break
            # DataLoader asks its workers in turn, so giving every worker each `turns`-th step
            # keeps the order.
            if (step - start) % turns == turn:
                if short:
                    _check_tail(len(batch), self._plan, "the stream ended")
                self._position.drawn = step + 1
                yield batch[slice(*_part(self._plan, self._rank, len(batch)))]
        self._position.drawn = 0

    def state_dict(self, steps_done: int | None = None) -> dict[str, Any]:
        """Where training is, for `load_state_dict`: under any plan of this global batch.

        Args:
            steps_done: steps that were trained on, counted from the first of the stream; 0 once the
                stream has come to its end. None: those that were drawn in this process.

        Raises:
            RuntimeError: without `steps_done`, if the stream is read by `DataLoader` workers: they
                read ahead, and only the trainer knows how many steps it has done.
        """
        if steps_done is None:
            if self._position.read_by_workers:
                raise RuntimeError(
                    "DataLoader workers read this stream ahead of training, so it cannot know "
                    "where training is; pass steps_done=, the trainer's own count"
                )
            steps_done = self._position.drawn
        if steps_done < 0:
            raise ValueError(f"steps_done must be at least 0, got {steps_done}")
        return {"version": _STATE_VERSION, "step": steps_done, **self._what_steps_mean()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken: the next pass over the stream skips what is done.

        Skipping reads the samples that were done and drops them. Only the first pass that begins
        after this call skips, even if it is left early; every later one is whole.

        Raises:
            ValueError: a state from another global batch size, or not from a stream.
        """
        _check_state(state, {"step"}, self._what_steps_mean(), "split_stream")
        self._position.resume_at(state["step"])

    def _what_steps_mean(self) -> dict[str, Any]:
        return {"global_batch": self._plan.global_batch}

    def _skip(self, samples: Iterator[T], steps: int) -> None:
        wanted = steps * self._plan.global_batch
        found = sum(1 for _ in islice(samples, wanted))
        if wanted - found >= self._plan.global_batch:
            raise ValueError(
                f"resuming at step {steps} skips {wanted} samples, but the stream ended after "
                f"{found}; is it the stream the state was saved from?"
            )


def split_stream(
    iterable: Iterable[T], plan: Plan, *, rank: int | None = None, drop_last: bool = True
) -> StreamSplit[T]:
    """Cut data without a length by a plan: this rank's list of samples for each global batch.

        stream = poplar.split_stream(records, plan)
        loader = DataLoader(stream, batch_size=None, collate_fn=collate, num_workers=2)

    `batch_size=None` because every item already is a batch; `collate_fn` gets the list. The order
    is the stream's own, with any number of workers.

    Args:
        iterable: the samples, in the same order on every rank. Each rank, and each worker, reads
            all of it and keeps its own, so leave what is expensive (decoding, tokenising) to
            `collate_fn`. For more than one pass it must start again at every `iter()`.
        plan: how a global batch is cut.
        rank: whose part; None: this process's rank in `torch.distributed`.
        drop_last: True leaves out what fills no whole global batch. False cuts it by the same plan;
            if it has fewer samples than there are ranks to share it, the iteration ends with a
            ValueError on every rank.

    Raises:
        ValueError: a rank that the plan does not have.
    """
    return StreamSplit(iterable, plan, _resolved_rank(plan, rank), drop_last)


class _StreamPosition:
    """Where the next pass over a stream begins; `DataLoader` workers hold copies and must agree.

    A resumed position belongs to the first pass that begins after it was set, and to no other. That
    does not depend on how far anybody has read, which differs between workers and between ranks.
    Workers know each other by the seed that they share during a pass; persistent ones keep it for
    good, but each remembers whether it has begun the pass before.
    """

    def __init__(self) -> None:
        self.drawn = 0
        # start, how often it was set, whose pass it belongs to (0: not begun), workers have read
        self._shared = torch.zeros(4, dtype=torch.int64).share_memory_()
        self._begun = 0  # the setting that this copy has begun a pass with

    @property
    def read_by_workers(self) -> bool:
        return bool(self._shared[3])

    def resume_at(self, step: int) -> None:
        self.drawn = step
        setting = int(self._shared[1]) + 1
        self._shared.copy_(torch.tensor([step, setting, 0, 0]))

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


def _part(plan: Plan, rank: int, samples: int) -> tuple[int, int]:
    """Where the part of `rank` begins and ends in a global batch of `samples`."""
    bounds = list(accumulate(plan.cut(samples), initial=0))
    if bounds[rank] == bounds[rank + 1]:
        return 0, 1
    return bounds[rank], bounds[rank + 1]


def _check_tail(tail: int, plan: Plan, why: str) -> None:
    working = sum(plan.samples(rank) > 0 for rank in range(plan.world_size))
    if tail < working:
        raise ValueError(
            f"{why}, and its last global batch has {tail} samples (of {plan.global_batch}), too "
            f"few for the {working} ranks that have samples in the plan; pass drop_last=True, or "
            f"pad the data by {working - tail} samples"
        )


def _check_state(
    state: Mapping[str, Any], position: set[str], expected: Mapping[str, Any], whose: str
) -> None:
    fields = {"version", *position, *expected}
    if set(state) != fields:
        raise ValueError(
            f"this is not a state of {whose}: its fields are {sorted(state)}, expected "
            f"{sorted(fields)}"
        )
    if state["version"] != _STATE_VERSION:
        raise ValueError(
            f"state format {state['version']!r}, but this version of Poplar reads {_STATE_VERSION}"
        )
    for name, value in expected.items():
        if state[name] != value:
            raise ValueError(
                f"the state was saved with {name}={state[name]!r}, but here it is {value!r}, so "
                f"its step would be other samples; use {name}={state[name]!r}, or start anew"
            )


def _resolved_rank(plan: Plan, rank: int | None) -> int:
    if rank is None:
        if dist.is_available() and dist.is_initialized():
            world_size = dist.get_world_size()
            if world_size != plan.world_size:
                raise ValueError(
                    f"rank {dist.get_rank()}: the plan is for {plan.world_size} ranks, but "
                    f"torch.distributed runs {world_size}; plan for {world_size}, or pass rank="
                )
            return dist.get_rank()
        if plan.world_size == 1:
            return 0
        raise ValueError(
            f"the plan is for {plan.world_size} ranks and torch.distributed is not initialised, so "
            "this process has no rank; call init_process_group first, or pass rank="
        )
    if not 0 <= rank < plan.world_size:
        raise ValueError(
            f"rank {rank}: the plan is for ranks 0 to {plan.world_size - 1}; pass one of these"
        )
    return rank
