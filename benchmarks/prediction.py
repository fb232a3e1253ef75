"""Compare predicted and measured step times on ranks of unequal speed.

For each cluster of CPU ranks under quotas and each model: measure a profile and save it. From the
saved file, for each stage, search a plan, create other plans of the same global batch (even and
proportional, in one and in several passes, with even and uneven shares, with a rank without samples
and a rank without a shard), and predict all of them with the closed form and with the simulator.
Then run them in turns. About half of the micro-batches have sizes without a point in the profile.
The cores that other programs use meanwhile are reported: they share caches and the memory bus.

Step times are reported as measured, and corrected for changes of the ranks' speed since profiling
(`prediction_yardstick.py`).

Regret is the seconds per sample of the chosen plan over those of the fastest other plan, minus 1.

    python benchmarks/prediction.py --output rows.jsonl
    python benchmarks/prediction.py --clusters 2:1 --models encoder --stages 0 3
    python benchmarks/prediction.py --show benchmarks/results/prediction.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from emulation import EmulationUnavailable, Ranks, cpu_quotas, measured_speeds, quotas_of
from prediction_models import SUBJECTS, Batch, Subject
from prediction_plans import part_unprofiled, plans_for
from prediction_report import (
    CLUSTER_COLUMNS,
    COLUMNS,
    REGRET_COLUMNS,
    Measurement,
    by_cluster,
    in_words,
    regrets,
    row_of,
)
from prediction_yardstick import Turn, Yardstick
from rich.console import Console
from rows import Kind, Row, at_least, new_console, new_parser, report, table_of

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from launch import LaunchError, run_ranks

from poplar import HeteroZeroOptimizer, Plan, predict, profile_cluster, simulate
from poplar.planner.what_if import with_slower_devices
from poplar.values.profile import ClusterProfile

LEARNING_RATE = 1e-4
CLUSTERS = ("2:1", "4:2:1", "3:3:1:1")
FASTEST = 0.8
"""Quota of the fastest rank, in cores. The rest is for other programs of the machine."""
FIRST_STEPS = 2
"""Steps before the first turn that are not timed: allocations, recording of the order."""
WARMUP_STEPS = 1
"""Steps of each turn that are not timed, because shards have just moved."""
MAX_NORM = 1.0
"""Gradient clipping in the profile and in the timed steps."""


class OtherPrograms:
    """Processor time of programs other than the ranks, since its creation. Linux only."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.machine, self.own = machine_seconds(), time.process_time()

    def cores(self) -> float:
        """Average number of cores that they used. Ranks must call it at the same time."""
        elapsed = time.perf_counter() - self.start
        machine = machine_seconds() - self.machine
        used = torch.tensor([time.process_time() - self.own, elapsed, machine])
        dist.all_reduce(used)
        ours, elapsed, machine = used.tolist()  # sums over ranks
        return max(0.0, (machine - ours * dist.get_world_size()) / elapsed)


def machine_seconds() -> float:
    """Busy seconds of all cores since boot.

    Without programs of low priority, such as those that keep cores busy (`idle_states.py`).
    """
    first = Path("/proc/stat").read_text().partition("\n")[0]
    user, _nice, system, _idle, _io, interrupts, soft, steal, *_ = map(int, first.split()[1:])
    return (user + system + interrupts + soft + steal) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Run every pair of cluster and model in new processes, and print a summary."""
    options = parse_options()
    # Freed memory that is returned to the system causes page faults in every step.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**30))
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**31 - 1))
    rows = report(
        options,
        measure(options),
        Kind("prediction", COLUMNS),
        expected=(LaunchError, EmulationUnavailable, ValueError),
    )
    console = new_console()
    console.print(table_of(by_cluster(rows), CLUSTER_COLUMNS))
    title = "chosen plan over the best other one"
    console.print(table_of(regrets(rows), REGRET_COLUMNS, title))
    print(in_words(regrets(rows)))


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """The rows of all pairs of cluster and model."""
    for cluster, model in pairs(options.clusters, options.models, quick=options.quick):
        quotas = quotas_of(speeds_of(cluster), FASTEST)
        with cpu_quotas(quotas) as ranks:
            yield from run_ranks(measure_pair, len(quotas), ranks, cluster, model, options)


def pairs(clusters: Sequence[str], models: Sequence[str], *, quick: bool) -> list[tuple[str, str]]:
    """All pairs of cluster and model; if quick, each of them about once."""
    if not quick:
        return list(itertools.product(clusters, models))
    count = max(len(clusters), len(models))
    return list(
        itertools.islice(
            zip(itertools.cycle(clusters), itertools.cycle(models), strict=False), count
        )
    )


def speeds_of(cluster: str) -> list[float]:
    """`4:2:1` as numbers."""
    return [float(speed) for speed in cluster.split(":")]


def valid_cluster(text: str) -> str:
    """A type of options: relative speeds such as `4:2:1`."""
    try:
        valid = all(0 < speed < math.inf for speed in speeds_of(text))
    except ValueError:
        valid = False
    if not valid:
        raise argparse.ArgumentTypeError(f"must be speeds and colons, such as 4:2:1, got {text!r}")
    return text


def measure_pair(ranks: Ranks, cluster: str, model: str, options: argparse.Namespace) -> list[Row]:
    """Profile, save, search and predict, then run the plans. Collective."""
    rank = dist.get_rank()
    ranks.enter(rank)
    console = Console(quiet=rank != 0, soft_wrap=True, highlight=False)
    speeds = measured_speeds()
    console.print(
        f"\n{cluster}, {model}: measured "
        + " : ".join(f"{speed / min(speeds):.2f}" for speed in speeds)
    )
    start, watch = time.perf_counter(), OtherPrograms()
    profile = saved_profile(cluster, model, options)
    console.print(
        f"profiled in {time.perf_counter() - start:.0f} s (others used {watch.cores():.1f} cores)"
    )
    rows = []
    for stage in options.stages:
        start = time.perf_counter()
        plans = plans_for(profile, stage, options.global_batch)
        # From the saved profile only, before any plan has run.
        predicted = {kind: predict(profile, plan) for kind, plan in plans.items()}
        simulated = {kind: simulate(profile, plan).step_seconds for kind, plan in plans.items()}
        measured = run_in_turns(SUBJECTS[model], profile, plans, options.rounds, options.steps)
        rows += [
            row_of(
                plan,
                predicted[kind],
                simulated[kind],
                measured[kind],
                lambda slowness, own=plan: expected_seconds(profile, own, slowness),
                cluster=cluster,
                model=model,
                plan=kind,
                unprofiled=part_unprofiled(plan, profile),
            )
            for kind, plan in plans.items()
        ]
        console.print(f"stage {stage}: {len(plans)} plans in {time.perf_counter() - start:.0f} s")
    return rows


def expected_seconds(profile: ClusterProfile, plan: Plan, slowness: Sequence[float]) -> float:
    """Predicted step time if each rank is slower than in the profile by its factor."""
    return predict(with_slower_devices(profile, slowness), plan).step_seconds


def saved_profile(cluster: str, model: str, options: argparse.Namespace) -> ClusterProfile:
    """Measure and save a profile; return what was read back from the file."""
    subject = SUBJECTS[model]
    profile = profile_cluster(
        subject.model(),
        subject.loss,
        subject.batch(4),
        max_batch=options.max_batch,
        seconds=options.seconds,
        max_norm=MAX_NORM,
        stages=tuple(options.stages),
        cache=False,
        lr=LEARNING_RATE,
    )
    folder = Path(options.profiles)
    path = folder / f"profile-{model}-{cluster.replace(':', '-')}.json"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        profile.to_json(path)
    dist.barrier()
    return ClusterProfile.from_json(path)


def run_in_turns(
    subject: Subject,
    profile: ClusterProfile,
    plans: Mapping[str, Plan],
    rounds: int,
    steps: int,
) -> dict[str, Measurement]:
    """Run plans of one stage in turns, `steps` steps of each in every round. Collective.

    In turns, because the speed of a machine drifts by as much as good plans differ.
    """
    optimizer = HeteroZeroOptimizer(
        subject.model(), torch.optim.AdamW, plan=next(iter(plans.values())), lr=LEARNING_RATE
    )
    samples = {kind: plan.samples(dist.get_rank()) for kind, plan in plans.items()}
    batches = {kind: subject.batch(count) if count else None for kind, count in samples.items()}
    yardstick = Yardstick(subject, profile.devices[dist.get_rank()])
    first = next(iter(batches.values()))
    for _ in range(FIRST_STEPS):
        optimizer.train_step(subject.loss, first, max_norm=MAX_NORM)
    turns: dict[str, list[Turn]] = {kind: [] for kind in plans}
    others: dict[str, list[float]] = {kind: [] for kind in plans}
    for _ in range(rounds):
        for kind, plan in plans.items():
            optimizer.apply_plan(plan)
            for _ in range(WARMUP_STEPS):
                optimizer.train_step(subject.loss, batches[kind], max_norm=MAX_NORM)
            watch = OtherPrograms()
            turns[kind].append(take_turn(optimizer, subject, batches[kind], yardstick, steps))
            others[kind].append(watch.cores())
    optimizer.release()
    return {kind: Measurement(tuple(turns[kind]), sum(others[kind]) / rounds) for kind in plans}


def take_turn(
    optimizer: HeteroZeroOptimizer,
    subject: Subject,
    batch: Batch | None,
    yardstick: Yardstick,
    steps: int,
) -> Turn:
    """Time steps between two measurements of the yardstick. Collective."""
    dist.barrier()
    before = yardstick.slowness()
    dist.barrier()
    began = time.perf_counter()  # all processes of a machine share this clock
    for _ in range(steps):
        optimizer.train_step(subject.loss, batch, max_norm=MAX_NORM)
    ended = time.perf_counter()
    dist.barrier()
    mine = (before + yardstick.slowness()) / 2
    latest = torch.tensor([began, ended], dtype=torch.float64)
    dist.all_reduce(latest, op=dist.ReduceOp.MAX)
    slowness = [0.0] * dist.get_world_size()
    dist.all_gather_object(slowness, mine)
    began, ended = latest.tolist()
    return Turn((ended - began) / steps, tuple(slowness))


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__, quick="fewer steps and fewer pairs of model and cluster")
    several = {"nargs": "+"}
    parser.add_argument(
        "--clusters", **several, type=valid_cluster, default=list(CLUSTERS), help="relative speeds"
    )
    parser.add_argument(
        "--models", **several, choices=SUBJECTS, default=list(SUBJECTS), help="models"
    )
    parser.add_argument(
        "--stages", **several, type=int, choices=range(4), default=[0, 1, 2, 3], help="stages"
    )
    parser.add_argument(
        "--global-batch", type=at_least(12), default=32, help="the largest of a configuration"
    )
    parser.add_argument("--max-batch", type=at_least(1), default=16, help="largest in a profile")
    parser.add_argument("--seconds", type=at_least(0.1), help="budget of a profile (40, quick: 20)")
    parser.add_argument("--rounds", type=at_least(2), help="turns of each plan (3, quick: 2)")
    parser.add_argument("--steps", type=at_least(1), help="timed steps of a turn (3, quick: 2)")
    parser.add_argument("--profiles", default="build/profiles", metavar="FOLDER", help="profiles")
    options = parser.parse_args(arguments)
    defaults = {"seconds": (40.0, 20.0), "rounds": (3, 2), "steps": (3, 2)}
    for name, (full, quick) in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else full)
    return options


if __name__ == "__main__":
    main()
