"""The engines that are compared: the usual loop of one rank, DDP, FSDP2, and Poplar.

All have AdamW with fp32 parameters and reductions, and compute in one dtype.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from poplar.data import pytree
from poplar.optimizer import HeteroZeroOptimizer
from poplar.values.plan import Plan
from poplar.zero.steps.step_result import StepResult

# FSDP2 calls two collectives by their deprecated names.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")

LossFunction = Callable[[nn.Module, Any], Tensor]


class Engine(ABC):
    """One way to train a model on this rank; all ranks make one."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        plan: Plan,
        rank: int,
        *,
        learning_rate: float,
        dtype: torch.dtype = torch.float32,
        max_norm: float | None = None,
        blocks: Sequence[nn.Module] = (),
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """
        Args:
            model: with fp32 parameters; frozen ones may have `dtype`.
            loss_fn: mean loss of the model on a batch.
            plan: the samples of each rank and pass; the rest of it is for Poplar only.
            rank: this rank, in the plan.
            learning_rate: of AdamW.
            dtype: of forward and backward. There is no loss scaling but Poplar's.
            max_norm: gradient clipping; None: none.
            blocks: what FSDP2 shards as units beside the root.
            process_group: of all ranks of the plan; None: WORLD.
        """
        self.loss_fn, self.plan, self.rank = loss_fn, plan, rank
        self.learning_rate, self.dtype, self.max_norm = learning_rate, dtype, max_norm
        self.blocks, self.process_group = blocks, process_group
        self.set_up(model)

    @abstractmethod
    def set_up(self, model: nn.Module) -> None:
        """Make the optimizer, and distribute the model."""

    @abstractmethod
    def step(self, batch: Any) -> Tensor | StepResult:
        """One optimizer step on this rank's samples; returns a mean loss without reading it."""

    def close(self) -> None:
        """Remove hooks."""


class Plain(Engine):
    """The usual training loop on one rank, without communication."""

    def set_up(self, model: nn.Module) -> None:
        if not all(all(sizes) for sizes in self.plan.micro_batches):
            raise ValueError(f"{type(self).__name__}: every rank needs samples in every pass")
        self.sizes = self.plan.micro_batches[self.rank]
        self.one_pass = max(map(len, self.plan.micro_batches)) == 1
        self.device = next(model.parameters()).device
        self.model = self.distribute(model)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=self.learning_rate, fused=True)

    def distribute(self, model: nn.Module) -> nn.Module:
        """Wrap or shard the model."""
        return model

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of a forward."""
        return autocast(self.device, self.dtype)

    def synchronized(self, last: bool) -> AbstractContextManager[Any]:
        """The context of a pass: gradients are reduced in the last pass only."""
        return nullcontext()

    def step(self, batch: Any) -> Tensor:
        # Engines average over ranks. With these weights, the average is the gradient of the whole
        # batch, also if batches are uneven.
        average = self.plan.global_batch / self.plan.world_size
        total = torch.zeros((), device=self.device)
        parts = zip(pytree.split(batch, self.sizes), self.sizes, strict=True)
        for number, (part, size) in enumerate(parts, start=1):
            with self.synchronized(last=number == len(self.sizes)):
                with self.autocast():
                    loss = self.loss_fn(self.model, part)
                (loss * (size / average)).backward()
            total += loss.detach() * size
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total / sum(self.sizes)


class DDP(Plain):
    """Replicated parameters; gradients are all-reduced in buckets, overlapped with the backward."""

    def distribute(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(
            model,
            process_group=self.process_group,
            gradient_as_bucket_view=True,
            static_graph=self.one_pass,  # does not work with `no_sync`
        )

    def synchronized(self, last: bool) -> AbstractContextManager[Any]:
        assert isinstance(self.model, DistributedDataParallel)
        return nullcontext() if last else self.model.no_sync()


class FSDP2(Plain):
    """Parameters sharded (ZeRO-3), a unit per block, cast by FSDP2 itself."""

    reshard_after_forward: bool | None = None
    """None is FSDP2's default: all units but the root, which the backward needs first."""

    def distribute(self, model: nn.Module) -> nn.Module:
        options: dict[str, Any] = {"reshard_after_forward": self.reshard_after_forward}
        if self.process_group is not None:
            options["mesh"] = DeviceMesh.from_group(self.process_group, self.device.type)
        if self.dtype != torch.float32:
            options["mp_policy"] = MixedPrecisionPolicy(self.dtype, torch.float32)
        for block in self.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        return model

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def synchronized(self, last: bool) -> AbstractContextManager[Any]:
        if not self.one_pass:
            assert isinstance(self.model, FSDPModule)
            self.model.set_requires_gradient_sync(last)
            self.model.set_is_last_backward(last)
            if self.reshard_after_forward is False:
                self.model.set_reshard_after_backward(last)
        return nullcontext()


class FSDP2Unsharded(FSDP2):
    """Parameters stay unsharded until the backward: gradients and state sharded (ZeRO-2)."""

    reshard_after_forward = False


class Poplar(Engine):
    """`train_step` under the plan."""

    def set_up(self, model: nn.Module) -> None:
        self.optimizer = HeteroZeroOptimizer(
            model,
            torch.optim.AdamW,
            plan=self.plan,
            lr=self.learning_rate,
            compute_dtype=self.dtype,
            process_group=self.process_group,
        )

    def step(self, batch: Any) -> StepResult:
        return self.optimizer.train_step(self.loss_fn, batch, max_norm=self.max_norm)

    def close(self) -> None:
        self.optimizer.release()


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """A context in which operators compute in a dtype; fp32: as usual."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)
