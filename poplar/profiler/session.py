"""One job on one rank: device, control channel, and how the ranks exchange results.

Every method that communicates is collective: all ranks call it, and all of them get the same result
or an error.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

from poplar.comm import Group, connect_control
from poplar.profiler import memory_limit
from poplar.profiler.compilation import HookedGraphs, compiled_code_preserved
from poplar.profiler.job import Job
from poplar.profiler.memory_budget import PassMemory
from poplar.profiler.passes import Passes
from poplar.profiler.unit_hooks import TrainedUnit
from poplar.system.out_of_memory import is_out_of_memory
from poplar.values.errors import agreed, equal_on_all_ranks
from poplar.zero import setup
from poplar.zero.agreement import exchange_results, run_on_all_ranks
from poplar.zero.preserved_state import (
    Copies,
    computing_in,
    gradients_dropped,
    host_copies,
    model_preserved,
    parameters_preserved,
)
from poplar.zero.weights.materialization import is_on_meta

T = TypeVar("T")


class Session:
    """What every instrument of the profiler needs."""

    def __init__(self, job: Job, group: Group) -> None:
        """Check the job on all ranks and compare. Collective.

        Raises:
            ValueError, TypeError: an argument of this rank is wrong, or ranks differ.
            RankFailed: an argument of another rank is wrong.
        """
        self.job = job
        self.group = group
        self.control = connect_control(group)
        self.graphs = HookedGraphs()
        self._copies: Copies | None = None

        def check() -> tuple[setup.Request, dict[str, Any]]:
            job.check()
            options = job.engine_options
            del options["process_group"], options["timeout"]  # of the group
            arguments = setup.Arguments(
                model=job.model,
                optimizer_class=job.optimizer_class,
                options=job.optimizer_options,
                stage=0,
                **options,
            )
            checked = setup.check_request(arguments, group)
            for stage in job.stages:
                setup.check_stage(checked.classes, stage, ())
            return checked, job.may_differ(checked.device)

        self.setup, own = run_on_all_ranks(self.control, check, doing="profiling")
        self.device = self.setup.device
        self.is_on_meta = is_on_meta(job.model)
        """No rank has values of the parameters."""
        self.asynchronous = self.device.type == "cuda"
        """The device computes while the host goes on."""
        also = job.must_be_equal()
        self.setup = setup.agree_on_request(self.control, self.setup, also=also)
        self.cast_to = self.setup.cast_to
        """Dtype that the engine casts the model to; None: it keeps the dtypes."""
        trained = (p.dtype for p in job.model.parameters() if p.requires_grad)
        self.compute_dtype = self.cast_to or next(trained)
        by_rank = self.exchange(own)
        devices, given = self.exchange(str(self.device)), self.exchange(job.memory_limit)
        with equal_on_all_ranks():
            limits = memory_limit.by_rank(given, devices)
        self.memory_limit = limits[group.rank]
        """Bytes that this rank may use; None: what is free."""
        for entries, limit in zip(by_rank, limits, strict=True):
            entries["memory_limit"] = limit
        is_here = next(job.model.parameters()).device == self.device
        self.model_is_on_device = all(self.exchange(is_here))
        """Otherwise it is on `meta` or in host memory: only passes on the engine are possible."""
        self.ranks_on_this_host = equal_entries(own, by_rank, "host")
        memory = ("host", "device") if self.asynchronous else ("host",)
        self.ranks_sharing_memory = equal_entries(own, by_rank, *memory)
        """Ranks that use the memory of this rank's device, which has its UUID in its entry."""
        backend = group.backend_for(self.device)
        self.identity = job.identity(self.setup, self.cast_to, by_rank, backend)
        self.memory = PassMemory.unlimited(group.size)
        """What passes may allocate."""
        self.largest_unsharded: Sequence[int] | None = None
        """The largest batch of each rank that fits beside all parameters; None: any may."""
        if group.rank == 0 and job.lengths is not None and job.measured_lengths is None:
            warnings.warn(
                "the samples of example_batch are not rows of its tensors, so it cannot be cut or "
                "repeated to lengths=: passes are measured with the samples as they are, and only "
                "HeteroBatchSampler(lengths=...) uses lengths; give typical samples as the example",
                stacklevel=5,
            )

    def limit_passes(self, memory: PassMemory) -> None:
        """Passes may allocate this from now on."""
        self.memory = memory

    def limit_plain_passes(self, largest: Sequence[int]) -> None:
        """Plain passes may have these batches, by rank, from now on."""
        self.largest_unsharded = largest

    def plain_passes_fit(self, batches: Sequence[int] = ()) -> bool:
        """Whether all ranks have memory for plain passes: of these batches by rank, or of one
        sample.
        """
        largest, wanted = self.largest_unsharded, batches or [1] * self.group.size
        return self.memory.fits_unsharded and (
            largest is None or all(map(operator.le, wanted, largest))
        )

    def passes(self, units: Sequence[TrainedUnit] = ()) -> Passes:
        """Plain passes of the model; memory is measured for these units, too."""
        job = self.job
        return Passes(
            job.model,
            job.loss_fn,
            job.example,
            self.device,
            units,
            lengths=job.measured_lengths,
        )

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure inside; at the end the model and its compiled functions are as before."""
        try:
            with model_preserved(self.job.model, self.device), compiled_code_preserved():
                yield
        finally:
            self._copies = None

    def parameters_preserved(self) -> AbstractContextManager[None]:
        """The parameters may change inside, and are restored at the end.

        CUDA values are copied to the host once for all uses inside of `measuring`: for a large
        model that takes longer than the steps between.
        """
        model = self.job.model
        if self.is_on_meta:
            return nullcontext()  # there are no values
        if self.asynchronous and self._copies is None:
            self._copies = host_copies(model)
        return parameters_preserved(model, self._copies)

    @contextmanager
    def as_in_training(self) -> Iterator[None]:
        """Plain passes compute in the dtype of the engine inside, and free their gradients."""
        model = self.job.model
        with (
            self.graphs.run(hooked=False),
            computing_in(model, self.cast_to, self.setup.unit_names),
            gradients_dropped(model),
        ):
            yield

    def on_all_ranks(self, work: Callable[[], T], doing: str) -> list[T]:
        """The results of `work` by rank; `doing` names it in the errors of other ranks.

        Raises:
            Exception: whatever `work` raised on this rank.
            RankFailed: it failed on another rank.
        """
        return exchange_results(self.control, work, what=doing)

    def fits_on_all_ranks(self, work: Callable[[], object], doing: str) -> bool:
        """Whether `work` ran out of memory on no rank.

        Raises:
            Exception: as `on_all_ranks`, for any other failure.
        """

        def fits() -> bool:
            try:
                work()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                return False
            return True

        return all(self.on_all_ranks(fits, doing))

    def on_first_rank(self, work: Callable[[], T], doing: str) -> T:
        """The result of `work` on rank 0, or its error, on all ranks."""
        answer: T | Exception | None = None
        if self.group.rank == 0:
            try:
                answer = work()
            except Exception as error:
                answer = error
        answer = self.control.exchange_objects(answer, what=doing)[0]
        if isinstance(answer, Exception):
            raise agreed(answer)
        return cast("T", answer)

    def exchange(self, value: T) -> list[T]:
        """The values of all ranks."""
        return self.control.exchange_objects(value, what="exchanging measurements")

    def from_first_rank(self, value: T) -> T:
        """The value of rank 0."""
        return self.exchange(value)[0]


def equal_entries(own: Mapping[str, Any], by_rank: Sequence[Mapping[str, Any]], *keys: str) -> int:
    """The number of ranks whose entries under all of these keys are those of this rank."""
    return sum(all(other[key] == own[key] for key in keys) for other in by_rank)
