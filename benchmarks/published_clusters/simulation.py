"""Simulation of one step: ranks that compute, and hosts whose network carries transfers.

Each rank follows its tasks. The network of a host carries one transfer at a time in each direction.
A transfer begins there when all ranks are ready for it and those before it have ended; it is
complete when all hosts have ended it in both directions. Compute of a rank runs at `overlap` of its
speed while its host carries a transfer. The events are in the order of time.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass, field

from published_clusters.cluster import Cluster
from published_clusters.step import Compute, Programme, Start, Step, Task, programme

_ROUNDING = 1e-12


@dataclass(slots=True)
class _Rank:
    """Stands for all ranks of a host with the same tasks."""

    host: int
    tasks: tuple[Task, ...]
    at: int = 0
    left: float = 0.0
    """Seconds of the current compute; 0: none runs."""


@dataclass(slots=True)
class _Lane:
    """One direction of the network of a host."""

    ready: list[tuple[float, int]] = field(default_factory=list)
    """Priorities and numbers of transfers."""
    transfer: int | None = None
    left: float = 0.0


def simulate(cluster: Cluster, step: Step) -> float:
    """Seconds of a step on a cluster."""
    return _Simulation(cluster, programme(step, cluster.world_size)).run()


class _Simulation:
    def __init__(self, cluster: Cluster, steps: Programme) -> None:
        self.overlap = cluster.overlap
        self.steps = steps
        alike = dict.fromkeys(zip(cluster.host_of, map(tuple, steps.tasks), strict=True))
        self.ranks = [_Rank(host, tasks) for host, tasks in alike]
        self.lanes = [_Lane() for _ in cluster.hosts for _ in ("leaving", "arriving")]
        self.started: Counter[int] = Counter()
        self.ended: Counter[int] = Counter()
        self.now = 0.0

    def run(self) -> float:
        """Run all tasks."""
        while True:
            while self._begin():
                pass
            seconds = min(
                (
                    *(lane.left for lane in self.lanes if lane.transfer is not None),
                    *(rank.left / self._rate(rank) for rank in self.ranks if rank.left > 0.0),
                ),
                default=math.inf,
            )
            if math.isinf(seconds):
                assert all(rank.at == len(rank.tasks) for rank in self.ranks), "a rank waits"
                return self.now
            self._advance(seconds)

    def _rate(self, rank: _Rank) -> float:
        lanes = self.lanes[2 * rank.host : 2 * rank.host + 2]
        return 1.0 if all(lane.transfer is None for lane in lanes) else self.overlap

    def _advance(self, seconds: float) -> None:
        self.now += seconds
        for rank in self.ranks:
            if rank.left > 0.0:
                rank.left -= seconds * self._rate(rank)
                if rank.left <= _ROUNDING:
                    rank.left, rank.at = 0.0, rank.at + 1
        for lane in self.lanes:
            if lane.transfer is not None:
                lane.left -= seconds
                if lane.left <= _ROUNDING:
                    self.ended[lane.transfer] += 1
                    lane.transfer = None

    def _begin(self) -> bool:
        """Begin what can begin now; whether anything did."""
        has_begun = False
        for rank in self.ranks:
            while rank.left == 0.0 and rank.at < len(rank.tasks) and self._next(rank):
                has_begun = True
        for number, one in enumerate(self.lanes):
            if one.transfer is None and one.ready:
                one.transfer = heapq.heappop(one.ready)[1]
                one.left = self.steps.transfers[one.transfer][number]
                if one.left <= _ROUNDING:
                    self.ended[one.transfer] += 1
                    one.transfer = None
                has_begun = True
        return has_begun

    def _next(self, rank: _Rank) -> bool:
        """Begin the next task of a rank; False if it waits."""
        task = rank.tasks[rank.at]
        if isinstance(task, Compute):
            rank.left = task.seconds
            rank.at += task.seconds <= 0.0
            return True
        if isinstance(task, Start):
            number = task.transfer
            self.started[number] += 1
            if self.started[number] == len(self.ranks):
                for lane in self.lanes:
                    heapq.heappush(lane.ready, (self.steps.priorities[number], number))
        elif self.ended[task.transfer] < len(self.lanes):
            return False
        rank.at += 1
        return True
