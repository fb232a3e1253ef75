"""The ways to train: plain autocast, DDP, FSDP2 and Poplar by stage, behind one interface.

All have bf16 compute, fp32 masters and reductions, clipping, and AdamW. One unit per block.
"""

from __future__ import annotations

import torch
from llama import next_byte_loss
from torch import Tensor, nn

from poplar import Plan, StepResult
from poplar.pair.engines import DDP, FSDP2, Engine, Plain, Poplar

LEARNING_RATE = 1e-4
MAX_NORM = 1.0
DTYPE = torch.bfloat16
"""Of the forward and backward passes."""

PLAIN, PEER = "plain autocast", "fsdp2"
PEERS: dict[str, type[Engine]] = {PLAIN: Plain, "ddp": DDP, PEER: FSDP2}
"""By the name of the way in tables and rows."""
ON_HOST = "poplar 1, state on the host"
OURS = {**{f"poplar {stage}": stage for stage in range(4)}, ON_HOST: 1}
"""The ZeRO stage, by the name of the way."""
WAYS = (*PEERS, *OURS)


def make_engine(way: str, model: nn.Module, plan: Plan, rank: int = 0) -> Engine:
    """The engine of that name; names that are not of a peer are Poplar's. Collective."""
    return PEERS.get(way, Poplar)(
        model,
        next_byte_loss,
        plan,
        rank,
        learning_rate=LEARNING_RATE,
        dtype=DTYPE,
        max_norm=MAX_NORM,
        blocks=list(model.blocks),
    )


def read(loss: Tensor | StepResult) -> float:
    """The value of a loss; waits for its device."""
    return float(loss.loss if isinstance(loss, StepResult) else loss)
