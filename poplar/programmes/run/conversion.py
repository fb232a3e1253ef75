"""Moves a tensor from one placement to another: which collective, with which bounds."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from poplar.comm.communicator import Communicator
from poplar.programmes.graph.placement import PARTIAL, REPLICATED, Placement, Sharded
from poplar.programmes.run.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    count_once,
    embed,
    reduce_scatter,
    take_own,
)


def convert(
    comm: Communicator,
    x: Tensor,
    source: Placement,
    target: Placement,
    shape: Sequence[int],
    ratios: Sequence[int],
    *,
    what: str,
) -> Tensor:
    """The tensor in another placement. Collective, and differentiable.

    Args:
        comm: the transport.
        x: what this rank has in the placement `source`.
        source: the placement of `x`.
        target: the placement of the result.
        shape: of the whole tensor.
        ratios: of the programme.
        what: the tensor's name in errors.

    Raises:
        ValueError: `x` does not have the shape that `source` gives this rank.
        CollectiveTimeout: names the ranks that did not take part before the deadline.
    """
    if source == target:
        return x
    if isinstance(source, Sharded):
        return _from_parts(comm, x, source, target, shape, ratios, what)
    if isinstance(target, Sharded):
        bounds = target.bounds(shape, ratios)
        move = take_own if source is REPLICATED else reduce_scatter
        return move(comm, x, target.dim, bounds, what=what)
    return (count_once if target is PARTIAL else all_reduce)(comm, x, what=what)


def _from_parts(
    comm: Communicator,
    x: Tensor,
    source: Sharded,
    target: Placement,
    shape: Sequence[int],
    ratios: Sequence[int],
    what: str,
) -> Tensor:
    bounds = source.bounds(shape, ratios)
    if target is REPLICATED:
        return all_gather(comm, x, source.dim, bounds, what=what)
    if not isinstance(target, Sharded):
        return embed(comm, x, source.dim, bounds, what=what)
    new_bounds = target.bounds(shape, ratios)
    if source.dim != target.dim:
        return all_to_all(comm, x, source.dim, target.dim, bounds, new_bounds, what=what)
    if bounds == new_bounds:
        return x
    # Other units of the same dimension. Plans avoid this, so it is not worth a collective.
    whole = all_gather(comm, x, source.dim, bounds, what=what)
    return take_own(comm, whole, target.dim, new_bounds, what=what)


def own_part(whole: Tensor, placement: Placement, ratios: Sequence[int], rank: int) -> Tensor:
    """A rank's part of a tensor that it has as a whole: a view.

    Raises:
        ValueError: a partial placement, of which no rank's summand is given.
    """
    if placement is PARTIAL:
        raise ValueError("a partial placement has no parts of a given tensor")
    if not isinstance(placement, Sharded):
        return whole
    bounds = placement.bounds(whole.shape, ratios)
    return whole.narrow(placement.dim, bounds[rank], bounds[rank + 1] - bounds[rank])
