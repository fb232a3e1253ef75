"""Our reconstruction of HAP's policy (EuroSys 2024, arXiv 2401.05965). It is not the authors' code.

A programme says for each layer whether samples, columns, rows or experts are divided, and how
gradients are added up: all-reduce, sharded parameters with padded or grouped collectives, or
sufficient factors. For given ratios, the fastest programme is found; for a given programme, a
linear programme finds the ratios; both alternate until the predicted seconds stop falling. As in
the paper, predicted seconds are the sum of computation on the slowest rank and of communication,
one ratio per rank serves all tensors, and no constraint is about memory.

The authors search operators with A*; here layers are a chain, so that dynamic programming is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from poplar.planner.shard_allocation import equal, minimize
from published_clusters.costs import Costs, seconds_of
from published_clusters.data_parallel import batch_shares, speeds
from published_clusters.decision import Decision, Decisions, part_of
from published_clusters.layer import Layer

_ROUNDS = 8
_CALLS = ("padded", "grouped")


def hap(costs: Costs, layers: tuple[Layer, ...], global_batch: int) -> Decisions:
    """The best programme and ratios that the alternation finds."""
    total = sum(speeds(costs))
    ratios = tuple(speed / total for speed in speeds(costs))
    best, least = None, math.inf
    for _ in range(_ROUNDS):
        found = fastest_programme(costs, layers, global_batch, ratios)
        seconds = predicted(costs, found)
        if best is not None and seconds >= least:
            break
        best, least = found, seconds
        ratios = best_ratios(costs, found, ratios)
    assert best is not None
    return best


def fastest_programme(
    costs: Costs, layers: tuple[Layer, ...], global_batch: int, ratios: Sequence[float]
) -> Decisions:
    """The programme with the fewest predicted seconds at these ratios."""
    ends: dict[bool, tuple[float, tuple[Decision, ...]]] = {False: (0.0, ())}
    """By whether the outputs are divided by columns."""
    for layer in layers:
        following: dict[bool, tuple[float, tuple[Decision, ...]]] = {}
        for seconds, chosen in ends.values():
            before = chosen[-1] if chosen else None
            for option in options(layer, global_batch, ratios, before):
                whole = seconds + _seconds(costs, layer, option, before, global_batch)
                has_columns = option.compute == "columns"
                if has_columns not in following or whole < following[has_columns][0]:
                    following[has_columns] = whole, (*chosen, option)
        ends = following
    _, decisions = ends.get(False, (0.0, ()))  # the loss is of samples
    return Decisions(layers=layers, decisions=decisions, global_batch=global_batch)


def options(
    layer: Layer, global_batch: int, ratios: Sequence[float], before: Decision | None
) -> Iterator[Decision]:
    """The decisions to choose from for a layer; experts read samples, not columns."""
    batch, width = batch_shares(global_batch, ratios), tuple(ratios)
    yield Decision(batch=batch)
    if layer.parameters:
        for call in _CALLS:
            yield Decision(batch=batch, parameters="sharded", shares=width, call=call)
    if layer.fan_in:
        yield Decision(batch=batch, factored=True, call="padded")
    divided = {"columns": layer.splits, "rows": layer.sums}
    for compute in (compute for compute, is_possible in divided.items() if is_possible):
        for call in _CALLS:
            yield Decision(compute=compute, batch=batch, width=width, parameters="local", call=call)
    if layer.experts and (before is None or before.compute != "columns"):
        placed = batch_shares(layer.expert_count, ratios)  # whole experts
        yield Decision(compute="experts", batch=batch, width=placed, parameters="local")


def predicted(costs: Costs, decisions: Decisions) -> float:
    """Seconds as HAP's cost model adds them up: nothing overlaps."""
    befores = (None, *decisions.decisions)
    return sum(
        _seconds(costs, layer, decision, before, decisions.global_batch)
        for layer, (before, decision) in zip(decisions.layers, pairwise(befores), strict=True)
        if decision is not None
    )


def _seconds(
    costs: Costs, layer: Layer, decision: Decision, before: Decision | None, global_batch: int
) -> float:
    part = part_of(costs, layer, decision, before, global_batch)
    seconds = max(part.forward) + max(part.backward) + max(part.update)
    seconds += 2.0 * sum(map(seconds_of, (*part.before, *part.after)))
    moved = (part.gathered, part.gathered_again, part.gradient, part.published)
    return seconds + sum(seconds_of(transfer) for transfer in moved if transfer is not None)


def best_ratios(costs: Costs, decisions: Decisions, ratios: Sequence[float]) -> tuple[float, ...]:
    """The ratios with which a programme has the fewest predicted seconds.

    Devices of one type get the same. Seconds of a layer are at least those of each type, which grow
    linearly with its ratio; padded collectives grow linearly with the largest ratio; the rest of
    the communication is taken as constant.
    """
    names = [device.name for device in costs.cluster.devices]
    kinds = list(dict.fromkeys(names))
    largest = len(kinds)
    rows = [*equal(1.0, {i: float(names.count(kind)) for i, kind in enumerate(kinds)})]
    rows += [(0.0, {i: 1.0, largest: -1.0}) for i in range(len(kinds))]
    objective = [0.0] * len(kinds) + [0.0]
    for layer, decision in zip(decisions.layers, decisions.decisions, strict=True):
        variable = len(objective)
        objective.append(1.0)
        for i, kind in enumerate(kinds):
            seconds = _pass_seconds(costs, layer, decision, names.index(kind), decisions)
            constant, slope = _line(seconds)
            rows.append((-constant, {i: slope, variable: -1.0}))
        if decision.call == "padded":
            objective[largest] += _padded_slope(costs, layer, decision, decisions.global_batch)
    solved = minimize(objective, rows)
    if solved is None:
        return tuple(ratios)
    return tuple(solved[1][kinds.index(name)] for name in names)


def _pass_seconds(
    costs: Costs, layer: Layer, decision: Decision, rank: int, decisions: Decisions
) -> Callable[[float], float]:
    """Seconds of forward and backward of one rank, by its ratio."""
    if decision.compute == "batch":
        return lambda ratio: costs.pass_seconds(rank, layer, ratio * decisions.global_batch)
    return lambda ratio: costs.pass_seconds(rank, layer, decisions.global_batch, ratio)


def _line(seconds: Callable[[float], float]) -> tuple[float, float]:
    """Constant and slope of a linear function."""
    half, whole = seconds(0.5), seconds(1.0)
    return 2.0 * half - whole, 2.0 * (whole - half)


def _padded_slope(costs: Costs, layer: Layer, decision: Decision, global_batch: int) -> float:
    """Seconds of a layer's padded collectives by the largest ratio."""
    ranks = costs.cluster.world_size

    def seconds(largest: float) -> float:
        shares = (largest,) * ranks
        uneven = Decision(
            compute=decision.compute,
            batch=shares,
            width=shares if decision.width else (),
            parameters=decision.parameters,
            shares=shares if decision.shares else (),
            factored=decision.factored,
            call="padded",
        )
        part = part_of(costs, layer, uneven, None, global_batch)
        moved = [2.0 * seconds_of(one) for one in (*part.before, *part.after)]
        moved += [seconds_of(one) for one in (part.gathered, part.gradient) if one is not None]
        return sum(moved)

    return max(0.0, _line(seconds)[1])
