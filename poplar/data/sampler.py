"""`HeteroBatchSampler`: batches of indices for a map-style dataset.

Step `k` is the same global batch for every plan: it depends only on the seed and the step. So plans
can be compared, changed and resumed without a change in the order of the data. Nothing here
communicates: each rank computes the same order and the same split, and takes its own part.
With `lengths`, the samples of a global batch are divided by length; it has the same samples.

A rank without samples in the plan still draws one sample per step, because an empty list breaks
collate functions; the optimizer drops it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import Sampler

from poplar.data.drawn_batches import DrawnBatches
from poplar.data.global_batch import (
    STATE_VERSION,
    check_last_batch,
    check_state,
    rank_slice,
    resolve_rank,
)
from poplar.data.lengths import checked_lengths, deal, digest_of, grouped_order
from poplar.values.plan import Plan
from poplar.values.schema import Count, checked

_NOT_COUNTED = (
    "an optimizer takes more steps than the HeteroBatchSampler has batches, as with several steps "
    "per batch, and the DataLoader draws batches ahead: it is not known which of them were trained"
)


class HeteroBatchSampler(DrawnBatches, Sampler[list[int]]):
    """Batches of indices for a map-style dataset: this rank's part of one global batch per step.

        loader = DataLoader(dataset, batch_sampler=HeteroBatchSampler(len(dataset), plan, seed=0))

    Epochs: an iteration after a finished one is the next epoch, in another order. An iteration
    after an unfinished one repeats the same epoch from its start. `set_epoch` overrides both.
    `DataLoader` workers draw batches ahead of training, and how far ahead may differ between ranks.
    So a loop that leaves an epoch early should call `set_epoch` on every rank before the next.

    `optimizer.apply_plan` also changes the plan of the sampler that has drawn the batches of the
    optimizer, from a batch on that no rank has drawn. Global batches stay the same.

    Args:
        length: number of samples in the dataset.
        plan: how a global batch is split.
        seed: determines, with the epoch, the order of the samples; the same on all ranks.
        shuffle: False keeps the order of the dataset.
        drop_last: True drops the samples that do not fill a global batch. False splits them by the
            same plan; every rank with samples in the plan gets at least one.
        rank: the rank whose part is drawn; None: this process's rank in `torch.distributed`.
        lengths: length of each sample, such as its number of tokens, the same on all ranks. The
            samples of a global batch are then divided so that each pass has samples of similar
            length, and ranks get padded tokens in proportion to their samples. That saves time if
            each micro-batch is padded on its own, as `poplar.data.CollateMicroBatches` does.
        group_by_length: with `lengths` and `shuffle`, global batches are drawn from groups of
            samples of similar length.

    Raises:
        ValueError: the dataset is too small for one step; with `drop_last=False`, the last global
            batch has fewer samples than the plan has ranks with samples; the plan does not have
            this rank; `lengths` is not one number above 0 per sample.
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
        lengths: Iterable[float] | torch.Tensor | None = None,
        group_by_length: bool = False,
    ) -> None:
        super().__init__(plan, resolve_rank(plan, rank))
        self._length = length = checked(Count, length, "length")
        self._seed = seed
        self._shuffle = shuffle
        self._steps, tail = divmod(length, plan.global_batch)
        if tail and not drop_last:
            check_last_batch(tail, plan, f"the dataset has {length} samples")
            self._steps += 1
        if self._steps == 0:
            raise ValueError(
                f"a dataset of {length} samples gives no step: the global batch is "
                f"{plan.global_batch}; make a plan for a smaller global batch"
                + (", or pass drop_last=False" if length > 0 else "")
            )
        if group_by_length and (lengths is None or not shuffle):
            raise ValueError(
                "group_by_length=True needs lengths= and shuffle=True: it draws global batches at "
                "random from groups of samples of similar length"
            )
        self._lengths = None if lengths is None else checked_lengths(lengths, length)
        self._lengths_digest = "" if self._lengths is None else digest_of(self._lengths)
        self._group_by_length = group_by_length
        self._epoch = 0
        self._start = 0  # first step of an iteration of this epoch; not 0 after load_state_dict
        self._drawn = 0  # steps of this epoch that were drawn, including those before `_start`
        self._done = 0  # of these, up to the last one that an optimizer has taken
        self._ahead_of_step = 0  # least number of later batches that were drawn when one was taken
        self._most_ahead = 0  # the largest
        self._is_drawing = False  # the iteration has batches left
        self._has_missed = False  # an optimizer has taken a step without a batch
        self._drop_last = drop_last

    @property
    def epoch(self) -> int:
        """The current or last epoch."""
        return self._epoch

    @property
    def drawn(self) -> int:
        """Steps of the current or last epoch that were drawn, with those before a resume."""
        return self._drawn

    @property
    def batch_size(self) -> int:
        """Not one number. Accelerate reads it before it divides the batches among ranks again.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "HeteroBatchSampler gives each rank its part of the global batch already, so its "
            "batches have no common size and must not be divided among ranks again; do not pass "
            "its DataLoader to accelerate.prepare() or Trainer, use poplar.integrations"
        )

    def __len__(self) -> int:
        """Steps in a full epoch, even if this one was resumed."""
        return self._steps

    def __iter__(self) -> Iterator[list[int]]:
        if self._drawn == self._steps:
            self.set_epoch(self._epoch + 1)
        size = self._plan.global_batch
        order = self._order()
        self._drawn = self._done = self._start
        self._ahead_of_step = self._steps
        self._most_ahead, self._is_drawing = 0, True
        ahead = self._begin()
        try:
            for step in range(self._start, self._steps):
                self._drawn = step + 1
                yield self._own_part(self._draw(), order[step * size : (step + 1) * size])
        except GeneratorExit:  # what was drawn ahead will not be trained
            ahead.clear()
            raise
        finally:
            if ahead is self._ahead:
                self._is_drawing = False

    def take(self) -> int:
        changes = super().take()
        self._most_ahead = max(self._most_ahead, self.ahead)
        # Batches that a loop has dropped count as ahead, but how far workers draw does not grow.
        self._ahead_of_step = min(self._ahead_of_step, self.ahead)
        self._done = self._drawn - self._ahead_of_step
        return changes

    def miss(self) -> None:
        # Steps that took no batch of their own have counted batches that workers drew ahead.
        if self._is_drawing and self._most_ahead:
            self._has_missed = True

    @property
    def _is_counted(self) -> bool:
        """`_done` is the number of batches that were trained, as far as is known."""
        return not (self._has_missed and self._most_ahead)

    def _own_part(self, plan: Plan, global_batch: torch.Tensor) -> list[int]:
        """The samples of this rank in a global batch of these indices."""
        if self._lengths is not None and plan.samples(self._rank):
            dealt = deal(plan, self._lengths[global_batch].tolist())
            return global_batch[dealt[self._rank]].tolist()
        first, stop = rank_slice(plan, self._rank, len(global_batch))
        return global_batch[first:stop].tolist()

    def check_plan(self, plan: Plan) -> None:
        super().check_plan(plan)
        if not self._is_counted:
            raise ValueError(f"{_NOT_COUNTED}, nor at which step the next one will be")
        if (tail := self._length % plan.global_batch) and not self._drop_last:
            check_last_batch(tail, plan, f"the dataset has {self._length} samples")

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch `epoch`.

        The current epoch keeps the position where it was resumed, so the usual
        `for epoch in range(...): sampler.set_epoch(epoch)` also works after `load_state_dict`.
        """
        if epoch != self._epoch or self._drawn == self._steps:
            self._epoch, self._start, self._drawn, self._done = epoch, 0, 0, 0

    def state_dict(self, steps_done: int | None = None) -> dict[str, Any]:
        """The position in the data, for `load_state_dict` with any plan of the same global batch.

        Args:
            steps_done: steps of this epoch that were trained, counted from the start of the epoch.
                None: those that a `HeteroZeroOptimizer` has taken; without one, the batches that
                were drawn. `DataLoader` workers draw ahead of training, so pass the trainer's own
                count if they draw for another optimizer, for several ones, for several steps, or
                beside other samplers for one optimizer.

        Raises:
            RuntimeError: without `steps_done`, if more steps were taken than batches.
        """
        if steps_done is None and not self._is_counted:
            raise RuntimeError(
                f"{_NOT_COUNTED}; save what state_dict(steps_done=) returns for the batches of "
                "this epoch that were trained, or let the DataLoader have num_workers=0"
            )
        done = self._done if self._taken else self._drawn
        steps = done if steps_done is None else steps_done
        if not 0 <= steps <= self._steps:
            raise ValueError(
                f"steps_done must be between 0 and the {self._steps} steps of an epoch, got "
                f"{steps}; count from the start of the epoch, not of the training"
            )
        finished = steps == self._steps
        return {
            "version": STATE_VERSION,
            "epoch": self._epoch + finished,
            "step": 0 if finished else steps,
            **self._state_identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`: the next iteration is the rest of its epoch.

        Raises:
            ValueError: the state has another dataset length, seed, order or global batch, so its
                step would be other samples.
        """
        check_state(state, {"epoch", "step"}, self._state_identity(), "HeteroBatchSampler")
        if not 0 <= state["step"] < self._steps:
            raise ValueError(
                f"the state is at step {state['step']} of an epoch, but an epoch has {self._steps} "
                "steps here; use the same drop_last as when it was saved"
            )
        self._epoch = state["epoch"]
        self._most_ahead = 0
        self._start = self._drawn = self._done = state["step"]

    def _state_identity(self) -> dict[str, Any]:
        """What decides which samples are in which global batch."""
        grouped = {"grouped_by_length": self._lengths_digest} if self._group_by_length else {}
        return {
            "length": self._length,
            "global_batch": self._plan.global_batch,
            "seed": self._seed,
            "shuffle": self._shuffle,
            **grouped,
        }

    def order(self) -> dict[str, Any]:
        return {**self._state_identity(), "lengths": self._lengths_digest, "epoch": self.epoch}

    def _order(self) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self._length, device="cpu")
        # Hashed, not added: seed 0 in epoch 1 must differ from seed 1 in epoch 0.
        mixed = hashlib.sha256(f"{self._seed}:{self._epoch}".encode()).digest()[:4]
        generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(mixed, "little"))
        order = torch.randperm(self._length, generator=generator, device="cpu")
        if self._group_by_length and self._lengths is not None:
            return grouped_order(order, self._lengths, self._plan.global_batch, generator)
        return order
