"""What `poplar.distribute` returns: the training of one model on all ranks, by a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from poplar.data.sampler import HeteroBatchSampler
from poplar.optimizer import HeteroZeroOptimizer
from poplar.programmes.graph.programme import Programme
from poplar.programmes.run.distributed_job import DistributedJob
from poplar.values.plan import Plan
from poplar.zero.steps.step_result import StepResult


class DistributedTraining:
    """The training of one model on all ranks.

    Every method but `explain` and `sampler` is collective: all ranks call it.
    """

    model: nn.Module
    optimizer: HeteroZeroOptimizer
    """The optimizer, for learning rates and schedulers. Do not call its own `train_step`."""
    plan: Plan
    """The plan, with the samples of every rank."""
    programme: Programme | None = None
    """How the tensors are divided over ranks; None: data parallelism."""
    reason: str
    """Why there is a programme, or why not."""
    _compares = True
    """Whether a few steps compare the programme with the model."""

    def __init__(self, job: DistributedJob, plan: Plan, *, reason: str, **options: Any) -> None:
        self._job, self.model, self.plan, self.reason = job, job.model, plan, reason
        given = {**job.engine_options, **job.optimizer_options, **options}
        self.optimizer = HeteroZeroOptimizer(self.model, job.optimizer_class, plan=plan, **given)

    def train_step(self, batch: Any, *, max_norm: float | None = None) -> StepResult:
        """One optimizer step on one global batch. Collective.

        Args:
            batch: this rank's part of the global batch, as `sampler` draws it.
            max_norm: clip the gradient to this norm.
        """
        job = self._job
        return self.optimizer.train_step(
            job.loss_fn, batch, weight=job.weight, loss=job.loss, max_norm=max_norm
        )

    def evaluate(self, loader: Iterable[Any]) -> float:
        """Mean loss over the batches of all ranks, in evaluation mode. Collective.

        Ranks may have different numbers of batches, of any shapes. Under a programme, every rank
        holds the whole parameters meanwhile.
        """
        return self.optimizer.evaluate(self._job.loss_fn, loader, self._job.weight)

    def state_dict(self, to: int = 0) -> dict[str, Any] | None:
        """The whole state, as of one device. Collective.

        Returns:
            On rank `to`: `"model"`, as the model's own `state_dict()`, and `"optimizer"`, as that
            of a plain optimizer of the class; on the CPU. None on other ranks.
        """
        optimizer = self.optimizer.full_state_dict(to)
        with self.optimizer.full_parameters():
            if optimizer is None:
                return None
            return {"model": on_host(self.model), "optimizer": optimizer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned under any plan or programme. Collective.

        Args:
            state: the same on all ranks.
        """
        with self.optimizer.full_parameters(writeback=True):
            self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def save_model(self, path: str | Path) -> None:
        """Write the whole weights as one safetensors file. Collective; rank 0 writes."""
        self.optimizer.save_model(path)

    def release(self) -> None:
        """Give the model its whole parameters back. Collective; the training ends."""
        self.optimizer.release()

    def _detach(self) -> None:
        """Drop the model, with any values in its parameters, after a failure. Not collective."""
        self.optimizer._training.detach()

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


def on_host(model: nn.Module) -> dict[str, Any]:
    """The state dict of a model, copied to the CPU."""
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
