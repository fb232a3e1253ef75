"""What this rank holds at the moment, by kind, and what it says if it runs out of memory.

Kinds do not overlap: each storage counts once. Activations are not counted, only the peak shows
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

from poplar.system import devices
from poplar.values.formatting import format_bytes
from poplar.zero.checks.placeholder_gradient import PlaceholderGradient
from poplar.zero.engine import Engine
from poplar.zero.opaque_parameter import component_tensors
from poplar.zero.update import ShardedUpdate

OnOutOfMemory = Literal["retry", "raise"]


class HeldMemory(dict[str, int]):
    """Bytes by kind, and their total. Print it for one line per kind.

    parameters      what this rank stores of the parameters, and the model's buffers
    unsharded       parameters of other ranks too, while they are unsharded (stage 3)
    masters         fp32 values of low-precision parameters, and what differences are taken from
    optimizer       state of the optimizer class
    host            masters and state that are in host memory instead, by `Plan.host_state`
    gradients       accumulated and reduced gradients, and `.grad`
    buckets         packed gradients in flight, and receive buffers kept for the next collectives
    shared_memory   blocks of shared segments kept for the next collectives
    """

    peak: int
    """Most bytes of this process so far: what CUDA's allocator reserved, or resident memory
    (with shared pages) on the CPU; 0 if unknown."""
    predicted: int | None
    """Most bytes of a step that the plan predicts for this rank; None if it predicts none."""

    def __init__(
        self, kinds: Mapping[str, int], *, peak: int = 0, predicted: int | None = None
    ) -> None:
        super().__init__(kinds)
        self.peak, self.predicted = peak, predicted

    @property
    def total(self) -> int:
        """Sum over all kinds."""
        return sum(self.values())

    def __str__(self) -> str:
        rows = {**self, "total": self.total}
        if self.peak:
            rows["peak of the process"] = self.peak
        if self.predicted is not None:
            rows["predicted peak"] = self.predicted
        width = max(map(len, rows))
        return "\n".join(f"{kind:{width}}  {format_bytes(size)}" for kind, size in rows.items())

    def listed(self) -> str:
        """The total and the kinds that are not empty, in one line."""
        kinds = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in self.items() if size)
        return f"{format_bytes(self.total)} ({kinds or 'nothing'})"


def held_memory(
    engine: Engine, update: ShardedUpdate, *, predicted: int | None = None
) -> HeldMemory:
    """The training state, gradients and buffers on this rank."""
    seen: set[int] = set()

    def count(tensors: Iterable[Tensor]) -> int:
        """Bytes of the storages that were not counted before."""
        total = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
        return total

    flats, trained = engine.flats, engine.trained
    managed = {id(parameter) for flat in flats for parameter in flat.parameters}
    whole = (*engine.model.parameters(), *engine.model.buffers())
    others = [part for t in whole if id(t) not in managed for part in component_tensors(t)]
    buffers = [buffer for unit in engine.units for buffer in unit.buffers]
    parameters = count([*(buffer.shard for buffer in buffers), *others])
    cached = engine.comm.cached_bytes()
    hosted = [flat.master for flat in trained if flat.is_hosted]
    gradients = [flat.gradient for flat in trained]
    gradients += [flat.squares for flat in trained if flat.squares is not None]
    found = [gradient for flat in trained for gradient in flat.held_gradients()]
    own = [grad for grad in found if not isinstance(grad, PlaceholderGradient)]
    in_flight = [bucket.data for bucket in engine.strategy.reductions.buckets()]
    return HeldMemory(
        {
            "parameters": parameters,
            "unsharded": count(buffer.values for buffer in buffers),
            "masters": count(flat.master for flat in trained if not flat.is_hosted)
            + count(flat.sent for flat in trained if flat.sent is not None),
            "optimizer": count(update.state_tensors(hosted=False)),
            "host": count([*hosted, *update.state_tensors(hosted=True)]),
            "gradients": count([*gradients, *own]),
            "buckets": count(in_flight) + cached.private,
            "shared_memory": cached.shared,
        },
        peak=devices.peak_memory(flats[0].device),
        predicted=predicted,
    )


def smaller_batches_message(too_large: Mapping[int, int]) -> str:
    """The warning that a step is run again, by the micro-batches that did not fit, by rank."""
    ranks = "; ".join(
        f"rank {rank} in a pass of {batch} samples, so it now runs at most {batch // 2} at once"
        for rank, batch in sorted(too_large.items())
    )
    return (
        f"out of memory: {ranks}. All ranks run this global batch again; the gradient stays the "
        "same, and later steps use the smaller micro-batches too. For a faster plan, measure "
        "again, or search with profile.with_largest_batches(optimizer.largest_batches)"
    )


def out_of_memory_error(
    error: Exception, rank: int, samples: int | None, held: HeldMemory
) -> torch.OutOfMemoryError:
    """The error of a rank that ran out of memory: where, what it held, and what would help.

    Args:
        error: what was raised.
        samples: of the micro-batch; None: not in a pass.
        held: what the rank held after its activations were freed.
    """
    if samples is None:
        where, remedy = "when the optimizer state was allocated", ""
    else:
        where = f"in a pass of {samples} sample{'' if samples == 1 else 's'}"
        remedy = "activation checkpointing or shorter samples, "
        if samples > 1:
            remedy = f"smaller micro-batches on this rank, {remedy}"
    first_line, *_ = str(error).strip().splitlines() or [type(error).__name__]
    explained = torch.OutOfMemoryError(
        f"rank {rank} ran out of memory {where}, beside {held.listed()}. {first_line.rstrip('.')}. "
        f"What helps: {remedy}a smaller share for this rank, or a higher stage"
    )
    explained.__cause__ = error
    return explained
