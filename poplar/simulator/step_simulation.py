"""Simulation of one step, unit by unit: the reference of the closed form in `planner.cost_model`.

Every rank has a compute stream, which follows its actions (`step.actions`), and a
communication stream, which runs its collectives one after the other. All ranks issue the same
collectives in the same order, and what a rank does before it issues one depends only on earlier
ones, so they are simulated in this order. A collective starts on a rank when the ranks that it
needs data from have issued it and the previous collective is complete there. During a collective,
compute on that rank advances by `overlap` seconds per second.

[Note: what the closed form leaves out]
Units of very unequal size in the middle of a model. From stage 2 on, a rank that is early at one
synchronization may start the next pass, so ranks that are last in turn wait less: up to 16 % on
random clusters. `tests/unit/test_simulator.py` holds both to within 3 % of each other elsewhere.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence

from poplar.planner.active_ranks import active_part
from poplar.planner.cost_model import costs_of
from poplar.planner.prediction import predict
from poplar.simulator.action_durations import ActionDurations, RankLoad
from poplar.simulator.timeline import Span, Timeline
from poplar.step.actions import Compute, Issue
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile


def simulate(cluster: ClusterProfile, plan: Plan) -> Timeline:
    """Simulate one step of a plan on a measured cluster, unit by unit.

    Ranks with equal loads are simulated once, so the cost depends on the number of different
    ranks.

    Raises:
        DoesNotFit: the plan needs more memory than a rank has, or a micro-batch that was not
            measured.
        ValueError: see `costs_of`.
    """
    predict(cluster, plan)  # raises if the plan cannot run
    devices, whole = cluster.devices, plan
    cluster, plan = active_part(cluster, plan)
    costs = costs_of(cluster, plan)
    durations = ActionDurations(costs, plan.shares)
    owned = costs.owned(plan.shares)
    loads = costs.by_rank(durations.load, plan.micro_batches, owned, durations.owns)
    simulated = {load: _Rank(load, durations) for load in dict.fromkeys(loads)}
    _run(list(simulated.values()), costs.overlap)
    step = max(rank.now for rank in simulated.values())
    by_end = operator.attrgetter("end")
    spans = {load: tuple(sorted(rank.spans, key=by_end)) for load, rank in simulated.items()}
    waiting = {load: max(0.0, step - _covered(spans[load])) for load in simulated}
    return Timeline(
        stage=plan.stage,
        devices=tuple(device.name for device in devices),
        step_seconds=step,
        spans=whole.by_rank([spans[load] for load in loads], ()),
        busy_seconds=whole.by_rank([simulated[load].busy for load in loads], 0.0),
        waiting_seconds=whole.by_rank([waiting[load] for load in loads], step),
    )


class _Rank:
    """The two streams of one rank, which stands for all ranks with its load."""

    def __init__(self, load: RankLoad, durations: ActionDurations) -> None:
        self.load = load
        self.now = 0.0
        """Until when the compute stream was simulated."""
        self.busy = 0.0
        """Seconds of compute, without the time for which communication stopped it."""
        self.spans: list[Span] = []
        self._durations = durations
        self._collectives: list[tuple[float, float, float]] = []
        """Begin and end of each, and seconds of compute per second meanwhile."""
        self._past = 0
        """Collectives that ended before `now`."""

    def issues(self) -> Iterator[Issue]:
        """Run the compute stream up to each collective that it issues, and to its end.

        Call `communicate` for each before the next.
        """
        for action in self._durations.actions(self.load):
            if isinstance(action, Issue):
                yield action
            elif isinstance(action, Compute):
                self._compute(action)
            else:
                self.now = max(self.now, self._collectives[action.position][1])

    def communicate(self, issue: Issue, ready: float, rate: float) -> None:
        """Run a collective when its data are ready and the previous one is complete."""
        seconds = self._durations.collective_seconds(issue)
        begin = max(ready, self._collectives[-1][1]) if self._collectives else ready
        self._collectives.append((begin, begin + seconds, rate))
        if seconds > 0.0:
            self.spans.append(Span("communication", *issue, begin, begin + seconds))

    def _compute(self, action: Compute) -> None:
        began = self.now
        seconds = remaining = self._durations.compute_seconds(action, self.load)
        if not seconds:
            return
        while self._past < len(self._collectives):
            begin, end, rate = self._collectives[self._past]
            alone = max(0.0, begin - self.now)
            if remaining <= alone:
                break
            remaining -= alone
            self.now += alone
            during = rate * max(0.0, end - self.now)
            if remaining < during:
                remaining /= rate
                break
            remaining -= during
            self.now = max(self.now, end)
            self._past += 1
        self.now += remaining
        self.busy += seconds
        self.spans.append(Span("compute", *action, began, self.now))


def _run(ranks: Sequence[_Rank], overlap: float) -> None:
    """Run a whole step, collective by collective."""
    for issues in zip(*(rank.issues() for rank in ranks), strict=True):
        issued_by_all = max(rank.now for rank in ranks)
        unit = issues[0].unit
        if unit is not None:
            issued_by_owners = max(rank.now for rank in ranks if rank.load.owns[unit])
        for rank, issue in zip(ranks, issues, strict=True):
            if unit is None:
                rank.communicate(issue, issued_by_all, rate=0.0)
            elif issue.what != "reduce":  # parameters or reduced gradients arrive from owners
                rank.communicate(issue, max(rank.now, issued_by_owners), overlap)
            else:  # gradients arrive from all ranks, at owners only
                ready = issued_by_all if rank.load.owns[unit] else rank.now
                rank.communicate(issue, ready, overlap)


def _covered(spans: Iterable[Span]) -> float:
    """Seconds during which at least one stream is busy."""
    total = end = 0.0
    for span in sorted(spans, key=operator.attrgetter("begin")):
        if span.end > end:
            total += span.end - max(end, span.begin)
            end = span.end
    return total
