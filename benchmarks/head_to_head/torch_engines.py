"""DDP and FSDP2 with the settings that their documentation recommends; even or uneven batches."""

from __future__ import annotations

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from head_to_head.engine import Configuration, Engine
from head_to_head.task import Batch, Task
from poplar.pair.engines import DDP, FSDP2, FSDP2Unsharded

SINGLE_BUCKET_MIB = 2**16


class Bf16DDP(DDP):
    """Gradients are sent in bf16."""

    def distribute(self, model: nn.Module) -> nn.Module:
        wrapped = super().distribute(model)
        # Not the hook itself, which DDP refuses on gloo.
        wrapped.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
        return wrapped


class PowerSGDDDP(DDP):
    """Gradients are sent as matrices of rank 4, with error feedback."""

    def distribute(self, model: nn.Module) -> nn.Module:
        # One bucket: the hook sends from callbacks, which gloo runs in another order on each rank.
        wrapped = DistributedDataParallel(
            model, static_graph=self.one_pass, bucket_cap_mb=SINGLE_BUCKET_MIB
        )
        # From the third step on, the first that is counted.
        state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook)
        return wrapped


ENGINES = {
    ("ddp", 0): DDP,
    ("ddp_bf16", 0): Bf16DDP,
    ("ddp_powersgd", 0): PowerSGDDDP,
    ("fsdp2", 2): FSDP2Unsharded,
    ("fsdp2", 3): FSDP2,
}
"""By provider and stage."""


class TorchEngine(Engine):
    """An engine of torch. Weighted losses make uneven micro-batches exact."""

    def __init__(self, task: Task, configuration: Configuration, rank: int) -> None:
        super().__init__(task, configuration, rank)
        model = task.new_model()
        self.engine = ENGINES[configuration.provider, configuration.stage](
            model,
            task.loss_fn,
            configuration.plan,
            rank,
            learning_rate=task.learning_rate,
            blocks=task.blocks(model),
        )

    def step(self, batch: Batch | None) -> float:
        assert batch is not None, f"{self.configuration.name}: every rank has samples"
        return float(self.engine.step(batch))
