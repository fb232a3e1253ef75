"""Losses: partial sums over the samples of a rank."""

from __future__ import annotations

from dataclasses import replace

from poplar.programmes.graph.graph import Node
from poplar.programmes.rules.local_call import LocalCall, Localize, Part
from poplar.programmes.rules.pattern import Pattern, named
from poplar.programmes.rules.rule import Rule, Types, argument, computed_by_all

_NONE, _MEAN, _SUM = 0, 1, 2
"""Values of the argument `reduction`."""


def class_loss(node: Node, types: Types) -> Pattern:
    """Scores `[samples, classes, ...]` and classes `[samples, ...]`, not reduced or summed.

    `with_global_means` makes sums of means.
    """
    scores, targets = types[0].shape, types[1].shape
    reduction = argument(node, 3, "reduction", _MEAN)
    if len(scores) != len(targets) + 1 or not targets or reduction == _MEAN:
        return computed_by_all(node, types)
    sizes: dict[str, int] = {}
    samples = named("d", targets, sizes)
    sizes["classes"] = scores[1]
    weight = ((("classes",),),) if len(types) > 2 else ()
    return Pattern(
        sizes=sizes,
        inputs=((samples[0], ("classes",), *samples[1:]), samples, *weight),
        output=() if reduction == _SUM else samples,
        summed=frozenset() if reduction == _NONE else frozenset(sizes) - {"classes"},
        whole=frozenset({"classes"}),
        flops=types[0].numel,
    )


def _mean_as_sum(position: int) -> Localize:
    """A partial mean: the sum, divided by the number of elements on all ranks."""

    def localized(call: LocalCall, part: Part) -> LocalCall:
        if not part.is_summed or argument(part.node, position, "reduction", _MEAN) != _MEAN:
            return call
        count = part.types[0].numel
        if len(call.arguments) > position:
            return replace(call.with_argument(position, _SUM), scale=1.0 / count)
        keywords = {**call.keywords, "reduction": _SUM}
        return replace(call, keywords=keywords, scale=1.0 / count)

    return localized


def elementwise_loss(position: int) -> Rule:
    """The rule of losses of two tensors of one shape.

    Args:
        position: of the argument `reduction`.
    """

    def pattern(node: Node, types: Types) -> Pattern:
        if len({kind.shape for kind in types}) > 1:
            return computed_by_all(node, types)
        sizes: dict[str, int] = {}
        dims = named("d", types[0].shape, sizes)
        is_reduced = argument(node, position, "reduction", _MEAN) != _NONE
        return Pattern(
            sizes=sizes,
            inputs=(dims,) * len(types),
            output=() if is_reduced else dims,
            summed=frozenset(sizes) if is_reduced else frozenset(),
            flops=types[0].numel,
        )

    return Rule(pattern, _mean_as_sum(position))


CLASS_LOSS = Rule(class_loss)
