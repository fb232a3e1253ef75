"""Operators that read or write elements at indices: `x[index]`, `scatter`, grouped products."""

from __future__ import annotations

import math
from dataclasses import replace

from poplar.programmes.graph.graph import Node, Reference, TensorType
from poplar.programmes.rules.local_call import GROUPED_MM_PART, INDEX_PART, LocalCall, Part
from poplar.programmes.rules.pattern import Dims, Pattern, aligned, named
from poplar.programmes.rules.rule import Rule, Types, argument, computed_by_all, counted_from_first

_INTEGERS = ("int64", "int32")


def _indexed_dims(node: Node, types: Types) -> range | None:
    """Adjacent dimensions that tensors of integers index; None: there are others, or none."""
    indices = node.arguments[1]
    given = [dim for dim, index in enumerate(indices) if isinstance(index, Reference)]
    if not given or any(kind.dtype not in _INTEGERS for kind in types[1 : len(given) + 1]):
        return None
    dims = range(given[0], given[-1] + 1)
    return dims if list(dims) == given else None


def index(node: Node, types: Types) -> Pattern:
    """`x[..., index, ...]`; of one index, a rank can have some entries: the output is partial."""
    dims = _indexed_dims(node, types)
    if dims is None:
        return computed_by_all(node, types)
    sizes: dict[str, int] = {}
    read = named("d", types[0].shape, sizes)
    added = len(node.output.shape) - len(read) + len(dims)
    shape = node.output.shape[dims.start : dims.start + added]
    places = named("place", shape, sizes)
    entries = frozenset(axis for dim in dims for axis in read[dim])
    return Pattern(
        sizes=sizes,
        inputs=(read, *(aligned(places, shape, kind.shape) for kind in types[1:])),
        output=(*read[: dims.start], *places, *read[dims.stop :]),
        summed=entries if len(dims) == 1 else frozenset(),
        whole=frozenset() if len(dims) == 1 else entries,
        linear_in=(frozenset({0}),),
        flops=node.output.numel,
    )


def _index_part(call: LocalCall, part: Part) -> LocalCall:
    if not part.is_summed:
        return call
    dim = next(at for at, given in enumerate(call.arguments[1]) if given is not None)
    arguments = (
        call.arguments[0],
        call.arguments[1][dim],
        dim,
        part.bounds[0],
        part.types[0].shape[dim],
    )
    return replace(call, operator=INDEX_PART, arguments=arguments, keywords={})


def index_put(node: Node, types: Types) -> Pattern:
    """`x[..., index, ...] = values`: the dimensions after the indices can be divided."""
    dims = _indexed_dims(node, types)
    if dims is None or node.output.shape != types[0].shape:
        return computed_by_all(node, types)
    sizes: dict[str, int] = {}
    written = named("d", types[0].shape, sizes)
    indices, values = types[1 : 1 + len(dims)], types[-1]
    kept = len(written) - dims.stop
    if kept and values.shape[-kept:] != types[0].shape[-kept:]:
        return computed_by_all(node, types)
    others: dict[str, int] = {}
    read = [named(f"index{at}_", kind.shape, others) for at, kind in enumerate(indices)]
    given = named("value", values.shape[: len(values.shape) - kept], others)
    sizes |= others
    before = {axis for axes in written[: dims.stop] for axis in axes}
    return Pattern(
        sizes=sizes,
        inputs=(written, *read, (*given, *written[dims.stop :])),
        output=written,
        whole=frozenset(before | set(others)),
        flops=values.numel,
    )


def scattered(node: Node, types: Types) -> Pattern:
    """`scatter` and `scatter_add`: other dimensions, where all tensors have the same size."""
    shape = types[0].shape
    if not shape or any(len(kind.shape) != len(shape) for kind in types):
        return computed_by_all(node, types)
    dim = counted_from_first(int(node.arguments[1]), len(shape))
    sizes: dict[str, int] = {}
    written = named("d", shape, sizes)

    def together(kind: TensorType, at: int) -> bool:
        return at != dim and kind.shape[at] == shape[at]

    others: dict[str, int] = {}
    inputs: list[Dims] = [written]
    uneven = set(written[dim])
    for position, kind in enumerate(types[1:]):
        own = named(f"other{position}_", kind.shape, others)
        inputs.append(
            tuple(written[at] if together(kind, at) else own[at] for at in range(len(shape)))
        )
        uneven |= {a for at, axes in enumerate(written) if not together(kind, at) for a in axes}
    return Pattern(
        sizes={**sizes, **others},
        inputs=tuple(inputs),
        output=written,
        whole=frozenset(uneven | set(others)),
        flops=node.output.numel,
    )


def grouped_product(node: Node, types: Types) -> Pattern:
    """`[rows, inner]` and `[experts, inner, columns]` to `[rows, columns]`.

    Consecutive rows belong to one expert; the third tensor has the end of the rows of each. A rank
    can have some experts: rows of others are zeros, and the output is partial. Other dimensions are
    whole, because kernels need aligned rows.
    """
    shapes = [len(kind.shape) for kind in types]
    if shapes != [2, 3, 1]:
        return computed_by_all(node, types)
    (rows, inner), (experts, _, columns) = types[0].shape, types[1].shape
    sizes = {"experts": experts, "inner": inner, "columns": columns, "rows": rows, "ends": experts}
    return Pattern(
        sizes=sizes,
        inputs=((("rows",), ("inner",)), (("experts",), ("inner",), ("columns",)), (("ends",),)),
        output=(("rows",), ("columns",)),
        summed=frozenset({"experts"}),
        whole=frozenset({"rows", "inner", "columns", "ends"}),
        linear_in=(frozenset({0}), frozenset({1})),
        flops=2.0 * math.prod((rows, inner, columns)),
    )


def _grouped_mm_part(call: LocalCall, part: Part) -> LocalCall:
    if part.strategy.axis != "experts":
        return call
    tensors = [Reference(name) for name in part.node.inputs]
    arguments = (call.operator, *tensors, *part.bounds)
    return replace(call, operator=GROUPED_MM_PART, arguments=arguments, keywords={})


def histogram(node: Node, types: Types) -> Pattern:
    """`histc` with given limits: each rank can count its elements."""
    low, high = argument(node, 2, "min", 0), argument(node, 3, "max", 0)
    if low == high:  # those of the elements on all ranks
        return computed_by_all(node, types)
    sizes: dict[str, int] = {}
    read = named("d", types[0].shape, sizes)
    elements = frozenset(sizes)
    output = named("bin", node.output.shape, sizes)
    return Pattern(
        sizes=sizes,
        inputs=(read,),
        output=output,
        summed=elements,
        whole=frozenset(sizes) - elements,
        flops=types[0].numel,
    )


INDEX = Rule(index, _index_part)
INDEX_PUT = Rule(index_put)
SCATTERED = Rule(scattered)
GROUPED_PRODUCT = Rule(grouped_product, _grouped_mm_part)
HISTOGRAM = Rule(histogram)
