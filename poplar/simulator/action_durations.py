"""How long the actions of `step.actions` take under a plan."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from poplar.planner.collective_costs import CollectiveCost
from poplar.planner.cost_model import StageCosts
from poplar.planner.factored_costs import Exchange
from poplar.step.actions import RANK_ACTIONS, Action, Compute, Issue


@dataclass(frozen=True, kw_only=True)
class RankLoad:
    """The work of one rank. Ranks with equal loads do the same at the same time."""

    passes: tuple[float, ...]
    """Seconds of each pass; 0 without samples."""
    optimizer: float
    """Seconds."""
    owns: tuple[bool, ...]
    """By unit, whether it has a share of it."""


class ActionDurations:
    """The durations of all actions of a step, under the shares of a plan.

    [Note: negative residuals]
    If a synchronization measured less than its collectives, all its collectives shrink. If a step
    measured less than its parts, the all-gather of parameters shrinks, and then the optimizer.
    """

    def __init__(self, costs: StageCosts, shares: Sequence[float]) -> None:
        self._costs, self._layout = costs, costs.layout
        own_shares = dict(costs.unit_shares) if costs.shares_matter else {}
        self._shares = [own_shares.get(unit, shares) for unit in range(len(self._layout.numels))]
        """By unit."""
        ticks, backward = self._layout.ticks, costs.cluster.backward_fraction
        self._compute_parts = {
            "forward": [(1.0 - backward) * own / ticks for own in self._layout.forward],
            "backward": [backward * own / ticks for own in self._layout.backward],
        }
        """By unit, the part of a pass."""

        gather, reduce = costs.communication(shares)
        residual = costs.synchronization_residual
        total = costs.schedule.gathers * gather + reduce
        scale = max(0.0, 1.0 + min(0.0, residual) / total) if total else 1.0
        slowest = max(map(costs.optimizer_seconds, range(len(shares)), costs.owned(shares)))
        step_residual = costs.step_residual + min(0.0, slowest)
        all_gather = costs.gather_after_step_seconds(shares) + min(0.0, step_residual)
        self._optimizer_change = min(0.0, all_gather)
        self._of_all = {
            "synchronization": max(0.0, residual),
            "agreement": max(0.0, step_residual),
        }
        """Seconds of what concerns the whole model."""

        whole_gather, whole_reduce = replace(costs, exchanges=()).communication(shares)
        both, numels = costs.collectives, self._layout.numels
        gathered = self._parts(both.all_gather, numels)
        unsharded = self._parts(both.all_gather, self._layout.unsharded)
        reduced = self._without_factored(self._parts(both.reduce_scatter, numels))
        reducing = [scale * whole_reduce * part for part in reduced]
        for exchange in costs.exchanges:
            seconds = costs.exchange_seconds(exchange, shares)
            reducing[self._unit_of(exchange)] += scale * seconds
        self._of_unit = {
            "unshard": [scale * whole_gather * part for part in unsharded],
            "all_gather_gradients": [
                scale * whole_gather * part for part in self._without_factored(gathered)
            ],
            "reduce": [
                own / max(1, len(buffers))  # a unit with nothing to train has none
                for own, buffers in zip(reducing, self._layout.buffers, strict=True)
            ],
            "all_gather_parameters": [max(0.0, all_gather) * part for part in gathered],
        }
        """By unit, seconds of a collective, of a reduction of each of its buffers."""

    def _parts(self, cost: CollectiveCost, numels: Sequence[float]) -> list[float]:
        """By unit, the part of a collective of the whole model, if it moves so many elements."""
        parts = [own / self._layout.numel for own in numels]
        if not self._costs.unit_shares:
            return parts
        seconds = list(map(operator.mul, parts, map(cost.seconds, self._shares)))
        scale = math.fsum(parts) / (math.fsum(seconds) or math.inf)
        return [own * scale for own in seconds] if scale else parts

    def _without_factored(self, parts: Sequence[float]) -> list[float]:
        """By unit, the parts of what is not factored."""
        left = list(parts)
        for exchange in self._costs.exchanges:
            unit = self._unit_of(exchange)
            factored = exchange.layer.numel / self._layout.numels[unit]
            left[unit] = max(0.0, left[unit] - parts[unit] * factored)
        return left

    def _unit_of(self, exchange: Exchange) -> int:
        """The number of the layer's unit in the layout."""
        parts = self._layout.parts
        return next(n for n, units in enumerate(parts) if exchange.layer.unit in units)

    @property
    def owns(self) -> list[tuple[bool, ...]]:
        """By rank, `RankLoad.owns`."""
        if not self._costs.shares_matter:
            return [(True,) * len(self._shares)] * self._costs.cluster.world_size
        if self._costs.unit_shares:
            return list(zip(*([share > 0.0 for share in own] for own in self._shares), strict=True))
        units = len(self._shares)
        known = {owns: (owns,) * units for owns in (False, True)}
        return [known[share > 0.0] for share in self._shares[0]]

    def load(
        self, rank: int, batches: Sequence[int], owned: float, owns: tuple[bool, ...]
    ) -> RankLoad:
        """The work of a rank with these passes and this part of the state."""
        update = self._costs.optimizer_seconds(rank, owned) + self._optimizer_change
        return RankLoad(
            passes=tuple(self._costs.pass_seconds(rank, batch) for batch in batches),
            optimizer=max(0.0, update),
            owns=owns,
        )

    def actions(self, load: RankLoad) -> Iterator[Action]:
        """The actions of a rank with this load."""
        has_samples = [seconds > 0.0 for seconds in load.passes]
        has_residual = self._of_all["synchronization"] > 0.0
        stage_actions = RANK_ACTIONS[self._costs.stage]
        return stage_actions(self._layout, has_samples, synchronization=has_residual).step()

    def compute_seconds(self, action: Compute, load: RankLoad) -> float:
        """Seconds of compute that no communication slows down."""
        if action.unit is None or action.pass_index is None:
            return load.optimizer
        return load.passes[action.pass_index] * self._compute_parts[action.what][action.unit]

    def collective_seconds(self, action: Issue) -> float:
        """Seconds of the collective that ranks issue with this action."""
        if action.unit is None:
            return self._of_all[action.what]
        return self._of_unit[action.what][action.unit]
