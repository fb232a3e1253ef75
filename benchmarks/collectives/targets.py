"""The performance targets of Poplar's transports, and whether rows meet them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from verdict import CaseVerdict

from collectives.case import Case
from collectives.row import Row

HEADLINE, LEAST = 64 << 20, 4 << 10
"""Bytes."""
ORDINARY, ZERO_COPY = "poplar shared_memory", "poplar shared_memory, zero-copy"
GLOO, ALL_TO_ALL, MPI, FLOOR = "gloo", "gloo all-to-all + sum", "Open MPI", "the floor"
WANTED = {
    "reduce_scatter": {
        ORDINARY: {GLOO: 5.0, ALL_TO_ALL: 2.0, MPI: 3.0},
        ZERO_COPY: {GLOO: 10.0, ALL_TO_ALL: 4.0, MPI: 5.0, FLOOR: 1.3},
    },
    "all_gather": {
        ORDINARY: {GLOO: 6.0, MPI: 0.75},
        ZERO_COPY: {MPI: 1.2, FLOOR: 1.4},
    },
    "all_reduce": {ORDINARY: {GLOO: 2.0, MPI: 1.2}, ZERO_COPY: {GLOO: 5.0}},
}
"""At `HEADLINE` bytes: required speed-up over each provider; for the floor, the largest ratio."""
DIRECT, HIERARCHICAL = "poplar process_group", "poplar hierarchical"
OVER_DIRECT, OVER_LINK = 0.6, 1.2
"""Largest time across a link, relative to the direct algorithm and to the link's bound."""
SMALL_OVER_GLOO = 5.0
SKEWED_OVER_EVEN = 1.15
SKEWED = (0.7, 0.1, 0.1, 0.1)


def verdicts(rows: Sequence[Row]) -> Iterator[CaseVerdict]:
    """All targets that apply to `rows`."""
    yield from _across([row for row in rows if row.link_gigabits])
    by_case: dict[Case, list[Row]] = {}
    for row in (row for row in rows if not row.link_gigabits):
        by_case.setdefault(row.case, []).append(row)
    for case, own in by_case.items():
        found = {row.provider: row for row in own}
        if case.dtype != "fp32":
            continue
        if case.nbytes == LEAST and case.is_even:
            yield from _small(case, found)
        if case.nbytes == HEADLINE and case.is_even:
            yield from _headline(case, found)
        if case.shares == SKEWED:
            even = by_case.get(Case(case.operation, case.nbytes, "fp32", (0.25,) * 4), [])
            yield from _skewed(case, found, {row.provider: row for row in even})


def _headline(case: Case, found: dict[str, Row]) -> Iterator[CaseVerdict]:
    for ours, wanted in WANTED[case.operation].items():
        row = found.get(ours)
        for name, threshold in wanted.items():
            if row is None:
                continue
            if name == FLOOR:
                yield _at_most(case, f"{ours} over {name}", row.ratio_to_floor, threshold)
                continue
            other = _of(
                found, lambda provider, name=name: provider == name or _is_mpi(provider, name)
            )
            if other is not None:
                ratio = other.p50_seconds / row.p50_seconds
                yield _at_least(case, f"{ours} faster than {name}", ratio, threshold)


def _across(rows: Sequence[Row]) -> Iterator[CaseVerdict]:
    for row in rows:
        case = row.case
        if row.provider != HIERARCHICAL or case.nbytes != HEADLINE or not case.is_even:
            continue
        if row.ratio_to_link is not None:
            yield _at_most(case, f"{HIERARCHICAL} over the link", row.ratio_to_link, OVER_LINK)
        for other in rows:
            if other.case == case and other.provider == DIRECT:
                ratio = row.p50_seconds / other.p50_seconds
                yield _at_most(case, f"{HIERARCHICAL} over {DIRECT}", ratio, OVER_DIRECT)


def _small(case: Case, found: dict[str, Row]) -> Iterator[CaseVerdict]:
    for ours in (ORDINARY, ZERO_COPY):
        row = found.get(ours)
        if row is not None and row.ratio_to_gloo is not None:
            what = f"{ours} faster than gloo"
            yield _at_least(case, what, row.ratio_to_gloo, SMALL_OVER_GLOO)


def _skewed(case: Case, found: dict[str, Row], even: dict[str, Row]) -> Iterator[CaseVerdict]:
    for ours in (ORDINARY, ZERO_COPY):
        if ours in found and ours in even:
            ratio = found[ours].p50_seconds / even[ours].p50_seconds
            yield _at_most(case, f"{ours}, time over even's", ratio, SKEWED_OVER_EVEN)


def _at_most(case: Case, what: str, value: float, wanted: float) -> CaseVerdict:
    return CaseVerdict(case=str(case), what=what, value=value, wanted=wanted, at_most=True)


def _at_least(case: Case, what: str, value: float, wanted: float) -> CaseVerdict:
    return CaseVerdict(case=str(case), what=what, value=value, wanted=wanted)


def _of(found: dict[str, Row], wanted: Callable[[str], bool]) -> Row | None:
    return next((row for provider, row in found.items() if wanted(provider)), None)


def _is_mpi(provider: str, name: str) -> bool:
    return name == MPI and provider.startswith(MPI)  # the name includes its version
