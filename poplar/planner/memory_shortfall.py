"""Memory that is missing: which rank lacks how many bytes, and the errors that say so."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from poplar.errors import PoplarError
from poplar.formatting import format_bytes
from poplar.planner.cost_model import StageCosts
from poplar.planner.memory_model import SLACK_BYTES

_GENERAL_ADVICE = (
    "free memory on that rank (or raise its memory_limit), use shorter sequences or activation "
    "checkpointing, or add ranks"
)
_ROUNDING = 1e-12


class Shortfall(NamedTuple):
    """What is missing at one stage."""

    stage: int
    total_bytes: float
    """Summed over the ranks."""
    bytes_by_rank: Mapping[int, float]
    """Ranks that lack memory, and how much more each of them needs."""
    sentence: str
    """Names the rank that lacks the most."""


class DoesNotFit(ValueError):
    """A plan that needs more memory than a rank has, or a micro-batch that was not measured."""


class NoPlanFits(PoplarError, ValueError):
    """No plan at any of the requested stages fits the ranks' memory.

    The message names the rank that lacks the most at the stage that comes closest, and the smallest
    changes with which a plan would fit. They are computed when `suggestions` or the message is
    first read, because that takes as long as a search.
    """

    def __init__(
        self, shortfalls: Sequence[Shortfall], suggest: Callable[[], tuple[str, ...]]
    ) -> None:
        self.shortfalls = tuple(shortfalls)
        """By stage, what is missing."""
        self._suggest = suggest
        closest = min(shortfalls, key=lambda one: (one.total_bytes, one.stage))
        super().__init__(f"no plan fits at stage {closest.stage}: {closest.sentence}")

    @cached_property
    def suggestions(self) -> tuple[str, ...]:
        """Changes that make a plan fit, each on its own."""
        return self._suggest()

    def __str__(self) -> str:
        changes = ", or ".join(self.suggestions)
        return f"{self.args[0]}; {f'what would fit: {changes}' if changes else _GENERAL_ADVICE}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.shortfalls, self._suggest)


def memory_shortfall(costs: StageCosts) -> Shortfall | None:
    """What is missing at this stage for every choice of batches and shares; None: a plan fits.

    Ranks that are too small even without samples and state are reported before others.
    """
    shares, rank_with_sample = smallest_shares(costs)
    batches = [int(rank == rank_with_sample) for rank in range(len(shares))]
    if suffice(largest_shares(costs, batches)):
        return None
    nothing = [0] * len(shares)
    found = _shortfall(costs, batches, shares, _needed(costs, batches, shares))
    too_small = shortfall_at(costs, nothing, nothing)
    return too_small._replace(total_bytes=found.total_bytes) if too_small else found


def shortfall_at(
    costs: StageCosts, largest_batches: Sequence[int], shares: Sequence[float]
) -> Shortfall | None:
    """What ranks lack for passes of up to so many samples beside these shares; None: nothing."""
    fits = costs.by_rank(
        lambda rank, *needs: costs.memories[rank].fits(*needs), largest_batches, shares
    )
    if all(fits):
        return None
    needed = _needed(costs, largest_batches, shares)
    return _shortfall(costs, largest_batches, shares, needed)


def shortfall_of(
    costs: StageCosts, micro_batches: Sequence[Sequence[int]], shares: Sequence[float]
) -> Shortfall | None:
    """What ranks lack for exactly these passes beside these shares; None: nothing."""
    needed = costs.needed_bytes(micro_batches, shares)
    largest = [max(passes, default=0) for passes in micro_batches]
    over = (
        own > memory.limit + SLACK_BYTES for own, memory in zip(needed, costs.memories, strict=True)
    )
    return _shortfall(costs, largest, costs.owned(shares), needed) if any(over) else None


def missing_bytes(costs: StageCosts, rank: int, micro_batch: int, share: float) -> float:
    """What the rank lacks for passes of so many samples beside this share."""
    memory = costs.memories[rank]
    return max(0.0, memory.needed(micro_batch, share) - memory.limit)


def _needed(costs: StageCosts, batches: Sequence[int], shares: Sequence[float]) -> list[float]:
    """By rank, bytes for any number of passes of so many samples."""
    return costs.by_rank(lambda rank, *needs: costs.memories[rank].needed(*needs), batches, shares)


def _shortfall(
    costs: StageCosts,
    largest_batches: Sequence[int],
    shares: Sequence[float],
    needed: Sequence[float],
) -> Shortfall:
    missing = [
        max(0.0, own - memory.limit) for own, memory in zip(needed, costs.memories, strict=True)
    ]
    rank = missing.index(max(missing))
    batch, share = largest_batches[rank], shares[rank]
    memory, device = costs.memories[rank], costs.cluster.devices[rank]
    samples = {0: "no samples", 1: "one sample"}.get(batch, f"{batch} samples")
    has_state = share and costs.shares_matter
    state = f" and {100 * share:.1f} % of the sharded state" if has_state else ""
    sentence = (
        f"rank {rank} ({device.name}) needs at least {format_bytes(needed[rank])} "
        f"for {samples}{state}, but may use {format_bytes(memory.limit)} of "
        f"{format_bytes(device.memory_bytes)}: {format_bytes(missing[rank])} too little"
    )
    by_rank = {rank: lacking for rank, lacking in enumerate(missing) if lacking > 1.0}
    return Shortfall(costs.stage, math.fsum(missing), by_rank, sentence)


def smallest_shares(costs: StageCosts) -> tuple[tuple[float, ...], int]:
    """The shares of the plan that needs the least memory, and the only rank that has a sample.

    The other ranks own as much as they can hold, and this rank owns the rest.
    """

    def cost_of_a_sample(rank: int) -> tuple[float, float]:
        """Bytes that the rank lacks for a sample, and the share that it can hold less."""
        beside_sample = costs.memories[rank].largest_share(1)
        lacking = 0.0 if beside_sample >= 0.0 else missing_bytes(costs, rank, 1, 0.0)
        return lacking, room[rank] - max(0.0, beside_sample)

    room = [max(0.0, largest) for largest in largest_shares(costs, [0] * costs.cluster.world_size)]
    costs_of_a_sample = costs.by_rank(cost_of_a_sample)
    rank = costs_of_a_sample.index(min(costs_of_a_sample))
    others = math.fsum(room) - room[rank]
    shares = [own / max(1.0, others) for own in room]
    shares[rank] = max(0.0, 1.0 - others)
    return tuple(shares), rank


def largest_shares(costs: StageCosts, batches: Sequence[int]) -> list[float]:
    """By rank, the largest share that fits beside a micro-batch; -inf: not even none does."""
    return costs.by_rank(lambda rank, batch: costs.memories[rank].largest_share(batch), batches)


def suffice(largest: Sequence[float]) -> bool:
    """Whether every rank can own a share, and with `largest_shares` everything, up to rounding."""
    return math.fsum(largest) >= 1.0 - _ROUNDING
