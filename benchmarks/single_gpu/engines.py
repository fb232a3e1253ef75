"""The ways to train: plain autocast, DDP, FSDP2 and Poplar by stage, behind one interface.

All have bf16 compute, fp32 masters and reductions, clipping, and AdamW. One unit per block.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from llama import next_byte_loss
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from poplar import HeteroZeroOptimizer, Plan, StepResult
from single_gpu.cases import Batch

# FSDP2 calls two collectives by their deprecated names.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")

LEARNING_RATE = 1e-4
MAX_NORM = 1.0
DTYPE = torch.bfloat16
"""Of the forward and backward passes."""


Loss = Tensor | float | StepResult
"""What a step returns: the value may still be computed on the device."""


class Engine(ABC):
    """One way to train on this rank. The default process group exists; all ranks build one."""

    @abstractmethod
    def __init__(self, model: nn.Module, plan: Plan, rank: int) -> None:
        """`plan`: the samples of each rank and pass; the rest of it is for Poplar only."""

    @abstractmethod
    def step(self, batch: Batch) -> Loss:
        """One optimizer step on this rank's samples; returns a mean loss, without reading it."""

    def close(self) -> None:
        """Remove hooks."""


class Plain(Engine):
    """The usual training loop on one rank, without communication."""

    def __init__(self, model: nn.Module, plan: Plan, rank: int) -> None:
        self.sizes = plan.micro_batches[rank]
        self.samples_per_rank = plan.global_batch / plan.world_size
        self.model = self.distribute(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)

    def distribute(self, model: nn.Module) -> nn.Module:
        """Wrap or shard the model."""
        return model

    def autocast(self, batch: Batch) -> AbstractContextManager[None]:
        """The context of a forward."""
        return torch.autocast(batch["input"].device.type, DTYPE)

    def synchronized(self, last: bool) -> AbstractContextManager[None]:
        """The context of a pass: gradients are reduced in the last pass only."""
        return nullcontext()

    def step(self, batch: Batch) -> Loss:
        total: Tensor | float = 0.0
        for number, (part, size) in enumerate(micro_batches(batch, self.sizes), start=1):
            with self.synchronized(last=number == len(self.sizes)):
                with self.autocast(part):
                    loss = next_byte_loss(self.model, part)
                loss = loss * (size / self.samples_per_rank)
                loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


class DDP(Plain):
    """Replicated parameters; gradients are all-reduced in buckets, overlapped with the backward."""

    def distribute(self, model: nn.Module) -> nn.Module:
        one_pass = len(self.sizes) == 1  # `static_graph` does not work with `no_sync`
        return DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=one_pass)

    def synchronized(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.model.no_sync()


class FSDP2(Plain):
    """Parameters sharded (ZeRO-3), cast to bf16 by FSDP2 itself."""

    def distribute(self, model: nn.Module) -> nn.Module:
        policy = MixedPrecisionPolicy(param_dtype=DTYPE, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)

    def autocast(self, batch: Batch) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronized(self, last: bool) -> AbstractContextManager[None]:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)
        self.model.set_is_last_backward(last)
        return nullcontext()


class Poplar(Engine):
    """`train_step` under a plan."""

    def __init__(self, model: nn.Module, plan: Plan, rank: int) -> None:
        self.optimizer = HeteroZeroOptimizer(
            model, torch.optim.AdamW, plan=plan, lr=LEARNING_RATE, compute_dtype=DTYPE
        )

    def step(self, batch: Batch) -> Loss:
        return self.optimizer.train_step(next_byte_loss, batch, max_norm=MAX_NORM)

    def close(self) -> None:
        self.optimizer.release()


PLAIN, PEER = "plain autocast", "fsdp2"
PEERS: dict[str, type[Engine]] = {PLAIN: Plain, "ddp": DDP, PEER: FSDP2}
"""By the name of the way in tables and rows."""
OURS = {f"poplar {stage}": stage for stage in range(4)}
"""The ZeRO stage, by the name of the way."""
WAYS = (*PEERS, *OURS)


def make_engine(way: str, model: nn.Module, plan: Plan, rank: int = 0) -> Engine:
    """The engine of that name. Collective."""
    return PEERS[way](model, plan, rank) if way in PEERS else Poplar(model, plan, rank)


def micro_batches(batch: Batch, sizes: tuple[int, ...]) -> Iterator[tuple[Batch, int]]:
    """Split a batch into the passes of a plan, each with its samples."""
    start = 0
    for size in sizes:
        yield {name: tensor[start : start + size] for name, tensor in batch.items()}, size
        start += size


def read(loss: Loss) -> float:
    """The value of a loss; waits for its device."""
    return float(loss.loss if isinstance(loss, StepResult) else loss)
