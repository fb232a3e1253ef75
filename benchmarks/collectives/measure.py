"""The benchmark on each rank: create the providers and run all cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from rows import Row

from collectives import deepspeed_provider, mpi_provider
from collectives.case import Case
from collectives.floor import Floor
from collectives.link_providers import STREAMS, InParts, Sockets
from collectives.poplar_providers import PoplarProvider
from collectives.provider import Prepared, Provider
from collectives.row import rows_of
from collectives.timing import time_turns
from collectives.torch_providers import AllToAll, Native
from poplar.comm import Group, connect

_FLOOR = "the floor"
PROVIDERS = (
    "gloo",
    "all-to-all",
    "mpi",
    "deepspeed",
    "process_group",
    "shared_memory",
    "hierarchical",
    "parts",
    "streams",
    "sockets",
)
ACROSS_HOSTS_ONLY = ("hierarchical", "parts", "streams", "sockets")


@dataclass(frozen=True)
class Request:
    """The cases to measure: every size with even shares, other shares and dtypes at `headline`."""

    providers: tuple[str, ...]
    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    shares: tuple[tuple[float, ...], ...]
    headline: int
    rounds: int
    link_gigabits: float | None = None
    """Gbit/s between two hosts with half of the ranks each; None: one host."""

    def cases(self, ranks: int) -> Iterator[Case]:
        """The cases in the order of measurement."""
        even, first = (1 / ranks,) * ranks, self.dtypes[0]
        for operation in self.operations:
            yield from (Case(operation, size, first, even) for size in self.sizes)
            for cut in self.shares:
                if len(cut) == ranks and operation != "all_reduce":
                    yield Case(operation, self.headline, first, cut)
            for dtype in self.dtypes[1:]:
                yield Case(operation, self.headline, dtype, even)


def measure(request: Request, report: Callable[[str], None]) -> list[Row]:
    """The rows of all cases, the same on every rank. Collective.

    Raises:
        ValueError: a provider's result is wrong; says which provider and where.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    providers = _make(request.providers, rank, ranks, report)
    floor = Floor(ranks)
    report(f"fastest copy: {floor.way}")
    rows = []
    for case in request.cases(ranks):
        report(str(case))
        mine = case.input_of(rank)
        ready: dict[str, tuple[Provider, Prepared]] = {}
        for provider in providers:
            prepared = provider.prepare(case, mine)
            if prepared is not None:
                ready[provider.name] = provider, prepared
                _check(case, provider, prepared, rank)
        runs = {name: prepared.run for name, (_, prepared) in ready.items()}
        seconds = time_turns({**runs, _FLOOR: floor.copy}, request.rounds)
        speeds = [floor.bytes_moved / copied for copied in seconds.pop(_FLOOR)]
        rows += rows_of(
            case,
            {ready[name][0]: own for name, own in seconds.items()},
            speeds,
            request.link_gigabits,
        )
    return rows


def shares_of(text: str) -> tuple[float, ...]:
    """`70/10/10/10` as fractions.

    Raises:
        ValueError: not numbers, or they do not add up to 100.
    """
    parts = tuple(float(part) / 100 for part in text.split("/"))
    if not math.isclose(sum(parts), 1.0) or min(parts) < 0:
        raise ValueError(f"shares {text}: percentages must add up to 100, got {100 * sum(parts):g}")
    return parts


def _make(
    names: Sequence[str], rank: int, ranks: int, report: Callable[[str], None]
) -> list[Provider]:
    found: list[Provider] = []
    if "gloo" in names:
        found.append(Native(rank))
    if "all-to-all" in names:
        found.append(AllToAll(rank))
    for name, why_absent, make in (
        ("mpi", lambda: mpi_provider.why_apart(ranks), lambda: mpi_provider.Mpi(rank)),
        (
            "deepspeed",
            deepspeed_provider.why_absent,
            lambda: deepspeed_provider.DeepSpeedShm(rank, ranks),
        ),
    ):
        if name not in names:
            continue
        if absent := why_absent():
            report(f"without {name}: {absent}")
        else:
            found.append(make())
    for name in ("process_group", "hierarchical"):
        if name in names:
            found.append(PoplarProvider(connect(Group.of(None, None), name), name))
    for name, streams in (("parts", 1), ("streams", STREAMS)):
        if name in names:
            groups = [dist.new_group() for _ in range(streams)]
            found.append(InParts([connect(Group.of(one, None), "process_group") for one in groups]))
    if "sockets" in names and ranks == 2:
        found.append(Sockets(rank))
    if "shared_memory" in names:
        comm = connect(Group.of(None, None), "shared_memory")
        found += [
            PoplarProvider(comm, "shared_memory"),
            PoplarProvider(comm, "shared_memory", zero_copy=True),
        ]
    return found


def _check(case: Case, provider: Provider, prepared: Prepared, rank: int) -> None:
    prepared.run()
    try:
        case.check(prepared.result(), rank)
    except ValueError as error:
        raise ValueError(f"{provider.name} is wrong: {error}") from None
