"""What torch itself offers: DDP and FSDP2, in the settings that their documentation recommends."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from contest.engine import Engine, Entrant, micro_batches
from contest.task import Batch, Task

# torch renamed two collectives, and its own FSDP2 still calls them by their old names.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")


class TorchEngine(Engine):
    """The loop that everybody writes, with gradient accumulation where there are several passes."""

    model: nn.Module

    def __init__(self, task: Task, entrant: Entrant, rank: int) -> None:
        super().__init__(task, entrant, rank)
        self.model = self.distribute(task.new_model())
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=task.learning_rate, fused=True
        )

    def distribute(self, model: nn.Module) -> nn.Module:
        """Wrap or shard the model."""
        raise NotImplementedError

    def one_pass(self, last: bool) -> AbstractContextManager[None]:
        """Around a forward and backward; gradients travel in the last one only."""
        raise NotImplementedError

    def step(self, batch: Batch | None) -> float:
        assert batch is not None, f"{self.entrant.name}: every rank has samples"
        sizes = self.entrant.plan.micro_batches[self.rank]
        total = 0.0
        for number, part in enumerate(micro_batches(batch, sizes), start=1):
            with self.one_pass(last=number == len(sizes)):
                with self.trace.span("pass", f"forward of pass {number}"):
                    loss = self.task.loss_fn(self.model, part) / len(sizes)
                with self.trace.span("pass", f"backward of pass {number}"):
                    loss.backward()
            total += float(loss.detach())
        with self.trace.span("optimizer", "the update"):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return total


class DDP(TorchEngine):
    """Replicated: all-reduce in buckets, under the backward."""

    def distribute(self, model: nn.Module) -> nn.Module:
        # The same graph at every step, which DDP may then rely on.
        return DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=self._once)

    @property
    def _once(self) -> bool:
        """One pass a step; with several, `static_graph` and `no_sync` do not go together."""
        return self.entrant.plan.passes(self.rank) == 1

    def one_pass(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.model.no_sync()


class FSDP2(TorchEngine):
    """Parameters sharded (ZeRO-3), a unit per block, gathered again for the backward."""

    gathers_again: bool | None = None
    """None: blocks are, and the root, which is needed again at once, is not."""

    def distribute(self, model: nn.Module) -> nn.Module:
        for block in self.task.blocks(model):
            fully_shard(block, reshard_after_forward=self.gathers_again)
        return fully_shard(model, reshard_after_forward=self.gathers_again)

    def one_pass(self, last: bool) -> AbstractContextManager[None]:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)
        self.model.set_is_last_backward(last)
        return nullcontext()


class FSDP2Kept(FSDP2):
    """Parameters stay gathered from forward to backward: gradients and state sharded (ZeRO-2)."""

    gathers_again = False

    def one_pass(self, last: bool) -> AbstractContextManager[None]:
        assert isinstance(self.model, FSDPModule)
        self.model.set_reshard_after_backward(last)  # from one pass to the next, too
        return super().one_pass(last)


ENGINES = {("ddp", 0): DDP, ("fsdp2", 2): FSDP2Kept, ("fsdp2", 3): FSDP2}
"""By provider and stage."""


def make_peer(task: Task, entrant: Entrant, rank: int) -> Engine:
    """The engine of an entrant. Collective."""
    return ENGINES[entrant.provider, entrant.stage](task, entrant, rank)
