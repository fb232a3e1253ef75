"""A configuration, and the engine that runs it on one rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from head_to_head.task import Batch, Task
from poplar import Plan
from poplar.programmes.graph.programme import Programme


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """One way to train the task on a cluster. A small picklable value."""

    name: str
    """Name in tables: `poplar exact, stage 2`, `DeepSpeed ZeRO-2`, `FSDP2`."""
    provider: str
    """`poplar`, `deepspeed`, `fsdp2` or `ddp`."""
    stage: int
    """The equivalent ZeRO stage."""
    policy: str
    """Poplar: `exact`, `programme`, `paper`, `flops` or `even`. Peers: `even`, or `uneven` (set
    manually)."""
    plan: Plan
    """Micro-batches and shares of the ranks that take part; peers use only the micro-batches."""
    ranks: tuple[int, ...]
    """The cluster's ranks that take part, ascending. Rank `i` of the plan is `ranks[i]`."""
    programme: Programme | None = None
    """How Poplar divides the tensors of the model; None: data parallelism."""
    over_gloo: bool = False
    """Poplar on gloo, as its peers, instead of shared memory."""

    def samples(self, rank: int) -> int:
        """Samples of the cluster's rank `rank` in a step."""
        return self.plan.samples(self.ranks.index(rank)) if rank in self.ranks else 0


class Engine(ABC):
    """A configuration on one rank. The default process group exists; all ranks build an engine."""

    losses_are_agreed = False
    """`step` returns the mean loss of the global batch instead of this rank's samples."""

    def __init__(self, task: Task, configuration: Configuration, rank: int) -> None:
        self.task, self.configuration, self.rank = task, configuration, rank

    @abstractmethod
    def step(self, batch: Batch | None) -> float:
        """One optimizer step on this rank's part of a global batch; returns its mean loss.

        Reading the loss is free on the CPU; on a GPU it would synchronize the device.
        """

    def close(self) -> None:
        """Free memory and remove hooks."""


def micro_batches(batch: Batch, sizes: tuple[int, ...]) -> Iterator[Batch]:
    """Split a batch into the passes of a plan."""
    start = 0
    for size in sizes:
        yield {name: tensor[start : start + size] for name, tensor in batch.items()}
        start += size
