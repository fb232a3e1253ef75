"""What a rank does and says if it runs out of memory in a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch

from poplar.zero.held_memory import HeldMemory

OnOutOfMemory = Literal["retry", "raise"]


def check_choice(on_out_of_memory: str) -> None:
    """Check the argument `on_out_of_memory`.

    Raises:
        ValueError: it has another value.
    """
    if on_out_of_memory not in get_args(OnOutOfMemory):
        raise ValueError(f"on_out_of_memory={on_out_of_memory!r}; use 'retry' or 'raise'")


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
        rank: this rank.
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
    explained = torch.OutOfMemoryError(
        f"rank {rank} ran out of memory {where}, beside {held.listed()}. {_first_line(error)}. "
        f"What helps: {remedy}a smaller share for this rank, or a higher stage"
    )
    explained.__cause__ = error
    return explained


def _first_line(error: Exception) -> str:
    """The start of the message of the allocator that failed."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")
