"""Poplar as an entrant: whatever its plan says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from contest.engine import Engine, Entrant
from contest.task import Batch, Task
from poplar import HeteroZeroOptimizer
from poplar.system.trace import Span


class Poplar(Engine):
    """`train_step` under the entrant's plan; ranks that take no part do nothing."""

    losses_are_agreed = True

    def __init__(self, task: Task, entrant: Entrant, rank: int) -> None:
        super().__init__(task, entrant, rank)
        everyone = len(entrant.ranks) == dist.get_world_size()
        # Collective over all ranks, those that take no part included.
        group = None if everyone else dist.new_group(list(entrant.ranks))
        self.optimizer: HeteroZeroOptimizer | None = None
        if rank in entrant.ranks:
            self.optimizer = HeteroZeroOptimizer(
                task.new_model(),
                torch.optim.AdamW,
                plan=entrant.plan,
                process_group=group,
                communicator="process_group" if entrant.over_gloo else "auto",
                lr=task.learning_rate,
                compute_dtype=torch.float32,
            )

    def step(self, batch: Batch | None) -> float:
        assert self.optimizer is not None, f"rank {self.rank} takes no part in {self.entrant.name}"
        return float(self.optimizer.train_step(self.task.loss_fn, batch).loss)

    @contextmanager
    def traced(self) -> Iterator[list[Span]]:
        assert self.optimizer is not None
        with self.optimizer.trace() as spans:
            yield spans

    def close(self) -> None:
        if self.optimizer is not None:
            self.optimizer.release()
            self.optimizer = None
