"""The rule of each operator, and what every rank calls for a node of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from poplar.programmes.graph.graph import GET_ITEM, LEAVES, Graph, Node
from poplar.programmes.graph.placement import Placement
from poplar.programmes.rules import (
    attention,
    contractions,
    indexing,
    lookups,
    losses,
    pointwise,
    shapes,
)
from poplar.programmes.rules.local_call import LocalCall, Part, local_call_of
from poplar.programmes.rules.pattern import Pattern
from poplar.programmes.rules.reductions import (
    EXTREMUM,
    MEAN,
    PADDED,
    SELECTION,
    SUM,
    along_dim,
    over_last_dims,
    selection_over,
)
from poplar.programmes.rules.rule import Rule, computed_by_all
from poplar.programmes.rules.strategy import Strategy, strategies, strategy_of

COMPUTED_BY_ALL = Rule(computed_by_all)
"""The rule of operators that are not in `RULES`."""

_BY_NAME: tuple[tuple[Rule, tuple[str, ...]], ...] = (
    (pointwise.POINTWISE, pointwise.NAMES),
    (pointwise.TYPE_AS, ("type_as",)),
    (contractions.LINEAR, ("linear",)),
    (contractions.MATMUL, ("matmul", "mm", "bmm", "mv", "dot")),
    (contractions.ADDED_PRODUCT, ("addmm", "baddbmm")),
    (contractions.OUTER, ("outer",)),
    (contractions.EINSUM, ("einsum",)),
    (contractions.CONVOLUTION, ("conv1d", "conv2d", "conv3d")),
    (attention.ATTENTION, ("scaled_dot_product_attention",)),
    (lookups.EMBEDDING, ("embedding",)),
    (lookups.GATHER, ("gather",)),
    (lookups.INDEX_SELECT, ("index_select",)),
    (lookups.ONE_HOT, ("one_hot",)),
    (indexing.INDEX, ("index",)),
    (indexing.INDEX_PUT, ("index_put",)),
    (indexing.SCATTERED, ("scatter", "scatter_add")),
    (indexing.GROUPED_PRODUCT, ("_grouped_mm", "transformers.grouped_mm_fallback.default")),
    (indexing.HISTOGRAM, ("histc",)),
    (SUM, ("sum",)),
    (MEAN, ("mean",)),
    (
        SELECTION,
        ("amax", "amin", "argmax", "argmin", "any", "all", "var", "std", "logsumexp", "prod"),
    ),
    (EXTREMUM, ("max", "min")),
    (selection_over(2), ("linalg_vector_norm", "norm", "cosine_similarity")),
    (along_dim(1), ("softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum", "cumprod")),
    (along_dim(1, -1), ("glu", "logcumsumexp")),
    (along_dim(2, -1), ("topk",)),
    (along_dim(1, -1), ("sort", "argsort")),
    (over_last_dims(), ("layer_norm", "native_layer_norm", "rms_norm")),
    (over_last_dims(kept_dims=1), ("group_norm",)),
    (over_last_dims(1), ("max_pool1d", "avg_pool1d", "adaptive_avg_pool1d")),
    (over_last_dims(0), ("view_as_real",)),
    (over_last_dims(1), ("view_as_complex",)),
    (over_last_dims(2), ("upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d")),
    (over_last_dims(2), ("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "triu", "tril")),
    (PADDED, ("pad", "constant_pad_nd")),
    (losses.CLASS_LOSS, ("cross_entropy_loss", "nll_loss_nd")),
    (losses.elementwise_loss(2), ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")),
    (losses.elementwise_loss(2), ("soft_margin_loss", "kl_div")),
    (losses.elementwise_loss(3), ("binary_cross_entropy",)),
    (losses.elementwise_loss(4), ("binary_cross_entropy_with_logits",)),
    (shapes.RESHAPED, ("view", "_unsafe_view", "reshape", "flatten", "unflatten")),
    (shapes.RESHAPED, ("squeeze", "unsqueeze")),
    (shapes.PERMUTED, ("permute", "transpose", "t")),
    (shapes.EXPANDED, ("expand",)),
    (shapes.REPEATED, ("repeat",)),
    (shapes.REPEATED_ELEMENTS, ("repeat_interleave",)),
    (shapes.REORDERED, ("flip", "roll")),
    (shapes.PARTLY_WRITTEN, ("slice_scatter", "select_scatter")),
    (shapes.BROADCAST, ("broadcast_tensors",)),
    (shapes.CHOSEN, ("select", "slice", "split", "split_with_sizes", "chunk", "unbind")),
    (shapes.ITEM, (GET_ITEM,)),
    (shapes.CONCATENATED, ("cat", "stack")),
    (shapes.CREATED, ("zeros", "ones", "full", "empty")),
    (shapes.CREATED_LIKE, ("new_zeros", "new_ones", "new_full", "new_empty")),
)
RULES = {name: rule for rule, names in _BY_NAME for name in names}
"""Rules by the base name of the operator, such as `linear` of `aten.linear.default`."""


def base_name(operator: str) -> str:
    """`linear` of `aten.linear.default`; `getitem` stays as it is."""
    namespace, _, name = operator.partition(".")
    return name.partition(".")[0] if namespace == "aten" else operator


def rule_of(node: Node) -> Rule:
    """The rule of a node's operator; `COMPUTED_BY_ALL` if there is none."""
    return RULES.get(base_name(node.operator), COMPUTED_BY_ALL)


def pattern_of(graph: Graph, node: Node) -> Pattern:
    """The pattern of a node that is no leaf."""
    if graph.nodes.get(node.name) is not node:
        return _new_pattern(graph, node)
    if node.name not in graph.derived:
        graph.derived[node.name] = _new_pattern(graph, node)
    pattern: Pattern = graph.derived[node.name]
    return pattern


def _new_pattern(graph: Graph, node: Node) -> Pattern:
    types = graph.types(node)
    pattern = rule_of(node).pattern(node, types)
    # Booleans have no sum.
    linear_in = (part for part in pattern.linear_in if all(types[i].dtype != "bool" for i in part))
    return replace(pattern, linear_in=tuple(linear_in))


def strategies_of(
    graph: Graph, node: Node, units: Callable[[str], Iterable[int]] = lambda axis: (1,)
) -> Iterator[Strategy]:
    """All strategies of a node that is no leaf; a tensor that it reads twice has one placement.

    Args:
        graph: with the node.
        node: no leaf.
        units: which units to consider for an axis, as in `strategies`.
    """
    for strategy in strategies(pattern_of(graph, node), units):
        pairs = set(zip(node.inputs, strategy.inputs, strict=True))
        if len(pairs) == len(set(node.inputs)):
            yield strategy


def local_call(
    graph: Graph,
    node: Node,
    inputs: Sequence[Placement | None],
    output: Placement,
    ratios: Sequence[int],
    rank: int,
) -> LocalCall:
    """What a rank calls for its part of a node.

    Args:
        graph: with the node.
        node: no leaf.
        inputs: placements in which the node's tensors are read, as in `Programme.inputs`.
        output: placement of the node's output, as in `Programme.placements`.
        ratios: of the programme.
        rank: whose call.

    Raises:
        ValueError: the operator cannot be computed with these placements.
    """
    pattern = pattern_of(graph, node)
    try:
        strategy = strategy_of(pattern, inputs, output)
    except ValueError as error:
        raise ValueError(f"node {node.name!r}, {node.operator}: {error}") from None
    part = Part(
        node=node,
        types=graph.types(node),
        pattern=pattern,
        strategy=strategy,
        ratios=tuple(ratios),
        rank=rank,
    )
    return local_call_of(part, rule_of(node).localize)


def without_rules(graph: Graph) -> Iterator[Node]:
    """Nodes that every rank computes whole, because their operators have no rule."""
    for node in graph.nodes.values():
        if node.operator not in LEAVES and rule_of(node) is COMPUTED_BY_ALL:
            yield node
