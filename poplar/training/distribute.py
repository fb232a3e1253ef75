"""`distribute`: profile, plan by batches and by tensors, and train with what is faster."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from poplar.comm import Communicator, Control, Group, connect, connect_control
from poplar.data import pytree
from poplar.errors import NotExportable
from poplar.optimizer import HeteroZeroOptimizer
from poplar.planner.graph.programme import Programme
from poplar.planner.synthesis.decision import ProgrammeDecision, plan_programme
from poplar.planner.synthesis.explanation import explain_programme
from poplar.profile import ClusterProfile
from poplar.profiler.memory_limit import MemoryLimit
from poplar.spmd.exported_graph import ExportedLoss, export_loss
from poplar.training.data_parallel import DataParallelTraining
from poplar.training.programme import ProgrammeTraining, sampling_plan
from poplar.training.training import DistributedTraining
from poplar.tuning.autotune import Tuned, tune
from poplar.zero.agreement import raise_on_any_error, run_on_all_ranks
from poplar.zero.micro_batch_loss import LossFunction
from poplar.zero.micro_batches import Loss, Weight
from poplar.zero.update import OptimizerFactory

Choice = Literal["auto", "never"] | Programme | Path


def distribute(
    model: nn.Module,
    loss_fn: LossFunction,
    example_batch: Any,
    *,
    global_batch: int,
    optimizer_class: OptimizerFactory = torch.optim.AdamW,
    programme: Choice = "auto",
    weight: Weight | None = None,
    loss: Loss = "mean",
    profile: ClusterProfile | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    seconds: float = 60.0,
    memory_limit: MemoryLimit = None,
    cache: bool = True,
    progress: bool = True,
    **optimizer_kwargs: Any,
) -> DistributedTraining:
    """A planned training run on all ranks, from a model for one device. Collective.

        training = poplar.distribute(model, loss_fn, example_batch, global_batch=512, lr=3e-4)
        print(training.explain())
        loader = DataLoader(dataset, batch_sampler=training.sampler(len(dataset)))
        for batch in loader:
            training.train_step(batch, max_norm=1.0)

    It profiles the ranks and plans as `autotune` does. Then it exports the loss with `torch.export`
    and searches for a programme: which tensors are sharded on which dimension, and which
    collectives move them in forward and backward. Parameters that are sharded in computation stay
    where they are; the others are trained at ZeRO stage 1. The training runs the programme if it is
    predicted to be faster than the plan, which is data parallelism at any stage. The gradient is
    that of one device in both cases.

    A programme runs one pass per step, of whole global batches in the shapes of the example. It
    computes in the dtype of the model. Models that cannot be exported (control flow that depends
    on values, BatchNorm in training, dropout) are trained by the plan; `explain()` says why.

    Args:
        model: on this rank's device. The values of the first rank are used.
        loss_fn: `loss_fn(model, batch)` -> mean loss.
        example_batch: a batch of any number of samples, as for `autotune`.
        global_batch: samples behind one optimizer step, over all ranks.
        optimizer_class: an elementwise optimizer class.
        programme: "auto"; "never" uses the plan in any case; or a programme to run without a
            profile: `training.programme` of an earlier run, or the `Path` of a file that
            `poplar plan --programme-output` or `Programme.to_json` wrote.
        weight, loss: as for `HeteroZeroOptimizer.train_step`. For a mean over tokens give
            `weight=poplar.tokens()`. Programmes need a loss that is a mean.
        profile, process_group, timeout, seconds, memory_limit, cache, progress: as for `autotune`.
        **optimizer_kwargs: for `optimizer_class`.

    Raises:
        NoPlanFits, ValueError, TypeError, RuntimeError, RankFailed, CollectiveTimeout: as
            `autotune` and `HeteroZeroOptimizer`; also a given programme that this model cannot run.
    """
    group = Group.of(process_group, timeout)
    control = connect_control(group)
    given = _given(control, programme)
    options = {"process_group": process_group, "timeout": timeout, **optimizer_kwargs}
    tuned: Tuned | None = None
    if given is None:
        tuned = tune(
            model,
            loss_fn,
            example_batch,
            global_batch=global_batch,
            optimizer_class=optimizer_class,
            weight=weight,
            loss=loss,
            profile=profile,
            seconds=seconds,
            memory_limit=memory_limit,
            cache=cache,
            progress=progress,
            **options,
        )
    exported: ExportedLoss | None = None
    reason = f"programme={programme!r}, so there is no programme."
    if given is not None or programme == "auto":
        exported, reason = _export(
            control, model, loss_fn, example_batch, global_batch, loss=loss, must=given is not None
        )
    if exported is not None and tuned is not None:
        decision = _decide(control, exported, tuned)
        given, reason = decision.programme, explain_programme(decision)
    if exported is None or given is None:
        assert tuned is not None
        optimizer = HeteroZeroOptimizer(model, optimizer_class, plan=tuned.plan, **options)
        return DataParallelTraining(
            model, loss_fn, optimizer, tuned.plan, weight=weight, loss=loss, reason=reason
        )
    planned = tuned.plan.transport if tuned is not None else None
    device = next(model.parameters()).device
    comm = connect(group, "auto", device, planned=planned)
    _broadcast(comm, dict(chain(model.named_parameters(), model.named_buffers())))
    _broadcast(comm, exported.constants)
    return ProgrammeTraining(
        comm,
        model,
        exported,
        given,
        sampling_plan(given, global_batch),
        optimizer_class,
        reason=reason,
        **options,
    )


def _decide(control: Control, exported: ExportedLoss, tuned: Tuned) -> ProgrammeDecision:
    """The first rank's decision: of equally fast programmes, ranks could find different ones.

    Collective.
    """

    def search() -> ProgrammeDecision | None:
        if control.group.rank:
            return None
        return plan_programme(exported.graph, tuned.profile, tuned.plan)

    mine = run_on_all_ranks(control, search, doing="distribute()")
    decision = control.exchange_objects(mine, what="distribute()")[0]
    assert decision is not None
    return decision


def _given(control: Control, programme: Choice) -> Programme | None:
    """The programme that the user gives, if any. Collective.

    Raises:
        ValueError: on all ranks, if it is none of the choices, or the ranks have different ones.
    """

    def read() -> Programme | None:
        if isinstance(programme, Path):
            return Programme.from_json(programme)
        if isinstance(programme, str) and programme not in ("auto", "never"):
            raise ValueError(
                f"programme={programme!r} must be 'auto', 'never', a Programme or a Path of a file"
            )
        return programme if isinstance(programme, Programme) else None

    given = run_on_all_ranks(control, read, doing="distribute()")
    mine = programme if given is None else given.to_dict()
    by_rank = control.exchange_objects(mine, what="distribute()")
    if any(other != by_rank[0] for other in by_rank):
        raise ValueError("the ranks passed different programmes to distribute()")
    return given


def _export(
    control: Control,
    model: nn.Module,
    loss_fn: LossFunction,
    example: Any,
    global_batch: int,
    *,
    loss: Loss,
    must: bool,
) -> tuple[ExportedLoss | None, str]:
    """The graph of the loss of a global batch; None on all ranks if one has none. Collective.

    Args:
        must: raise instead.

    Returns:
        The graph, or why there is none.
    """
    exported: ExportedLoss | None = None
    error: Exception | None = None
    try:
        if loss != "mean":
            raise NotExportable(f"loss={loss!r}, but programmes need a loss that is a mean")
        if any(tensor.is_meta for tensor in chain(model.parameters(), model.buffers())):
            raise NotExportable("the model is on meta, and a programme divides real values")
        exported = export_loss(model, loss_fn, _enlarged(example, global_batch))
    except NotExportable as caught:
        error = caught
    if must:
        raise_on_any_error(control, error, doing="distribute()")
    reasons = control.exchange_objects(None if error is None else str(error), what="distribute()")
    found = next((f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text), "")
    return (exported, "") if not found else (None, f"No programme: {found}.")


def _enlarged(batch: Any, samples: int) -> Any:
    """A batch of so many samples, which repeats those of `batch`."""
    known = pytree.samples_in(batch)
    return pytree.take(batch, [index % known for index in range(samples)])


@torch.no_grad()
def _broadcast(comm: Communicator, tensors: Mapping[str, Tensor]) -> None:
    """Give all ranks the first rank's values. Collective."""
    for name, tensor in tensors.items():
        values = tensor.detach().contiguous()
        comm.broadcast(values, 0, what=f"the broadcast of {name}")
        tensor.copy_(values)
