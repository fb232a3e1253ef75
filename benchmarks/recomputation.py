"""What is gained if each rank recomputes as many units as its memory needs, not all or none?

    python benchmarks/recomputation.py --output rows.jsonl

Simulated: the predicted step of clusters of four GPUs that `catalogue.py` draws, with recomputation
on no rank, of all blocks on all ranks (activation checkpointing, as FSDP and DeepSpeed users set
it), and as the search decides. `gain` is of the search over the better of the two others.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace

from catalogue import Case, draw_case
from rows import Column, Kind, Row, Target, at_least, new_parser, report

from poplar.hardware.simulated_cluster import simulated_cluster
from poplar.planner.memory_shortfall import NoPlanFits
from poplar.planner.search import Choice, search
from poplar.values.plan import Plan
from poplar.values.profile import ClusterProfile

BENCHMARK = "recomputation"
RANKS, CLUSTERS, QUICK_CLUSTERS = 4, 40, 2
GPUS = ("RTX-3060", "RTX-3090", "RTX-4090", "RTX-A6000", "A100-SXM-80")
"""12 to 80 GiB."""
LEAST_GAIN = 0.98
"""A choice by rank includes none and all. But the backward is a larger part of passes that
recompute, so more communication overlaps; the search does not count that, only "all" does."""
COLUMNS = (
    Column("seed", "seed"),
    Column("GPUs (simulated)", "gpus"),
    Column("model", "model"),
    Column("global batch", "global_batch"),
    Column("none", "none_seconds", "{:.3f} s"),
    Column("all", "all_seconds", "{:.3f} s"),
    Column("search", "seconds", "{:.3f} s"),
    Column("stage", "stage"),
    Column("units by rank", lambda row: ", ".join(map(str, row["recomputed_units"]))),
    Column("gain", "gain", "{:.2f}x"),
)


def main() -> None:
    """Plan all clusters, or show saved rows."""
    options = parse_options()
    rows = report(options, planned(options.clusters), Kind(BENCHMARK, COLUMNS, targets))
    gains = [row["gain"] for row in rows if row["gain"] is not None]
    print(
        f"{len(rows)} clusters; faster by more than 1 % on {sum(gain > 1.01 for gain in gains)}; "
        f"only the search's plan fits on {sum(row['gain'] is None for row in rows)}"
    )


def planned(clusters: int) -> Iterator[Row]:
    """One row for each of the first clusters on which any plan fits."""
    found = seed = 0
    while found < clusters:
        row = row_of(draw_case(RANKS, seed, GPUS), seed)
        seed += 1
        if row is not None:
            found += 1
            yield row


def row_of(case: Case, seed: int) -> Row | None:
    """The three plans of a cluster; None if no plan fits."""
    plain, recomputing = (
        simulated_cluster(case.described, replace(case.job, checkpointing=every)).middle
        for every in (False, True)
    )
    both = with_recomputed_points(plain, recomputing)
    chosen = plan_of(both, case.global_batch, "auto")
    if chosen is None:
        return None
    none = plan_of(plain, case.global_batch, "never")
    every = plan_of(recomputing, case.global_batch, "never")
    seconds = chosen.prediction["step_seconds"]
    others = [plan.prediction["step_seconds"] for plan in (none, every) if plan is not None]
    return Row.of(
        BENCHMARK,
        {
            "seed": seed,
            "gpus": ", ".join(device.name for device in plain.devices),
            "model": case.model,
            "global_batch": case.global_batch,
        },
        {
            # None: no such plan fits.
            "none_seconds": none and none.prediction["step_seconds"],
            "all_seconds": every and every.prediction["step_seconds"],
            "seconds": seconds,
            "stage": chosen.stage,
            "recomputed_units": [len(chosen.recomputed_units(rank)) for rank in range(RANKS)],
            "gain": min(others) / seconds if others else None,
        },
        packages=(),
    )


def with_recomputed_points(plain: ClusterProfile, recomputing: ClusterProfile) -> ClusterProfile:
    """The profile that measures passes without and with recomputation."""
    devices = zip(plain.devices, recomputing.devices, strict=True)
    return replace(
        plain,
        devices=tuple(replace(device, recomputed_points=other.points) for device, other in devices),
    )


def plan_of(profile: ClusterProfile, global_batch: int, recompute: Choice) -> Plan | None:
    """The fastest plan of all stages; None if none fits."""
    try:
        return search(profile, global_batch=global_batch, recompute=recompute)
    except NoPlanFits:
        return None


def targets(rows: Sequence[Row]) -> Iterator[Target]:
    """How much slower than the better of the two others the search may be."""
    gains = [row["gain"] for row in rows if row["gain"] is not None]
    if gains:
        yield Target(case="all clusters", what="least gain", value=min(gains), wanted=LEAST_GAIN)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__, quick=f"{QUICK_CLUSTERS} clusters")
    parser.add_argument("--clusters", type=at_least(1), default=CLUSTERS, help="number of them")
    options = parser.parse_args()
    if options.quick:
        options.clusters = QUICK_CLUSTERS
    return options


if __name__ == "__main__":
    main()
