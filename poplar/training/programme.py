"""Training by a programme: the ranks compute the loss of the global batch together.

The gradients of parameters that the programme shards stay on their ranks (local parameters); those
of the others are reduced as at ZeRO stage 1. To the optimizer every rank has one sample, the
programme's loss, whose weight is 1: the loss is the sum over ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from poplar.comm import Communicator
from poplar.optimizer import HeteroZeroOptimizer
from poplar.plan import Plan
from poplar.planner.graph.placement import Sharded, cut
from poplar.planner.graph.programme import Programme
from poplar.spmd.divided_model import DividedModel
from poplar.spmd.execution import Execution
from poplar.spmd.exported_graph import ExportedLoss
from poplar.training.divided_guard import DividedGuard
from poplar.training.training import DistributedTraining
from poplar.training.whole_state import WholeState
from poplar.zero.step_result import StepResult
from poplar.zero.update import OptimizerFactory


def sampling_plan(programme: Programme, global_batch: int) -> Plan:
    """The samples and shares of the ranks under a programme: one pass, at stage 1."""
    bounds = cut(global_batch, programme.ratios)
    even = (1.0 / programme.world_size,) * programme.world_size
    return Plan(
        stage=1,
        global_batch=global_batch,
        micro_batches=tuple((stop - start,) for start, stop in pairwise(bounds)),
        shares=programme.shares or even,
    )


class ProgrammeTraining(DistributedTraining):
    """Runs a programme in every step.

    Args:
        comm: carries the programme's tensors, and nothing else.
        model: with the same values on all ranks; its sharded parameters become parts.
        exported: of the loss on a whole global batch.
        programme: of the exported graph.
        plan: from `sampling_plan`.
        optimizer_class, options: as for `HeteroZeroOptimizer`.
        reason: why there is a programme.

    Raises:
        ValueError, TypeError: as `Execution` and `HeteroZeroOptimizer`.
    """

    def __init__(
        self,
        comm: Communicator,
        model: nn.Module,
        exported: ExportedLoss,
        programme: Programme,
        plan: Plan,
        optimizer_class: OptimizerFactory,
        *,
        reason: str,
        **options: Any,
    ) -> None:
        self.model, self.plan = model, plan
        self.programme: Programme = programme
        self.reason = reason
        self._rank, self._ranks = comm.group.rank, comm.group.size
        device = next(model.parameters()).device
        self._graph = exported.graph
        self._execution = Execution(comm, exported.graph, programme, exported.constants, device)
        self._comm, self._device = comm, device
        self._divided = DividedModel(comm, model, programme)
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        options.setdefault("compute_dtype", dtypes.pop() if len(dtypes) == 1 else "auto")
        self.optimizer = HeteroZeroOptimizer(
            model,
            optimizer_class,
            plan=Plan(
                stage=1,
                global_batch=self._ranks,
                micro_batches=((1,),) * self._ranks,
                shares=plan.shares,
            ),
            local=self._divided.sharded,
            on_out_of_memory="raise",
            **options,
        )
        self.optimizer.expect_artificial_data()
        self.optimizer.expect_collectives_in_loss()
        self._guard = DividedGuard(model)
        self._state = WholeState(self._divided, self.optimizer, self._guard)

    def train_step(self, batch: Any, *, max_norm: float | None = None) -> StepResult:
        loss = _ProgrammeLoss(self, batch)
        one = torch.zeros(1, dtype=torch.uint8, device="cpu")
        result = self.optimizer.train_step(loss, one, loss="global_mean", max_norm=max_norm)
        result.samples = self.plan.global_batch
        return result

    def loss(self, batch: Any) -> Tensor:
        """This rank's contribution to the loss of a global batch. Collective.

        Args:
            batch: this rank's part, as for `train_step`.
        """
        return self._execution.loss(self._divided.parameters, self._tensors(batch))

    def abort(self, error: Exception) -> None:
        """Make the collectives of the programme raise on the other ranks."""
        self._comm.abort(f"rank {self._rank}: a pass of the programme failed: {error!r}")

    def _tensors(self, batch: Any) -> dict[str, Tensor]:
        """The tensors of a batch by path; those of a rank without samples are empty."""
        samples = self.plan.samples(self._rank)
        programme, nodes = self.programme, self._graph.batch
        found: dict[str, Any] = {}
        if batch is not None:
            leaves, _ = tree_flatten_with_path(batch)
            found = {keystr(path): leaf for path, leaf in leaves}
        tensors: dict[str, Tensor] = {}
        for path, node in nodes.items():
            whole = node.output.shape
            is_divided = programme.placements[node.name] == Sharded(0)
            value = found.get(path)
            if samples == 0 and is_divided:
                dtype = getattr(torch, node.output.dtype)
                value = torch.empty((0, *whole[1:]), dtype=dtype, device=self._device)
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"rank {self._rank}: the batch has no tensor at {path}, which the example "
                    "batch had"
                )
            expected = (samples, *whole[1:]) if is_divided else whole
            if tuple(value.shape) != tuple(expected):
                raise ValueError(
                    f"rank {self._rank}: the batch's tensor at {path} must have the shape "
                    f"{tuple(expected)}, got {tuple(value.shape)}; draw whole global batches with "
                    "training.sampler(len(dataset)), padded to the shape of the example batch"
                )
            tensors[path] = value.to(self._device, non_blocking=True)
        return tensors

    @torch.no_grad()
    def evaluate(self, loader: Iterable[Any]) -> float:
        control, doing = self.optimizer.control, "evaluate()"
        batches = iter(loader)
        total, count = 0.0, 0
        while True:
            batch = next(batches, None)
            have = control.exchange_objects(batch is not None, what=doing)
            if not any(have):
                break
            if not all(have):
                missing = [rank for rank, has in enumerate(have) if not has]
                raise ValueError(
                    f"evaluate(): ranks {missing} have fewer batches than the others; all ranks "
                    "need a part of every global batch (drop_last=True)"
                )
            parts = control.exchange_objects(float(self.loss(batch)), what=doing)
            total, count = total + sum(parts), count + 1
        if not count:
            raise ValueError("evaluate(): no rank had a batch")
        return total / count

    def state_dict(self, to: int = 0) -> dict[str, Any] | None:
        return self._state.collect(to)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state.load(state)

    def save_model(self, path: str | Path) -> None:
        self._state.save_model(Path(path))

    def release(self) -> None:
        self.optimizer.release()
        self._divided.restore()
        self._guard.remove()


class _ProgrammeLoss:
    """The loss of one step, as `train_step` of the optimizer calls it."""

    def __init__(self, training: ProgrammeTraining, batch: Any) -> None:
        self._training, self._batch = training, batch

    def __call__(self, model: nn.Module, _: Any) -> Tensor:
        return self._training.loss(self._batch)

    def abort(self, error: Exception) -> None:
        """See `MicroBatchLoss.abort`."""
        self._training.abort(error)
