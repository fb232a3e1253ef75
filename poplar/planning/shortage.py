"""What is missing where no plan fits: which rank, how many bytes, and what would help."""

from __future__ import annotations

from collections.abc import Sequence

from poplar.errors import PoplarError
from poplar.planning.cost_model import StageCosts, readable_bytes

_WAYS_OUT = (
    "free memory on that rank, lower memory_reserve, use shorter sequences or activation "
    "checkpointing, or choose a higher stage or more ranks"
)


class NoPlanFits(PoplarError, ValueError):
    """No plan at any stage that was asked for fits the ranks' memory."""

    def __init__(self, message: str, missing_bytes: float = 0.0) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes
        """How much more the rank in the message would need."""


def shortage_at_shares(
    costs: StageCosts, shares: Sequence[float], micro_batch: int
) -> NoPlanFits | None:
    """The rank that misses most under these shares, or None if all fit.

    Args:
        costs: of the stage.
        shares: fraction of the state that each rank owns.
        micro_batch: samples that every rank has to hold at a time; 0: none has to, but one must.
    """
    missing = [
        memory.needed(micro_batch, share) - memory.limit
        for memory, share in zip(costs.memories, shares, strict=True)
    ]
    rank = max(range(len(missing)), key=lambda r: missing[r])
    if costs.memories[rank].fits(micro_batch, shares[rank]):
        return None if micro_batch else _shortage_of_one_sample(costs, shares)
    return _named(costs, rank, micro_batch, shares[rank])


def shortage(costs: StageCosts) -> NoPlanFits | None:
    """What is missing at this stage whatever the shares, or None if something fits."""
    ranks = range(len(costs.memories))
    nothing = (0.0,) * len(costs.memories)
    if not costs.shares_matter:
        return shortage_at_shares(costs, nothing, 0)
    room = [memory.largest_share(0) for memory in costs.memories]
    if min(room) < 0.0:
        return shortage_at_shares(costs, nothing, 0)
    spare = [
        sum(room) - room[r] + memory.largest_share(1) for r, memory in enumerate(costs.memories)
    ]
    rank = max(ranks, key=lambda r: spare[r])
    if spare[rank] >= 1.0 and costs.memories[rank].largest_share(1) >= 0.0:
        return None
    if costs.memories[rank].largest_share(1) < 0.0:
        return _shortage_of_one_sample(costs, nothing)
    return _named(costs, rank, 1, 1.0 - sum(room) + room[rank])


def _shortage_of_one_sample(costs: StageCosts, shares: Sequence[float]) -> NoPlanFits | None:
    """Every rank holds its state; this is the rank that comes closest to holding a sample too."""
    missing = [
        memory.needed(1, share) - memory.limit
        for memory, share in zip(costs.memories, shares, strict=True)
    ]
    rank = min(range(len(missing)), key=lambda r: missing[r])
    if costs.memories[rank].fits(1, shares[rank]):
        return None
    return _named(costs, rank, 1, shares[rank])


def _named(costs: StageCosts, rank: int, micro_batch: int, share: float) -> NoPlanFits:
    memory = costs.memories[rank]
    needed = memory.needed(micro_batch, share)
    samples = {0: "no samples", 1: "one sample"}.get(micro_batch, f"{micro_batch} samples")
    owned = f" and {100 * share:.1f} % of the sharded state" if share else ""
    return NoPlanFits(
        f"no plan fits at stage {costs.stage}: rank {rank} ({memory.device.name}) needs at least "
        f"{readable_bytes(needed)} for {samples}{owned}, but may use "
        f"{readable_bytes(memory.limit)} ({readable_bytes(needed - memory.limit)} too little); "
        f"{_WAYS_OUT}",
        needed - memory.limit,
    )
