"""Buffers that forwards write, as the statistics of BatchNorm, where no forward writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from poplar.zero.agreement import run_on_all_ranks
from poplar.zero.opaque_parameter import is_opaque_buffer
from poplar.zero.preserved_state import persistent_buffers

if TYPE_CHECKING:
    from poplar.zero.engine import Engine


@torch.no_grad()
def take_trained_buffers(engine: Engine, *, doing: str) -> None:
    """Copy the buffers that are saved for all to the ranks without samples. Collective.

    Call it before a model is evaluated or its own state dict is saved.
    """
    if not engine.idle_ranks:
        return
    control, whose = engine.control, engine.buffer_rank
    buffers = persistent_buffers(engine.model)
    own = {n: buffer.detach() for n, buffer in buffers.items() if not is_opaque_buffer(buffer)}
    sent = own if control.group.rank == whose else {}
    received = control.exchange_objects(sent, what=f"the buffers of {doing}")[whose]

    def copy() -> None:
        if control.group.rank in engine.idle_ranks:
            for name, value in received.items():
                own[name].copy_(value)

    run_on_all_ranks(control, copy, doing=doing)
