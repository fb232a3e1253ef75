"""Views: dimensions are joined and split, and elements keep their order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from poplar.programmes.graph.graph import Node
from poplar.programmes.rules.local_call import Rule, with_output_shape
from poplar.programmes.rules.pattern import Dims, Pattern, Types


def reshaped(node: Node, types: Types) -> Pattern:
    """The axes that both shapes have in common."""
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    before, after = _common_axes(types[0].shape, node.output.shape, sizes, whole)
    return Pattern(
        sizes=sizes,
        inputs=(before,),
        output=after,
        whole=frozenset(whole),
        linear_in=(frozenset({0}),),
        flops=0.0,
    )


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


# Not `view`: the strides of a rank's tensor may be others than those of the exported one.
RESHAPED = Rule(reshaped, with_output_shape(1, "aten.reshape.default"))
