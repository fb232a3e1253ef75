"""The policies that are compared, each from costs and a model to the step on any outlook."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from poplar.planner.memory_shortfall import NoPlanFits
from poplar.programmes.graph.graph import Graph
from poplar.programmes.graph.placement import Sharded
from poplar.programmes.graph.programme import Programme
from published_clusters import data_parallel, hap, heterog, poplar_plan
from published_clusters.costs import Costs
from published_clusters.decision import Decisions
from published_clusters.layer import Layer
from published_clusters.simulation import simulate
from published_clusters.step import Step


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model on a cluster."""

    model: str
    layers: tuple[Layer, ...]
    global_batch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """What a policy decided on the middle of the outlooks."""

    step: Callable[[Costs], Step] | None
    """The step on a cluster that may be faster or slower; None: there is none."""
    details: str = ""
    why_not: str = ""
    """Why no step can run; else empty."""


Policy = Callable[[Costs, Case], Chosen]


def _from(decide: Callable[[Costs, tuple[Layer, ...], int], Decisions]) -> Policy:
    def policy(costs: Costs, case: Case) -> Chosen:
        decisions = decide(costs, case.layers, case.global_batch)
        return fitting(decisions.step, decisions.missing_bytes(costs), summary(decisions))

    return policy


def fitting(step: Callable[[Costs], Step], missing: float, details: str) -> Chosen:
    """The step, if no bytes are missing."""
    if missing > 0.0:
        return Chosen(step=None, details=details, why_not=f"a rank lacks {missing / 2**30:.1f} GiB")
    return Chosen(step=step, details=details)


def summary(decisions: Decisions) -> str:
    """How many layers are divided in which way; data parallelism has all-reduce everywhere."""
    return ", ".join(_words(decisions))


def _words(decisions: Decisions) -> Iterator[str]:
    every = decisions.decisions
    counts = {
        "by samples, all-reduce": sum(
            one.compute == "batch" and one.parameters == "all_reduce" and not one.factored
            for one in every
        ),
        "by samples, sharded parameters": sum(one.parameters == "sharded" for one in every),
        "by samples, factors": sum(one.factored for one in every),
        "with a server": sum(one.parameters == "server" for one in every),
        "by columns or rows": sum(one.compute in ("columns", "rows") for one in every),
        "by experts": sum(one.compute == "experts" for one in every),
    }
    found = {words: count for words, count in counts.items() if count}
    if list(found) != ["by samples, all-reduce"]:
        yield from (f"{count} {words}" for words, count in found.items())
    batch = [round(part * decisions.global_batch) for part in every[0].batch]
    if len(set(batch)) > 1:
        yield f"batches {max(batch)} to {min(batch)}"


@lru_cache(1)
def poplar(costs: Costs, case: Case) -> Chosen:
    """The plan of `poplar.planner.search`."""
    try:
        plan = poplar_plan.poplar_plan(costs, case.layers, case.global_batch)
    except NoPlanFits as error:
        return Chosen(step=None, why_not=str(error).partition("\n")[0])
    decisions = poplar_plan.decisions_of(plan, case.layers, case.global_batch)
    batch = summary(decisions).rpartition("batches ")[2]
    details = f"{poplar_plan.description(plan)}, batches {batch}"
    return Chosen(step=decisions.step, details=details)


def poplar_programme(costs: Costs, case: Case) -> Chosen:
    """What is simulated to be fastest of the plan and the programmes that are found."""
    from published_clusters import graphs, programme_search  # torch takes seconds to import

    graph = graphs.graph(case.model, costs.cluster.world_size, case.global_batch)
    fastest, least = Chosen(step=None, why_not="neither the plan nor a programme fits"), math.inf
    for one in (
        poplar(costs, case),
        *(
            _of_programme(costs, case, graph, programme)
            for programme in programme_search.found_programmes(graph, costs, case.global_batch)
        ),
    ):
        seconds = math.inf if one.step is None else simulate(costs.cluster, one.step(costs))
        if seconds < least:
            fastest, least = one, seconds
    return fastest


def _of_programme(costs: Costs, case: Case, graph: Graph, programme: Programme) -> Chosen:
    from published_clusters import programme_search

    model = (graph, programme, case.layers, case.global_batch)
    placements = programme.parameters(graph).values()
    divided = sum(isinstance(placement, Sharded) for placement in placements)
    return fitting(
        lambda outlook: programme_search.programme_step(outlook, *model),
        programme_search.missing_bytes(costs, *model),
        f"{divided} of {len(placements)} parameters divided in computation",
    )


POLICIES: Mapping[str, Policy] = {
    "DP-EV": _from(data_parallel.even),
    "DP-CP": _from(data_parallel.by_flops),
    "DP-EV, servers": _from(heterog.even_servers),
    "HAP": _from(hap.hap),
    "HeteroG": _from(heterog.heterog),
    "Poplar": poplar,
    "Poplar, programme": poplar_programme,
}
RECONSTRUCTED = ("HAP", "HeteroG")
"""Policies that are our reconstruction."""
