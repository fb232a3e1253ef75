"""torch.distributed: the backend's own collectives, and common substitutes made from others."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.case import Case
from collectives.provider import Prepared, Provider


class Native(Provider):
    """The backend's own collectives; for uneven shares that it does not support, one call per
    slice.
    """

    name = transport = "gloo"

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def prepare(self, case: Case, mine: Tensor) -> Prepared | None:
        if case.operation == "all_reduce":
            whole = mine.clone()
            return Prepared(lambda: dist.all_reduce(whole), lambda: whole)
        if case.operation == "reduce_scatter":
            return self._reduce_scatter(case, mine)
        return self._all_gather(case, mine)

    def _reduce_scatter(self, case: Case, mine: Tensor) -> Prepared:
        out = torch.empty(case.layout.size(self._rank), dtype=mine.dtype)
        if case.is_even:
            return Prepared(lambda: reduce_scatter(out, mine), lambda: out)
        # gloo supports lists of different sizes, but no empty tensors.
        parts = [mine[low:high].clone() for low, high in map(case.layout.bounds, range(case.ranks))]

        def reduce_each() -> None:
            for owner, part in enumerate(parts):
                if part.numel():
                    dist.reduce(part, owner)

        return Prepared(reduce_each, lambda: parts[self._rank])

    def _all_gather(self, case: Case, mine: Tensor) -> Prepared:
        whole = torch.empty(case.layout.numel, dtype=mine.dtype)
        if case.is_even:
            return Prepared(lambda: all_gather(whole, mine), lambda: whole)
        slices = [whole[slice(*case.layout.bounds(rank))] for rank in range(case.ranks)]

        def broadcast_each() -> None:
            slices[self._rank].copy_(mine)
            for owner, part in enumerate(slices):
                if part.numel():
                    dist.broadcast(part, owner)

        return Prepared(broadcast_each, lambda: whole)


class AllToAll(Provider):
    """A reduce-scatter made of an all-to-all and a local sum, as is common on gloo."""

    name, transport = "gloo all-to-all + sum", "gloo"

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def prepare(self, case: Case, mine: Tensor) -> Prepared | None:
        if case.operation != "reduce_scatter":
            return None
        own = case.layout.size(self._rank)
        sent_sizes = [case.layout.size(rank) for rank in range(case.ranks)]
        received_sizes = [own] * case.ranks
        received = torch.empty(case.ranks * own, dtype=mine.dtype)
        out = torch.empty(own, dtype=mine.dtype)

        def exchange() -> None:
            dist.all_to_all_single(received, mine, received_sizes, sent_sizes)
            torch.sum(received.view(case.ranks, own), 0, out=out)

        return Prepared(exchange, lambda: out)


# torch 2.13 renamed these and warns about the old names; earlier versions have only those.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
