"""One training step of Poplar, of FSDP2 and of plain PyTorch, on the same model and batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from llama import Llama, next_byte_loss
from torch import Tensor

from host.scaled_model import CONTEXT, Shape, check_units, scaled_limits
from poplar import HeteroZeroOptimizer, Plan
from poplar.pair.engines import FSDP2, FSDP2Unsharded
from poplar.zero.unit import Unit

Batch = dict[str, Tensor]


@dataclass
class Engine:
    """A model that is trained by `step`."""

    provider: str
    step: Callable[[], object]
    limits: AbstractContextManager[None] = field(default_factory=nullcontext)
    """Enter it before the first step."""
    units: Sequence[Unit] = ()
    """Of Poplar, at scaled size."""
    full_units: Sequence[Unit] = ()
    """The same at full size."""


def poplar_engine(shape: Shape, stage: int, max_norm: float | None) -> Engine:
    """Poplar with equal batches and even shares."""
    ranks, model, batch = dist.get_world_size(), new_model(shape), new_batch(shape)
    with scaled_limits(shape):
        optimizer = HeteroZeroOptimizer(
            model,
            torch.optim.AdamW,
            plan=Plan.even(ranks, ranks, 1, stage),
            lr=1e-4,
            compute_dtype=torch.bfloat16,
            communicator="process_group",  # the control channel, too, as on several hosts
        )
    optimizer._training.expect_artificial_data()
    engine = optimizer._training.engine
    # On one host, the size of the model does not matter.
    limit = optimizer.control.max_flat_bytes(torch.device("cpu"), numel=0)
    full = shape.full_units(shards_parameters=stage == 3, max_flat_bytes=limit)
    check_units(shape, full, engine.units, ranks)

    def step() -> object:
        return optimizer.train_step(next_byte_loss, batch, max_norm=max_norm)

    return Engine("poplar", step, scaled_limits(shape), engine.units, full)


def fsdp2_engine(shape: Shape, stage: int, max_norm: float | None) -> Engine:
    """FSDP2 with one unit per block; at stage 2 parameters stay unsharded until the backward."""
    model, batch, ranks = new_model(shape), new_batch(shape), dist.get_world_size()
    engine = (FSDP2 if stage == 3 else FSDP2Unsharded)(
        model,
        next_byte_loss,
        Plan.even(ranks, ranks, 1, stage),
        dist.get_rank(),
        learning_rate=1e-4,
        dtype=torch.bfloat16,
        max_norm=max_norm,
        blocks=list(model.blocks),
    )
    return Engine("fsdp2", lambda: engine.step(batch))


def plain_engine(shape: Shape) -> Engine:
    """Forward and backward of one process in bf16, without an optimizer: what all engines share."""
    model, batch = new_model(shape).bfloat16(), new_batch(shape)

    def step() -> object:
        loss = next_byte_loss(model, batch)
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        return loss

    return Engine("plain passes", step)


def new_model(shape: Shape) -> Llama:
    """The scaled model in fp32."""
    torch.manual_seed(0)
    return Llama(shape.config(full=False))


def new_batch(shape: Shape) -> Batch:
    """One sample."""
    generator = torch.Generator().manual_seed(1)
    vocabulary = shape.config(full=False).vocabulary
    tokens = torch.randint(vocabulary, (1, CONTEXT + 1), generator=generator)
    return {"input": tokens[:, :-1], "target": tokens[:, 1:]}
