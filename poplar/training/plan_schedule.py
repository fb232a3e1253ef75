"""When an optimizer changes to other plans, together with the sampler of its batches.

`DataLoader` workers draw batches ahead of training, so a change takes effect at a step whose batch
no rank has drawn. The sampler numbers the batches as the optimizer numbers its steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from poplar.data.drawn_batches import DrawnBatches, last_drawn, take_continued, take_last
from poplar.values.plan import Plan

_SEVERAL = (
    "the steps take batches of several samplers, and only one of them would follow the plan; draw "
    "all batches from one, for example of a torch.utils.data.StackDataset, and those of a "
    "validation in optimizer.evaluate(loss_fn, islice(val, 1)); or leave the loop, delete the "
    "samplers and their loaders, call apply_plan(), and build them by the new plan"
)


class PlanSchedule:
    """The steps of one optimizer on this rank, and the changes of its plan."""

    def __init__(self) -> None:
        self.steps = 0
        """Steps that have begun."""
        self.in_step = False
        """A step has begun and not ended."""
        self.version = 0
        """How often the plan of the current batch had changed, plus 1; 0 if that is unknown."""
        self._changes: list[tuple[int, Plan]] = []
        self._sampler: weakref.ref[DrawnBatches] | None = None
        self._spans = weakref.WeakKeyDictionary[DrawnBatches, tuple[int, int]]()
        """The last and the first step for which each sampler has drawn."""

    def first_step(self, plan: Plan) -> int:
        """The first step at which this rank can follow another plan.

        Raises:
            ValueError: the sampler cannot split its global batches by the plan, or would split them
                otherwise than now while steps also take batches of other samplers.
        """
        spans = sorted(self._spans.values())
        several = len(spans) > 1 and spans[-2][0] >= spans[-1][1]
        sampler = self._known_sampler() or self._next_sampler()
        if several and (sampler is None or sampler.changes_with(plan)):
            raise ValueError(_SEVERAL)
        latest = self._changes[-1][0] if self._changes else 0
        if sampler is None:
            return max(self.steps, latest)
        sampler.check_plan(plan)
        return max(self.steps + sampler.ahead, latest)

    @property
    def changes(self) -> int:
        """How often the plan of this rank's batches has changed or will."""
        sampler = self._known_sampler() or self._next_sampler()
        return 0 if sampler is None else sampler.changes

    @property
    def plans(self) -> list[Plan]:
        """The plans to which later steps change."""
        return [plan for _, plan in self._changes]

    def add(self, step: int, plan: Plan, changes: int) -> None:
        """Change to a plan at a step, at which all ranks can.

        `changes` are those of the rank where they are most.
        """
        self._changes = [change for change in self._changes if change[0] < step]
        self._changes.append((step, plan))
        sampler = self._known_sampler() or self._next_sampler()
        if sampler is not None:
            sampler.follow(plan, after=step - self.steps, changes=changes + 1)

    @property
    def latest(self) -> Plan | None:
        """The last plan to which a later step changes; None if there is none."""
        return self._changes[-1][1] if self._changes else None

    @property
    def is_due(self) -> bool:
        """Whether the next step changes the plan."""
        return bool(self._changes) and self._changes[0][0] <= self.steps

    def due(self) -> Plan | None:
        """The plan to which the next step changes, once; None if it keeps its plan."""
        return self._changes.pop(0)[1] if self.is_due else None

    def begin_step(self) -> None:
        """Take the next batch of the sampler, if there is one."""
        self.steps += 1
        self.in_step = True
        for drawing in take_continued():
            _, first = self._spans.get(drawing, (0, self.steps))
            self._spans[drawing] = self.steps, first
        sampler = self._next_sampler()
        self._sampler = None if sampler is None else weakref.ref(sampler)
        self.version = 0
        if sampler is not None and sampler.ahead:
            self.version = sampler.take()
        elif sampler is not None:
            sampler.miss()

    def count_from(self, steps: int) -> None:
        """Take the number of steps that have begun from another rank."""
        self.steps = steps

    def end_step(self) -> None:
        """The step has been applied."""
        self.in_step = False

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """A context in which batches are drawn that are trained by no step."""
        before = take_last()
        try:
            yield
        finally:
            sampler = last_drawn()
            if sampler is not None and sampler is not self._known_sampler():
                sampler.drop_ahead()
            if before is not None:
                before.set_last()

    def _known_sampler(self) -> DrawnBatches | None:
        """The sampler of the last step, if it draws in this process."""
        sampler = None if self._sampler is None else self._sampler()
        return None if sampler is None or sampler.drawn_by_workers else sampler

    def _next_sampler(self) -> DrawnBatches | None:
        """The sampler of a step that begins: another one, if the known one has no batch for it."""
        latest, known = last_drawn(), self._known_sampler()
        if latest is not None and latest.ahead and (known is None or not known.ahead):
            return latest
        return latest if known is None and latest is not None and latest.drawn_by_workers else known
