"""Planning time and plan quality against ranks, device groups and the global batch.

    python benchmarks/search.py --output rows.jsonl

Clusters are drawn from a seed: devices one to five times as fast as the slowest, with 16 to 56 GiB,
and a model of 1.1 billion parameters. Every search covers all stages. Seconds are the median of
several searches, each on a new profile, so that nothing is cached. `gap` is what the search could
not rule out without rounding to simple plans. `without branch and bound` is how much slower the
plan of the heuristic alone is, at the stage where it is slowest.

`--catalogue 16:10 8:32` plans the clusters of GPUs that `catalogue.py` draws with 16 ranks and the
seed 10, and so on, on which little memory is left. Default: six that take long.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import chain

from catalogue import draw_case
from rows import Column, Kind, Row, Target, new_parser, report

from poplar.planner.branch_and_bound import fastest_plan
from poplar.planner.cost_model import StageCosts
from poplar.planner.heuristic import Alternation
from poplar.planner.memory_shortfall import Request
from poplar.planner.search import alternatives
from poplar.values.profile import (
    BatchPoint,
    ClusterProfile,
    DeviceProfile,
    ModelProfile,
    NetworkProfile,
)

RANKS, GROUPS, BATCHES = (8, 64, 256, 1024, 10_000), (1, 4, 8, 16), (64, 512, 8192, 65_536)
USUAL_RANKS, USUAL_GROUPS = 1024, 8
DIFFERENT = (96, 256)
"""Ranks that are all different, as in measured profiles."""
TARGETS = {(1024, 8, 8192): 0.2, (10_000, 8, 65_536): 2.0}
"""Seconds, by ranks, device groups and global batch."""
UNITS = 22
AMPLE_MEMORY, SMALL_MEMORY = (16, 56), (6, 16)
"""GiB of the smallest and the largest device."""
SMALL = ((4, 2), (8, 4))
"""Ranks and device groups of the clusters with little memory."""
CATALOGUE = ("16:10", "16:13", "8:32", "8:43", "8:36", "8:34")
QUICK_CATALOGUE = ("4:1",)
GIB = 2**30


COLUMNS = (
    Column("ranks", "ranks", "{:,}"),
    Column("groups", "groups"),
    Column("GiB", lambda row: tuple(row["memory_gib"]), "{}-{}"),
    Column("global batch", "global_batch", "{:,}"),
    Column("seconds", "seconds", "{:.3f}"),
    Column("stage", "stage"),
    Column("gap", "optimality_gap", "{:.2%}"),
    Column("without branch and bound", "heuristic_slowdown", "{:+.2%}"),
)
CATALOGUE_COLUMNS = (
    *(Column("ranks", "ranks"), Column("seed", "seed"), Column("model", "model")),
    Column("global batch", "global_batch"),
    Column("CPU seconds", "cpu_seconds", "{:.2f}"),
    Column("stage", "stage"),
    Column("gap", "optimality_gap", "{:.2%}"),
)


def main() -> None:
    """Measure all cases, or show saved rows."""
    options = parse_options()
    measured = chain(
        (measure(*case, options.rounds) for case in cases(options.quick)),
        (measure_catalogue(case, options.rounds) for case in options.catalogue),
    )
    report(
        options,
        measured,
        Kind("search", COLUMNS, targets),
        Kind("search of the catalogue", CATALOGUE_COLUMNS),
    )


def cases(quick: bool) -> Iterator[tuple[int, int, int, tuple[int, int]]]:
    """Ranks, device groups and global batch: one varied at a time, and the cases with a target."""
    if quick:
        yield 4, 2, 32, SMALL_MEMORY
        return
    for ranks in RANKS:
        yield ranks, min(USUAL_GROUPS, ranks), 8 * ranks, AMPLE_MEMORY
    for groups in GROUPS:
        if groups != USUAL_GROUPS:
            yield USUAL_RANKS, groups, 8192, AMPLE_MEMORY
    for batch in BATCHES:
        if batch != 8192:
            yield USUAL_RANKS, USUAL_GROUPS, batch, AMPLE_MEMORY
    yield 10_000, 8, 65_536, AMPLE_MEMORY
    for ranks in DIFFERENT:
        yield ranks, ranks, 8 * ranks, AMPLE_MEMORY
    for ranks, groups in SMALL:
        yield ranks, groups, 8 * ranks, SMALL_MEMORY


def measure(ranks: int, groups: int, batch: int, memory_gib: tuple[int, int], rounds: int) -> Row:
    """Search all stages several times."""
    seconds = []
    for _ in range(rounds):
        drawn = cluster(ranks, groups, memory_gib)
        began = time.perf_counter()
        plans = alternatives(drawn, global_batch=batch)
        seconds.append(time.perf_counter() - began)
    exact = alternatives(drawn, global_batch=batch, preference=0.0, within=math.inf)
    return Row.of(
        "search",
        {"ranks": ranks, "groups": groups, "memory_gib": memory_gib, "global_batch": batch},
        {
            "seconds": statistics.median(seconds),
            # Of the fastest plan.
            "stage": plans[0].stage,
            # Of the search without preference for simple plans; the largest of all stages.
            "optimality_gap": max(plan.prediction["optimality_gap"] for plan in exact),
            "heuristic_slowdown": heuristic_slowdown(drawn, batch, [plan.stage for plan in exact]),
            "rounds": rounds,
        },
        packages=(),
    )


def measure_catalogue(name: str, rounds: int) -> Row:
    """Search all stages of a cluster of `catalogue.py`, named by its ranks and its seed."""
    ranks, seed = map(int, name.split(":"))
    seconds = []
    for _ in range(rounds):
        case = draw_case(ranks, seed)
        began = time.process_time()
        plans = alternatives(case.profile, global_batch=case.global_batch)
        seconds.append(time.process_time() - began)
    return Row.of(
        "search of the catalogue",
        {"ranks": ranks, "seed": seed, "model": case.model, "global_batch": case.global_batch},
        {
            "cpu_seconds": statistics.median(seconds),
            "stage": plans[0].stage,
            "optimality_gap": plans[0].prediction["optimality_gap"],
            "rounds": rounds,
        },
        packages=(),
    )


def heuristic_slowdown(drawn: ClusterProfile, batch: int, stages: Sequence[int]) -> float:
    """How much slower the first plan is than the fastest one, without persistent units."""
    slowdowns = []
    for stage in stages:
        costs, request = StageCosts(drawn, stage), Request(batch, batch)
        first = Alternation(costs, request).first_plan()
        fastest = fastest_plan(costs, request).plan
        fastest_seconds = costs.step_seconds(fastest.micro_batches, fastest.shares)
        slowdowns.append(first.seconds / fastest_seconds - 1.0)
    return max(slowdowns)


def cluster(ranks: int, groups: int, memory_gib: tuple[int, int] = AMPLE_MEMORY) -> ClusterProfile:
    """Equal ranks are consecutive; the model's state does not fit on every rank."""
    draw = random.Random(groups)
    devices = []
    for group in range(groups):
        speed, memory = 1.0 + 4.0 * draw.random(), int(draw.uniform(*memory_gib) * GIB)
        points = tuple(
            BatchPoint(
                batch=b, seconds=0.002 + 0.01 * b / speed, activation_bytes=int(0.4 * b * GIB)
            )
            for b in (1, 2, 4, 8, 16, 32, 64)
        )
        devices.append(
            DeviceProfile(
                name=f"device {group}",
                memory_bytes=memory,
                points=points,
                optimizer_seconds=0.05 / speed,
                optimizer_latency_seconds=0.0005,
            )
        )
    return ClusterProfile(
        devices=tuple(devices[rank * groups // ranks] for rank in range(ranks)),
        model=ModelProfile(
            unit_numels=(50_000_000,) * UNITS,
            unit_names=tuple(f"block {unit}" for unit in range(UNITS)),
            param_bytes=2,
            grad_bytes=2,
            optimizer_bytes=12,
        ),
        network=NetworkProfile(
            reduce_scatter_seconds=0.1,
            all_gather_seconds=0.05,
            send_seconds_per_byte=(1e-10,) * ranks,
            receive_seconds_per_byte=(1e-10,) * ranks,
        ),
        overlap=0.5,
    )


def targets(rows: Sequence[Row]) -> Iterator[Target]:
    """The most seconds of some cases."""
    for row in rows:
        wanted = TARGETS.get((row["ranks"], row["groups"], row["global_batch"]))
        if wanted is not None:
            case = f"{row['ranks']:,} ranks, {row['groups']} groups"
            seconds = row["seconds"]
            yield Target(case=case, what="seconds", value=seconds, wanted=wanted, at_most=True)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__, rounds=3, quick="two clusters of 4 ranks")
    parser.add_argument("--catalogue", nargs="+", metavar="RANKS:SEED")
    options = parser.parse_args(arguments)
    if options.catalogue is None:
        options.catalogue = QUICK_CATALOGUE if options.quick else CATALOGUE
    return options


if __name__ == "__main__":
    main()
