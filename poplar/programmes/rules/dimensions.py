"""Operators that keep some dimensions of their first tensor, and mix, sum or move the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from poplar.programmes.graph.graph import GET_ITEM, Node, Reference
from poplar.programmes.rules.local_call import (
    INDEX_PART,
    Localize,
    Part,
    Rule,
    argument,
    unchanged,
    weighted_mean,
    with_output_shape,
)
from poplar.programmes.rules.pattern import Label, Pattern, Types, computed_by_all, mapped
from poplar.programmes.rules.reshaping import RESHAPED

Find = Callable[[Node, Types], Iterable[int] | None]
"""The dimensions that a call does not keep; None: all ranks compute all."""
ALL = object()
"""All dimensions."""
Labels: TypeAlias = tuple[Sequence[Sequence[Label]], Sequence[Label]] | None
"""Those of the inputs and of the output; None: all ranks compute all."""


def by_argument(position: int, default: object = None) -> Find:
    """The dimensions that an argument names.

    Args:
        position: of the argument.
        default: one dimension, or `ALL`, if the argument is missing or empty.
    """

    def find(node: Node, types: Types) -> Iterable[int] | None:
        dims = len(types[0].shape)
        given = argument(node, position, "dim", argument(node, position, "dims"))
        if given is None or given == [] or isinstance(given, bool):  # `unbiased` of `var`
            given = list(range(dims)) if default is ALL else default
        if given is None or not dims:
            return None
        return {dim % dims for dim in (given if isinstance(given, list) else [given])}

    return find


def last(count: int | Callable[[Node], int]) -> Find:
    """The last dimensions, so many of them."""

    def find(node: Node, types: Types) -> Iterable[int]:
        dims = len(types[0].shape)
        return range(dims - (count if isinstance(count, int) else count(node)), dims)

    return find


def keeping(
    find: Find,
    *,
    is_sum: bool = False,
    only_moves: bool = False,
    localize: Localize = unchanged,
) -> Rule:
    """The rule of an operator that keeps all dimensions but those that are found.

    Other tensors with as many dimensions as the first one have the same, and of others, such as the
    weight of a norm, every rank needs all. The output has the kept dimensions, in order.

    Args:
        find: the dimensions that are not kept.
        is_sum: the output is a sum over them.
        only_moves: the operator computes nothing; it is linear in all of its tensors together.
    """

    def labels(node: Node, types: Types) -> Labels:
        found = find(node, types)
        if found is None:
            return None
        every = range(len(types[0].shape))
        kept: list[Label] = [None if dim in set(found) else dim for dim in every]
        size = len(node.output.shape)
        output = kept if size == len(kept) else [dim for dim in kept if dim is not None]
        read = every if is_sum else kept
        others = (kept if len(k.shape) == len(kept) else [None] * len(k.shape) for k in types[1:])
        return [read, *others], [*output, *[None] * (size - len(output))]

    linear = (0,) if is_sum else ()
    return labelled(labels, linear=linear, only_moves=only_moves, localize=localize)


def labelled(
    labels: Callable[[Node, Types], Labels],
    *,
    linear: Sequence[int] = (),
    only_moves: bool = False,
    broadcasts: bool = False,
    localize: Localize = unchanged,
) -> Rule:
    """The rule of an operator whose dimensions have the labels that a function gives.

    Args:
        labels: of the inputs and of the output; None: all ranks compute all.
        linear: inputs in which the operator is linear together.
        only_moves: the operator computes nothing, and is linear in all inputs together.
        broadcasts: as for `mapped`.
    """

    def pattern(node: Node, types: Types) -> Pattern:
        found = labels(node, types)
        if found is None:
            return computed_by_all(node, types)
        together = range(len(types)) if only_moves else linear
        return mapped(
            node,
            types,
            *found,
            linear_in=[together] if together else (),
            flops=0.0 if only_moves else None,
            broadcasts=broadcasts,
        )

    return Rule(pattern, localize)


def _dim(node: Node, position: int, dims: int) -> int:
    return int(argument(node, position, "dim", 0)) % dims


def _without(dim: int, dims: int) -> list[Label]:
    return [other for other in range(dims) if other != dim]


def _whole_at(dim: int, dims: int) -> list[Label]:
    return [None if other == dim else other for other in range(dims)]


def _permuted(node: Node, types: Types) -> Labels:
    """`permute`, `transpose` and `t`."""
    count = len(types[0].shape)
    order = list(range(count))
    name = node.operator.split(".")[1]
    if name == "permute":
        order = [dim % count for dim in node.arguments[1]]
    elif count > 1:
        one, other = (dim % count for dim in ((0, 1) if name == "t" else node.arguments[1:3]))
        order[one], order[other] = other, one
    return [range(count)], order


def _stacked(node: Node, types: Types) -> Labels:
    dims = len(node.output.shape)
    dim = _dim(node, 1, dims)
    return [_without(dim, dims)] * len(types), _whole_at(dim, dims)


def _select_scattered(node: Node, types: Types) -> Labels:
    dims = len(types[0].shape)
    dim = _dim(node, 2, dims)
    return [_whole_at(dim, dims), _without(dim, dims)], _whole_at(dim, dims)


def _gathered(node: Node, types: Types) -> Labels:
    """All of a dimension is needed of the values, and a part of the indices."""
    dims = len(types[0].shape)
    if not dims or dims != len(types[1].shape):
        return None
    return [_whole_at(_dim(node, 1, dims), dims), range(dims)], range(dims)


def _index_selected(node: Node, types: Types) -> Labels:
    dims = len(types[0].shape)
    if not dims or len(types[1].shape) != 1:
        return None
    dim = _dim(node, 1, dims)
    return [_whole_at(dim, dims), [dim]], range(dims)


def _indexed_dims(node: Node, types: Types) -> range | None:
    """Adjacent dimensions that tensors of integers index; None: there are others, or none."""
    indices = node.arguments[1]
    given = [dim for dim, index in enumerate(indices) if isinstance(index, Reference)]
    if not given or any(kind.dtype not in ("int64", "int32") for kind in types[1 : len(given) + 1]):
        return None
    dims = range(given[0], given[-1] + 1)
    return dims if list(dims) == given else None


def _indexed(node: Node, types: Types) -> Labels:
    """`x[..., index, ...]`; of one index, a rank can have some entries: the output is partial."""
    dims = _indexed_dims(node, types)
    if dims is None:
        return None
    count = len(types[0].shape)
    before: list[Label] = list(range(dims.start))
    after: list[Label] = list(range(dims.stop, count))
    places = [f"place{at}" for at in range(len(node.output.shape) - len(before) - len(after))]
    entries: list[Label] = ["entries"] if len(dims) == 1 else [None] * len(dims)
    indices = [places[len(places) - len(kind.shape) :] for kind in types[1:]]
    return [[*before, *entries, *after], *indices], [*before, *places, *after]


def _index_part(call: Node, part: Part) -> Node:
    if not part.is_summed:
        return call
    dim = next(at for at, given in enumerate(call.arguments[1]) if given is not None)
    size = part.types[0].shape[dim]
    arguments = (call.arguments[0], call.arguments[1][dim], dim, part.start, size)
    return replace(call, operator=INDEX_PART, arguments=arguments, keywords={})


def _index_put(node: Node, types: Types) -> Labels:
    """`x[..., index, ...] = values`: the dimensions after the indices can be divided."""
    dims = _indexed_dims(node, types)
    if dims is None or node.output.shape != types[0].shape:
        return None
    written = [None if dim < dims.stop else dim for dim in range(len(types[0].shape))]
    indices = [[None] * len(kind.shape) for kind in types[1:-1]]
    count, kept = len(types[-1].shape), written[dims.stop :]
    values = [*[None] * (count - len(kept)), *kept[max(0, len(kept) - count) :]]
    return [written, *indices, values], written


def _counted(node: Node, types: Types) -> Labels:
    """`histc` with given limits: each rank can count its elements."""
    if argument(node, 2, "min", 0) == argument(node, 3, "max", 0):
        return None
    return [[f"element{dim}" for dim in range(len(types[0].shape))]], [None]


def _class_loss(node: Node, types: Types) -> Labels:
    """Scores `[samples, classes, ...]` and classes `[samples, ...]`, not reduced or summed."""
    scores, targets = len(types[0].shape), len(types[1].shape)
    reduction = argument(node, 3, "reduction", 1)
    if scores != targets + 1 or not targets or reduction == 1:
        return None
    samples = [f"sample{dim}" for dim in range(targets)]
    weight = [[None]] * (len(types) - 2)
    return [[samples[0], None, *samples[1:]], samples, *weight], [] if reduction else samples


def _repeated_elements(node: Node, types: Types) -> Pattern:
    """`repeat_interleave` by a number, along a dimension."""
    dims = len(types[0].shape)
    if argument(node, 2, "dim") is None:
        return computed_by_all(node, types)
    output: list[Label] = list(range(dims))
    dim = _dim(node, 2, dims)
    output[dim] = (str(dim), "repeated")
    return _copied(node, types, output, {"repeated": int(node.arguments[1])})


def _repeated(node: Node, types: Types) -> Pattern:
    """`repeat`: dimensions that are not repeated can be divided."""
    times = node.arguments[1]
    added = len(times) - len(types[0].shape)
    copies = {f"copy{at}": count for at, count in enumerate(times)}
    output: list[Label] = [
        (
            *((f"copy{at}",) if count > 1 or at < added else ()),
            *((str(at - added),) if at >= added else ()),
        )
        for at, count in enumerate(times)
    ]
    return _copied(node, types, output, copies)


def _copied(node: Node, types: Types, output: Sequence[Label], copies: dict[str, int]) -> Pattern:
    read = [range(len(types[0].shape))]
    return mapped(node, types, read, output, sizes=copies, whole=copies, linear_in=[{0}], flops=0.0)


def _elementwise_loss(position: int) -> Rule:
    """The rule of losses of two tensors of one shape; `position`: of the argument `reduction`."""

    def labels(node: Node, types: Types) -> Labels:
        if len({kind.shape for kind in types}) > 1:
            return None
        dims = range(len(types[0].shape))
        return [dims] * len(types), [] if argument(node, position, "reduction", 1) else dims

    return labelled(labels, localize=weighted_mean(position))


def _broadcast(node: Node, types: Types) -> Labels:
    """Of `expand` and `broadcast_tensors`, new dimensions and those of size 1 are repeated."""
    dims = range(len(node.output.shape))
    return [dims[len(dims) - len(kind.shape) :] for kind in types], dims


def _moving(labels: Callable[[Node, Types], Labels], **options: Any) -> Rule:
    return labelled(labels, only_moves=True, **options)


DIMENSIONS: dict[str, Rule] = {
    "sum": keeping(by_argument(1, ALL), is_sum=True),
    "mean": keeping(by_argument(1, ALL), is_sum=True, localize=weighted_mean(0)),
    "amax amin argmax argmin any all var std logsumexp prod max min": keeping(by_argument(1, ALL)),
    "linalg_vector_norm norm": keeping(by_argument(2, ALL)),
    "cosine_similarity": keeping(by_argument(2, 1)),
    "softmax log_softmax _softmax _log_softmax cumsum cumprod": keeping(by_argument(1)),
    "scatter scatter_add": keeping(by_argument(1)),
    "glu logcumsumexp sort argsort": keeping(by_argument(1, -1)),
    "topk": keeping(by_argument(2, -1)),
    "layer_norm native_layer_norm rms_norm": keeping(last(lambda node: len(node.arguments[1]))),
    "group_norm": keeping(lambda node, types: range(1, len(types[0].shape))),
    "view_as_real one_hot": keeping(last(0)),
    "max_pool1d avg_pool1d adaptive_avg_pool1d view_as_complex": keeping(last(1)),
    "max_pool2d avg_pool2d adaptive_avg_pool2d triu tril": keeping(last(2)),
    "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d": keeping(last(2)),
    "pad constant_pad_nd": keeping(last(lambda node: len(node.arguments[1]) // 2)),
    "select slice unbind cat": keeping(by_argument(1, 0), only_moves=True),
    "split split_with_sizes chunk slice_scatter": keeping(by_argument(2, 0), only_moves=True),
    "flip": keeping(by_argument(1), only_moves=True),
    "roll": keeping(by_argument(2), only_moves=True),
    "stack": _moving(_stacked),
    "select_scatter": _moving(_select_scattered),
    "permute transpose t": _moving(_permuted),
    GET_ITEM: keeping(last(0), only_moves=True),
    "broadcast_tensors": _moving(_broadcast, broadcasts=True),
    "expand": _moving(_broadcast, broadcasts=True, localize=with_output_shape(1)),
    "zeros ones full empty": _moving(_broadcast, localize=with_output_shape(0)),
    "gather": labelled(_gathered, linear=(0,)),
    "index_select": labelled(_index_selected, linear=(0,)),
    "index": labelled(_indexed, linear=(0,), broadcasts=True, localize=_index_part),
    "index_put": labelled(_index_put),
    "histc": labelled(_counted),
    "cross_entropy_loss nll_loss_nd": labelled(_class_loss),
    "mse_loss l1_loss smooth_l1_loss huber_loss": _elementwise_loss(2),
    "soft_margin_loss kl_div": _elementwise_loss(2),
    "binary_cross_entropy": _elementwise_loss(3),
    "binary_cross_entropy_with_logits": _elementwise_loss(4),
    "repeat": Rule(_repeated),
    "repeat_interleave": Rule(_repeated_elements),
    "view _unsafe_view reshape flatten unflatten squeeze unsqueeze": RESHAPED,
}
"""Rules by the names of operators."""
