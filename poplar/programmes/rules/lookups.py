"""Operators that select by index: embedding, `gather`, `index_select`, `one_hot`."""

from __future__ import annotations

from dataclasses import replace

from poplar.programmes.graph.graph import Node
from poplar.programmes.rules.local_call import EMBEDDING_PART, LocalCall, Part
from poplar.programmes.rules.pattern import Pattern, named
from poplar.programmes.rules.rule import Rule, Types, argument, computed_by_all, counted_from_first


def embedding(node: Node, types: Types) -> Pattern:
    """`[entries, columns]` and indices `[...]` to `[..., columns]`.

    Each rank can have some of the entries: the output is then partial.
    """
    if argument(node, 3, "scale_grad_by_freq", False) or argument(node, 4, "sparse", False):
        return computed_by_all(node, types)
    sizes = {"entries": types[0].shape[0], "columns": types[0].shape[1]}
    indices = named("index", types[1].shape, sizes)
    return Pattern(
        sizes=sizes,
        inputs=((("entries",), ("columns",)), indices),
        output=(*indices, ("columns",)),
        summed=frozenset({"entries"}),
        linear_in=(frozenset({0}),),
        flops=node.output.numel,
    )


def _embedding_part(call: LocalCall, part: Part) -> LocalCall:
    if not part.is_summed:
        return call
    table, indices = call.arguments[:2]
    padding = argument(part.node, 2, "padding_idx", -1)
    start, _ = part.bounds
    arguments = (table, indices, start, padding)
    return replace(call, operator=EMBEDDING_PART, arguments=arguments, keywords={})


def gather(node: Node, types: Types) -> Pattern:
    """`gather(values, dim, index)`: all of `dim` is needed of the values."""
    values, index = types[0].shape, types[1].shape
    if len(values) != len(index) or not values:
        return computed_by_all(node, types)
    dim = counted_from_first(int(node.arguments[1]), len(values))
    sizes: dict[str, int] = {}
    output = named("d", index, sizes)
    read = named("value", values, sizes)
    uneven = {axis for i, axes in enumerate(output) if values[i] != index[i] for axis in axes}
    together = tuple(
        output[i] if i != dim and values[i] == index[i] else axes for i, axes in enumerate(read)
    )
    return Pattern(
        sizes=sizes,
        inputs=(together, output),
        output=output,
        whole=frozenset({*(axis for axes in read for axis in axes), *(uneven - {f"d{dim}"})}),
        linear_in=(frozenset({0}),),
        flops=node.output.numel,
    )


def index_select(node: Node, types: Types) -> Pattern:
    """`index_select(values, dim, index)`."""
    values = types[0].shape
    if not values or len(types[1].shape) != 1:
        return computed_by_all(node, types)
    dim = counted_from_first(int(node.arguments[1]), len(values))
    sizes: dict[str, int] = {"chosen": types[1].shape[0]}
    read = named("d", values, sizes)
    return Pattern(
        sizes=sizes,
        inputs=(read, (("chosen",),)),
        output=(*read[:dim], ("chosen",), *read[dim + 1 :]),
        whole=frozenset(read[dim]),
        linear_in=(frozenset({0}),),
        flops=node.output.numel,
    )


def one_hot(node: Node, types: Types) -> Pattern:
    """`[...]` to `[..., classes]`."""
    sizes: dict[str, int] = {}
    dims = named("d", types[0].shape, sizes)
    sizes["classes"] = node.output.shape[-1]
    return Pattern(
        sizes=sizes,
        inputs=(dims,),
        output=(*dims, ("classes",)),
        whole=frozenset({"classes"}),
        flops=node.output.numel,
    )


EMBEDDING = Rule(embedding, _embedding_part)
GATHER = Rule(gather)
INDEX_SELECT = Rule(index_select)
ONE_HOT = Rule(one_hot)
