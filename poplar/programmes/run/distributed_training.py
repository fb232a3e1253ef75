"""What `poplar.distribute` returns, however the ranks divide the work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from poplar.data.sampler import HeteroBatchSampler
from poplar.optimizer import HeteroZeroOptimizer
from poplar.programmes.graph.programme import Programme
from poplar.values.plan import Plan
from poplar.zero.step_result import StepResult


class DistributedTraining(ABC):
    """The training of one model on all ranks.

    Every method but `explain` and `sampler` is collective: all ranks call it.
    """

    model: nn.Module
    optimizer: HeteroZeroOptimizer
    """The optimizer, for learning rates and schedulers. Do not call its own `train_step`."""
    plan: Plan
    """The plan, with the samples of every rank."""
    programme: Programme | None
    """How the tensors are divided over ranks; None: data parallelism."""
    reason: str
    """Why there is a programme, or why not."""

    @abstractmethod
    def train_step(self, batch: Any, *, max_norm: float | None = None) -> StepResult:
        """One optimizer step on one global batch. Collective.

        Args:
            batch: this rank's part of the global batch, as `sampler` draws it.
            max_norm: clip the gradient to this norm.
        """

    @abstractmethod
    def evaluate(self, loader: Iterable[Any]) -> float:
        """Mean loss over the batches of all ranks, in evaluation mode. Collective.

        Under a programme, every rank has the same number of batches, each its part of a whole
        global batch (`drop_last=True`).
        """

    @abstractmethod
    def state_dict(self, to: int = 0) -> dict[str, Any] | None:
        """The whole state, as of one device. Collective.

        Returns:
            On rank `to`: `"model"`, as the model's own `state_dict()`, and `"optimizer"`, as that
            of a plain optimizer of the class; on the CPU. None on other ranks.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned under any plan or programme. Collective.

        Args:
            state: the same on all ranks.
        """

    @abstractmethod
    def save_model(self, path: str | Path) -> None:
        """Write the whole weights as one safetensors file. Collective; rank 0 writes."""

    @abstractmethod
    def release(self) -> None:
        """Give the model its whole parameters back. Collective; the training ends."""

    def sampler(self, length: int, **options: Any) -> HeteroBatchSampler:
        """A sampler that draws this rank's part of each global batch.

        Args:
            length: of the dataset.
            options: as for `HeteroBatchSampler`.
        """
        return HeteroBatchSampler(length, self.plan, **options)

    def explain(self) -> str:
        """The plan, and why it has a programme or not."""
        return f"{self.plan}\n{self.reason}"
