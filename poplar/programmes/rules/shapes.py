"""Operators that move elements: views, permutations, slices, concatenations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from poplar.programmes.graph.graph import Node
from poplar.programmes.rules.local_call import LocalCall, Part, with_output_shape
from poplar.programmes.rules.pattern import Dims, Pattern, elementwise, named, without
from poplar.programmes.rules.rule import Rule, Types, argument, computed_by_all, counted_from_first


def _moved(
    sizes: dict[str, int], read: Dims, output: Dims, *, whole: Iterable[str] = ()
) -> Pattern:
    """The pattern of an operator that only moves the elements of one tensor."""
    return Pattern(
        sizes=sizes,
        inputs=(read,),
        output=output,
        whole=frozenset(whole),
        linear_in=(frozenset({0}),),
        flops=0.0,
    )


def reshaped(node: Node, types: Types) -> Pattern:
    """Views: dimensions are joined and split, and elements keep their order."""
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    before, after = _common_axes(types[0].shape, node.output.shape, sizes, whole)
    return _moved(sizes, before, after, whole=whole)


def _common_axes(
    before: Sequence[int], after: Sequence[int], sizes: dict[str, int], whole: set[str]
) -> tuple[Dims, Dims]:
    """Axes of two shapes with the same elements in the same order.

    Axes of only one shape, as those of 2 and 3 in [2, 3] and [3, 2], are entered in `whole`.
    """
    left: list[list[str]] = [[] for _ in before]
    right: list[list[str]] = [[] for _ in after]
    for (first, last), (start, stop) in _groups(before, after):
        remaining = [list(before[first:last]), list(after[start:stop])]
        i = j = 0
        while i < last - first and j < stop - start:
            size = math.gcd(remaining[0][i], remaining[1][j])
            if size == 1 and min(remaining[0][i], remaining[1][j]) > 1:
                break
            name = f"a{len(sizes)}"
            sizes[name] = size
            left[first + i].append(name)
            right[start + j].append(name)
            remaining[0][i] //= size
            remaining[1][j] //= size
            done = (remaining[0][i] == 1, remaining[1][j] == 1)
            i, j = i + done[0], j + done[1]
        for axes, offset, rest, at in (
            (left, first, remaining[0], i),
            (right, start, remaining[1], j),
        ):
            for k in range(at, len(rest)):
                name = f"a{len(sizes)}"
                sizes[name] = rest[k]
                whole.add(name)
                axes[offset + k].append(name)
    return tuple(map(tuple, left)), tuple(map(tuple, right))


def _groups(
    before: Sequence[int], after: Sequence[int]
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Ranges of dimensions with the same number of elements, as short as possible.

    Dimensions of size 1 are paired with one of size 1, or are in no range.
    """
    i = j = 0
    while i < len(before) and j < len(after):
        if (before[i] == 1) != (after[j] == 1):
            i, j = i + (before[i] == 1), j + (after[j] == 1)
            continue
        first, start, products = i, j, [before[i], after[j]]
        i, j = i + 1, j + 1
        while products[0] != products[1]:
            if products[0] < products[1]:
                products[0] *= before[i]
                i += 1
            else:
                products[1] *= after[j]
                j += 1
        yield (first, i), (start, j)


def permuted(node: Node, types: Types) -> Pattern:
    """`permute`, `transpose` and `t`."""
    count = len(types[0].shape)
    order = list(range(count))
    name = node.operator.split(".")[1]
    if name == "permute":
        order = [counted_from_first(dim, count) for dim in node.arguments[1]]
    elif count > 1:
        pair = (0, 1) if name == "t" else node.arguments[1:3]
        one, other = (counted_from_first(dim, count) for dim in pair)
        order[one], order[other] = order[other], order[one]
    sizes: dict[str, int] = {}
    dims = named("d", types[0].shape, sizes)
    return _moved(sizes, dims, tuple(dims[dim] for dim in order))


def broadcast(node: Node, types: Types) -> Pattern:
    """`expand` and `broadcast_tensors`: new dimensions, and those of size 1, are repeated."""
    every = frozenset(range(len(types)))
    return elementwise(node.output, types, linear_in=(every,), flops=0.0)


def chosen(node: Node, types: Types) -> Pattern:
    """`select`, `slice`, `split` and `unbind`: all indices of one dimension are needed.

    A slice of a whole dimension leaves it as it is.
    """
    name = node.operator.split(".")[1]
    shape, result = types[0].shape, node.output.shape
    given = argument(node, 2 if name.startswith("split") else 1, "dim", 0)
    dim = counted_from_first(int(given), len(shape))
    sizes: dict[str, int] = {}
    dims = named("d", shape, sizes)
    output, whole = dims, frozenset(dims[dim])
    if len(result) < len(shape):
        output = without(dims, [dim])
    elif name == "slice" and result[dim] == shape[dim]:
        whole = frozenset()
    else:
        sizes["chosen"] = result[dim]
        output = (*dims[:dim], ("chosen",), *dims[dim + 1 :])
        whole |= {"chosen"}
    return _moved(sizes, dims, output, whole=whole)


def _without_bounds(call: LocalCall, part: Part) -> LocalCall:
    """A slice of a whole dimension, which may be the divided one, with the rank's size of it."""
    shape = part.types[0].shape
    if not call.operator.startswith("aten.slice.") or part.node.output.shape != shape:
        return call
    dim = counted_from_first(int(argument(part.node, 1, "dim", 0)), len(shape))
    arguments = (call.arguments[0], dim, 0, call.outputs[0].shape[dim])
    return replace(call, arguments=arguments, keywords={})


def item(node: Node, types: Types) -> Pattern:
    """One of several outputs."""
    sizes: dict[str, int] = {}
    dims = named("d", types[0].shape, sizes)
    return _moved(sizes, dims, dims)


def concatenated(node: Node, types: Types) -> Pattern:
    """`cat` and `stack`: other dimensions than the joined one can be divided."""
    shape = node.output.shape
    is_stack = node.operator.startswith("aten.stack")
    dim = counted_from_first(int(argument(node, 1, "dim", 0)), len(shape))
    if any(len(kind.shape) != len(shape) - is_stack for kind in types):
        return computed_by_all(node, types)
    sizes: dict[str, int] = {}
    output = named("d", shape, sizes)
    inputs = []
    for index, kind in enumerate(types):
        if is_stack:
            inputs.append(without(output, [dim]))
        else:
            sizes[f"joined{index}"] = kind.shape[dim]
            inputs.append((*output[:dim], (f"joined{index}",), *output[dim + 1 :]))
    whole = {*output[dim], *(name for name in sizes if name.startswith("joined"))}
    return Pattern(
        sizes=sizes,
        inputs=tuple(inputs),
        output=output,
        whole=frozenset(whole),
        linear_in=(frozenset(range(len(types))),),
        flops=0.0,
    )


def created(node: Node, types: Types) -> Pattern:
    """Tensors of one value; of a tensor that is given, only type and device are used."""
    sizes: dict[str, int] = {}
    inputs = tuple(named(f"in{index}_", kind.shape, sizes) for index, kind in enumerate(types))
    whole = frozenset(sizes)
    output = named("d", node.output.shape, sizes)
    return Pattern(
        sizes=sizes,
        inputs=inputs,
        output=output,
        whole=whole,
        unread=frozenset(range(len(types))),
        flops=0.0,
    )


def repeated_elements(node: Node, types: Types) -> Pattern:
    """`repeat_interleave` by a number, along a dimension."""
    dim = argument(node, 2, "dim")
    if dim is None:
        return computed_by_all(node, types)
    sizes: dict[str, int] = {}
    dims = named("d", types[0].shape, sizes)
    at = counted_from_first(int(dim), len(dims))
    sizes["repeated"] = int(node.arguments[1])
    output = (*dims[:at], (*dims[at], "repeated"), *dims[at + 1 :])
    return _moved(sizes, dims, output, whole={"repeated"})


def repeated(node: Node, types: Types) -> Pattern:
    """`repeat`: dimensions that are not repeated can be divided."""
    sizes: dict[str, int] = {}
    dims = named("d", types[0].shape, sizes)
    times = node.arguments[1]
    added = len(times) - len(dims)
    copies = named("copy", times, sizes)
    output = tuple(
        (*(copy if count > 1 or at < added else ()), *(dims[at - added] if at >= added else ()))
        for at, (copy, count) in enumerate(zip(copies, times, strict=True))
    )
    return _moved(sizes, dims, output, whole=(axis for copy in copies for axis in copy))


def reordered(node: Node, types: Types) -> Pattern:
    """`flip` and `roll`: dimensions whose indices are not moved can be divided."""
    moved = argument(node, 1 if node.operator.startswith("aten.flip") else 2, "dims", [])
    sizes: dict[str, int] = {}
    dims = named("d", types[0].shape, sizes)
    if not moved:  # as one dimension
        return computed_by_all(node, types)
    given = [moved] if isinstance(moved, int) else moved
    places = {counted_from_first(dim, len(dims)) for dim in given}
    return _moved(sizes, dims, dims, whole=(axis for at in places for axis in dims[at]))


def partly_written(node: Node, types: Types) -> Pattern:
    """`slice_scatter` and `select_scatter`: another tensor is written to a part of a dimension."""
    shape, source = types[0].shape, types[1].shape
    sizes: dict[str, int] = {}
    dims = named("d", shape, sizes)
    dim = counted_from_first(int(argument(node, 2, "dim", 0)), len(shape))
    sizes["written"] = source[dim] if len(source) == len(shape) else 1
    written = (("written",),) if len(source) == len(shape) else ()
    return Pattern(
        sizes=sizes,
        inputs=(dims, (*dims[:dim], *written, *dims[dim + 1 :])),
        output=dims,
        whole=frozenset({"written", *dims[dim]}),
        linear_in=(frozenset({0, 1}),),
        flops=0.0,
    )


# Not `view`: the strides of a rank's tensor may be others than those of the exported one.
RESHAPED = Rule(reshaped, with_output_shape(1, "aten.reshape.default"))
PERMUTED = Rule(permuted)
EXPANDED = Rule(broadcast, with_output_shape(1))
BROADCAST = Rule(broadcast)
CHOSEN = Rule(chosen, _without_bounds)
ITEM = Rule(item)
CONCATENATED = Rule(concatenated)
REPEATED_ELEMENTS = Rule(repeated_elements)
REPEATED = Rule(repeated)
REORDERED = Rule(reordered)
PARTLY_WRITTEN = Rule(partly_written)
CREATED = Rule(created, with_output_shape(0))
CREATED_LIKE = Rule(created, with_output_shape(1))
