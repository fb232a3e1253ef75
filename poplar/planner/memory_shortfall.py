"""What a plan is searched for, and which rank lacks how many bytes for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from poplar.planner.cost_model import StageCosts
from poplar.planner.memory_model import SLACK_BYTES, Caps
from poplar.planner.share_limits import largest_sum, suffice
from poplar.values.errors import PoplarError
from poplar.values.formatting import format_bytes
from poplar.values.plan import ALL_STAGES

_GENERAL_ADVICE = (
    "free memory on that rank (or raise its memory_limit), use shorter sequences or activation "
    "checkpointing, or add ranks"
)


class Request(NamedTuple):
    """What every stage is searched for; see `search`."""

    global_batch: int
    max_micro_batch: int
    """Largest micro-batch that is allowed on any rank."""
    policy: str = "exact"
    preference: float = 0.0
    may_recompute: bool = False
    """Ranks may recompute units; only with policy "exact"."""
    may_host: bool = False
    """Ranks may keep optimizer state in host memory; only with policy "exact"."""
    below: float = math.inf
    """Slower plans than this many seconds need not be told apart."""


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


class Allowed(NamedTuple):
    """What the caller of a search can also search for."""

    stages: tuple[int, ...] = ALL_STAGES
    policies: bool = True
    """Other policies than that of the request."""


_ANYTHING = Allowed()


class NoPlanFits(PoplarError, ValueError):
    """No plan at any of the requested stages fits the ranks' memory.

    The message names the rank that lacks the most at the stage that comes closest, and the smallest
    changes with which a plan would fit. They are computed when `suggestions` or the message is
    first read, because that takes as long as a search.
    """

    def __init__(
        self,
        shortfalls: Sequence[Shortfall],
        suggest: Callable[[Allowed], tuple[str, ...]],
        allowed: Allowed = _ANYTHING,
    ) -> None:
        self.shortfalls = tuple(shortfalls)
        """By stage, what is missing."""
        self._suggest, self._allowed = suggest, allowed
        closest = min(shortfalls, key=lambda one: (one.total_bytes, one.stage))
        super().__init__(f"no plan fits at stage {closest.stage}: {closest.sentence}")

    def allow_only(self, stages: Iterable[int], *, policies: bool = True) -> None:
        """From now on, suggest no other stages, and other policies only if `policies`."""
        known = self._allowed
        both = tuple(sorted({*stages} & {*known.stages}))
        self._allowed = Allowed(both, policies and known.policies)
        self.__dict__.pop("suggestions", None)

    @cached_property
    def suggestions(self) -> tuple[str, ...]:
        """Changes that make a plan fit, each on its own."""
        return self._suggest(self._allowed)

    def __str__(self) -> str:
        changes = ", or ".join(self.suggestions)
        return f"{self.args[0]}; {f'what would fit: {changes}' if changes else _GENERAL_ADVICE}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.shortfalls, self._suggest, self._allowed)


def memory_shortfall(costs: StageCosts, request: Request) -> Shortfall | None:
    """What is missing at this stage for every choice of batches and shares; None: a plan fits.

    Ranks that are too small even without samples and state are reported before others.
    """
    caps, shares = least_of_several_passes(costs, request)
    if _shares_fit(costs, caps):
        return None
    found = shortfall_at(costs, caps, shares)
    samples, shares_of_one = least_of_one_pass(costs, request)
    if samples:
        caps = list(map(Caps, samples))
        if _shares_fit(costs, caps):
            return None
        other = shortfall_at(costs, caps, shares_of_one)
        found = min(filter(None, (found, other)), key=lambda one: one.total_bytes)
    assert found is not None, "shares that do not suffice are missing bytes"
    nothing = [Caps(0)] * len(shares)
    too_small = shortfall_at(costs, nothing, [0.0] * len(shares))
    return too_small._replace(total_bytes=found.total_bytes) if too_small else found


def _shares_fit(costs: StageCosts, caps: Sequence[Caps]) -> bool:
    """Whether shares of some plan fit beside these passes.

    Where no state is sharded, ranks still receive their shares of the reductions, which are even in
    every plan.
    """
    if costs.shares_matter:
        return suffice(largest_shares(costs, caps))
    return shortfall_at(costs, caps, costs.cluster.even_shares) is None


def _least_shares(costs: StageCosts) -> tuple[float, ...]:
    """By rank, the least share that a plan can give to it."""
    return (0.0,) * costs.cluster.world_size if costs.shares_matter else costs.cluster.even_shares


def shortfall_at(
    costs: StageCosts, caps: Sequence[Caps], shares: Sequence[float]
) -> Shortfall | None:
    """What ranks lack for passes of up to these sizes beside these shares; None: nothing."""
    needed = costs.by_rank(lambda rank, *needs: costs.memories[rank].needed(*needs), caps, shares)
    return _shortfall(costs, caps, shares, needed)


def shortfall_of(
    costs: StageCosts,
    micro_batches: Sequence[Sequence[int]],
    shares: Sequence[float],
    numbers: Sequence[int] | None = None,
) -> Shortfall | None:
    """What ranks lack for exactly these passes beside these shares; None: nothing.

    `numbers` are the names of the ranks in the sentence; None: their positions.
    """
    needed = costs.needed_bytes(micro_batches, shares)
    caps = list(map(Caps.of, micro_batches))
    return _shortfall(costs, caps, costs.owned(shares), needed, numbers)


def missing_bytes(costs: StageCosts, rank: int, caps: Caps, share: float) -> float:
    """What the rank lacks for passes of up to these sizes beside this share."""
    memory = costs.memories[rank]
    return max(0.0, memory.needed(caps, share) - memory.limit)


def _shortfall(
    costs: StageCosts,
    caps: Sequence[Caps],
    shares: Sequence[float],
    needed: Sequence[float],
    numbers: Sequence[int] | None = None,
) -> Shortfall | None:
    missing = [
        max(0.0, own - memory.limit) for own, memory in zip(needed, costs.memories, strict=True)
    ]
    rank = missing.index(max(missing))
    if missing[rank] <= SLACK_BYTES:
        return None
    batch, share = max(caps[rank]), shares[rank]
    memory, device = costs.memories[rank], costs.cluster.devices[rank]
    samples = {0: "no samples", 1: "one sample"}.get(batch, f"{batch} samples")
    has_state = share and costs.shares_matter
    state = f" and {100 * share:.1f} % of the sharded state" if has_state else ""
    frozen = sum(costs.cluster.model.unit_frozen_bytes)
    base = f" (the model has {format_bytes(frozen)} of frozen parameters)" if frozen else ""
    if (has_state or not costs.shares_matter) and device.state_on_host:
        state += (
            f"{'' if state else ' with the optimizer state'}, as far as possible in host memory"
        )
    number = numbers[rank] if numbers else rank
    sentence = (
        f"rank {number} ({device.name}) needs at least {format_bytes(needed[rank])} "
        f"for {samples}{state}, but may use {format_bytes(memory.limit)} of "
        f"{format_bytes(device.memory_bytes)}: {format_bytes(missing[rank])} too little{base}"
    )
    by_rank = {rank: lacking for rank, lacking in enumerate(missing) if lacking > 1.0}
    return Shortfall(costs.stage, math.fsum(missing), by_rank, sentence)


def least_of_several_passes(
    costs: StageCosts, request: Request
) -> tuple[list[Caps], tuple[float, ...]]:
    """The plan of any number of passes that needs the least memory: its caps and shares.

    One rank has passes of one sample and the rest of the state; the other ranks own as much as
    they can hold.
    """
    idle = Caps(0, 0) if costs.synchronizes_every_pass else Caps(0)
    one_sample = Caps(1, 1)
    if request.global_batch == 1:
        idle, one_sample = Caps(0), Caps(1)
    least = _least_shares(costs)

    def cost_of_a_sample(rank: int) -> tuple[float, float]:
        """Bytes that the rank lacks for a sample, and the share that it can hold less."""
        beside_sample = costs.memories[rank].largest_share(one_sample)
        lacks = beside_sample < least[rank]
        lacking = missing_bytes(costs, rank, one_sample, least[rank]) if lacks else 0.0
        return lacking, room[rank] - max(0.0, beside_sample)

    caps = [idle] * costs.cluster.world_size
    room = [max(0.0, largest) for largest in largest_shares(costs, caps)]
    costs_of_a_sample = costs.by_rank(cost_of_a_sample)
    rank = costs_of_a_sample.index(min(costs_of_a_sample))
    caps[rank] = one_sample
    if not costs.shares_matter:
        return caps, least
    others = math.fsum(room) - room[rank]
    shares = [own / max(1.0, others) for own in room]
    shares[rank] = max(0.0, 1.0 - others)
    return caps, tuple(shares)


def least_of_one_pass(
    costs: StageCosts, request: Request
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The plan of one pass that needs the least memory: by rank, its samples and its share.

    Empty if no pass holds the global batch, even without state.
    """
    total = request.global_batch
    at_most, least = min(total, request.max_micro_batch), _least_shares(costs)
    most = costs.by_rank(
        lambda rank, share: costs.memories[rank].largest_caps(share, at_most).first, least
    )
    if min(most) < 0 or sum(most) < total:
        return (), ()
    room = costs.by_rank(
        lambda rank, largest: tuple(costs.memories[rank].largest_shares(largest, later=False)), most
    )
    batches = largest_sum(room, total)
    if not costs.shares_matter:
        return tuple(batches), least
    shares = [own[batch] for own, batch in zip(room, batches, strict=True)]
    together = math.fsum(shares)
    if together <= 0.0:
        return tuple(batches), (1.0 / len(shares),) * len(shares)
    return tuple(batches), tuple(share / together for share in shares)


def largest_shares(costs: StageCosts, caps: Sequence[Caps]) -> list[float]:
    """By rank, the largest share that fits beside its passes; -inf: not even none does."""
    return costs.by_rank(lambda rank, own: costs.memories[rank].largest_share(own), caps)
