"""Bytes of a linear layer's weight gradient: reduced, or sent as factors and multiplied by owners.

A layer has `outputs` times `inputs` weights; rank `r` of `R` has `rows[r]` of the rows (samples or
tokens) of a step, `N` in all, and owns `shares[r]`. Over all ranks, elements sent are

                                reduced                          as factors
    sharded                     (R - 1) outputs inputs           (R - 1) N (inputs + outputs / R)
    every rank updates all      2 (R - 1) outputs inputs         (R - 1) N (inputs + outputs)

with even rows: an owner gets the whole inputs, and the gradients of the outputs that it owns.
"""

from __future__ import annotations

from collections.abc import Sequence

from poplar.values.host_traffic import Traffic


def reduction_traffic(
    outputs: int,
    inputs: int,
    shares: Sequence[float],
    *,
    replicated: bool = False,
    itemsize: int = 4,
) -> list[Traffic]:
    """Bytes that each rank sends and receives if the gradient is reduced.

    Args:
        outputs: rows of the weight.
        inputs: columns of the weight.
        shares: fraction of the weight that each rank owns.
        replicated: every rank updates the whole weight (stage 0); then `shares` only give the
            number of ranks.
        itemsize: bytes of an element on the wire.
    """
    ranks, whole = len(shares), outputs * inputs * itemsize
    if replicated:  # a reduce-scatter and an all-gather of even slices
        moved = 2 * whole * (ranks - 1) / ranks
        return [Traffic(moved, moved) for _ in shares]
    return [Traffic(whole * (1 - share), whole * share * (ranks - 1)) for share in shares]


def factored_traffic(
    outputs: int,
    inputs: int,
    rows: Sequence[float],
    shares: Sequence[float],
    *,
    replicated: bool = False,
    itemsize: int = 4,
) -> list[Traffic]:
    """Bytes that each rank sends and receives if the rows are sent.

    Where a slice begins or ends inside a row of the weight, up to 2 more columns are sent.

    Args:
        outputs: rows of the weight.
        inputs: columns of the weight.
        rows: rows of each rank in one reduction.
        shares: as in `reduction_traffic`.
        replicated: as in `reduction_traffic`.
        itemsize: bytes of an element on the wire.
    """
    needed = [
        itemsize * (inputs + outputs * (1.0 if replicated else share))
        if replicated or share > 0
        else 0.0
        for share in shares
    ]
    total, everybody = sum(rows), sum(needed)
    return [
        Traffic(own_rows * (everybody - own_needs), (total - own_rows) * own_needs)
        for own_rows, own_needs in zip(rows, needed, strict=True)
    ]


def break_even_rows(outputs: int, inputs: int, ranks: int, *, replicated: bool = False) -> float:
    """Rows of all ranks in one reduction below which factors are fewer bytes, with even shares."""
    if replicated:
        return 2 * outputs * inputs / (outputs + inputs)
    return outputs * inputs / (inputs + outputs / ranks)
