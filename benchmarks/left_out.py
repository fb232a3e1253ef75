"""Ranks behind slow links: what plans that leave them out gain, and what a left-out rank costs.

CPU ranks under quotas, of which the last one is on a host of its own behind a link of a given rate,
train a Llama. Jobs train in turns: the plan with all ranks, the plan that leaves the last rank out,
and twice that plan on the other ranks alone. How much the latter two differ shows what differences
are noise.

`--recovers` trains one job, in which the quota of the last rank is divided by `SLOWER` for a while:
`follow_drift` leaves the rank out, and takes it back. The same steps run with `leave_out="never"`.

    python benchmarks/left_out.py --quick
    python benchmarks/left_out.py --recovers --stages 1
    python benchmarks/left_out.py --stages 0 1 2 3 --output rows.jsonl
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import torch
import torch.distributed as dist
from drift import CONTEXT, LEARNING_RATE, part_of, profiled, whole_batch
from emulation import Ranks, cpu_quotas
from launch import run_ranks
from llama import SIZES, Llama, LlamaConfig, next_byte_loss
from network import Hosts, emulated_network
from rows import Column, Kind, Row, Target, new_parser, report

from poplar import HeteroZeroOptimizer, Plan, search
from poplar.drift import idle_speed
from poplar.planner.search import Choice
from poplar.values.profile import ClusterProfile

MEASURED, RECOVERED = "left_out", "left_out_recovered"
QUOTAS = (0.5, 0.5, 0.5)
HOST_OF = (0, 0, 1)
"""By rank."""
FAR = len(QUOTAS) - 1
LINK_BITS = 1e8
"""Per second, of each host."""
GLOBAL_BATCH = 12
FIRST_STEPS, TURN_STEPS = 4, 20
"""Steps of a turn that are not timed, and those that are."""
PORT = 29517
MOST_COST = 1.01
"""Seconds of a step with a rank left out over those without that rank."""
SLOWER, FASTER_LINK = 5.0, 1e9
"""With `--recovers`: of the last rank, and bits per second of each host."""
SLOW_AT, FAST_AT, LAST = 60, 260, 2000
"""Steps from which on it is slow, and fast again, and the last one at the latest."""
REST_SECONDS, AFTER, SETTLED = 10.0, 40, 20
"""Between two measurements of the rank; steps after it is back; steps after a change that are not
timed."""
MEASURED_COLUMNS = (
    Column("stage", "stage"),
    Column("link", lambda row: row["link_bits_per_s"] / 1e6, "{:g} Mbit/s"),
    Column("step with all", "all_seconds", "{:.4f} s"),
    Column("left out", "left_out_seconds", "{:.4f} s"),
    Column("without the rank", "alone_seconds", "{:.4f} s"),
    Column("gain", "gain", "{:.2f}x"),
    Column("predicted for its own choice", "predicted_gain", "{:.2f}x"),
    Column("cost", lambda row: tuple(row["cost"]), "{:.4f} ({:.4f} to {:.4f})"),
    Column(
        "noise",
        lambda row: tuple(row.get("of_the_same_job") or ()) or None,
        "{:.4f} ({:.4f} to {:.4f})",
    ),
)
RECOVERED_COLUMNS = (
    Column("stage", "stage"),
    Column("step before", "before", "{:.4f} s"),
    Column("slow, all ranks", "slow_all", "{:.4f} s"),
    Column("slow, left out", "slow_left_out", "{:.4f} s"),
    Column("gain", "gain", "{:.2f}x"),
    Column("steps to leave", "steps_to_leave"),
    Column("seconds to come back", "seconds_to_return", "{:.1f}"),
    Column("step after", "after", "{:.4f} s"),
    Column("loss difference", "loss_difference", "{:.1e}"),
)


def main() -> None:
    """Measure, or show saved rows."""
    options = parse_options()
    os.environ["OMP_NUM_THREADS"] = "1"  # more threads would share the rank's quota
    rows = report(
        options,
        measure_all(options),
        Kind(MEASURED, MEASURED_COLUMNS, measured_targets),
        Kind(RECOVERED, RECOVERED_COLUMNS, recovered_targets),
    )
    for line in [line for row in rows for line in row.get("messages") or ()]:
        print(f"  {line}")


def measure_all(options: argparse.Namespace) -> Iterator[Row]:
    """The rows that the options ask for."""
    if options.recovers:
        yield from (measure(stage, 1, quick=True, recovers=True) for stage in options.stages)
    else:
        yield from (measure(stage, options.rounds, quick=options.quick) for stage in options.stages)


def measure(stage: int, rounds: int, *, quick: bool, recovers: bool = False) -> Row:
    """One row of real ranks."""
    bits = FASTER_LINK if recovers else LINK_BITS
    with (
        emulated_network(hosts=max(HOST_OF) + 1, bits_per_second=bits) as hosts,
        cpu_quotas(QUOTAS) as ranks,
    ):
        given = (ranks, hosts, stage, 0 if recovers else rounds, quick)
        figures = run_ranks(train_all, len(QUOTAS), *given, before=partial(enter_host, hosts))
    case = {"stage": stage, "quotas": QUOTAS, "hosts": HOST_OF, "link_bits_per_s": bits}
    name = RECOVERED if recovers else MEASURED
    return Row.of(name, {**case, "quick": quick, "rounds": rounds}, figures)


def enter_host(hosts: Hosts, rank: int) -> None:
    """Move a rank to its host."""
    hosts.enter(HOST_OF[rank])


def train_all(ranks: Ranks, hosts: Hosts, stage: int, rounds: int, quick: bool) -> dict[str, Any]:
    """Plan, and train the three jobs in turns. Collective; the first rank has the figures.

    No rounds: train one job whose last rank is slow for a while.
    """
    torch.set_num_threads(1)
    rank = dist.get_rank()
    # As torchrun does it: the store is a server that the first host runs.
    dist.destroy_process_group()
    address = f"tcp://{hosts.address(HOST_OF[0])}:{PORT}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=len(QUOTAS))
    near = dist.new_group([each for each in range(len(QUOTAS)) if each != FAR])
    ranks.enter(rank)
    config = replace(SIZES["tiny" if quick else "demo"], context=CONTEXT)
    profile = profiled(config, stage, GLOBAL_BATCH, seconds=5 if quick else 12)
    request: dict[str, Any] = {"global_batch": GLOBAL_BATCH, "stages": (stage,)}
    all_ranks = search(profile, **request, leave_out="never")
    if not rounds:
        given = (ranks, profile, all_ranks, config)
        figures = recovered_figures(*(slowed(*given, leave_out=one) for one in ("never", "auto")))
        dist.barrier()
        return figures
    chosen = search(profile, **request, leave_out="auto")
    predicted = [plan.prediction["step_seconds"] for plan in (all_ranks, chosen)]
    left = chosen if chosen.left_out == (FAR,) else without_far(all_ranks)
    jobs = {"all": (all_ranks, None), "left_out": (left, None)}
    if rank != FAR:
        jobs["alone"] = jobs["again"] = (left.of_active_ranks(), near)
    taken = take_turns(jobs, config, rounds)
    dist.barrier()
    if rank == FAR:  # it has not trained the jobs of the others
        return {}
    return {
        "chosen_left_out": list(chosen.left_out),
        "batches": {name: plan.micro_batches for name, (plan, _) in jobs.items()},
        "predicted_gain": predicted[0] / predicted[1],
        **compared(taken),
    }


def slowed(
    ranks: Ranks,
    profile: ClusterProfile,
    plan: Plan,
    config: LlamaConfig,
    *,
    leave_out: Choice,
) -> dict[str, Any]:
    """Train while the last rank becomes slow and fast again. Collective."""
    torch.manual_seed(0)
    idle_speed.REST_SECONDS = REST_SECONDS
    rank = dist.get_rank()
    optimizer = HeteroZeroOptimizer(Llama(config), torch.optim.AdamW, plan=plan, lr=LEARNING_RATE)
    given: dict[str, Any] = {"replan": "auto", "steps": 100_000, "leave_out": leave_out}
    follower = optimizer.follow_drift(profile, **given)
    seconds, losses, left = [], [], []
    for step in range(FAST_AT if leave_out == "never" else LAST):
        if step in (SLOW_AT, FAST_AT) and rank == 0:
            ranks.change(FAR, QUOTAS[FAR] / (SLOWER if step == SLOW_AT else 1.0))
        current = optimizer.plan
        assert current is not None
        left.append(bool(current.left_out))
        if step > FAST_AT and not any(left[-AFTER:]):
            break
        part, began = None, time.perf_counter()
        if optimizer.is_active:
            part = part_of(whole_batch(step, GLOBAL_BATCH), current)
        losses.append(optimizer.train_step(next_byte_loss, part).loss)
        seconds.append(time.perf_counter() - began)
    if leave_out == "never" and rank == 0:
        ranks.change(FAR, QUOTAS[FAR])
    optimizer.release()
    return {"seconds": seconds, "losses": losses, "left": left, "messages": follower.messages}


def recovered_figures(fixed: dict[str, Any], followed: dict[str, Any]) -> dict[str, Any]:
    """The figures of two runs of the same steps."""
    seconds, left = followed["seconds"], followed["left"]
    leaves = left.index(True, SLOW_AT) if True in left[SLOW_AT:] else FAST_AT
    returns = left.index(False, FAST_AT) if False in left[FAST_AT:] else len(seconds)
    slow = median(fixed["seconds"][SLOW_AT + SETTLED : FAST_AT])
    without = median(seconds[min(leaves + SETTLED, FAST_AT - 1) : FAST_AT])
    pairs = zip(fixed["losses"], followed["losses"], strict=False)
    return {
        "before": median(seconds[SETTLED:SLOW_AT]),
        "slow_all": slow,
        "slow_left_out": without,
        "gain": slow / without,
        "steps_to_leave": leaves - SLOW_AT,
        "seconds_to_return": sum(seconds[FAST_AT:returns]),
        "after": median(seconds[returns + SETTLED // 2 :] or [math.nan]),
        "loss_difference": max(abs(one - other) / other for one, other in pairs),
        "messages": followed["messages"],
    }


def recovered_targets(rows: Sequence[Row]) -> Iterator[Target]:
    """It pays to leave the slow rank out, it comes back, and losses do not change."""
    for row in rows:
        case = f"stage {row['stage']}, recovers"
        yield Target(case=case, what="gain while slow", value=row["gain"], wanted=1.0)
        value, most = row["after"] / row["before"], 1.1
        yield Target(case=case, what="step after", value=value, wanted=most, at_most=True)
        value = row["loss_difference"]
        yield Target(case=case, what="loss difference", value=value, wanted=1e-4, at_most=True)


def without_far(plan: Plan) -> Plan:
    """A plan of the same stage and global batch on the other ranks, which are equally fast."""
    even = Plan.even(FAR, plan.global_batch, plan.global_batch, stage=plan.stage)
    return even.beside((FAR,))


def take_turns(
    jobs: Mapping[str, tuple[Plan, dist.ProcessGroup | None]],
    config: LlamaConfig,
    rounds: int,
) -> dict[str, list[float]]:
    """Seconds of a step of each job in each round. Collective.

    Two equal jobs in one process differ by a percent, for as long as they live: their memory lies
    elsewhere. So each round builds them again, in both orders, and runs them in both orders.
    """
    orders = list(permutations(("left_out", "alone", "again")))
    taken: dict[str, list[float]] = {name: [] for name in ("all", *orders[0])}
    for number in range(rounds):
        # The plan with all ranks takes long, and is not compared as finely.
        also = ["all"] if number % 8 == 0 else []
        order = [*orders[number % len(orders)], *also]
        trained = {}
        for name in [*orders[number // 2 % len(orders)], *also]:
            dist.barrier()
            if name in jobs:
                plan, group = jobs[name]
                given: dict[str, Any] = {"plan": plan, "process_group": group, "lr": LEARNING_RATE}
                trained[name] = HeteroZeroOptimizer(Llama(config), torch.optim.AdamW, **given)
        for name in order:
            dist.barrier()
            if name in jobs:
                taken[name].append(take_turn(trained[name]))
        for optimizer in trained.values():
            optimizer.release()
    return taken


def take_turn(optimizer: HeteroZeroOptimizer) -> float:
    """Seconds of a step, over the steps of one turn."""
    plan, part = optimizer.plan, None
    assert plan is not None
    if optimizer.is_active:
        part = part_of(whole_batch(0, GLOBAL_BATCH), plan)
    for step in range(FIRST_STEPS + TURN_STEPS):
        if step == FIRST_STEPS:
            began = time.perf_counter()
        optimizer.train_step(next_byte_loss, part)
    return (time.perf_counter() - began) / TURN_STEPS


def compared(taken: dict[str, list[float]]) -> dict[str, Any]:
    """The figures of all rounds; ratios with their 90 % intervals."""
    alone = list(zip(taken["alone"], taken["again"], strict=True))
    cost = [one / fmean(both) for one, both in zip(taken["left_out"], alone, strict=True)]
    seconds = {name: median(each) if each else None for name, each in taken.items()}
    return {
        **{f"{name}_seconds": value for name, value in seconds.items()},
        "gain": seconds["all"] / seconds["left_out"] if seconds["all"] else None,
        "cost": with_interval(cost),
        "of_the_same_job": with_interval([second / first for first, second in alone]),
    }


def with_interval(ratios: Sequence[float]) -> list[float]:
    """The median, and its 90 % interval."""
    draw = random.Random(0)
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return [median(ratios), medians[len(medians) // 20], medians[-len(medians) // 20]]


def measured_targets(rows: Sequence[Row]) -> Iterator[Target]:
    """A rank that is left out costs nothing."""
    for row in rows:
        case = f"stage {row['stage']}"
        value = row["cost"][0]
        yield Target(case=case, what="cost", value=value, wanted=MOST_COST, at_most=True)
        yield Target(case=case, what="gain over all ranks", value=row["gain"], wanted=1.0)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    quick = "a tiny model at stage 1"
    parser = new_parser(__doc__, rounds=24, quick=quick)
    parser.add_argument("--stages", type=int, choices=range(4), default=None, nargs="+")
    parser.add_argument("--recovers", action="store_true", help="a rank is slow for a while")
    options = parser.parse_args(arguments)
    options.stages = options.stages or ([1] if options.quick else [0, 1, 2, 3])
    return options


if __name__ == "__main__":
    main()
