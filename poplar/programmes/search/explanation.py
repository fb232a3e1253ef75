"""A decision about a programme in plain English."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from poplar.programmes.graph.graph import Graph
from poplar.programmes.graph.placement import Placement, Sharded
from poplar.programmes.rules.registry import without_rules
from poplar.programmes.search.decision import ParameterGroup, ProgrammeDecision
from poplar.values.formatting import format_bytes, format_count, format_percent, format_seconds

_MOST_GROUPS = 8


def explain_programme(decision: ProgrammeDecision, graph: Graph) -> str:
    """What was decided and why, as lines of text.

    Args:
        decision: about a programme of the graph.
        graph: of the loss.
    """
    return "\n".join((*_lines(decision), *_lines_without_rules(graph)))


def _lines_without_rules(graph: Graph) -> Iterator[str]:
    """Operators that no programme divides; tables of constants do not matter."""
    counts = Counter(node.operator for node in without_rules(graph) if node.inputs)
    if counts:
        listed = ", ".join(f"{name} ({count})" for name, count in counts.most_common())
        yield f"operators without a rule, which every rank computes whole: {listed}"


def _lines(decision: ProgrammeDecision) -> Iterator[str]:
    known = format_seconds(decision.data_parallel_seconds)
    programme = decision.programme
    if programme is None:
        yield f"data parallelism, {known} per step: {decision.reason}"
    else:
        faster = decision.data_parallel_seconds / decision.step_seconds
        yield (
            f"programme, {format_seconds(decision.step_seconds)} per step: {faster:.2f} times as "
            f"fast as data parallelism ({known})"
        )
        samples = ", ".join(map(str, programme.ratios))
        yield f"samples per rank, and ratios of what is sharded: {samples}"
        if not all(isinstance(group.placement, Sharded) for group in decision.groups):
            shares = ", ".join(map(format_percent, programme.shares))
            yield f"shares of the gradients and the state of replicated parameters: {shares}"
        yield (
            f"collectives on activations: {decision.forward_collectives} in the forward, "
            f"{decision.backward_collectives} in the backward, which send "
            f"{format_bytes(decision.activation_bytes)} per step"
        )
        parts = (
            f"{format_seconds(seconds)} {name} ({format_percent(seconds / decision.step_seconds)})"
            for name, seconds in decision.seconds.items()
        )
        yield "predicted: " + ", ".join(parts)
        yield "memory by rank: " + ", ".join(map(format_bytes, decision.memory_bytes))
        yield from _group_lines(decision.groups)
    if decision.states:
        searched = "completely" if decision.is_complete else "with a limited width"
        yield (
            f"searched {searched}: {decision.states} states in "
            f"{format_seconds(decision.planning_seconds)}"
        )


def _group_lines(groups: tuple[ParameterGroup, ...]) -> Iterator[str]:
    sharded = [group for group in groups if isinstance(group.placement, Sharded)]
    for group in sharded[:_MOST_GROUPS]:
        yield (
            f"{group.name} ({_several(group)}): {_placed(group.placement)}; saves "
            f"{format_bytes(group.gradient_bytes_saved)} of gradients and parameters per step"
        )
    if len(sharded) > _MOST_GROUPS:
        yield f"{len(sharded) - _MOST_GROUPS} smaller groups are sharded too"
    others = [group for group in groups if group not in sharded]
    if others:
        numel = format_count(sum(group.numel for group in others))
        count = sum(group.count for group in others)
        verb = "parameter is" if count == 1 else "parameters are"
        yield f"{count} {verb} replicated ({numel} elements)"


def _several(group: ParameterGroup) -> str:
    what = "parameter" if group.count == 1 else "parameters"
    return f"{group.count} {what}, {format_count(group.numel)} elements"


def _placed(placement: Placement) -> str:
    if not isinstance(placement, Sharded):
        return "replicated"
    unit = f" in multiples of {placement.unit}" if placement.unit > 1 else ""
    return f"sharded on dimension {placement.dim}{unit}"
