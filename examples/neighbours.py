"""Is the chosen plan the best one? Its neighbours, measured in turns with it.

Neighbours differ a little from the chosen plan: a sample or two at another rank, other cuts into
passes, other shares of the training state. All of them are legal plans of the same stage that fit
the ranks' memory, so one optimizer runs them all, one after another, by `apply_plan`.
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
from poplar.planner.plan_neighborhood import moved, recut

STEPS_OF_A_TURN = 2
FARTHEST_MOVE = 4
"""Samples."""
SHIFTED_SHARES = (0.05, 0.1)
"""Parts of the training state that move from one rank to another."""


def neighbours(plan: Plan, profile: ClusterProfile, count: int) -> list[Plan]:
    """Plans near `plan`, the nearest first; the same on every rank.

    Args:
        plan: the chosen one; it is not among the result.
        profile: what it was chosen on; a neighbour keeps to the memory and the batches in it.
        count: how many; fewer come back if there are no more.
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


def measure_in_turns(
    optimizer: HeteroZeroOptimizer,
    plans: Sequence[Plan],
    one_step: Callable[[Plan], None],
    *,
    rounds: int,
    tell: Callable[[str], None],
) -> list[float]:
    """Seconds of a step under each plan: the median, of the slowest rank. Every rank must call it.

    Args:
        optimizer: runs all of them; it ends under the last one.
        plans: of its stage.
        one_step: takes a step under the plan that it is given, which is applied already.
        rounds: how often each plan has its turn; odd rounds go backwards.
        tell: is told after each turn.
    """
    seconds: list[list[float]] = [[] for _ in plans]
    for turn in range(rounds):
        order = range(len(plans)) if turn % 2 == 0 else reversed(range(len(plans)))
        for number in order:
            plan, before = plans[number], optimizer.plan
            optimizer.apply_plan(plan)
            if before is None or before.shares != plan.shares or turn == 0:
                one_step(plan)  # what has moved, and sizes never seen before, settle
            dist.barrier()
            for _ in range(STEPS_OF_A_TURN):
                start = time.perf_counter()
                one_step(plan)
                seconds[number].append(time.perf_counter() - start)
            tell(f"plan {number + 1} of {len(plans)}")
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [statistics.median(own) for own in slowest.tolist()]


def own_part(plan: Plan, rank: int, collate: Callable[[range], Any]) -> Any:
    """This rank's part of one global batch, samples 0 to `plan.global_batch`, under any plan."""
    start = plan.offset(rank)
    # A rank without samples gives one that the optimizer drops, as the sampler does.
    return collate(range(start, start + max(1, plan.samples(rank))))


def _moves(plan: Plan) -> Iterator[Plan]:
    """A few samples of one rank at another."""
    pairs = list(itertools.permutations(range(plan.world_size), 2))
    for samples, (source, target) in itertools.product(range(1, FARTHEST_MOVE + 1), pairs):
        near = moved(plan, source, target, samples)
        if near is not None:
            yield near


def _cuts(plan: Plan) -> Iterator[Plan]:
    """Each rank's samples in another number of passes, as alike as they can be."""
    for change in (1, -1, 2):
        if plan.stage >= 2:  # ranks meet at every pass, so all of them change
            counts = [max(map(len, plan.micro_batches)) + change] * plan.world_size
            choices = [list(range(plan.world_size))]
        else:
            counts = [len(sizes) + change for sizes in plan.micro_batches]
            choices = [[rank] for rank in range(plan.world_size)]
        for ranks in choices:
            if all(counts[rank] > 0 for rank in ranks):
                yield recut(plan, ranks, counts[ranks[0]])


def _shares(plan: Plan) -> Iterator[Plan]:
    """Even shares, shares by samples, and a part that moves from one rank to another."""
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
