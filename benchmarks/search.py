"""How long planning takes: against ranks, kinds of devices and the global batch.

    python benchmarks/search.py --output rows.jsonl

Clusters are drawn from a seed: devices one to five times as fast as the slowest, with 16 to 56 GiB,
a model of 1.1 billion parameters. Every search takes all stages; figures are medians of a few, the
profile made anew each time, so that nothing is known from the search before.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import provenance
from rich.console import Console
from rich.table import Table

from poplar.planner.search import alternatives
from poplar.profile import BatchPoint, ClusterProfile, DeviceProfile, ModelProfile, NetworkProfile

RANKS, KINDS, BATCHES = (8, 64, 256, 1024, 10_000), (1, 4, 8, 16), (64, 512, 8192, 65_536)
USUAL_RANKS, USUAL_KINDS = 1024, 8
DIFFERENT = (96, 256)
"""Ranks of which no two are equal, as measured ones are."""
WANTED = {(1024, 8, 8192): 0.2, (10_000, 8, 65_536): 2.0}
"""Seconds, by ranks, kinds and global batch."""
UNITS = 22
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case."""

    benchmark: str
    ranks: int
    kinds: int
    global_batch: int
    seconds: float
    """Median."""
    stage: int
    """Of the plan that was chosen."""
    optimality_gap: float
    """Largest of all stages."""
    rounds: int
    device: str
    versions: str
    commit: str
    day: str


def main() -> None:
    """Measure and show."""
    options = parse_options()
    console = Console()
    rows = []
    for ranks, kinds, batch in cases(options.quick):
        rows.append(measure(ranks, kinds, batch, options.rounds))
        if options.output:
            with options.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(rows[-1])) + "\n")
    console.print(table_of(rows))


def cases(quick: bool) -> Iterator[tuple[int, int, int]]:
    """Ranks, kinds and global batches: one varied at a time, and what is wanted of planning."""
    if quick:
        yield from ((8, 4, 512), (64, 8, 512))
        return
    for ranks in RANKS:
        yield ranks, min(USUAL_KINDS, ranks), 8 * ranks
    for kinds in KINDS:
        if kinds != USUAL_KINDS:
            yield USUAL_RANKS, kinds, 8192
    for batch in BATCHES:
        if batch != 8192:
            yield USUAL_RANKS, USUAL_KINDS, batch
    yield 10_000, 8, 65_536
    for ranks in DIFFERENT:
        yield ranks, ranks, 8 * ranks


def measure(ranks: int, kinds: int, batch: int, rounds: int) -> Row:
    """All stages, several times."""
    seconds = []
    for _ in range(rounds):
        drawn = cluster(ranks, kinds)
        began = time.perf_counter()
        plans = alternatives(drawn, global_batch=batch)
        seconds.append(time.perf_counter() - began)
    return Row(
        benchmark="search",
        ranks=ranks,
        kinds=kinds,
        global_batch=batch,
        seconds=statistics.median(seconds),
        stage=plans[0].stage,
        optimality_gap=max(plan.prediction["optimality_gap"] for plan in plans),
        rounds=rounds,
        device=provenance.device(),
        versions=provenance.versions(),
        commit=provenance.commit(),
        day=date.today().isoformat(),
    )


def cluster(ranks: int, kinds: int) -> ClusterProfile:
    """Equal ranks stand beside each other; the model's state does not fit everywhere."""
    draw = random.Random(kinds)
    devices = []
    for kind in range(kinds):
        speed, memory = 1.0 + 4.0 * draw.random(), int((16 + 40 * draw.random()) * GIB)
        points = tuple(
            BatchPoint(
                batch=b, seconds=0.002 + 0.01 * b / speed, activation_bytes=int(0.4 * b * GIB)
            )
            for b in (1, 2, 4, 8, 16, 32, 64)
        )
        devices.append(
            DeviceProfile(
                name=f"kind {kind}",
                memory_bytes=memory,
                points=points,
                optimizer_seconds=0.05 / speed,
                optimizer_latency_seconds=0.0005,
            )
        )
    return ClusterProfile(
        devices=tuple(devices[rank * kinds // ranks] for rank in range(ranks)),
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


def table_of(rows: Sequence[Row]) -> Table:
    """For people."""
    table = Table("ranks", "kinds", "global batch", "seconds", "wanted", "stage", "gap")
    for row in rows:
        wanted = WANTED.get((row.ranks, row.kinds, row.global_batch))
        said = (
            "" if wanted is None else f"<= {wanted:g}" + ("" if row.seconds <= wanted else " short")
        )
        table.add_row(
            f"{row.ranks:,}",
            str(row.kinds),
            f"{row.global_batch:,}",
            f"{row.seconds:.3f}",
            said,
            str(row.stage),
            f"{100 * row.optimality_gap:.2f} %",
        )
    return table


def parse_options() -> argparse.Namespace:
    """What to measure, and where it goes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two small clusters")
    parser.add_argument("--output", type=Path, metavar="FILE", help="add rows as JSON lines")
    return parser.parse_args()


if __name__ == "__main__":
    main()
