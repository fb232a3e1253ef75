"""Batches that were drawn ahead of training, and the plans that split them."""

from __future__ import annotations

from collections import deque
from typing import Any
from weakref import WeakSet, ref

from poplar.values.plan import Plan

_last_drawn: ref[DrawnBatches] | None = None
"""What has drawn a batch last in this process."""
_steps = 0
"""Steps of optimizers that have begun in this process."""
_continued: WeakSet[DrawnBatches] = WeakSet()
"""See `take_continued`."""


class DrawnBatches:
    """The base of what draws the batches of steps: it splits each one by the plan of its step."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan, self._rank = plan, rank
        self._taken = 0  # batches that an optimizer has taken
        self._plans = [(0, 0, plan)]
        """Each with the number of the first batch that it splits, and how often the plan had
        changed then, on the rank where it had most often."""
        self._ahead: deque[int] = deque()
        """Of each batch of this iteration that was drawn and not taken, that number of changes."""

    def set_last(self) -> None:
        """Make `last_drawn` return this."""
        global _last_drawn
        _last_drawn = ref(self)

    def _begin(self) -> deque[int]:
        """Note that an iteration begins.

        Returns:
            What it has drawn ahead. If the iteration is left, it clears this and not that of a
            later iteration, which may have begun before.
        """
        self._ahead, self._begun_at = deque(), _steps
        return self._ahead

    def _draw(self) -> Plan:
        """Note that the next batch is drawn; returns its plan."""
        self.set_last()
        if self._begun_at < _steps:
            _continued.add(self)
        number = self._taken + len(self._ahead)
        _, changes, plan = [one for one in self._plans if one[0] <= number][-1]
        self._ahead.append(changes)
        return plan

    @property
    def has_samples(self) -> bool:
        """Whether this rank has samples in the plan. Else each of its batches is one sample that
        belongs to another rank, because an empty list breaks collate functions.
        """
        _, _, plan = self._plans[-1]
        return plan.samples(self._rank) > 0

    @property
    def drawn_by_workers(self) -> bool:
        """Batches are drawn in other processes, which do not follow."""
        return False

    @property
    def ahead(self) -> int:
        """Batches that were drawn and that no optimizer has taken yet."""
        return len(self._ahead)

    def take(self) -> int:
        """Note that an optimizer has taken the next batch; called by optimizers.

        Returns:
            How often the plan had changed when the batch was drawn, plus 1; 0 if no such batch was
            drawn.
        """
        self._taken += 1
        return self._ahead.popleft() + 1 if self._ahead else 0

    def miss(self) -> None:
        """Note that an optimizer takes a step without a batch of these; called by optimizers."""

    def skip(self, batches: int) -> None:
        """Note that no optimizer will take the first of the batches that were drawn."""
        for _ in range(min(batches, len(self._ahead))):
            self._ahead.popleft()

    def drop_ahead(self) -> None:
        """Note that no optimizer will take the batches that were drawn."""
        self._ahead.clear()
        _continued.discard(self)

    def changes_with(self, plan: Plan) -> bool:
        """Whether another plan splits the batches otherwise than the latest one."""
        _, _, latest = self._plans[-1]
        return plan.micro_batches != latest.micro_batches

    def check_plan(self, plan: Plan) -> None:
        """Check that `follow` can change to a plan.

        Raises:
            ValueError: the plan has another global batch, or too many ranks with samples.
        """
        if plan.global_batch != self._plan.global_batch:
            raise ValueError(
                f"the plan has global batches of {plan.global_batch} samples, but the "
                f"{type(self).__name__} draws global batches of {self._plan.global_batch}; make a "
                "plan for the same global batch"
            )

    @property
    def changes(self) -> int:
        """How often the plan has changed or will."""
        return self._plans[-1][1]

    def follow(self, plan: Plan, after: int, changes: int) -> None:
        """Split by another plan, once an optimizer has taken `after` more batches.

        `optimizer.apply_plan` calls it. All of these batches may have been drawn already, but not
        the next one.
        """
        first = self._taken + after
        self._plans = [one for one in self._plans if one[0] < first or not one[0]]
        self._plans.append((first, changes, plan))

    def order(self) -> dict[str, Any]:
        """What decides the parts that it gives; equal on all ranks."""
        return {"global_batch": self._plan.global_batch}


def drawn_by(loader: Any) -> Any:
    """The `DrawnBatches` of a loader, if it has one."""
    sources = (getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None), loader)
    return next((source for source in sources if isinstance(source, DrawnBatches)), None)


def last_drawn() -> DrawnBatches | None:
    """What has drawn a batch last in this process.

    In a training loop it has drawn the batch of the step: a `DataLoader` draws in the process that
    iterates it, also with workers (but not from a stream). It is another one if a loader was
    iterated between the batch and the step.
    """
    return None if _last_drawn is None else _last_drawn()


def take_last() -> DrawnBatches | None:
    """`last_drawn`, which is None from now on until a batch is drawn."""
    global _last_drawn
    last, _last_drawn = last_drawn(), None
    return last


def take_continued() -> list[DrawnBatches]:
    """What draws batches of steps, when the next step begins; called by optimizers.

    That is what has drawn since the step before, in an iteration that had begun before that step.
    A loop that evaluates between two steps begins after the first one.
    """
    global _steps
    _steps += 1
    continued = list(_continued)
    _continued.clear()
    return continued
