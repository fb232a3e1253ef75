"""DDP and FSDP2 with the settings that their documentation recommends; even or uneven batches."""

from __future__ import annotations

from head_to_head.engine import Configuration, Engine
from head_to_head.task import Batch, Task
from poplar.pair.engines import DDP, FSDP2, FSDP2Unsharded

ENGINES = {("ddp", 0): DDP, ("fsdp2", 2): FSDP2Unsharded, ("fsdp2", 3): FSDP2}
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


def make_peer(task: Task, configuration: Configuration, rank: int) -> Engine:
    """The engine of a configuration. Collective."""
    return TorchEngine(task, configuration, rank)
