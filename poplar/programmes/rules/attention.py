"""Attention, divided by samples or by heads."""

from __future__ import annotations

import math

from poplar.programmes.graph.graph import Node
from poplar.programmes.rules.pattern import Dims, Pattern, aligned, named
from poplar.programmes.rules.rule import Rule, Types, computed_by_all

_LEADING = 4
"""Dimensions of `[samples, heads, tokens, channels]`."""


def attention(node: Node, types: Types) -> Pattern:
    """`scaled_dot_product_attention`; several query heads may share a key and value head."""
    query, key, value = (kind.shape for kind in types[:3])
    if not len(query) == len(key) == len(value) == _LEADING:
        return computed_by_all(node, types)
    sizes = {"samples": query[0], "heads": key[1], "shared": query[1] // key[1]}
    before = dict(sizes)
    queries, keys = named("query", query[2:], sizes), named("key", key[2:], sizes)
    values = named("value", value[2:], sizes)
    placed = named("out", node.output.shape[2:], sizes)
    query_heads = ("heads", "shared") if sizes["shared"] > 1 else ("heads",)
    output: Dims = (("samples",), query_heads, *placed)
    masks: tuple[Dims, ...] = ()
    if len(types) > 3:
        masks = (_mask(query_heads, types, sizes),)
    return Pattern(
        sizes=sizes,
        inputs=(
            (("samples",), query_heads, *queries),
            (("samples",), ("heads",), *keys),
            (("samples",), ("heads",), *values),
            *masks,
        ),
        output=output,
        whole=frozenset(set(sizes) - set(before)) | {"shared"},
        flops=2.0 * math.prod(query[:3]) * key[2] * (query[3] + value[3]),
    )


def _mask(query_heads: tuple[str, ...], types: Types, sizes: dict[str, int]) -> Dims:
    """Axes of a mask that is broadcast to [samples, heads, queries, keys]."""
    query, key, mask = types[0].shape, types[1].shape, types[3].shape
    scores: Dims = (("samples",), query_heads, *named("score", (query[2], key[2]), sizes))
    return aligned(scores, (*query[:3], key[2]), mask)


ATTENTION = Rule(attention)
