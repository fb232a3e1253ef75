"""The performance targets of Poplar's transports, and whether rows meet them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rows import Row, Target

from collectives.case import Case
from collectives.row import case_of

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


def targets(rows: Sequence[Row]) -> Iterator[Target]:
    """All targets that apply to `rows`."""
    by_case: dict[tuple[Case, float | None], dict[str, Row]] = {}
    for row in rows:
        own = by_case.setdefault((case_of(row), row["link_gigabits"]), {})
        own[MPI if row["provider"].startswith(MPI) else row["provider"]] = row  # with its version
    for (case, link), found in by_case.items():
        if link:
            yield from _across(case, found)
        elif case.dtype == "fp32":
            if case.nbytes == LEAST and case.is_even:
                yield from _small(case, found)
            if case.nbytes == HEADLINE and case.is_even:
                yield from _headline(case, found)
            if case.shares == SKEWED:
                even = Case(case.operation, case.nbytes, "fp32", (0.25,) * 4)
                yield from _skewed(case, found, by_case.get((even, None), {}))


def _headline(case: Case, found: Mapping[str, Row]) -> Iterator[Target]:
    for ours, wanted in WANTED[case.operation].items():
        for name, threshold in wanted.items():
            if name == FLOOR and ours in found:
                ratio = found[ours]["ratio_to_floor"]
                yield _at_most(case, f"{ours} over {name}", ratio, threshold)
            elif ours in found and name in found:
                ratio = found[name]["p50_seconds"] / found[ours]["p50_seconds"]
                yield _at_least(case, f"{ours} faster than {name}", ratio, threshold)


def _across(case: Case, found: Mapping[str, Row]) -> Iterator[Target]:
    row = found.get(HIERARCHICAL)
    if row is None or case.nbytes != HEADLINE or not case.is_even:
        return
    yield _at_most(case, f"{HIERARCHICAL} over the link", row["ratio_to_link"], OVER_LINK)
    if DIRECT in found:
        ratio = row["p50_seconds"] / found[DIRECT]["p50_seconds"]
        yield _at_most(case, f"{HIERARCHICAL} over {DIRECT}", ratio, OVER_DIRECT)


def _small(case: Case, found: Mapping[str, Row]) -> Iterator[Target]:
    for ours in (ORDINARY, ZERO_COPY):
        if ours in found and found[ours]["ratio_to_gloo"] is not None:
            what = f"{ours} faster than gloo"
            yield _at_least(case, what, found[ours]["ratio_to_gloo"], SMALL_OVER_GLOO)


def _skewed(case: Case, found: Mapping[str, Row], even: Mapping[str, Row]) -> Iterator[Target]:
    for ours in (ORDINARY, ZERO_COPY):
        if ours in found and ours in even:
            ratio = found[ours]["p50_seconds"] / even[ours]["p50_seconds"]
            yield _at_most(case, f"{ours}, time over even's", ratio, SKEWED_OVER_EVEN)


def _at_most(case: Case, what: str, value: float, wanted: float) -> Target:
    return Target(case=str(case), what=what, value=value, wanted=wanted, at_most=True)


def _at_least(case: Case, what: str, value: float, wanted: float) -> Target:
    return Target(case=str(case), what=what, value=value, wanted=wanted)
