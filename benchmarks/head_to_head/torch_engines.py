"""DDP and FSDP2 with the settings that their documentation recommends; even or uneven batches."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from head_to_head.engine import Configuration, Engine, micro_batches
from head_to_head.task import Batch, Task

# FSDP2 calls two collectives by their deprecated names.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")


class TorchEngine(Engine):
    """The usual training loop, with gradient accumulation where there are several passes.

    Each pass's mean loss is weighted by its part of the global batch, so that uneven micro-batches
    give the gradient of the whole batch.
    """

    model: nn.Module
    averages_over_ranks = True
    """The engine divides summed gradients by the number of ranks."""

    def __init__(self, task: Task, configuration: Configuration, rank: int) -> None:
        super().__init__(task, configuration, rank)
        if not all(all(sizes) for sizes in configuration.plan.micro_batches):
            raise ValueError(f"{configuration.name}: every rank needs samples in every pass")
        self.model = self.distribute(task.new_model())
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=task.learning_rate, fused=True
        )

    def distribute(self, model: nn.Module) -> nn.Module:
        """Wrap or shard the model."""
        raise NotImplementedError

    def synchronized(self, last: bool) -> AbstractContextManager[None]:
        """The context of one pass: gradients are reduced in the last pass only."""
        raise NotImplementedError

    def loss_weight(self, samples: int) -> float:
        """Factor of the mean loss of a pass of so many samples."""
        plan = self.configuration.plan
        return samples / plan.global_batch * (plan.world_size if self.averages_over_ranks else 1)

    def step(self, batch: Batch | None) -> float:
        assert batch is not None, f"{self.configuration.name}: every rank has samples"
        sizes = self.configuration.plan.micro_batches[self.rank]
        total = 0.0
        for number, part in enumerate(micro_batches(batch, sizes), start=1):
            with self.synchronized(last=number == len(sizes)):
                loss = self.task.loss_fn(self.model, part)
                (loss * self.loss_weight(sizes[number - 1])).backward()
            total += float(loss.detach()) * sizes[number - 1]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total / sum(sizes)


class DDP(TorchEngine):
    """Replicated parameters; gradients are all-reduced in buckets, overlapped with the backward."""

    def distribute(self, model: nn.Module) -> nn.Module:
        # With several passes, `static_graph` does not work with `no_sync`.
        one_pass = max(map(len, self.configuration.plan.micro_batches)) == 1
        return DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=one_pass)

    def synchronized(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.model.no_sync()


class FSDP2(TorchEngine):
    """Parameters sharded (ZeRO-3), a unit per block, unsharded again for the backward."""

    reshard_after_forward: bool | None = None
    """None is FSDP2's default: all units but the root, which the backward needs first."""

    def distribute(self, model: nn.Module) -> nn.Module:
        for block in self.task.blocks(model):
            fully_shard(block, reshard_after_forward=self.reshard_after_forward)
        model = fully_shard(model, reshard_after_forward=self.reshard_after_forward)
        if not self.averages_over_ranks:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
        return model

    @property
    def averages_over_ranks(self) -> bool:
        """Uneven batches use a divide factor of 1: weighted gradients are summed."""
        return self.configuration.policy == "even"

    def synchronized(self, last: bool) -> AbstractContextManager[None]:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)
        self.model.set_is_last_backward(last)
        return nullcontext()


class FSDP2Unsharded(FSDP2):
    """Parameters stay unsharded until the backward: gradients and state sharded (ZeRO-2)."""

    reshard_after_forward = False

    def synchronized(self, last: bool) -> AbstractContextManager[None]:
        assert isinstance(self.model, FSDPModule)
        self.model.set_reshard_after_backward(last)
        return super().synchronized(last)


ENGINES = {("ddp", 0): DDP, ("fsdp2", 2): FSDP2Unsharded, ("fsdp2", 3): FSDP2}
"""By provider and stage."""


def make_peer(task: Task, configuration: Configuration, rank: int) -> Engine:
    """The engine of a configuration. Collective."""
    return ENGINES[configuration.provider, configuration.stage](task, configuration, rank)
