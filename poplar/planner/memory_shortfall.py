"""The memory that is missing where no plan fits: which rank lacks how many bytes.

A shortfall is a lower bound: it holds for every choice of batches, and for every choice of shares
unless the shares are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from poplar.errors import PoplarError
from poplar.formatting import format_bytes
from poplar.planner.cost_model import StageCosts
from poplar.planner.memory_model import RankMemory
from poplar.planner.rank_groups import each

_Value = TypeVar("_Value")

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
    """Ranks that cannot hold their part, and how much more each of them needs."""
    sentence: str
    """Names the rank that lacks the most."""


ShortfallRule = Callable[[StageCosts], "Shortfall | None"]
"""What a policy lacks at a stage; None: the policy finds a plan that fits."""


class NoPlanFits(PoplarError, ValueError):
    """No plan at any of the requested stages fits the ranks' memory.

    The message names the rank that lacks the most at the stage that comes closest, and the smallest
    changes with which a plan would fit. They are computed when `suggestions` or the message is
    first read, because that takes as long as a search.
    """

    def __init__(
        self, shortfalls: Iterable[Shortfall], request: Mapping[str, Any] | None = None
    ) -> None:
        self.shortfalls = tuple(shortfalls)
        """By stage, what is missing."""
        self.closest = min(self.shortfalls, key=lambda one: (one.total_bytes, one.stage))
        """The stage at which the least is missing."""
        self._request = request
        """The arguments of the search; None: no suggestions."""
        super().__init__(self.closest.sentence)

    @cached_property
    def suggestions(self) -> tuple[str, ...]:
        """Changes that make a plan fit, each on its own."""
        if self._request is None:
            return ()
        # Imported here because it builds on this module, and only failures need it.
        from poplar.planner.suggested_changes import suggested_changes

        return suggested_changes(self.shortfalls, **self._request)

    def __str__(self) -> str:
        if not self.suggestions:
            return f"{self.closest.sentence}; {_GENERAL_ADVICE}"
        return f"{self.closest.sentence}; what would fit: {', or '.join(self.suggestions)}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.shortfalls, self._request)


def memory_shortfall(costs: StageCosts) -> Shortfall | None:
    """What is missing at this stage for every choice of batches and shares; None: a plan fits."""
    if not costs.shares_matter:
        return shortfall_at_shares(costs, (0.0,) * len(costs.memories))
    shares, rank = smallest_shares(costs)
    room = _by_rank(costs, lambda memory: memory.largest_share(0))
    room[rank] = costs.memories[rank].largest_share(1)
    if min(room) >= 0.0 and suffice(room):
        return None
    total = math.fsum(_missing(costs, shares, 0))
    missing = _missing(costs, (0.0,) * len(shares), 0)
    too_small = {rank: by for rank, by in enumerate(missing) if by}
    if too_small:
        worst = max(too_small, key=too_small.__getitem__)
        return _shortfall(costs, worst, 0, 0.0, total, too_small)
    return _shortfall(costs, rank, 1, shares[rank], max(total, _missing(costs, shares, 1)[rank]))


def shortfall_at_shares(
    costs: StageCosts, shares: Sequence[float], *, working: Collection[int] = ()
) -> Shortfall | None:
    """What is missing under these shares; None: a plan fits.

    Args:
        costs: of the stage.
        shares: fraction of the state that each rank owns.
        working: ranks that must hold a sample; empty: any one of them must.
    """
    ranks = range(len(costs.memories))
    with_none, with_one = _missing(costs, shares, 0), _missing(costs, shares, 1)
    missing = [with_one[rank] if rank in working else with_none[rank] for rank in ranks]
    if not any(missing):
        rank = min(ranks, key=with_one.__getitem__)
        if working or not with_one[rank]:
            return None
        return _shortfall(costs, rank, 1, shares[rank], with_one[rank])
    rank = max(ranks, key=missing.__getitem__)
    by_rank = {rank: by for rank, by in enumerate(missing) if by}
    return _shortfall(costs, rank, int(rank in working), shares[rank], math.fsum(missing), by_rank)


def suffice(room: Sequence[float]) -> bool:
    """Whether ranks that can own at most these shares can own everything, up to rounding."""
    return math.fsum(room) >= 1.0 - _ROUNDING


def smallest_shares(costs: StageCosts) -> tuple[tuple[float, ...], int]:
    """The shares of the plan that needs the least memory, and the only rank that has samples.

    The other ranks own as much as they can hold, and this rank owns the rest.
    """
    room = _by_rank(costs, lambda memory: max(0.0, memory.largest_share(0)))
    with_one = _by_rank(costs, lambda memory: max(0.0, memory.largest_share(1)))
    lost = [own - less for own, less in zip(room, with_one, strict=True)]
    too_small = _by_rank(costs, lambda memory: not memory.fits(1, 0.0))
    rank = min(range(len(room)), key=lambda r: (too_small[r], lost[r]))
    others = math.fsum(room) - room[rank]
    shares = [own / max(1.0, others) for own in room]
    shares[rank] = max(0.0, 1.0 - others)
    return tuple(shares), rank


def _missing(costs: StageCosts, shares: Sequence[float], micro_batch: int) -> list[float]:
    """By rank, the bytes that it lacks; 0 if it has enough."""

    def missing(memory: RankMemory, share: float) -> float:
        fits = memory.fits(micro_batch, share)
        return 0.0 if fits else memory.needed(micro_batch, share) - memory.limit

    return _by_rank(costs, missing, shares)


def _by_rank(
    costs: StageCosts, function: Callable[..., _Value], *arguments: Sequence[float]
) -> list[_Value]:
    """`function` of each rank's memory and arguments, computed once for equal ranks."""
    kinds = costs.cluster.device_kinds
    memories = dict(zip(kinds, costs.memories, strict=True))
    keys = list(zip(kinds, *arguments, strict=True))
    return each(lambda key: function(memories[key[0]], *key[1:]), keys)


def _shortfall(
    costs: StageCosts,
    rank: int,
    micro_batch: int,
    share: float,
    total: float,
    by_rank: Mapping[int, float] | None = None,
) -> Shortfall:
    memory, name = costs.memories[rank], costs.cluster.devices[rank].name
    needed = memory.needed(micro_batch, share)
    missing = needed - memory.limit
    samples = "one sample" if micro_batch else "no samples"
    state = share and costs.shares_matter
    owned = f" and {100 * share:.1f} % of the sharded state" if state else ""
    sentence = (
        f"no plan fits at stage {costs.stage}: rank {rank} ({name}) needs at least "
        f"{format_bytes(needed)} for {samples}{owned}, but may use "
        f"{format_bytes(memory.limit)}: {format_bytes(missing)} too little"
    )
    return Shortfall(costs.stage, total, {rank: missing} if by_rank is None else by_rank, sentence)
