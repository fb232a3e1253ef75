"""What is missing where no plan fits: which rank, how many bytes, and what would help."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeVar

from poplar.errors import PoplarError
from poplar.formatting import format_bytes
from poplar.planner.cost_model import StageCosts
from poplar.planner.memory_model import RankMemory
from poplar.planner.rank_groups import each

_Value = TypeVar("_Value")

_WAYS_OUT = (
    "free memory on that rank (or raise its memory_limit), use shorter sequences or activation "
    "checkpointing, or add ranks"
)


_ROUNDING = 1e-12


class Lack(NamedTuple):
    """Who lacks how much, for one stage."""

    bytes_by_rank: Mapping[int, float]
    """Ranks that need at least so much more each."""
    sentence: str
    """The rank that lacks the most, for a person."""


class NoPlanFits(PoplarError, ValueError):
    """No plan at any stage that was asked for fits the ranks' memory."""

    def __init__(
        self,
        message: str,
        missing_bytes: float = 0.0,
        *,
        lack: Lack | None = None,
        remedies: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes
        """What all ranks together lack for the least that a plan may ask of them."""
        self.lack = lack
        """Who lacks how much at the stage that comes closest."""
        self.remedies = tuple(remedies)
        """Changes of which each on its own makes a plan fit, in words; empty: nobody looked."""

    def helped_by(self, remedies: Sequence[str]) -> NoPlanFits:
        """The same error with what would help, in place of general advice."""
        if not remedies or self.lack is None:
            return self
        message = f"{self.lack.sentence}; what would fit: {', or '.join(remedies)}"
        return NoPlanFits(message, self.missing_bytes, lack=self.lack, remedies=remedies)


def shortage(costs: StageCosts) -> NoPlanFits | None:
    """What is missing at this stage, however samples and state are dealt out; None: a plan fits."""
    if not costs.shares_matter:
        return shortage_at_shares(costs, (0.0,) * len(costs.memories))
    shares, rank = smallest_shares(costs)
    room = _of_each(costs, lambda memory: memory.largest_share(0))
    room[rank] = costs.memories[rank].largest_share(1)
    if min(room) >= 0.0 and suffice(room):
        return None
    lacking = math.fsum(_lacking(costs, shares, 0))
    nothing = (0.0,) * len(shares)
    hold_nothing = {r: by for r, by in enumerate(_lacking(costs, nothing, 0)) if by}
    if hold_nothing:
        worst = max(hold_nothing, key=lambda r: hold_nothing[r])
        return _named(costs, worst, 0, 0.0, lacking, hold_nothing)
    return _named(costs, rank, 1, shares[rank], max(lacking, _lacking(costs, shares, 1)[rank]))


def _of_each(costs: StageCosts, function: Callable[[RankMemory], _Value]) -> list[_Value]:
    """By rank, what holds of its memory: the same for equal ones."""
    kinds = costs.cluster.device_kinds
    memories = dict(zip(kinds, costs.memories, strict=True))
    return each(lambda kind: function(memories[kind]), kinds)


def suffice(room: Sequence[float]) -> bool:
    """Whether ranks with room for these shares can own everything, rounding aside."""
    return math.fsum(room) >= 1.0 - _ROUNDING


def smallest_shares(costs: StageCosts) -> tuple[tuple[float, ...], int]:
    """The shares of the plan that comes closest to not fitting, and the rank that works in it.

    The others own all that they have room for, and this rank the rest.
    """
    room = _of_each(costs, lambda memory: max(0.0, memory.largest_share(0)))
    with_one = _of_each(costs, lambda memory: max(0.0, memory.largest_share(1)))
    lost = [own - less for own, less in zip(room, with_one, strict=True)]
    holds_none = _of_each(costs, lambda memory: not memory.fits(1, 0.0))
    rank = min(range(len(room)), key=lambda r: (holds_none[r], lost[r]))
    others = math.fsum(room) - room[rank]
    shares = [own / max(1.0, others) for own in room]
    shares[rank] = max(0.0, 1.0 - others)
    return tuple(shares), rank


def shortage_at_shares(
    costs: StageCosts, shares: Sequence[float], *, working: Collection[int] = ()
) -> NoPlanFits | None:
    """What is missing under these shares, or None if a plan fits.

    Args:
        costs: of the stage.
        shares: fraction of the state that each rank owns.
        working: ranks that have to hold a sample; empty: any one of them has to.
    """
    ranks = range(len(costs.memories))
    none, one = _lacking(costs, shares, 0), _lacking(costs, shares, 1)
    least = [one[rank] if rank in working else none[rank] for rank in ranks]
    if not any(least):
        rank = min(ranks, key=lambda r: one[r])
        fits = working or not one[rank]
        return None if fits else _named(costs, rank, 1, shares[rank], one[rank])
    rank = max(ranks, key=lambda r: least[r])
    lacks = {rank: by for rank, by in enumerate(least) if by}
    return _named(costs, rank, int(rank in working), shares[rank], math.fsum(least), lacks)


def _lacking(costs: StageCosts, shares: Sequence[float], micro_batch: int) -> list[float]:
    """By rank, the bytes that it has too few; 0 if it has enough."""
    return [
        0.0 if memory.fits(micro_batch, share) else memory.needed(micro_batch, share) - memory.limit
        for memory, share in zip(costs.memories, shares, strict=True)
    ]


def _named(
    costs: StageCosts,
    rank: int,
    micro_batch: int,
    share: float,
    missing: float,
    lacks: Mapping[int, float] | None = None,
) -> NoPlanFits:
    memory, name = costs.memories[rank], costs.cluster.devices[rank].name
    needed = memory.needed(micro_batch, share)
    samples = "one sample" if micro_batch else "no samples"
    owned = (
        f" and {100 * share:.1f} % of the sharded state" if share and costs.shares_matter else ""
    )
    too_much = needed - memory.limit
    sentence = (
        f"no plan fits at stage {costs.stage}: rank {rank} ({name}) needs at least "
        f"{format_bytes(needed)} for {samples}{owned}, but may use "
        f"{format_bytes(memory.limit)}: {format_bytes(too_much)} too little"
    )
    lack = Lack({rank: too_much} if lacks is None else lacks, sentence)
    return NoPlanFits(f"{sentence}; {_WAYS_OUT}", missing, lack=lack)
