"""Collectives over unevenly cut tensors that autograd differentiates, and `convert` with them.

The value of a tensor is what all ranks have together, and so is the loss: the sum of the ranks'
contributions. So each collective is a linear map over all ranks, and its backward is the adjoint
map:

    all_gather       sharded -> replicated     backward: reduce_scatter
    reduce_scatter   partial -> sharded        backward: all_gather
    all_reduce       partial -> replicated     backward: all_reduce
    all_to_all       sharded -> sharded        backward: all_to_all back

A part of a replicated tensor (`own_part`) is taken without communication; the gradient is partial.

All other functions are collective, in the same order on all ranks. That holds for backward too: on
one device, autograd visits operators in exactly the opposite order of the forward, and every
function here is part of the graph on every rank, also with empty parts.

`bounds` are `len(ranks) + 1` integers: rank `r` has the indices `bounds[r]` to `bounds[r + 1]` of
the dimension. `what` names the call in errors. Sums of float64 tensors and of integers have their
dtype and are in rank order. Others are fp32, in the transport's order and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from poplar.comm.bucket import Codec
from poplar.comm.communicator import Communicator, Splits
from poplar.comm.shard_layout import Layout
from poplar.programmes.graph.placement import REPLICATED, Placement, Sharded, cut

Bounds = Sequence[int]
_ADDED_IN_FP32 = (torch.float32, torch.bfloat16, torch.float16)


def all_gather(comm: Communicator, x: Tensor, dim: int, bounds: Bounds, *, what: str) -> Tensor:
    """The whole tensor, from each rank's part of `dim`.

    Args:
        x: this rank's part, of any dtype; other dimensions are the same on all ranks.

    Raises:
        CollectiveTimeout: names the ranks that did not take part before the deadline.
    """

    def run(x: Tensor) -> Tensor:
        layout = _layout_of_parts(x, dim, bounds)
        data = torch.empty(layout.numel, dtype=x.dtype, device=x.device)
        own = x.contiguous().view(-1)
        comm.all_gather(_words(data), layout, what=what, own=_words(own)).wait()
        if math.prod(x.shape[:dim]) == 1:  # the parts are consecutive in the whole, too
            return data.view(_resized(x, dim, bounds[-1]))
        parts = zip(data.split(layout.sizes), pairwise(bounds), strict=True)
        return torch.cat([part.view(_resized(x, dim, b - a)) for part, (a, b) in parts], dim)

    return _apply(run, x, lambda g: reduce_scatter(comm, g, dim, bounds, what=_of_gradient(what)))


def reduce_scatter(comm: Communicator, x: Tensor, dim: int, bounds: Bounds, *, what: str) -> Tensor:
    """This rank's part of `dim` of the sum over ranks.

    Args:
        x: of the whole shape, which is the same on all ranks; any dtype but bool.

    Raises:
        CollectiveTimeout: as `all_gather`.
    """

    def run(x: Tensor) -> Tensor:
        rank = comm.group.rank
        layout = _layout_of_parts(x, dim, bounds)
        total = _reduce_scatter(comm, _parts(x, dim, bounds), layout, what)
        return total.view(_resized(x, dim, bounds[rank + 1] - bounds[rank])).to(x.dtype)

    return _apply(run, x, lambda g: all_gather(comm, g, dim, bounds, what=_of_gradient(what)))


def all_reduce(comm: Communicator, x: Tensor, *, what: str) -> Tensor:
    """The sum over ranks; arguments and errors as `reduce_scatter`."""

    def run(x: Tensor) -> Tensor:
        # The same bounds for all ranks, without regard to their speed: each adds what it sends.
        layout = Layout(cut(x.numel(), (1,) * comm.group.size))
        data = x.contiguous().view(-1)
        total = _reduce_scatter(comm, data.split(layout.sizes), layout, what).to(x.dtype)
        result = torch.empty_like(data)
        comm.all_gather(result, layout, what=what, own=total).wait()
        return result.view(x.shape)

    return _apply(run, x, lambda g: all_reduce(comm, g, what=_of_gradient(what)))


def all_to_all(
    comm: Communicator,
    x: Tensor,
    source_dim: int,
    target_dim: int,
    source_bounds: Bounds,
    target_bounds: Bounds,
    *,
    what: str,
) -> Tensor:
    """This rank's part of `target_dim`, from each rank's part of `source_dim`.

    Args:
        x: this rank's part of `source_dim`; the whole of `target_dim`.
        target_dim: another dimension than `source_dim`.

    Raises:
        CollectiveTimeout: as `all_gather`.
    """

    def run(x: Tensor) -> Tensor:
        sent = _parts(x, target_dim, target_bounds)
        own = sent[comm.group.rank]
        shapes = [_resized(own, source_dim, b - a) for a, b in pairwise(source_bounds)]
        numels = [math.prod(shape) for shape in shapes]
        sizes = Splits(received=numels, sent=[part.numel() for part in sent])
        received = torch.empty(sum(numels), dtype=x.dtype, device=x.device)
        flat = torch.cat([part.reshape(-1) for part in sent])
        comm.all_to_all(_words(received), _words(flat), sizes, what=what).wait()
        parts = zip(received.split(numels), shapes, strict=True)
        return torch.cat([part.view(shape) for part, shape in parts], source_dim)

    def back(gradient: Tensor) -> Tensor:
        dims, bounds = (target_dim, source_dim), (target_bounds, source_bounds)
        return all_to_all(comm, gradient, *dims, *bounds, what=_of_gradient(what))

    return _apply(run, x, back)


_Map = Callable[[Tensor], Tensor]


class _LinearMap(torch.autograd.Function):
    """A linear map of one tensor, whose backward is another one that is differentiable, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: _Map, adjoint: _Map) -> Tensor:
        ctx.adjoint = adjoint
        return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.adjoint(gradient), None, None


def _apply(run: _Map, x: Tensor, adjoint: _Map) -> Tensor:
    if x.is_complex():  # sums of complex numbers are sums of their parts
        parts = torch.view_as_real(x.resolve_conj())
        return torch.view_as_complex(_apply(run, parts, adjoint).contiguous())
    result: Tensor = _LinearMap.apply(x, run, adjoint)  # type: ignore[no-untyped-call]
    return result


def _of_gradient(what: str) -> str:
    return f"the gradient of {what}"


def _reduce_scatter(
    comm: Communicator, parts: Sequence[Tensor], layout: Layout, what: str
) -> Tensor:
    """The flat sum over ranks of this rank's part, in the dtype of sums; `parts`: by rank."""
    first = parts[0]
    own, ranks = layout.size(comm.group.rank), comm.group.size
    if first.dtype not in _ADDED_IN_FP32:  # rare, and the transports add in fp32
        sizes = Splits(received=[own] * ranks, sent=list(layout.sizes))
        received = torch.empty(ranks * own, dtype=first.dtype, device=first.device)
        flat = torch.cat([part.reshape(-1) for part in parts])
        comm.all_to_all(received, flat, sizes, what=what).wait()
        exact: Tensor = reduce(torch.add, received.view(ranks, own))
        return exact
    bucket = comm.buffer(layout, first.dtype, first.device, Codec(first.dtype))
    bucket.wait_until_writable()
    for target, part in zip(bucket.data.split(layout.sizes), parts, strict=True):
        target.view(part.shape).copy_(part)
    total = torch.empty(own, dtype=torch.float32, device=first.device)
    comm.reduce_scatter(bucket, total, accumulate=False, what=what).wait()
    return total


def _parts(x: Tensor, dim: int, bounds: Bounds) -> list[Tensor]:
    """Every rank's part of `dim`: views."""
    return [x.narrow(dim, start, stop - start) for start, stop in pairwise(bounds)]


def _resized(x: Tensor, dim: int, size: int) -> tuple[int, ...]:
    """The shape of `x` with another size of `dim`."""
    return (*x.shape[:dim], size, *x.shape[dim + 1 :])


def _layout_of_parts(x: Tensor, dim: int, bounds: Bounds) -> Layout:
    """One rank's part of `dim` after the other, each contiguous."""
    row = math.prod(_resized(x, dim, 1))
    return Layout(tuple(row * bound for bound in bounds))


def _words(flat: Tensor) -> Tensor:
    """The same memory in a dtype that all transports send; bool is not one of them."""
    return flat.view(torch.uint8) if flat.dtype is torch.bool else flat


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
        x: what this rank has in the placement `source`.
        shape: of the whole tensor.
        what: the tensor's name in errors.

    Raises:
        CollectiveTimeout: names the ranks that did not take part before the deadline.
    """
    if source == target:
        return x
    rank = comm.group.rank
    if source is REPLICATED:
        return own_part(x, target, ratios, rank)
    new_bounds = target.bounds(shape, ratios) if isinstance(target, Sharded) else ()
    if not isinstance(source, Sharded):
        if not isinstance(target, Sharded):
            return all_reduce(comm, x, what=what)
        return reduce_scatter(comm, x, target.dim, new_bounds, what=what)
    bounds = source.bounds(shape, ratios)
    if isinstance(target, Sharded) and source.dim != target.dim:
        return all_to_all(comm, x, source.dim, target.dim, bounds, new_bounds, what=what)
    if bounds == new_bounds:
        return x
    # Other units of the same dimension. Plans avoid this, so it is not worth a collective.
    return own_part(all_gather(comm, x, source.dim, bounds, what=what), target, ratios, rank)


def own_part(whole: Tensor, placement: Placement, ratios: Sequence[int], rank: int) -> Tensor:
    """A rank's part of a tensor that it has as a whole: a view."""
    if not isinstance(placement, Sharded):
        return whole
    start, stop = placement.bounds(whole.shape, ratios)[rank : rank + 2]
    return whole.narrow(placement.dim, start, stop - start)
