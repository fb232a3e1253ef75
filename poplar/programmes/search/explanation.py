"""A decision about a programme in plain English."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from poplar.programmes.graph.graph import Graph
from poplar.programmes.graph.placement import Placement, Sharded
from poplar.programmes.graph.programme import Programme
from poplar.programmes.rules.registry import without_rules
from poplar.programmes.search.decision import ProgrammeDecision
from poplar.values.formatting import format_bytes, format_count, format_percent, format_seconds


def explain_programme(decision: ProgrammeDecision, graph: Graph) -> str:
    """What was decided and why, as lines of text."""
    return "\n".join((*_lines(decision, graph), *_lines_without_rules(graph)))


def _lines_without_rules(graph: Graph) -> Iterator[str]:
    """Calls that no programme divides; tables of constants do not matter."""
    counts = Counter(node.operator for node in without_rules(graph) if node.inputs)
    if counts:
        listed = ", ".join(f"{name} ({count})" for name, count in counts.most_common())
        yield f"operators that no rule fits, which every rank computes whole: {listed}"
    misfits = {node.operator: node.misfit for node in graph.nodes.values() if node.misfit}
    for operator, why in misfits.items():
        yield f"the rule of {operator} does not fit a call: {why}"


def _lines(decision: ProgrammeDecision, graph: Graph) -> Iterator[str]:
    known = format_seconds(decision.data_parallel_seconds)
    programme = decision.programme
    if programme is None:
        yield f"data parallelism, {known} per step: {decision.reason}"
        return
    faster = decision.data_parallel_seconds / decision.step_seconds
    yield (
        f"programme, {format_seconds(decision.step_seconds)} per step: {faster:.2f} times as "
        f"fast as data parallelism ({known})"
    )
    samples = ", ".join(map(str, programme.ratios))
    yield f"samples per rank, and ratios of what is sharded: {samples}"
    if not all(isinstance(placed, Sharded) for placed in programme.parameters(graph).values()):
        shares = ", ".join(map(format_percent, programme.shares))
        yield f"shares of the gradients and the state of replicated parameters: {shares}"
    yield (
        f"collectives on activations: {decision.collectives}, which send "
        f"{format_bytes(decision.activation_bytes)} per step"
    )
    parts = (
        f"{format_seconds(seconds)} {name} ({format_percent(seconds / decision.step_seconds)})"
        for name, seconds in decision.seconds.items()
    )
    yield "predicted: " + ", ".join(parts)
    yield "memory by rank: " + ", ".join(map(format_bytes, decision.memory_bytes))
    yield from _parameter_lines(programme, graph)


def _parameter_lines(programme: Programme, graph: Graph) -> Iterator[str]:
    """Parameters whose names differ only in numbers, with the same placement, share a line."""
    groups: dict[tuple[str, Placement], list[int]] = {}
    for name, node in graph.parameters.items():
        key = re.sub(r"\d+", "*", name), programme.placements[node.name]
        groups.setdefault(key, []).append(node.output.numel)
    replicated: list[int] = []
    for (name, placement), numels in sorted(groups.items(), key=lambda group: -sum(group[1])):
        if isinstance(placement, Sharded):
            unit = f" in multiples of {placement.unit}" if placement.unit > 1 else ""
            yield f"{name} ({_several(numels)}): sharded on dimension {placement.dim}{unit}"
        else:
            replicated += numels
    if replicated:
        yield f"replicated: {_several(replicated)}"


def _several(numels: list[int]) -> str:
    what = "parameter" if len(numels) == 1 else "parameters"
    return f"{len(numels)} {what}, {format_count(sum(numels))} elements"
