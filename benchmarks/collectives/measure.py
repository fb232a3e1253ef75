"""What each rank of the benchmark does: make the providers, and run case after case."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from collectives import deepspeed_provider, mpi_provider
from collectives.case import Case, cases
from collectives.floor import Floor
from collectives.our_providers import Ours
from collectives.provider import Prepared, Provider
from collectives.row import Row, rows_of
from collectives.stopwatch import time_turns
from collectives.torch_providers import AllToAll, Native
from poplar.comm import Group, connect

_FLOOR = "the floor"
ALGORITHMS = ("process_group:padded+grouped", "process_group:library+padded")
"""As `connect` names them; measured only where they are asked for."""
PROVIDERS = (
    "gloo",
    "all-to-all",
    "mpi",
    "deepspeed",
    "process_group",
    *ALGORITHMS,
    "shared_memory",
    "hierarchical",
)


@dataclass(frozen=True)
class Request:
    """What to measure: every size with even shares, other shares and dtypes at `headline`."""

    providers: tuple[str, ...]
    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    shares: tuple[tuple[float, ...], ...]
    headline: int
    rounds: int
    link_gigabits: float | None = None
    """Between two hosts with half of the ranks each; None: one host."""

    def cases(self, ranks: int) -> Iterator[Case]:
        """In the order in which they are measured."""
        own = [cut for cut in self.shares if len(cut) == ranks]
        yield from cases(ranks, self.operations, self.sizes, self.dtypes, own, self.headline)


def measure(request: Request, tell: Callable[[str], None]) -> list[Row]:
    """Rows of all cases, the same on every rank. Collective.

    Raises:
        ValueError: a provider's result is wrong; says whose and where.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    providers = _make(request.providers, rank, ranks, tell)
    floor = Floor(ranks)
    tell(f"copies by {floor.way}")
    rows = []
    for case in request.cases(ranks):
        tell(str(case))
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
        ValueError: they are not numbers, or don't add up to 100.
    """
    parts = tuple(float(part) / 100 for part in text.split("/"))
    if not math.isclose(sum(parts), 1.0) or min(parts) < 0:
        raise ValueError(f"shares {text}: percentages that add up to 100, got {100 * sum(parts):g}")
    return parts


def _make(
    names: Sequence[str], rank: int, ranks: int, tell: Callable[[str], None]
) -> list[Provider]:
    found: list[Provider] = []
    if "gloo" in names:
        found.append(Native(rank, "gloo"))
    if "all-to-all" in names:
        found.append(AllToAll(rank, "gloo"))
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
            tell(f"without {name}: {absent}")
        else:
            found.append(make())
    for name in ("process_group", *ALGORITHMS, "hierarchical"):
        if name in names:
            found.append(Ours(connect(Group.of(None, None), name), name))
    if "shared_memory" in names:
        comm = connect(Group.of(None, None), "shared_memory")
        found += [Ours(comm, "shared_memory"), Ours(comm, "shared_memory", zero_copy=True)]
    return found


def _check(case: Case, provider: Provider, prepared: Prepared, rank: int) -> None:
    prepared.run()
    try:
        case.check(prepared.result(), rank)
    except ValueError as error:
        raise ValueError(f"{provider.name} is wrong: {error}") from None
