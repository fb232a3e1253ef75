"""Plans similar to the chosen one, and their measured times: is the chosen plan the fastest?

A similar plan has a few samples on another rank, another number of passes, or other shares. All of
them have the same stage and fit the ranks' memory, so one optimizer runs them by `apply_plan`.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

import poplar
from poplar import ClusterProfile, HeteroZeroOptimizer, Plan
from poplar.values.plan import FIRST_STAGE_SYNCHRONIZING_EVERY_PASS, spread

STEPS_OF_A_TURN = 2
FARTHEST_MOVE = 4
"""Samples."""
SHIFTED_SHARES = (0.05, 0.1)
"""Fractions of the training state that move from one rank to another."""


def similar_plans(plan: Plan, profile: ClusterProfile, count: int) -> list[Plan]:
    """Plans similar to `plan`, the most similar first; the same on every rank.

    Args:
        plan: the chosen plan; it is not in the result.
        profile: limits memory and batch sizes.
        count: the largest number of plans.
    """
    kinds = [_moves(plan), _cuts(plan), _shares(plan)]
    seen = {plan}
    found: list[Plan] = []
    while kinds and len(found) < count:
        for kind in list(kinds):
            near = next((p for p in kind if p not in seen and _fits(profile, p)), None)
            if near is None:
                kinds.remove(kind)
            elif len(found) < count:
                seen.add(near)
                found.append(near)
    return found


def moved(plan: Plan, source: int, target: int, samples: int = 1) -> Plan | None:
    """The plan with samples moved from the longest pass of `source` to the shortest of `target`.

    At stages 2 and 3, which synchronize at every pass, both ranks change in the same pass: the
    longest of `source`. None if it has fewer samples, or a rank has no passes.
    """
    passes = [list(sizes) for sizes in plan.micro_batches]
    if not passes[source] or not passes[target]:
        return None
    longest = max(range(len(passes[source])), key=passes[source].__getitem__)
    if plan.stage >= FIRST_STAGE_SYNCHRONIZING_EVERY_PASS:
        receiving = longest
    else:
        receiving = min(range(len(passes[target])), key=passes[target].__getitem__)
    if passes[source][longest] < samples:
        return None
    passes[source][longest] -= samples
    passes[target][receiving] += samples
    micro_batches = tuple(tuple(sizes) for sizes in passes)
    return dataclasses.replace(plan, micro_batches=micro_batches, prediction=None)


def recut(plan: Plan, ranks: Sequence[int], passes: int) -> Plan:
    """The plan with the samples of these ranks in `passes` passes of nearly equal size."""
    micro_batches = tuple(
        spread(sum(sizes), passes) if rank in ranks else sizes
        for rank, sizes in enumerate(plan.micro_batches)
    )
    return dataclasses.replace(plan, micro_batches=micro_batches, prediction=None)


def measure_in_turns(
    optimizer: HeteroZeroOptimizer,
    plans: Sequence[Plan],
    one_step: Callable[[Plan], None],
    *,
    rounds: int,
    after_turn: Callable[[str], None],
) -> list[float]:
    """Median seconds per step of the slowest rank under each plan. Every rank must call it.

    Args:
        optimizer: runs all plans.
        plans: plans of its stage.
        one_step: runs a step under the given plan, which is already applied.
        rounds: turns of each plan; every other round is in reverse order.
        after_turn: called with a message after each turn.
    """
    seconds: list[list[float]] = [[] for _ in plans]
    for turn in range(rounds):
        order = range(len(plans)) if turn % 2 == 0 else reversed(range(len(plans)))
        for number in order:
            plan, before = plans[number], optimizer.plan
            optimizer.apply_plan(plan)
            if before is None or before.shares != plan.shares or turn == 0:
                one_step(plan)  # not timed: state was moved, or buffers are new
            dist.barrier()
            for _ in range(STEPS_OF_A_TURN):
                start = time.perf_counter()
                one_step(plan)
                seconds[number].append(time.perf_counter() - start)
            after_turn(f"plan {number + 1} of {len(plans)}")
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [statistics.median(own) for own in slowest.tolist()]


def own_part(plan: Plan, rank: int, collate: Callable[[range], Any]) -> Any:
    """This rank's part of the global batch of samples 0 to `plan.global_batch`."""
    start = plan.offset(rank)
    # Like the sampler: a rank without samples gets one, which the optimizer drops.
    return collate(range(start, start + max(1, plan.samples(rank))))


def _moves(plan: Plan) -> Iterator[Plan]:
    """A few samples move from one rank to another."""
    pairs = list(itertools.permutations(range(plan.world_size), 2))
    for samples, (source, target) in itertools.product(range(1, FARTHEST_MOVE + 1), pairs):
        near = moved(plan, source, target, samples)
        if near is not None:
            yield near


def _cuts(plan: Plan) -> Iterator[Plan]:
    """Each rank's samples in another number of passes of nearly equal size."""
    for change in (1, -1, 2):
        if (
            plan.stage >= FIRST_STAGE_SYNCHRONIZING_EVERY_PASS
        ):  # all ranks run the same number of passes
            counts = [max(map(len, plan.micro_batches)) + change] * plan.world_size
            choices = [list(range(plan.world_size))]
        else:
            counts = [len(sizes) + change for sizes in plan.micro_batches]
            choices = [[rank] for rank in range(plan.world_size)]
        for ranks in choices:
            if all(counts[rank] > 0 for rank in ranks):
                yield recut(plan, ranks, counts[ranks[0]])


def _shares(plan: Plan) -> Iterator[Plan]:
    """Even shares, shares by samples, and a fraction that moves from one rank to another."""
    if plan.stage == 0:
        return  # nothing is sharded
    ranks = range(plan.world_size)
    proposals = [
        [1 / plan.world_size] * plan.world_size,
        [plan.samples(rank) / plan.global_batch for rank in ranks],
    ]
    for part, (source, target) in itertools.product(
        SHIFTED_SHARES, itertools.permutations(ranks, 2)
    ):
        shares = list(plan.shares)
        if shares[source] >= part:
            shares[source] -= part
            shares[target] += part
            proposals.append(shares)
    for shares in proposals:
        yield dataclasses.replace(plan, shares=tuple(shares), prediction=None)


def _fits(profile: ClusterProfile, plan: Plan) -> bool:
    try:
        poplar.predict(profile, plan)
    except ValueError:
        return False
    return True
