"""Optimizers for measuring, and passes on the engine at stage 3, for what does not fit unsharded.

They give the same points as plain passes: seconds without waits, and the memory of activations
alone. Gradients are dropped and nothing is reduced, updated or clipped.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from statistics import fmean
from time import perf_counter
from typing import Any, TypeVar

import torch

from poplar.comm import Control
from poplar.optimizer import HeteroZeroOptimizer
from poplar.profiler.memory import PassBytes
from poplar.profiler.model_profile import trained_units
from poplar.profiler.passes import Passes
from poplar.profiler.session import Session
from poplar.profiler.timing import SHORTEST_SAMPLE_SECONDS, SHORTEST_SECONDS
from poplar.profiler.unit_hooks import TrainedUnit
from poplar.system.devices import synchronize
from poplar.system.out_of_memory import free_failed_pass, is_out_of_memory
from poplar.values.errors import CollectiveTimeout, equal_on_all_ranks
from poplar.values.plan import FIRST_STAGE_SHARDING_PARAMETERS, Plan
from poplar.zero.agreement import leader_of
from poplar.zero.collective_calls import AGAIN, stop_reason, waiting_in
from poplar.zero.engine import Engine
from poplar.zero.optimizers.granularity import OptimizerFactory
from poplar.zero.passes.collective_pass import Mode
from poplar.zero.weights.materialization import move_to_meta

T = TypeVar("T")


@contextmanager
def built_optimizer(
    session: Session,
    plan: Plan,
    optimizer_class: OptimizerFactory,
    options: Mapping[str, Any],
) -> Iterator[HeteroZeroOptimizer]:
    """An optimizer under a plan. Collective at both ends; the parameters are restored at the end.

    No rank gathers the parameters for that: the values were kept, on CUDA in host memory. A model
    that was on `meta` is put back there. There are no exact first steps: most steps of a training
    come after them.
    """
    job = session.job
    plan = replace(plan, communication=replace(plan.communication, warmup_steps=0))
    hooked = plan.stage >= FIRST_STAGE_SHARDING_PARAMETERS
    with session.graphs.run(hooked=hooked), session.parameters_preserved():
        optimizer = HeteroZeroOptimizer(
            job.model,
            optimizer_class,
            plan=plan,
            **job.engine_options,
            on_out_of_memory="raise",  # a changed plan would be measured as the given one
            **options,
        )
        optimizer._training.expect_artificial_data()
        try:
            yield optimizer
            session.exchange(None)  # no rank reads the shards of another one any more
            if session.is_on_meta:
                optimizer.release(values=False)
        except BaseException:
            optimizer._training.detach()
            with suppress(RuntimeError):  # the error may hold a graph: the caller retries
                put_back_on_meta(session)
            raise
        else:
            optimizer._training.detach()
        del optimizer
        gc.collect()  # Python does not see how much memory a reference cycle holds


def put_back_on_meta(session: Session) -> None:
    """Put the parameters on `meta` if the model was there before; an optimizer must not own them.

    Raises:
        RuntimeError: a graph of autograd still holds one of them.
    """
    if session.is_on_meta:
        move_to_meta([p for p in session.job.model.parameters() if not p.is_meta])


@contextmanager
def sharded_passes(session: Session) -> Iterator[EnginePasses]:
    """Passes with the parameters sharded by the free memory of each rank. Collective at both ends.

    The optimizer is SGD without momentum, so a rank holds its part of the parameters and no state.

    Raises:
        ValueError: the ranks together cannot hold the parameters; the same on all ranks.
    """
    memory, size = session.memory, session.group.size
    with equal_on_all_ranks():
        memory.check_sharded()
    plan = Plan(
        stage=FIRST_STAGE_SHARDING_PARAMETERS,
        global_batch=size,
        micro_batches=((1,),) * size,
        shares=memory.shares,
    )
    with built_optimizer(session, plan, torch.optim.SGD, {"lr": 0.0}) as optimizer:
        job = session.job
        passes = EnginePasses(
            job.model,
            job.loss_fn,
            job.example,
            session.device,
            trained_units(session),
            lengths=job.measured_lengths,
            engine=optimizer._training.engine,
            control=session.control,
            unsharded_bytes=memory.unsharded_units,
        )
        try:
            yield passes
        finally:
            del passes.engine  # callers may keep `passes`, but not the memory of the engine


@dataclass(kw_only=True)
class EnginePasses(Passes):
    """Forward and backward on the engine. Every pass is collective: see [Note: rounds].

    [Note: rounds]
    Ranks measure different sizes, different numbers of times. So passes run in rounds: each rank
    says how many samples it has, all of them open a pass, and a rank without samples only takes
    part in its collectives. A rank that is done in `together` does so until all ranks are done.
    """

    engine: Engine
    control: Control
    unsharded_bytes: int
    """Bytes of the units that are unsharded at once."""
    _seconds: float = 0.0
    """Seconds of the last pass, without waits."""
    _in_round: bool = False
    """Other ranks may wait for this one in a pass."""

    @contextmanager
    def one_pass(self, size: int) -> Iterator[None]:
        """A round in which this rank has `size` samples.

        Raises:
            Exception: what the body raised, after the pass has been completed on all ranks.
        """
        self._open_round(size)
        began = perf_counter()
        error: Exception | None = None
        try:
            yield
        except CollectiveTimeout:
            self.engine.drop_pass()
            raise
        except Exception as caught:
            error = self.engine.strategy.explain_error(caught)
            if is_out_of_memory(error):
                free_failed_pass(error)
                self.model.zero_grad()
        self._end_round(failed=error is not None)
        synchronize(self.device)
        waited = self.engine.strategy.timing.step.waited_seconds()
        self._seconds = max(0.0, perf_counter() - began - waited)
        if error is not None:
            raise error

    def _open_round(self, size: int) -> bool:
        """Exchange the sizes and open a pass; False if no rank has samples. Collective."""
        self._in_round = True
        own = torch.tensor([size], device="cpu")
        sizes = self.control.exchange(own, what="a measured pass")()
        leader = leader_of([int(other) for other in sizes])
        if leader is None:
            self._in_round = False
            return False
        self.engine.begin_step()
        synchronize(self.device)
        self.engine.begin_pass(weight=0.0, leader=leader, last=False, mode=Mode.MEASURE)
        return True

    def _end_round(self, *, failed: bool = False) -> None:
        """Close the pass. Collective. If it ran out of memory here, it is complete elsewhere."""
        try:
            self.engine.end_pass(failed=failed)
        except Exception as error:
            self._in_round = not is_out_of_memory(error)
            raise
        self._in_round = False

    def together(self, work: Callable[[], T]) -> T:
        """Run `work`, then take part in the passes of the other ranks. Collective.

        Raises:
            Exception: what `work` raised on this rank.
            CollectiveTimeout: this rank has left a pass alone, or another one has.
        """
        try:
            try:
                result = work()
            except Exception:
                if not self._in_round:
                    self._take_part()
                raise
            self._take_part()
            return result
        except Exception as error:
            if self._in_round:
                rank, where = self.control.group.rank, waiting_in("a measured pass")
                reason = stop_reason(rank, where, error, advice=AGAIN)
                self.engine.stop_all_ranks(reason)
                raise CollectiveTimeout(reason) from error
            raise

    def _take_part(self) -> None:
        """Rounds without samples, until no rank has any."""
        error: Exception | None = None
        while self._open_round(0):
            try:
                self._end_round()
            except Exception as caught:
                if self._in_round:
                    raise
                error = caught
        if error is not None:
            raise error

    def seconds(self, size: int, repeats: int = 1) -> float:
        """Fewer repeats if rounds, with their waits, take longer than a sample should."""
        taken: list[float] = []
        end = perf_counter() + SHORTEST_SAMPLE_SECONDS
        while not taken or (len(taken) < repeats and perf_counter() < end):
            self.run(size)
            taken.append(max(self._seconds, SHORTEST_SECONDS))
        return fmean(taken)

    def _timed_units(self) -> Sequence[TrainedUnit]:
        """None: a unit's time would contain the waits for its parameters."""
        return ()

    def pass_bytes(self, size: int) -> PassBytes:
        """Excludes the unsharded units, which the CPU's counter does not see."""
        held = super().pass_bytes(size)
        return held if self.device.type == "cpu" else held.plus(-self.unsharded_bytes)
