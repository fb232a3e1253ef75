"""An entrant, and what it is on one rank: an engine that can take a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from contest.task import Batch, Task
from poplar import Plan
from poplar.system.trace import Span, Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class Entrant:
    """One way to train the task on a cluster. A small picklable value."""

    name: str
    """As the table shows it: `poplar exact, stage 2`, `DeepSpeed ZeRO-2`, `FSDP2`."""
    provider: str
    """`poplar`, `deepspeed`, `fsdp2` or `ddp`."""
    stage: int
    """The ZeRO stage that it is, whatever the provider calls it."""
    policy: str
    """Poplar: `exact`, `paper`, `flops` or `even`. Peers: `even` or `uneven` (set by hand)."""
    plan: Plan
    """Who computes what; for peers it says how many even micro-batches of which size. It has as
    many ranks as take part."""
    ranks: tuple[int, ...]
    """Which of the cluster's ranks take part, ascending; all of them but for the weak-only and
    strong-only baselines. Rank `i` of the plan is `ranks[i]`."""
    over_gloo: bool = False
    """Poplar, carried as its peers are, although the ranks could share memory."""

    def samples(self, rank: int) -> int:
        """Samples of the cluster's rank `rank` in a step."""
        return self.plan.samples(self.ranks.index(rank)) if rank in self.ranks else 0


class Engine(ABC):
    """An entrant on one rank. The default process group is made before; every rank makes one."""

    losses_are_agreed = False
    """What `step` returns is the global batch's mean loss, not that of this rank's samples."""

    def __init__(self, task: Task, entrant: Entrant, rank: int) -> None:
        self.task, self.entrant, self.rank = task, entrant, rank
        self.trace = Trace()

    @abstractmethod
    def step(self, batch: Batch | None) -> float:
        """One optimizer step on this rank's part of a global batch; returns its mean loss.

        Reading the loss off the device is not part of a training step, so return a float only
        where that costs nothing, as on the CPU.
        """

    @contextmanager
    def traced(self) -> Iterator[list[Span]]:
        """Collect what the steps in the `with` block consist of: passes, waits, the optimizer."""
        with self.trace.record() as spans:
            yield spans

    def close(self) -> None:
        """Give memory and hooks back."""


def micro_batches(batch: Batch, sizes: tuple[int, ...]) -> Iterator[Batch]:
    """Cut a batch into the plan's passes."""
    start = 0
    for size in sizes:
        yield {name: tensor[start : start + size] for name, tensor in batch.items()}
        start += size
