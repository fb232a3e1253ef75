"""When an optimizer changes to other plans, together with the samplers of its batches.

`DataLoader` workers draw batches ahead of training, so a change takes effect at a step whose batch
no rank has drawn. The sampler numbers the batches as the optimizer numbers its steps.

[Note: several samplers]
A step may take a batch of each of several samplers, or steps of several tasks take turns. They
follow if none draws batches ahead: then each batch is drawn just before its step. Else it is not
known at which step a batch that is drawn will be trained, and they cannot follow. What a step takes
is seen from what was drawn since the step before: a `DataLoader` draws a batch for each that it
gives, until the epoch ends. Where that is not certain, the samplers are told.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from poplar.data.drawn_batches import DrawnBatches, drawn_since_step, last_drawn
from poplar.values.plan import Plan

_SEVERAL = (
    "the steps take batches of several samplers, whose DataLoaders draw batches ahead: it is not "
    "known at which step each of them will be trained; use num_workers=0, or one sampler"
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
        self._changes: list[tuple[int, Plan, int]] = []
        """Each with its step, and how often the plan has changed then."""
        self._sampler: weakref.ref[DrawnBatches] | None = None
        self._samplers: weakref.WeakSet[DrawnBatches] = weakref.WeakSet()
        """All from which steps have taken batches."""

    def first_step(self, plan: Plan) -> int:
        """The first step at which this rank can follow another plan.

        Raises:
            ValueError: a sampler cannot split its global batches by the plan, or see
                [Note: several samplers].
        """
        samplers = self._followers(plan)
        latest = self._changes[-1][0] if self._changes else 0
        is_open = [sampler for sampler in samplers if sampler.is_open]
        if len(is_open) > 1 and any(sampler.draws_ahead for sampler in is_open):
            raise ValueError(_SEVERAL)
        for sampler in samplers:
            sampler.check_plan(plan)
        return max(self.steps + max((s.ahead for s in samplers), default=0), latest)

    @property
    def changes(self) -> int:
        """How often the plan of this rank's batches has changed or will."""
        samplers = {*self._samplers, *self._next_samplers()}
        return max((sampler.changes for sampler in samplers), default=0)

    @property
    def plans(self) -> list[Plan]:
        """The plans to which later steps change."""
        return [plan for _, plan, _ in self._changes]

    def add(self, step: int, plan: Plan, changes: int) -> None:
        """Change to a plan at a step, at which all ranks can.

        `changes` are those of the rank where they are most.
        """
        self._changes = [change for change in self._changes if change[0] < step]
        self._changes.append((step, plan, changes + 1))
        samplers = self._followers(plan)
        if samplers and not any(other.is_open for other in samplers[1:]):
            samplers[0].follow(plan, after=step - self.steps, changes=changes + 1)
        self._follow_next()

    def _follow_next(self) -> None:
        """Let samplers split the next batches by the plan of the next step."""
        for step, plan, changes in self._changes:
            if step == self.steps:
                for sampler in self._followers(plan):
                    if sampler.changes < changes:
                        sampler.follow(plan, after=0, changes=changes)

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
        """Take the next batch of each sampler of the step, if there is one."""
        self.steps += 1
        self.in_step = True
        taken = self._next_samplers()
        uncertain = self._uncertain(taken)
        self._samplers.update([*taken, *uncertain])
        self._sampler = weakref.ref(taken[-1]) if taken else None
        self.version = 0
        for sampler in uncertain:
            sampler.lose_count()
        for sampler in taken:
            if sampler.ahead:
                self.version = sampler.take()
            else:
                sampler.miss()
        drawn_since_step().clear()
        self._follow_next()

    def count_from(self, steps: int) -> None:
        """Take the number of steps that have begun from another rank."""
        self.steps = steps

    def end_step(self) -> None:
        """The step has been applied."""
        self.in_step = False

    def end_evaluation(self) -> None:
        """What was drawn for an evaluation is trained by no step."""
        sampler = last_drawn()
        if sampler is not None and sampler is not self._known_sampler():
            sampler.drop_ahead()

    def _known_sampler(self) -> DrawnBatches | None:
        """The sampler of the last step, or one of them, if it draws in this process."""
        sampler = None if self._sampler is None else self._sampler()
        return None if sampler is None or sampler.drawn_by_workers else sampler

    def _followers(self, plan: Plan) -> list[DrawnBatches]:
        """The samplers that follow a plan: first those of the last step, or before it of the next.

        Of earlier ones, those with the same global batches.
        """
        known = self._known_sampler()
        first = self._next_samplers() if known is None else [known]
        others = (s for s in self._samplers if s not in first and not s.drawn_by_workers)
        return [*first, *(s for s in others if s.global_batch == plan.global_batch)]

    def _next_samplers(self) -> list[DrawnBatches]:
        """Those whose batches the step takes that begins next: see [Note: several samplers]."""
        drawn = [sampler for sampler in drawn_since_step() if sampler.ahead]
        if len(drawn) > 1 and all(sampler.ahead == 1 for sampler in drawn):
            return drawn
        if not drawn and len(waiting := self._waiting()) > 1:
            ended = [sampler for sampler in waiting if not sampler.is_drawing]
            return ended if len(ended) == 1 else []
        one = self._next_sampler()
        return [] if one is None else [one]

    def _next_sampler(self) -> DrawnBatches | None:
        """As `_next_samplers`, if there is one: another one than the known one, if that has no
        batch for the step, or has not drawn.
        """
        latest, known = last_drawn(), self._known_sampler()
        if latest is not None and latest.ahead:
            if known is None or not known.ahead:
                return latest
            # Not if it was drawn for an evaluation while the epoch of the known one ends.
            is_next = known.is_drawing or latest in self._samplers
            if latest in drawn_since_step() and known not in drawn_since_step() and is_next:
                return latest
        return latest if known is None and latest is not None and latest.drawn_by_workers else known

    def _waiting(self) -> list[DrawnBatches]:
        """Samplers with batches that were drawn and that no step has taken."""
        return [sampler for sampler in self._samplers if sampler.ahead]

    def _uncertain(self, taken: Sequence[DrawnBatches]) -> list[DrawnBatches]:
        """Of which samplers it is not certain whether a step that takes these also takes a batch.

        It does if they draw in step: several loaders with workers that are zipped.
        """
        if not taken:
            return self._waiting()
        drawn = drawn_since_step()
        if any(drawn.get(sampler) != 1 for sampler in taken):
            return []
        others = [sampler for sampler in drawn if sampler.is_drawing and sampler not in taken]
        return [sampler for sampler in others if drawn[sampler] == 1 and sampler.ahead]
