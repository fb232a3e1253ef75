"""Training by a programme: the ranks compute the loss of the global batch together.

The gradients of parameters that the programme shards stay on their ranks (local parameters); those
of the others are reduced as at ZeRO stage 1. A step has one pass; its loss is the sum over ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from poplar.checkpoint.saved_model import save_model
from poplar.checkpoint.state_dicts.shard_tensor import ShardTensor
from poplar.comm import Communicator
from poplar.data import pytree
from poplar.programmes.graph.graph import BUFFER, Graph
from poplar.programmes.graph.placement import Sharded, part_sizes
from poplar.programmes.graph.programme import Programme
from poplar.programmes.run.checked_export import CheckedExport
from poplar.programmes.run.distributed_job import DistributedJob
from poplar.programmes.run.distributed_training import DistributedTraining, on_host
from poplar.programmes.run.divided_model import DividedModel
from poplar.programmes.run.execution import Execution
from poplar.programmes.search.composition import batch_placements
from poplar.system.out_of_memory import is_out_of_memory
from poplar.training.whole_step import take_joint_step
from poplar.values.errors import NotExportable, equal_on_all_ranks, is_agreed
from poplar.values.plan import Plan
from poplar.zero.agreement import run_on_all_ranks
from poplar.zero.micro_batch_loss import PassLoss
from poplar.zero.steps.step_result import StepResult

LossPart = Callable[[list[Exception]], Tensor]

_MORE_MEMORY = (
    "A programme runs the whole global batch in one pass; data parallelism with smaller passes may "
    "fit: call distribute(programme='never')"
)


def sampling_plan(programme: Programme, global_batch: int) -> Plan:
    """The samples and shares of the ranks under a programme: one pass, at stage 1."""
    samples = part_sizes(global_batch, programme.ratios)
    even = (1.0 / programme.world_size,) * programme.world_size
    return Plan(
        stage=1,
        global_batch=global_batch,
        micro_batches=tuple((own,) for own in samples),
        shares=programme.shares or even,
    )


class ProgrammeTraining(DistributedTraining):
    """Runs a programme in every step.

    Args:
        comm: carries the programme's tensors, and nothing else.
        checked: the loss of a whole global batch of the job. The model has the same values on all
            ranks; its sharded parameters become parts.

    Raises:
        ValueError, TypeError: as `Execution` and `HeteroZeroOptimizer`.
    """

    def __init__(
        self,
        job: DistributedJob,
        comm: Communicator,
        checked: CheckedExport,
        programme: Programme,
        *,
        reason: str,
    ) -> None:
        model = job.model
        self._rank, self._comm, self._device = comm.group.rank, comm, job.own_device
        self._modules, self._steps = tuple(model.modules()), 0
        self._checked, exported = checked, checked.exported
        with equal_on_all_ranks():
            plan = sampling_plan(programme, job.global_batch)
            self._execution = Execution(
                comm, exported.graph, programme, exported.constants, self._device
            )
            self._divided = DividedModel(comm, model, programme, exported.graph)
        read = {node.source for node in exported.graph.nodes.values() if node.operator == BUFFER}
        self._buffers = read & dict(model.named_buffers()).keys()
        self._compared_modes = self._modes()
        self._name_of = {id(p): name for name, p in self._divided.parameters.items()}
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        own_dtype = dtypes.pop() if len(dtypes) == 1 else "auto"
        try:
            super().__init__(
                job,
                plan,
                reason=reason,
                _local=self._divided.sharded,
                on_out_of_memory="raise",
                compute_dtype=own_dtype if job.compute_dtype == "auto" else job.compute_dtype,
            )
        except Exception as error:
            if is_agreed(error):  # such as a wrong argument: all ranks can collect the parameters
                self._divided.restore()
            else:
                self._divided.detach()
            raise
        self.programme: Programme = programme

    def train_step(self, batch: Any, *, max_norm: float | None = None) -> StepResult:
        loss = _ProgrammeLoss(self, batch)
        samples = self.plan.samples(self._rank)
        given = self.optimizer._training, loss, loss.open
        take = partial(take_joint_step, *given, samples=samples, max_norm=max_norm)
        try:
            result = self.optimizer.collective_calls.call("train_step()", take)
        except Exception as error:
            if is_out_of_memory(error):
                error.args = (f"{error}. {_MORE_MEMORY}",)
            raise
        self._steps += 1
        return result

    def opened(self, batch: Any) -> LossPart:
        """A function that computes this rank's contribution to the loss of a global batch.

        The function is collective; this method is not. See `Execution.loss` for its argument.

        Args:
            batch: this rank's part, as for `train_step`.

        Raises:
            RuntimeError: the model computes something else than the programme.
            ValueError: the batch is not like the example batch.
        """
        exported = self._checked.exported
        if isinstance(batch, pytree.SplitsItself):
            (batch,) = batch.split([len(batch)])
        tensors = self._tensors(exported.graph, exported.tensors(batch, self._device))
        if self._compares and self.plan.samples(self._rank):
            self._compare(batch)
        whole = (path for path, node in exported.graph.batch.items() if not node.output.shape)
        numbers = {path: float(tensors[path]) for path in whole}
        buffers = {source: self.model.get_buffer(source) for source in self._buffers}

        def compute(errors: list[Exception]) -> Tensor:
            try:
                self._check_equal(numbers)
            except ValueError as error:  # on all ranks
                errors.append(error)
                raise
            # The graph has the casts of autocast in loss_fn.
            with torch.autocast(self._device.type, enabled=False):
                return self._execution.loss(self._divided.parameters, tensors, buffers, errors)

        return compute

    def _compare(self, batch: Any) -> None:
        """Compare the graph with the model on samples of this rank, in a few steps.

        Also in the first step in which the training flags of modules have changed. The comparison
        needs memory for the whole parameters. If that is missing, it is left out.
        """
        divided, modes = self._divided, self._modes()
        step = self._steps if modes == self._compared_modes else 0
        has_parts = all(divided.parameters[name].numel() for name in divided.sharded)
        if not has_parts or not self._checked.is_due(step):
            return
        try:
            with divided.with_whole_shapes(divided.repeated):
                self._checked.check(batch, step)
            self._compared_modes = modes
        except NotExportable as error:
            raise RuntimeError(
                f"rank {self._rank}: after {self._steps} steps, the programme does not compute "
                f"what loss_fn computes: {error}. Steps since the last comparison, after half as "
                "many steps or 256 steps before, may have been wrong: load a checkpoint, and call "
                "distribute(programme='never')"
            ) from error
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._compared_modes = modes
            warnings.warn(
                f"rank {self._rank}: too little memory to compare the programme with loss_fn after "
                f"{self._steps} steps; numbers that Python code changes are not noticed",
                stacklevel=2,
            )

    def _check_equal(self, numbers: Mapping[str, float]) -> None:
        """Raise on all ranks if their batches have different numbers. Collective if there are any.

        Ranks compute a number's part of the loss together, so they need the same one.
        """
        if not numbers:
            return
        own = torch.tensor(list(numbers.values()), dtype=torch.float64, device="cpu")
        by_rank = self.optimizer.control.exchange(own, what="the numbers of the batch")()
        for path, values in zip(numbers, torch.stack(by_rank).T.tolist(), strict=True):
            if len(set(map(repr, values))) > 1:  # NaN is equal to NaN
                raise ValueError(
                    f"the batches of the ranks have different numbers at {path}: {values}; give "
                    "every rank the same one, or a tensor with a value for each sample"
                )

    def abort(self, error: Exception) -> None:
        """Make the collectives of the programme raise on the other ranks."""
        advice = f". {_MORE_MEMORY}" if is_out_of_memory(error) else ""
        self._comm.abort(f"rank {self._rank}: a pass of the programme failed: {error!r}{advice}")

    def _modes(self) -> tuple[bool, ...]:
        """The training flags of all modules, on which the graph depends."""
        return tuple([module.training for module in self._modules])

    def _tensors(self, graph: Graph, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a batch by path; those of a rank without samples are empty."""
        samples, divided = self.plan.samples(self._rank), batch_placements(graph)
        tensors: dict[str, Tensor] = {}
        for path, node in graph.batch.items():
            whole = node.output.shape
            is_divided = divided[node.name] == Sharded(0)
            value = found.get(path)
            if samples == 0 and is_divided:
                dtype = getattr(torch, node.output.dtype)
                value = torch.empty((0, *whole[1:]), dtype=dtype, device=self._device)
            if value is None:
                raise ValueError(
                    f"rank {self._rank}: the batch has no tensor or number at {path}, which the "
                    "example batch had"
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

    def evaluate(self, loader: Iterable[Any]) -> float:
        def whole(name: str) -> Tensor:
            return self._divided.whole(name, self._divided.parameters[name].data)

        with self._divided.with_whole_shapes(whole):
            return super().evaluate(loader)

    def state_dict(self, to: int = 0) -> dict[str, Any] | None:
        optimizer = self.optimizer.full_state_dict(to)
        for index, name, parameter in self._sharded():
            whole = self._whole_optimizer_state(name, parameter)
            if optimizer is not None:
                optimizer["state"][index] = whole
        with self._divided.with_whole_shapes(self._collected(to)):
            if optimizer is None:
                return None
            return {"model": on_host(self.model), "optimizer": optimizer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        divided, control = self._divided, self.optimizer.control
        run_on_all_ranks(control, lambda: self._check(state["model"]), doing="load_state_dict()")
        states = dict(state["optimizer"]["state"])
        for index, name, _ in self._sharded():
            states[index] = {
                key: divided.own(name, value).contiguous()
                if isinstance(value, Tensor) and tuple(value.shape) == divided.shapes[name]
                else value
                for key, value in states.get(index, {}).items()
            }
        self.optimizer.load_state_dict({**state["optimizer"], "state": states})
        with self.optimizer.full_parameters(writeback=True), torch.no_grad():
            with self._with_shapes("cpu") as given:
                self.model.load_state_dict(state["model"])
            for name, whole in given.items():
                divided.parameters[name].copy_(divided.own(name, whole))

    def save_model(self, path: str | Path) -> None:
        engine, control = self.optimizer._training.engine, self.optimizer.control
        self.optimizer._training.step.nonfinite.reject_state("save_model()")
        with self._divided.with_whole_shapes(self._collected(0)):
            save_model(engine, control, self.model, Path(path), sharded=False, frozen=True)

    def release(self) -> None:
        self.optimizer.release()
        self._divided.restore()

    def _detach(self) -> None:
        super()._detach()
        self._divided.detach()

    def _sharded(self) -> list[tuple[int, str, nn.Parameter]]:
        """Number in the optimizer, name and value of parameters of which ranks have parts."""
        groups = self.optimizer.param_groups
        numbered = enumerate(chain.from_iterable(group["params"] for group in groups))
        named = ((index, self._name_of[id(p)], p) for index, p in numbered)
        return [found for found in named if found[1] in self._divided.sharded]

    def _collected(self, to: int) -> Callable[[str], Tensor]:
        """Makes the whole values on the CPU of rank `to`, and none on others. Collective."""

        def made(name: str) -> Tensor:
            whole = self._divided.whole(name, self._divided.parameters[name].data)
            return whole.to("cpu" if self._rank == to else "meta")

        return made

    def _with_shapes(self, device: str) -> AbstractContextManager[dict[str, nn.Parameter]]:
        """The model with sharded parameters of whole shapes, without values."""
        shapes = self._divided.shapes
        return self._divided.with_whole_shapes(
            lambda name: torch.empty(shapes[name], device=device)
        )

    def _whole_optimizer_state(self, name: str, parameter: nn.Parameter) -> dict[str, Any]:
        """The whole state of a sharded parameter, on the CPU. Collective."""
        state, parts = self.optimizer.state[parameter], {}
        for key, own in sorted(state.items()):
            if isinstance(own, ShardTensor) and own.shape == parameter.shape:
                parts[key] = own.local.view(parameter.shape)
        # Such as a step counter, which a rank with an empty part does not have.
        others = {key: value for key, value in state.items() if key not in parts}
        mine = others if parameter.numel() else None
        by_rank = self.optimizer.control.exchange_objects(mine, what="state_dict()")
        known = next(values for values in by_rank if values is not None)
        return {**known, **{key: self._divided.whole(name, p).cpu() for key, p in parts.items()}}

    def _check(self, model: Mapping[str, Tensor]) -> None:
        """Raise if a state dict is of another model."""
        with self._with_shapes("meta"):
            known = self.model.state_dict()
        if model.keys() != known.keys():
            differing = sorted(model.keys() ^ known.keys())
            raise ValueError(f"the state is of another model: the names {differing} differ")
        for key, value in known.items():
            if model[key].shape != value.shape:
                raise ValueError(
                    f"{key!r} has the shape {tuple(model[key].shape)} in the state, but here it "
                    f"has the shape {tuple(value.shape)}; the state is of another model"
                )


class _ProgrammeLoss(PassLoss):
    """This rank's part of the loss of one step."""

    def __init__(self, training: ProgrammeTraining, batch: Any) -> None:
        self._training, self._batch = training, batch
        self._compute: LossPart | None = None
        self._errors: list[Exception] = []

    def open(self) -> None:
        """Check the batch, while the ranks agree that the step begins."""
        self._compute = self._training.opened(self._batch)

    def __call__(self, batch: Any) -> Tensor:
        assert self._compute is not None
        return self._compute(self._errors)

    def abort(self, error: Exception) -> bool:
        others_wait = error not in self._errors
        if others_wait:
            self._training.abort(error)
        return others_wait

    def raise_any_error(self) -> None:
        for error in self._errors:
            raise error
