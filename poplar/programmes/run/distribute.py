"""`distribute`: profile, plan by batches and by tensors, and train with what is faster."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from torch import nn

from poplar.comm import Control, connect_control
from poplar.profiler.progress import show_progress
from poplar.profiler.trial_runs import OutOfMemoryInTrial
from poplar.programmes.graph.programme import Programme
from poplar.programmes.run.checked_export import CheckedExport
from poplar.programmes.run.distributed_job import DistributedJob
from poplar.programmes.run.distributed_training import DistributedTraining
from poplar.programmes.run.exported_graph import ExportedLoss
from poplar.programmes.run.programme_training import ProgrammeTraining
from poplar.programmes.run.trials import Comparison, compare
from poplar.programmes.search.decision import ProgrammeDecision, plan_programme
from poplar.programmes.search.explanation import explain_programme
from poplar.tuning.autotune import Tuned, tune_job
from poplar.values.communication import EXACT
from poplar.values.errors import NotExportable, agreed
from poplar.values.formatting import format_seconds
from poplar.zero.agreement import exchange_results
from poplar.zero.collective_calls import new_group
from poplar.zero.micro_batch_loss import LossFunction

Choice = Literal["auto", "never"] | Programme

TRIALS_PART = 0.25
"""Seconds for timing a programme and the plan, as a part of those for profile and plan."""


def distribute(
    model: nn.Module,
    loss_fn: LossFunction,
    example_batch: Any,
    *,
    global_batch: int,
    stage: int | Literal["auto"] = "auto",
    programme: Choice = "auto",
    **options: Any,
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
    where they are; the others are trained at ZeRO stage 1. If the programme is predicted to be
    faster than the plan, which is data parallelism at any stage, both run some steps in turns, and
    the training runs what was faster; the plan, if memory runs out in the programme. The gradient
    is that of one device in both cases.

    A programme runs one pass per step, of whole global batches in the shapes of the example. It
    computes in the dtype of the model and sends everything exactly, whatever `communication` says;
    if that is slower than a plan that sends fewer bits, the plan is used.

    Models that cannot be exported (control flow that depends on values, BatchNorm in training,
    dropout) are trained by the plan; `explain()` says why. So are models whose exported graph has
    another loss or gradient than the model itself (hooks, custom `autograd.Function`s, numbers that
    Python code changes); this is compared here and in some steps of the training, with few samples.

    Args:
        model: on this rank's device. The values of the first rank are used.
        loss_fn: `loss_fn(model, batch)` -> mean loss.
        example_batch: a batch of any number of samples, as for `autotune`.
        global_batch: samples behind one optimizer step, over all ranks.
        stage: of the plan, as for `autotune`.
        programme: "auto"; "never" uses the plan in any case; or a programme to run without a
            profile, such as `training.programme` of an earlier run. `Programme.to_json` and
            `from_json` keep one in a file.
        options: those below and those of `autotune`, whose `leave_out` is "never" by default here;
            all others are options of the optimizer.

    Keyword Args:
        optimizer_class: default: AdamW. Programmes need an elementwise one.
        weight, loss: as for `HeteroZeroOptimizer.train_step`. For a mean over tokens give
            `weight=poplar.tokens()`. Programmes need a loss that is a mean.
        verify: with False, neither plans nor programmes are timed; predictions decide. Default:
            True.

    Raises:
        NoPlanFits, ValueError, TypeError, RuntimeError, RankFailed, CollectiveTimeout: as
            `autotune` and `HeteroZeroOptimizer`; also a given programme that this model cannot run.
    """
    if stage != "auto":
        options["stages"] = (stage,)
    process_group, timeout = options.get("process_group"), options.get("timeout")
    with new_group(process_group, timeout, "distribute()") as group:
        job = DistributedJob.of(
            model,
            loss_fn,
            example_batch,
            global_batch=global_batch,
            group=group,
            control=connect_control(group),
            **options,
        )
        return _training(job, programme)


def _training(job: DistributedJob, programme: Choice) -> DistributedTraining:
    """The training that is fastest, or runs the given programme."""
    given = _given(job, programme)
    if given is not None:
        checked = job.exported(must=True)
        comm = job.connected(checked, planned=None)
        return ProgrammeTraining(job, comm, checked, given, reason="The programme was given.")
    with new_group(job.process_group, job.timeout, "distribute()") as group:
        tuned = tune_job(job, group)
    by_plan = partial(DistributedTraining, job, tuned.plan)
    if programme == "never":
        return by_plan(reason="programme='never', so there is no programme.")
    exported: CheckedExport | None = None
    try:
        exported = job.exported(tuned.cast_to)
    except NotExportable as error:
        reason = f"No programme: {error.reason}."
    if exported is None:
        return by_plan(reason=reason)
    decision = _decide(job.control, exported.exported, tuned)
    text = explain_programme(decision, exported.exported.graph)
    if decision.programme is None:
        return by_plan(reason=text)
    if tuned.plan.communication.compresses:
        text = f"{text}\nIt sends everything exactly; the plan does not."
    comm = job.connected(exported, tuned.plan.transport)
    by_programme = partial(ProgrammeTraining, job, comm, exported, decision.programme)
    if not job.verify:
        return by_programme(reason=text)
    seconds = TRIALS_PART * job.seconds
    expected = decision.step_seconds + decision.data_parallel_seconds
    try:
        with show_progress(job.progress and job.group.rank == 0, seconds) as report:
            measured = compare(
                job, by_programme, by_plan, expected=expected, seconds=seconds, report=report
            )
        is_faster, reason = _outcome(measured, text)
    except OutOfMemoryInTrial as short:
        is_faster = False
        reason = f"data parallelism, because {short}. The programme was:\n{text}"
    return by_programme(reason=reason) if is_faster else by_plan(reason=reason)


def _outcome(measured: Comparison, text: str) -> tuple[bool, str]:
    """Whether trials show that the programme is faster, and the reason for what is used."""
    if measured.difference:
        return False, (
            "data parallelism, because the programme computes something else "
            f"({measured.difference}). The loss may be no mean over samples, such as a mean over "
            "tokens without weight=, or one that compares samples. The programme was:\n"
            f"{text}"
        )
    own = format_seconds(measured.programme_seconds)
    other = format_seconds(measured.plan_seconds)
    if measured.ratio < 1.0:
        return (
            True,
            f"{text}\nmeasured in trials: {own} per step, and {other} with data parallelism",
        )
    return False, (
        f"data parallelism, which was faster in trials: {other} per step, and {own} with this "
        f"programme, which was predicted to be faster:\n{text}"
    )


def _decide(control: Control, exported: ExportedLoss, tuned: Tuned) -> ProgrammeDecision:
    """The first rank's decision: of equally fast programmes, ranks could find different ones.

    Collective.
    """

    def search() -> ProgrammeDecision | None:
        if control.group.rank:
            return None
        return plan_programme(exported.graph, tuned.profile, tuned.plan)

    decision = exchange_results(control, search, what="distribute()")[0]
    assert decision is not None
    return decision


def _given(job: DistributedJob, programme: Choice) -> Programme | None:
    """The programme that the user gives, if any. Collective.

    Raises:
        ValueError: on all ranks, if it is none of the choices, or the ranks have different ones, or
            the job asks for fewer bits than a programme sends.
    """

    def read() -> Programme | str:
        if programme in ("auto", "never"):
            return programme
        if isinstance(programme, Programme) and job.communication in ("exact", "auto", EXACT):
            return programme
        if isinstance(programme, Programme):
            raise ValueError(
                f"communication={job.communication!r} with a given programme, but programmes send "
                "everything exactly; leave out communication, or the programme"
            )
        raise ValueError(f"programme={programme!r} must be 'auto', 'never' or a Programme")

    first, *others = exchange_results(job.control, read, what="distribute()")
    if any(other != first for other in others):
        raise agreed(ValueError("the ranks passed different programmes to distribute()"))
    return first if isinstance(first, Programme) else None
