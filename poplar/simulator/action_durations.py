"""How long the actions of `planner.step_actions` take under a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from poplar.planner.cost_model import StageCosts
from poplar.planner.step_actions import RANK_ACTIONS, Compute, Issue, RankActions, UnitLayout


class Senders(Enum):
    """The ranks that must issue a collective before it can start on a rank."""

    ALL = 0
    OWNERS = 1
    """All ranks with a share: an all-gather."""
    ALL_TO_OWNERS = 2
    """A reduction: a rank with a share needs all gradients, a rank without a share needs none."""


class Collective(NamedTuple):
    """What the communication streams run for one `Issue`."""

    what: str
    unit: int | None
    seconds: float
    senders: Senders
    blocks_compute: bool = False
    """No compute runs under it; otherwise compute runs at the cluster's `overlap`."""


@dataclass(frozen=True, kw_only=True)
class RankLoad:
    """The work of one rank. Ranks with equal loads do the same at the same time."""

    passes: tuple[float, ...]
    """Seconds of each pass; 0 without samples."""
    optimizer: float
    """Seconds."""
    owns: bool
    """Whether it has a share of what is sharded."""


def rank_loads(
    costs: StageCosts, micro_batches: Sequence[tuple[int, ...]], shares: Sequence[float]
) -> list[RankLoad]:
    """The load of each rank."""

    def load(rank: int, batches: Sequence[int], share: float) -> RankLoad:
        return RankLoad(
            passes=tuple(costs.pass_seconds(rank, batch) for batch in batches),
            optimizer=costs.optimizer_seconds(rank, share),
            owns=share > 0.0 or not costs.shares_matter,
        )

    return costs.by_rank(load, micro_batches, shares)


class ActionDurations:
    """The durations of all actions of a step, under the shares of a plan.

    [Note: negative residuals]
    If a synchronization measured less than its collectives, all its collectives shrink. If a step
    measured less than its parts, the all-gather of parameters shrinks, and then the optimizer.
    """

    def __init__(self, costs: StageCosts, shares: Sequence[float]) -> None:
        self._stage = costs.stage
        self._layout = UnitLayout.of(costs.cluster.model, costs.stage, costs.persistent)
        numel = self._layout.numel
        self._parts = [unit_numel / numel for unit_numel in self._layout.numels]
        backward_fraction = costs.cluster.backward_fraction
        self._fractions = {"forward": 1.0 - backward_fraction, "backward": backward_fraction}

        gather, reduce = costs.communication(shares)
        residual = costs.synchronization_residual
        total = costs.schedule.gathers * gather + reduce
        scale = max(0.0, 1.0 + min(0.0, residual) / total) if total else 1.0
        slowest = max(costs.optimizer_seconds(rank, share) for rank, share in enumerate(shares))
        step_residual = costs.cluster.network.step_seconds[costs.stage] + min(0.0, slowest)
        all_gather = costs.gather_after_step_seconds(shares) + min(0.0, step_residual)
        self._optimizer_change = min(0.0, all_gather)
        self._seconds = {
            "unshard": scale * gather,
            "all_gather_gradients": scale * gather,
            "reduce": scale * reduce,
            "all_gather_parameters": max(0.0, all_gather),
            "synchronization": max(0.0, residual),
            "agreement": max(0.0, step_residual),
        }

    def actions(self, load: RankLoad) -> RankActions:
        """The actions of a rank with this load."""
        return RANK_ACTIONS[self._stage](
            self._layout,
            [seconds > 0.0 for seconds in load.passes],
            synchronization=self._seconds["synchronization"] > 0.0,
        )

    def compute_seconds(self, action: Compute, load: RankLoad) -> float:
        """Seconds of compute that no communication slows down."""
        if action.unit is None or action.pass_index is None:
            return max(0.0, load.optimizer + self._optimizer_change)
        part = self._parts[action.unit]
        return load.passes[action.pass_index] * self._fractions[action.what] * part

    def collective(self, action: Issue) -> Collective:
        """The collective that ranks issue with this action."""
        what, unit, _ = action
        seconds = self._seconds[what]
        if unit is None:
            return Collective(what, None, seconds, Senders.ALL, blocks_compute=True)
        seconds *= self._parts[unit]
        if what == "reduce":
            buffers = self._layout.buffers(unit)
            return Collective(what, unit, seconds / buffers, Senders.ALL_TO_OWNERS)
        return Collective(what, unit, seconds, Senders.OWNERS)
