"""Measuring what a plan rests on before it is tried: the points that `planning.doubt` asks for.

A profile climbs in powers of two, and a plan chooses batches in between. Where steps may hide
there, the ranks measure the batches that decide between plans, and only those.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from poplar.comm.control_channel import Control
from poplar.plan import Plan
from poplar.planner.uncertainty import TOLERANCE, Question, doubts, safest
from poplar.profile import BatchPoint, ClusterProfile
from poplar.profiler.cluster_profiler import Profiler
from poplar.profiler.points import with_measured
from poplar.profiler.progress import Tell

T = TypeVar("T")

QUESTIONS = 3
"""Turns, at most: so many took 85 % off what wrong plans cost random clusters with steps."""
_PASSES = 16
"""About so many are run to measure a point, those beside it included."""


class Inquiry:
    """About the best plans of one job on its ranks; its methods are collective."""

    def __init__(
        self, profiler: Profiler, search: Callable[[ClusterProfile], tuple[Plan, ...]]
    ) -> None:
        """On these ranks.

        Args:
            profiler: measures points.
            search: the best plans on a profile, best first; collective.
        """
        self._profiler = profiler
        self._control = profiler.control
        self._search = search

    def settled(
        self, profile: ClusterProfile, plans: tuple[Plan, ...], *, seconds: float, tell: Tell
    ) -> tuple[ClusterProfile, tuple[Plan, ...]]:
        """The profile with the points that the best plan rests on, and the best plans on it.

        In a turn every rank answers the question that matters most for its kind of device, and
        those without one compute as well. What stays open is answered by the safest plan, which
        comes last, if it may be the best one.

        Args:
            profile: what is known of the ranks.
            plans: the best ones on it, best first.
            seconds: budget; no turn begins that would probably end later.
            tell: what is being measured.
        """
        ends = time.perf_counter() + seconds
        for _ in range(QUESTIONS):
            questions = self._questions(profile, plans, ends)
            if not questions:
                break
            tell(f"one more point: {questions[0]}")
            asked = _asked(profile, questions)
            points = self._profiler.points_at(asked, _beside(profile, plans[0], asked))
            profile = with_measured(profile, points)
            plans = self._search(profile)
        safe = on_first_rank(
            self._control, lambda: safest(profile, plans[0], stages=_stages(plans))
        )
        return profile, tuple(dict.fromkeys([*plans, safe]))

    def _questions(
        self, profile: ClusterProfile, plans: Sequence[Plan], ends: float
    ) -> tuple[Question, ...]:
        """What is measured next; nothing if the best plan is settled, or too little time left."""

        def ask() -> tuple[Question, ...]:
            found = doubts(profile, plans[0], stages=_stages(plans))
            if not found or found[0].stake <= TOLERANCE:
                return ()
            longest = max(
                profile.devices[rank].seconds(question.batch)
                for question in found
                for rank in question.ranks
            )
            return found if time.perf_counter() + _PASSES * longest <= ends else ()

        return on_first_rank(self._control, ask)


def on_first_rank(control: Control, work: Callable[[], T]) -> T:
    """What rank 0 makes of it, or its error, on all ranks: one search is one answer. Collective."""
    answer: T | Exception | None = None
    if control.group.rank == 0:
        try:
            answer = work()
        except Exception as error:
            answer = error
    answer = control.exchange_objects(answer, what="the search")[0]
    if isinstance(answer, Exception):
        raise answer
    return cast("T", answer)


def _stages(plans: Sequence[Plan]) -> tuple[int, ...]:
    return tuple(plan.stage for plan in plans)


def _asked(profile: ClusterProfile, questions: Sequence[Question]) -> list[int | None]:
    """By rank, what it does not know of that and has the memory for."""
    asked: list[int | None] = [None] * profile.world_size
    for question in questions:
        for rank in question.ranks:
            device = profile.devices[rank]
            measured = {point.batch for point in device.points}
            if question.batch not in measured and question.batch <= device.max_batch:
                asked[rank] = question.batch
    return asked


def _beside(profile: ClusterProfile, plan: Plan, asked: Sequence[int | None]) -> list[BatchPoint]:
    """By rank, the measured point nearest to what is asked of it, or else to what it is to run."""
    beside = []
    for device, passes, batch in zip(profile.devices, plan.micro_batches, asked, strict=True):
        wanted = batch or max(passes, default=0) or 1
        beside.append(min(device.points, key=lambda point: abs(math.log(point.batch / wanted))))
    return beside
