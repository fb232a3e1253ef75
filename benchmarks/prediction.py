"""Does a profile say how long a step takes? Predicted beside measured, on ranks of unequal speed.

For each cluster of CPU ranks under quotas (so that a rank's speed is its own, whatever the others
do): measure a profile and save it; from the saved file predict a set of plans per stage; then run
them. The plans are even and proportional ones, in one pass and in several, with even and uneven
shares, with a rank that has no samples and one that owns nothing; about half of their micro-batches
have sizes that the profile has no point for. How many cores other programs use meanwhile is told:
ranks get their quota before them, but share caches and the memory bus.

    python benchmarks/prediction.py --output rows.jsonl
    python benchmarks/prediction.py --quick --clusters 2:1 --stages 0 3
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from emulation import EmulatedCluster, EmulationUnavailable, Ranks, measured_speeds
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from launch import LaunchError, run_ranks
from llama import SIZES, Llama, LlamaConfig, next_byte_loss

from poplar import HeteroZeroOptimizer, Plan, profile_cluster
from poplar.planning.cluster import ClusterProfile
from poplar.planning.cost_model import Prediction, predict

SEED = 0
LEARNING_RATE = 1e-4
CLUSTERS = ("1:1", "2:1", "4:2:1")
FASTEST = 0.8
"""Of a core, for the fastest rank. Less than all of it: the programs that every machine runs
beside us then take from what nobody was promised."""
WARMUP_STEPS = 2
"""Not counted: allocations, the recording of the schedule, shards that have just moved."""

MAX_NORM = 1.0
"""Steps are profiled and run with the gradient clipped, as most training is."""

Speeds = Sequence[float]
Maker = Callable[[int, Speeds, Sequence[int], int], Plan]
"""A plan from a global batch, the ranks' speeds, their largest micro-batches and a stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One plan's result, as it is appended to `--output`."""

    cluster: str
    stage: int
    plan: str
    """Which kind of plan, in words."""
    micro_batches: list[list[int]]
    shares: list[float]
    unprofiled: float
    """Part of the micro-batches whose size the profile has no point for."""
    predicted_seconds: float
    p20_seconds: float
    p50_seconds: float
    p80_seconds: float
    error: float
    """Predicted over measured (p50), less 1."""
    bound: str
    """What bounds the step, as predicted."""
    bystanders: float
    """Cores that other programs used during the measurement."""
    size: str
    device: str
    versions: str
    commit: str

    @classmethod
    def of(
        cls,
        plan: Plan,
        predicted: Prediction,
        measured: Measurement,
        *,
        cluster: str,
        kind: str,
        unprofiled: float,
        size: str,
    ) -> Row:
        """What was predicted of a plan beside what was measured of it."""
        low, *_, high = statistics.quantiles(measured.seconds, n=5)
        median = statistics.median(measured.seconds)
        return cls(
            cluster=cluster,
            stage=plan.stage,
            plan=kind,
            micro_batches=[list(passes) for passes in plan.micro_batches],
            shares=list(plan.shares),
            unprofiled=unprofiled,
            predicted_seconds=predicted.step_seconds,
            p20_seconds=low,
            p50_seconds=median,
            p80_seconds=high,
            error=predicted.step_seconds / median - 1,
            bound=predicted.bound,
            bystanders=measured.bystanders,
            size=size,
            device=f"{platform.machine()} CPU, {os.cpu_count()} cores",
            versions=f"torch {torch.__version__}, python {platform.python_version()}",
            commit=commit(),
        )

    def in_words(self) -> str:
        """The comparison in a line."""
        return (
            f"predicted {self.predicted_seconds:.3f} s, measured {self.p50_seconds:.3f} s, "
            f"{100 * self.error:+.1f} % (others use {self.bystanders:.1f} cores)"
        )


@dataclass(frozen=True, slots=True)
class Measurement:
    """Steps of one plan."""

    seconds: tuple[float, ...]
    """Of each step that counts, on the rank that took longest."""
    bystanders: float
    """Cores that other programs used meanwhile."""


class Bystanders:
    """Watches what programs other than the ranks do, from when it is made. Linux only."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.machine, self.own = machine_seconds(), time.process_time()

    def cores(self) -> float:
        """How many cores they have used on average. Every rank must call it, within a moment."""
        elapsed = time.perf_counter() - self.start
        machine = machine_seconds() - self.machine
        used = torch.tensor([time.process_time() - self.own, elapsed, machine])
        dist.all_reduce(used)
        ours, elapsed, machine = used.tolist()  # sums over ranks, each of which saw the machine
        return max(0.0, (machine - ours * dist.get_world_size()) / elapsed)


def machine_seconds() -> float:
    """Seconds of all cores together that were not idle since boot; 0 where nobody counts them."""
    try:
        first = Path("/proc/stat").read_text().partition("\n")[0]
    except OSError:
        return 0.0
    user, nice, system, _idle, _io, interrupts, soft, steal, *_ = map(int, first.split()[1:])
    return (user + nice + system + interrupts + soft + steal) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Run cluster by cluster, in fresh processes each, and sum up."""
    options = parse_options()
    # Memory that is freed and given back has to be faulted in again at every step; keeping it makes
    # timings steadier.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**30))
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**31 - 1))
    # A table that is wider than its terminal may wrap; in a file it must not.
    console = Console(width=None if sys.stdout.isatty() else 140, soft_wrap=True, highlight=False)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for cluster in options.clusters:
            try:
                rows += run_cluster(cluster, options, Path(folder))
            except (LaunchError, EmulationUnavailable, ValueError) as failure:
                print(failure, file=sys.stderr)
                raise SystemExit(1) from None
            console.print(table_of([row for row in rows if row.cluster == cluster]))
    if options.output:
        with Path(options.output).open("a", encoding="utf-8") as output:
            output.writelines(json.dumps(asdict(row)) + "\n" for row in rows)
    print(json.dumps(summary(rows)), flush=True)


def run_cluster(cluster: str, options: argparse.Namespace, folder: Path) -> list[Row]:
    """Start the ranks of one cluster under their quotas and bring its rows home."""
    fractions = quotas_of(cluster)
    result = folder / f"{cluster.replace(':', '-')}.jsonl"
    with EmulatedCluster.quotas(fractions) as ranks:
        run_ranks(measure_cluster, len(fractions), ranks, cluster, options, str(result))
    return [Row(**json.loads(line)) for line in result.read_text().splitlines()]


def quotas_of(cluster: str) -> tuple[float, ...]:
    """Fractions of a core for speeds like `4:2:1`; less for all where there are not enough cores.

    Raises:
        ValueError: not numbers above 0, with colons in between.
    """
    try:
        speeds = [float(speed) for speed in cluster.split(":")]
    except ValueError:
        speeds = []
    if not speeds or min(speeds) <= 0:
        raise ValueError(f"a cluster is speeds with colons in between, as 4:2:1, got {cluster!r}")
    relative = [speed / max(speeds) for speed in speeds]
    cores = len(os.sched_getaffinity(0))
    scale = min(FASTEST, FASTEST * cores / sum(relative))
    return tuple(scale * speed for speed in relative)


def measure_cluster(ranks: Ranks, cluster: str, options: argparse.Namespace, result: str) -> None:
    """Profile, save, predict, then run; every rank runs this."""
    rank = dist.get_rank()
    ranks.enter(rank)
    console = Console(quiet=rank != 0, soft_wrap=True, highlight=False)
    speeds = measured_speeds()
    console.print(
        f"\n{cluster}: quotas {' '.join(f'{quota:.2f}' for quota in quotas_of(cluster))}, measured "
        f"{' : '.join(f'{speed / min(speeds):.2f}' for speed in speeds)}"
    )
    start, watch = time.perf_counter(), Bystanders()
    profile = saved_profile(cluster, options)
    console.print(
        f"profiled in {time.perf_counter() - start:.0f} s (others used {watch.cores():.1f} cores)"
    )
    rows = []
    for stage in options.stages:
        plans = plans_for(profile, stage, options.global_batch)
        # From the saved profile alone, before any of them has run.
        predicted = {kind: predict(profile, plan) for kind, plan in plans.items()}
        for kind, measured in run_plans(plans, SIZES[options.size], options.steps):
            rows.append(
                Row.of(
                    plans[kind],
                    predicted[kind],
                    measured,
                    cluster=cluster,
                    kind=kind,
                    unprofiled=part_unprofiled(plans[kind], profile),
                    size=options.size,
                )
            )
            console.print(f"stage {stage}, {kind}: {rows[-1].in_words()}")
    if rank == 0:
        Path(result).write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))


def saved_profile(cluster: str, options: argparse.Namespace) -> ClusterProfile:
    """Measure the cluster, save what was measured, and go on with what the file says."""
    config = SIZES[options.size]
    torch.manual_seed(SEED)
    profile = profile_cluster(
        Llama(config),
        next_byte_loss,
        make_batch(config, 4),
        max_batch=options.max_batch,
        seconds=options.seconds,
        max_norm=MAX_NORM,
        stages=tuple(options.stages),
        cache=False,
        lr=LEARNING_RATE,
    )
    folder = Path(options.profiles)
    path = folder / f"profile-{options.size}-{cluster.replace(':', '-')}.json"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        profile.to_json(path)
    dist.barrier()
    return ClusterProfile.from_json(path)


def make_batch(config: LlamaConfig, samples: int) -> dict[str, Tensor]:
    """Any bytes: what they say changes nothing in how long they take."""
    generator = torch.Generator().manual_seed(SEED)
    text = torch.randint(config.vocabulary, (samples, config.context + 1), generator=generator)
    return {"input": text[:, :-1].contiguous(), "target": text[:, 1:].contiguous()}


def run_plans(
    plans: dict[str, Plan], config: LlamaConfig, steps: int
) -> Iterator[tuple[str, Measurement]]:
    """Run plans of one stage, one after another on one model. Every rank must exhaust it.

    Yields:
        Each plan's name and measurement.
    """
    torch.manual_seed(SEED)
    optimizer = HeteroZeroOptimizer(
        Llama(config), torch.optim.AdamW, plan=next(iter(plans.values())), lr=LEARNING_RATE
    )
    for kind, plan in plans.items():
        optimizer.apply_plan(plan)
        yield kind, run_steps(optimizer, plan, config, steps)
    optimizer.release()


def run_steps(
    optimizer: HeteroZeroOptimizer, plan: Plan, config: LlamaConfig, steps: int
) -> Measurement:
    """Steps as training takes them, one after another. Every rank must call it."""
    samples = plan.samples(dist.get_rank())
    batch = make_batch(config, samples) if samples else None
    seconds = []
    for step in range(steps):
        if step == WARMUP_STEPS:
            watch = Bystanders()
        start = time.perf_counter()
        optimizer.train_step(next_byte_loss, batch, max_norm=MAX_NORM)
        seconds.append(time.perf_counter() - start)
    bystanders = watch.cores()
    slowest = torch.tensor(seconds[WARMUP_STEPS:], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return Measurement(tuple(slowest.tolist()), bystanders)


# Plans


def even(batch: int, speeds: Speeds, caps: Sequence[int], stage: int) -> Plan:
    """As DDP and FSDP do it."""
    return Plan.even(len(speeds), batch, min(caps), stage)


def even_in_small_passes(batch: int, speeds: Speeds, caps: Sequence[int], stage: int) -> Plan:
    """Many meetings where every pass is one."""
    return Plan.even(len(speeds), batch, min(3, *caps), stage)


def proportional(batch: int, speeds: Speeds, caps: Sequence[int], stage: int) -> Plan:
    """All ranks finish together."""
    return Plan.proportional(speeds, batch, stage, caps)


def proportional_in_small_passes(
    batch: int, speeds: Speeds, caps: Sequence[int], stage: int
) -> Plan:
    """All ranks finish together, in several passes."""
    return Plan.proportional(speeds, batch, stage, [min(5, cap) for cap in caps])


def shares_by_speed(batch: int, speeds: Speeds, caps: Sequence[int], stage: int) -> Plan:
    """Who is fast owns much of the state too."""
    shares = [speed / sum(speeds) for speed in speeds]
    return Plan.proportional(speeds, batch, stage, caps, shares=shares)


def all_owned_by_the_fastest(batch: int, speeds: Speeds, caps: Sequence[int], stage: int) -> Plan:
    """The other ranks own nothing."""
    fastest = speeds.index(max(speeds))
    shares = [float(rank == fastest) for rank in range(len(speeds))]
    return Plan.proportional(speeds, batch, stage, caps, shares=shares)


def slowest_without_samples(batch: int, speeds: Speeds, caps: Sequence[int], stage: int) -> Plan:
    """The slowest rank only owns its share."""
    slowest = len(speeds) - 1 - speeds[::-1].index(min(speeds))
    working = [speed * (rank != slowest) for rank, speed in enumerate(speeds)]
    return Plan.proportional(working, batch, stage, caps)


def too_much_for_the_slowest(batch: int, speeds: Speeds, caps: Sequence[int], stage: int) -> Plan:
    """Between even and proportional: the fast ranks wait a while."""
    flattened = [speed**0.5 for speed in speeds]
    return Plan.proportional(flattened, batch, stage, [min(7, cap) for cap in caps])


MAKERS: tuple[Maker, ...] = (
    even,
    even_in_small_passes,
    proportional,
    proportional_in_small_passes,
    shares_by_speed,
    all_owned_by_the_fastest,
    slowest_without_samples,
    too_much_for_the_slowest,
)


def plans_for(profile: ClusterProfile, stage: int, global_batch: int) -> dict[str, Plan]:
    """One plan of each kind, by name; half of their micro-batches have sizes without a point.

    Global batches differ from plan to plan: each is the one that brings the mean over plans of the
    part of such micro-batches nearest to a half.
    """
    speeds = [device.max_batch / device.seconds(device.max_batch) for device in profile.devices]
    caps = [device.max_batch for device in profile.devices]
    chosen: dict[str, Plan] = {}
    parts: list[float] = []
    for make in MAKERS:
        offered = [
            make(batch, speeds, caps, stage)
            for batch in range(global_batch, global_batch // 2 - 1, -1)
        ]
        best = min(
            offered,
            key=lambda plan: abs(statistics.mean([*parts, part_unprofiled(plan, profile)]) - 0.5),
        )
        chosen[make.__name__.replace("_", " ")] = best
        parts.append(part_unprofiled(best, profile))
    return chosen


def part_unprofiled(plan: Plan, profile: ClusterProfile) -> float:
    """Part of the passes with samples whose size is not among their rank's measured points."""
    measured = [{point.batch for point in device.points} for device in profile.devices]
    passes = [
        size in points
        for points, sizes in zip(measured, plan.micro_batches, strict=True)
        for size in sizes
        if size
    ]
    return passes.count(False) / len(passes)


# Results


def summary(rows: Sequence[Row]) -> dict[str, object]:
    """Median and p90 of the errors' sizes: over all plans, by stage, by cluster."""
    stages = sorted({row.stage for row in rows})
    clusters = list(dict.fromkeys(row.cluster for row in rows))
    return {
        "plans": len(rows),
        **errors(rows),
        "unprofiled": round(statistics.mean(row.unprofiled for row in rows), 3),
        "by_stage": {str(s): errors([row for row in rows if row.stage == s]) for s in stages},
        "by_cluster": {c: errors([row for row in rows if row.cluster == c]) for c in clusters},
    }


def errors(rows: Sequence[Row]) -> dict[str, float]:
    """How far predictions are off, as parts of what was measured."""
    sizes = sorted(abs(row.error) for row in rows)
    p90 = statistics.quantiles(sizes, n=10, method="inclusive")[8] if len(sizes) > 1 else sizes[0]
    return {
        "median_error": round(statistics.median(sizes), 4),
        "p90_error": round(p90, 4),
        "worst_error": round(sizes[-1], 4),
    }


def table_of(rows: Sequence[Row]) -> Table:
    """The rows of one cluster, for people."""
    over_all = errors(rows)
    table = Table(
        title=f"cluster {rows[0].cluster}, model {rows[0].size}: median error "
        f"{100 * over_all['median_error']:.1f} %, p90 {100 * over_all['p90_error']:.1f} %",
        title_justify="left",
    )
    for heading in ("stage", "plan", "samples", "passes", "new sizes", "predicted s"):
        table.add_column(heading, justify="left" if heading == "plan" else "right", no_wrap=True)
    for heading in ("p20 s", "p50 s", "p80 s", "error", "others"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        seconds = (row.predicted_seconds, row.p20_seconds, row.p50_seconds, row.p80_seconds)
        table.add_row(
            str(row.stage),
            row.plan,
            " ".join(str(sum(passes)) for passes in row.micro_batches),
            str(max(map(len, row.micro_batches))),
            f"{100 * row.unprofiled:.0f} %",
            *(f"{value:.3f}" for value in seconds),
            f"{100 * row.error:+.1f} %",
            f"{row.bystanders:.1f}",
        )
    return table


def commit() -> str:
    """The commit that is checked out."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    return found.stdout.strip() or "unknown"


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Predict steps from a saved profile, run them under CPU quotas, and compare.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--clusters", nargs="+", default=list(CLUSTERS), help="relative speeds")
    parser.add_argument("--stages", nargs="+", type=int, choices=range(4), default=[0, 1, 2, 3])
    parser.add_argument("--size", choices=tuple(SIZES), default="demo", help="of the model")
    parser.add_argument("--global-batch", type=int, default=32, help="at most; plans differ")
    parser.add_argument("--max-batch", type=int, default=16, help="largest that is profiled")
    parser.add_argument("--seconds", type=float, help="for each profile (60, quick: 20)")
    parser.add_argument("--steps", type=int, help="of each plan (10, quick: 6)")
    parser.add_argument("--profiles", default="build/profiles", metavar="FOLDER", help=" ")
    parser.add_argument("--output", metavar="FILE", help="append one JSON row per plan")
    parser.add_argument("--quick", action="store_true", help="fewer steps: a first impression")
    options = parser.parse_args()
    options.seconds = options.seconds or (20.0 if options.quick else 60.0)
    options.steps = options.steps or (6 if options.quick else 10)
    if options.steps < WARMUP_STEPS + 2:
        parser.error(f"--steps must be at least {WARMUP_STEPS + 2}, got {options.steps}")
    if options.global_batch < 12:
        parser.error(f"--global-batch must be at least 12, got {options.global_batch}")
    return options


if __name__ == "__main__":
    main()
