"""How long the actions of `planner.step_actions` take under a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from poplar.planner.cost_model import StageCosts
from poplar.planner.step_actions import RANK_ACTIONS, Action, Compute, Issue, UnitLayout


@dataclass(frozen=True, kw_only=True)
class RankLoad:
    """The work of one rank. Ranks with equal loads do the same at the same time."""

    passes: tuple[float, ...]
    """Seconds of each pass; 0 without samples."""
    optimizer: float
    """Seconds."""
    owns: bool
    """Whether it has a share of what is sharded."""


class ActionDurations:
    """The durations of all actions of a step, under the shares of a plan.

    [Note: negative residuals]
    If a synchronization measured less than its collectives, all its collectives shrink. If a step
    measured less than its parts, the all-gather of parameters shrinks, and then the optimizer.
    """

    def __init__(self, costs: StageCosts, shares: Sequence[float]) -> None:
        self._costs = costs
        self._layout = UnitLayout.of(costs.cluster.model, costs.stage, costs.persistent)
        numel = self._layout.numel
        self._parts = [unit_numel / numel for unit_numel in self._layout.numels]

        gather, reduce = costs.communication(shares)
        residual = costs.synchronization_residual
        total = costs.schedule.gathers * gather + reduce
        scale = max(0.0, 1.0 + min(0.0, residual) / total) if total else 1.0
        slowest = max(costs.optimizer_seconds(rank, share) for rank, share in enumerate(shares))
        step_residual = costs.cluster.network.step_seconds[costs.stage] + min(0.0, slowest)
        all_gather = costs.gather_after_step_seconds(shares) + min(0.0, step_residual)
        self._optimizer_change = min(0.0, all_gather)
        self._collectives = {
            "unshard": scale * gather,
            "all_gather_gradients": scale * gather,
            "reduce": scale * reduce,
            "all_gather_parameters": max(0.0, all_gather),
            "synchronization": max(0.0, residual),
            "agreement": max(0.0, step_residual),
        }

    def load(self, rank: int, batches: Sequence[int], share: float) -> RankLoad:
        """The work of a rank with these passes and this share."""
        update = self._costs.optimizer_seconds(rank, share) + self._optimizer_change
        return RankLoad(
            passes=tuple(self._costs.pass_seconds(rank, batch) for batch in batches),
            optimizer=max(0.0, update),
            owns=share > 0.0 or not self._costs.shares_matter,
        )

    def actions(self, load: RankLoad) -> Iterator[Action]:
        """The actions of a rank with this load."""
        has_samples = [seconds > 0.0 for seconds in load.passes]
        has_residual = self._collectives["synchronization"] > 0.0
        stage_actions = RANK_ACTIONS[self._costs.stage]
        return stage_actions(self._layout, has_samples, synchronization=has_residual).step()

    def compute_seconds(self, action: Compute, load: RankLoad) -> float:
        """Seconds of compute that no communication slows down."""
        if action.unit is None or action.pass_index is None:
            return load.optimizer
        backward = self._costs.cluster.backward_fraction
        fraction = backward if action.what == "backward" else 1.0 - backward
        return load.passes[action.pass_index] * fraction * self._parts[action.unit]

    def collective_seconds(self, action: Issue) -> float:
        """Seconds of the collective that ranks issue with this action."""
        seconds = self._collectives[action.what]
        if action.unit is None:
            return seconds
        buffers = self._layout.buffers(action.unit) if action.what == "reduce" else 1
        return seconds * self._parts[action.unit] / buffers
