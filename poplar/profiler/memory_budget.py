"""How much memory a rank may use, and what of it a measured pass may allocate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from poplar.values.formatting import format_bytes
from poplar.values.profile import MEMORY_RESERVE


class MemoryBudget(NamedTuple):
    """Bytes of one rank."""

    memory_bytes: int
    """What the rank may use."""
    held_bytes: int
    """What of it is held by other things than the model and its passes, such as a CUDA context,
    loaded kernels, NCCL buffers, and other tensors of this process."""

    @property
    def activation_bytes(self) -> float:
        """What activations may take."""
        return self.memory_bytes * (1 - MEMORY_RESERVE) - self.held_bytes

    def tightened(self, later: MemoryBudget) -> MemoryBudget:
        """The budget once kernels were loaded and collectives have run."""
        return MemoryBudget(
            min(self.memory_bytes, later.memory_bytes), max(self.held_bytes, later.held_bytes)
        )


@dataclass(frozen=True, kw_only=True)
class PassMemory:
    """Limits of all ranks, for passes without optimizer state. Equal on all ranks."""

    parameters: int
    """Bytes of all parameters where they are sharded, fp32 masters included."""
    unsharded_units: int
    """Bytes of the units that are unsharded at once at stage 3, and of the buffers."""
    budgets: tuple[float, ...]
    """Bytes of each rank for everything that a pass at stage 3 holds."""
    unsharded: tuple[float, ...]
    """Bytes of each rank for activations beside all parameters, as in plain passes; below 0 if
    they do not fit, and if the model is not on its device."""

    @classmethod
    def unlimited(cls, ranks: int) -> PassMemory:
        """No limits but those of the devices."""
        plenty = (math.inf,) * ranks
        return cls(parameters=0, unsharded_units=0, budgets=plenty, unsharded=plenty)

    @property
    def capacities(self) -> tuple[float, ...]:
        """Bytes of each rank for its shard and activations at stage 3."""
        return tuple(max(0.0, budget - self.unsharded_units) for budget in self.budgets)

    @property
    def shares(self) -> tuple[float, ...]:
        """Provisional shares, in proportion to the capacities."""
        total = sum(self.capacities)
        if total in (0.0, math.inf):
            return (1.0 / len(self.capacities),) * len(self.capacities)
        return tuple(capacity / total for capacity in self.capacities)

    @property
    def sharded(self) -> tuple[float, ...]:
        """Bytes of each rank for activations beside its shard and the unsharded units."""
        both = zip(self.capacities, self.shares, strict=True)
        return tuple(capacity - share * self.parameters for capacity, share in both)

    @property
    def fits_unsharded(self) -> bool:
        """Whether all ranks have memory for the whole model."""
        return min(self.unsharded) > 0.0

    def spare(self, rank: int) -> float:
        """Bytes for measurements without passes: beside all parameters, if there is room."""
        return self.unsharded[rank] if self.unsharded[rank] > 0.0 else self.capacities[rank]

    def check_sharded(self) -> None:
        """Check that the ranks together can hold the parameters.

        Raises:
            ValueError: they cannot; says what is missing.
        """
        if min(self.sharded) >= 0.0 and sum(self.capacities) > 0.0:
            return
        by_rank = ", ".join(
            f"rank {rank} may use {format_bytes(max(0.0, budget))}{self._lacking(budget)}"
            for rank, budget in enumerate(self.budgets)
        )
        raise ValueError(
            f"the parameters, {format_bytes(self.parameters)}, do not fit even if they are sharded "
            f"over all ranks, beside {format_bytes(self.unsharded_units)} of unsharded units on "
            f"each: {by_rank}. What would fit: {format_bytes(self.missing, round_up=True)} more on "
            "each rank (raise memory_limit; a plan also needs memory for gradients and the "
            "optimizer), more ranks, or smaller units (units=[...])"
        )

    def _lacking(self, budget: float) -> str:
        lacks = self.unsharded_units - budget
        return f" ({format_bytes(lacks)} too little for the units)" if lacks > 0.0 else ""

    @property
    def missing(self) -> float:
        """Bytes with which, on every rank, the ranks could hold the parameters; at least 0."""
        size = len(self.budgets)
        needed = self.parameters + size * self.unsharded_units
        one_rank = self.unsharded_units - min(self.budgets)
        return max(0.0, one_rank, (needed - sum(self.budgets)) / size)
