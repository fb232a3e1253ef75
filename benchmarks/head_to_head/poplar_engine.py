"""Poplar under a given plan or programme."""

from __future__ import annotations

import torch
import torch.distributed as dist

from head_to_head.engine import Configuration, Engine
from head_to_head.task import Batch, Task
from poplar import HeteroZeroOptimizer, distribute


class Poplar(Engine):
    """`train_step` under the configuration's plan; unused ranks do nothing."""

    losses_are_agreed = True

    def __init__(self, task: Task, configuration: Configuration, rank: int) -> None:
        super().__init__(task, configuration, rank)
        all_ranks = len(configuration.ranks) == dist.get_world_size()
        # Collective over all ranks, unused ones included.
        group = None if all_ranks else dist.new_group(list(configuration.ranks))
        self.optimizer: HeteroZeroOptimizer | None = None
        if rank in configuration.ranks:
            self.optimizer = HeteroZeroOptimizer(
                task.new_model(),
                torch.optim.AdamW,
                plan=configuration.plan,
                process_group=group,
                communicator="process_group" if configuration.over_gloo else "auto",
                lr=task.learning_rate,
                compute_dtype=torch.float32,
            )

    def step(self, batch: Batch | None) -> float:
        assert self.optimizer is not None, (
            f"rank {self.rank} takes no part in {self.configuration.name}"
        )
        return float(self.optimizer.train_step(self.task.loss_fn, batch).loss)

    def close(self) -> None:
        if self.optimizer is not None:
            self.optimizer.release()
            self.optimizer = None


class PoplarProgramme(Engine):
    """`train_step` of what `poplar.distribute` returns for the configuration's programme."""

    losses_are_agreed = True

    def __init__(self, task: Task, configuration: Configuration, rank: int) -> None:
        super().__init__(task, configuration, rank)
        assert configuration.programme is not None
        self.training = distribute(
            task.new_model(),
            task.loss_fn,
            task.example(1),
            global_batch=configuration.plan.global_batch,
            programme=configuration.programme,
            lr=task.learning_rate,
        )

    def step(self, batch: Batch | None) -> float:
        return float(self.training.train_step(batch).loss)

    def close(self) -> None:
        self.training.release()
