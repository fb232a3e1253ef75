"""Plans run in turns until one of them has shown that it is the fastest.

The search knows plans by a profile, which misses a few percent, as much as good plans differ by. So
the best ones run. Each turn tells more of the ranks' speeds, the search asks again, and who then
looks better still joins.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from poplar.plan import FIRST_STAGE_SYNCHRONIZING_EVERY_PASS, Plan
from poplar.planner.plan_neighborhood import moved, recut
from poplar.planner.prediction import predict
from poplar.profile import ClusterProfile
from poplar.profiler.calibration import at_observed_speeds, refine
from poplar.profiler.cluster_profiler import Profiler, fits
from poplar.profiler.engine_steps import Observation
from poplar.profiler.points import with_measured
from poplar.profiler.progress import Tell
from poplar.profiler.trial_runs import Trials

CONTENDERS = 3
"""At most so many run in the same turn."""
TURNS = 7
LEAST_TURNS = 3
"""If the budget allows: nobody joins so late as to have fewer, and who is alone needs no more."""
TURN_STEPS = range(3, 16)
"""Steps of a plan in a turn: as many as the budget allows. The more, the finer the balance."""
CLOSE = 0.04
"""Who is slower than the fastest by more than this part is out."""
WORTH_A_TRIAL = 5e-3
"""A plan that the search finds joins if it promises to be faster by more than this part."""
MAY_ERR = 0.01
"""One that is better balanced joins unless it promises to be slower by more than this part."""
ACCEPTED_ERROR = 0.05
"""Above this error in the first turn, each rank's planned batch is measured too."""


class Race:
    """Between plans of one job on its ranks; its methods are collective."""

    def __init__(
        self,
        profiler: Profiler,
        profile: ClusterProfile,
        search: Callable[[ClusterProfile], Plan],
        *,
        seconds: float,
        rebalances: bool,
    ) -> None:
        """On a profile of these ranks.

        Args:
            profiler: runs steps.
            profile: what is known of the ranks.
            search: the best plan on a profile.
            seconds: budget; the first two plans have one turn all the same.
            rebalances: plans may join that no search has found.
        """
        self.trials = Trials()
        self._profiler = profiler
        self._profile = profile
        self._search = search
        self._seconds = seconds
        # Of an asynchronous device nobody knows when it was busy.
        self._rebalances = rebalances and not profiler.asynchronous

    def winner(self, plans: Sequence[Plan], tell: Tell) -> Plan:
        """The fastest of these, best first, and of those that join."""
        contenders = self._affordable(plans)
        ends = time.perf_counter() + self._seconds
        for turn in itertools.count(1):
            began = time.perf_counter()
            order = contenders if turn % 2 else contenders[::-1]  # nobody always comes last
            self.trials.add([self._run(plan, tell) for plan in order])
            if turn == 1 and self._worst_error() > ACCEPTED_ERROR:
                self._measure_planned(plans[0])
            half = (time.perf_counter() - began) / 2
            over = self._is_over(ends - half)  # most of another turn would come too late
            contenders = self._next(contenders, late=over or turn > TURNS - LEAST_TURNS)
            turns = [self.trials.turns(plan) for plan in contenders]
            enough = over or turn >= TURNS or (len(turns) == 1 and turns[0] >= LEAST_TURNS)
            if enough and all(turns):
                break
        return self.trials.ranking(contenders)[0]

    def refined(self, exactly: Plan | None = None) -> ClusterProfile:
        """The profile with what the turns have shown; `exactly` is predicted as it ran."""
        asynchronous, everything = self._profiler.asynchronous, self.trials.observations()
        profile = self._profile
        if not asynchronous:
            profile = at_observed_speeds(profile, everything)
        for stage in {seen.plan.stage for seen in everything}:
            own = [seen for seen in everything if seen.plan.stage == stage]
            exact = [seen for seen in own if seen.plan == exactly]
            profile = refine(profile, stage, exact or own, asynchronous=asynchronous)
        return profile

    def _affordable(self, plans: Sequence[Plan]) -> list[Plan]:
        """The first two, and as many more as have a turn within the budget."""
        steps = TURN_STEPS[0] + 1  # the one that warms up
        seconds = [steps * predict(self._profile, plan).step_seconds for plan in plans]
        ends = itertools.accumulate(seconds)
        return [
            plan
            for number, (plan, end) in enumerate(zip(plans, ends, strict=True))
            if number < 2 or end <= self._seconds
        ]

    def _run(self, plan: Plan, tell: Tell) -> Observation:
        """A plan's part of a turn."""
        longest = self._seconds / (TURNS * CONTENDERS)
        steps = int(longest / predict(self._profile, plan).step_seconds)
        steps = min(max(steps, TURN_STEPS[0]), TURN_STEPS[-1])
        return self._profiler.steps_of([plan], steps=steps, tell=tell)[0]

    def _is_over(self, ends: float) -> bool:
        """By the clock of rank 0, for all."""
        over = time.perf_counter() >= ends
        return bool(self._profiler.control.exchange_objects(over, what="the race's budget")[0])

    def _next(self, ran: Sequence[Plan], *, late: bool) -> list[Plan]:
        """The next turn's: who may still win, and, unless it is late, who joins."""
        still = self._still_in(ran)
        if late and still:
            return still
        newcomer = self._newcomer(still)
        if newcomer is None:
            return still
        fastest = self.trials.ranking(still)[: CONTENDERS - 1] if still else []
        return [*(plan for plan in still if plan in fastest), newcomer]

    def _still_in(self, ran: Sequence[Plan]) -> list[Plan]:
        allowed = [plan for plan in ran if fits(self._profile, plan)]
        if not allowed:
            return []
        fastest = self.trials.ranking(allowed)[0]
        return [plan for plan in allowed if self.trials.ratio(plan, fastest) <= 1.0 + CLOSE]

    def _newcomer(self, still: Sequence[Plan]) -> Plan | None:
        refined = self.refined()
        found = self._search(refined)
        if not still or self._is_better(refined, found):
            return found
        if not self._rebalances:
            return None
        return self._rebalanced(refined, self.trials.ranking(still)[0])

    def _is_better(self, refined: ClusterProfile, plan: Plan) -> bool:
        """Whether it promises more than all that ran, by a profile that knows how they did."""
        if self.trials.turns(plan):
            return False
        ran = [seen.plan for seen in self.trials.observations() if fits(refined, seen.plan)]
        best = min((predict(refined, other).step_seconds for other in ran), default=math.inf)
        return predict(refined, plan).step_seconds < (1.0 - WORTH_A_TRIAL) * best

    def _rebalanced(self, refined: ClusterProfile, plan: Plan) -> Plan | None:
        """One sample from the rank that the others waited for, to the one that waited longest.

        The closed form takes ranks for independent, but those that share a core, a memory bus or a
        power budget leave it to each other while they wait: this may be faster than the form says.
        """
        (seen,) = (seen for seen in self.trials.observations() if seen.plan == plan)
        busy = seen.busy_seconds
        last = max(range(len(busy)), key=busy.__getitem__)
        first = min(range(len(busy)), key=busy.__getitem__)
        other = moved(plan, last, first)
        if other is None or self.trials.turns(other) or not fits(refined, other):
            return None
        most = (1.0 + MAY_ERR) * predict(refined, plan).step_seconds
        return other if predict(refined, other).step_seconds <= most else None

    def _worst_error(self) -> float:
        """Of the predictions, relative to what was measured."""
        return max(
            abs(predict(self._profile, seen.plan).step_seconds / seen.step_seconds - 1.0)
            for seen in self.trials.observations()
        )

    def _measure_planned(self, plan: Plan) -> None:
        """One more point on each rank's curve: the batch that the plan gives it."""
        fresh: list[int | None] = []
        for passes, device in zip(plan.micro_batches, self._profile.devices, strict=True):
            planned = max(passes, default=0)
            known = {point.batch for point in device.points}
            fresh.append(planned if planned and planned not in known else None)
        points = self._profiler.points_at(fresh)
        self._profile = with_measured(self._profile, points)


def plainer(profile: ClusterProfile, plan: Plan) -> Plan:
    """The same samples in the fewest passes that fit, with even shares if these fit too.

    Between ways to cut the same samples the noise in a curve decides, and a search is good at
    finding it: what promises to gain by many cuts should show that against one that has none.
    """
    even = replace(plan, shares=(1.0 / plan.world_size,) * plan.world_size, prediction=None)
    plain = even if fits(profile, even) else plan
    everybody = range(plan.world_size)
    if plan.stage >= FIRST_STAGE_SYNCHRONIZING_EVERY_PASS:
        return _in_fewest_passes(profile, plain, everybody)
    for rank in everybody:
        plain = _in_fewest_passes(profile, plain, [rank])
    return plain


def _in_fewest_passes(profile: ClusterProfile, plan: Plan, ranks: Sequence[int]) -> Plan:
    cuts = (recut(plan, ranks, passes) for passes in range(1, plan.passes(ranks[0])))
    return next((cut for cut in cuts if fits(profile, cut)), plan)
