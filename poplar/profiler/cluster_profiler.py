"""Measures every rank, in the real training job: `profile_cluster`.

All ranks measure at once, so whatever they share is shared as in training. What always holds: the
model, its gradients and buffers and all random state are afterwards as they were; every rank gets
the same profile, or an error; nothing is measured twice that the cache has.

A profile is made in this order: plain passes (time and memory against the batch), the optimizer
step, the collectives, and a few steps of the engine itself at every stage, which tell what the
closed form of a step leaves out; beside those plain passes again, as devices change their speed.
After Poplar (AAAI 2025), which measures time against the batch at each ZeRO stage; here stages
share one curve and differ in what is measured of their steps.
"""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from poplar.comm import Group, connect, connect_control
from poplar.formatting import format_bytes
from poplar.optimizer import HeteroZeroOptimizer
from poplar.plan import Plan
from poplar.planner.memory_shortfall import NoPlanFits
from poplar.planner.prediction import DoesNotFit, predict
from poplar.planner.search import search
from poplar.profile import BatchPoint, ClusterProfile, DeviceProfile, ModelProfile, NetworkProfile
from poplar.profiler.cache import Cache, default_folder
from poplar.profiler.calibration import Slowness, as_profiled, fit
from poplar.profiler.collectives import Collectives, measure_network
from poplar.profiler.engine_steps import Observation, observe
from poplar.profiler.optimizer_step import UpdateCost, measure_update
from poplar.profiler.passes import (
    SHORTEST_SAMPLE_SECONDS,
    LossFunction,
    Passes,
    Rung,
    Timings,
    scout,
    time_rungs,
)
from poplar.profiler.peak_flops import peak_flops
from poplar.profiler.points import at_speed_of, on_a_line, times_to_be_sure
from poplar.profiler.preserved_state import computing_in, parameters_kept, surroundings_kept
from poplar.profiler.progress import Tell, progress
from poplar.profiler.request import DEFAULT_MAX_BATCH, Agreed, Request, agree_on, sizes_of
from poplar.profiler.transports import sample_numels, time_transports
from poplar.profiler.trial_runs import Trials
from poplar.system import devices, host_limits
from poplar.zero.agreement import raise_on_any_error
from poplar.zero.update import OptimizerFactory

T = TypeVar("T")

MEMORY_RESERVE = 0.05
LONGEST_PASS = 1 / 10
"""No batch is tried whose pass would probably take more of the budget than this."""
TIMING = 0.35
"""Part of the budget for timing plain passes."""
NETWORK = 0.08
"""Part of the budget for the collectives."""
STEPS = 0.4
"""Part of the budget for steps of the engine, over all stages."""
PLAIN = 0.4
"""Of that, at most for plain passes before, between and after: is the device as fast as it was?"""
TIMES_EACH = 5
"""Passes of a size, and steps of a plan, that are timed where they take equally long."""
FEWEST_STEPS = 2
"""Of a plan in one turn, besides one that does not count."""
PASSES_OBSERVED = (1, 3)
"""Steps of the engine are observed with so many passes; the difference is what a meeting costs."""


def profile_cluster(
    model: nn.Module,
    loss_fn: LossFunction,
    example_batch: Any,
    *,
    optimizer_class: OptimizerFactory = torch.optim.AdamW,
    max_batch: int | None = None,
    memory_limit: int | None = None,
    stages: Sequence[int] = (0, 1, 2, 3),
    seconds: float = 60.0,
    max_norm: float | None = 1.0,
    process_group: dist.ProcessGroup | None = None,
    units: Sequence[str | nn.Module | type[nn.Module]] | None = None,
    compute_dtype: torch.dtype | str = "auto",
    reduce_dtype: torch.dtype = torch.float32,
    timeout: timedelta | None = None,
    allow_batch_norm: bool = False,
    cache: bool | str | Path = True,
    progress: bool = True,
    **optimizer_kwargs: Any,
) -> ClusterProfile:
    """Measure every rank, and the network between them. Collective: every rank calls it.

    Args:
        model: on this rank's device, not wrapped; afterwards as it was, bit by bit.
        loss_fn: as for `train_step`: `loss_fn(model, micro_batch)` -> mean loss.
        example_batch: a batch as training sees it; its samples are repeated for larger ones, so a
            few do. Typical lengths: a pass takes what its tokens take.
        optimizer_class: with `optimizer_kwargs`, as training will use it.
        max_batch: largest micro-batch to try on this rank; default: what memory and time allow.
        memory_limit: bytes that this rank may use; default: what its device has, less what others
            hold.
        stages: ZeRO stages to run steps at; only these can be predicted well.
        seconds: budget. It bounds the time unless a pass takes so long that a handful of them is
            more; then it is a few of each.
        max_norm: clip in the measured steps, as training will; None for none.
        process_group, units, compute_dtype, reduce_dtype, timeout, allow_batch_norm: as for
            `HeteroZeroOptimizer`.
        cache: use the profile that was measured before of the same model, dtype, devices and
            versions, and keep this one; or the folder to keep it in; or False.
        progress: show on rank 0 what is being measured, if stderr is a terminal.
        optimizer_kwargs: for `optimizer_class`.

    Returns:
        The same `ClusterProfile` on every rank.

    Raises:
        ValueError, TypeError, RuntimeError: what this rank was given is wrong, or ranks differ.
        RankFailed: another rank was given something wrong, or could not be measured.
        CollectiveTimeout: a rank did not answer in time.
    """
    request = Request(
        model=model,
        loss_fn=loss_fn,
        example=example_batch,
        optimizer_class=optimizer_class,
        optimizer_options=optimizer_kwargs,
        max_batch=max_batch,
        memory_limit=memory_limit,
        stages=stages,
        seconds=seconds,
        max_norm=max_norm,
        units=units,
        compute_dtype=compute_dtype,
        reduce_dtype=reduce_dtype,
        allow_batch_norm=allow_batch_norm,
    )
    group = Group.of(process_group, timeout)
    return Profiler(request, group, cache_of(cache), show=progress).profile()


def cache_of(choice: bool | str | Path) -> Cache | None:
    """The cache that a caller chose."""
    if choice is False:
        return None
    return Cache(default_folder() if choice is True else Path(choice))


@dataclass(frozen=True)
class _Curve:
    """What one rank found out about its passes and its optimizer."""

    points: tuple[BatchPoint, ...]
    backward_fraction: float
    throttled: str


class Profiler:
    """One request on one rank; its methods are collective."""

    def __init__(self, request: Request, group: Group, cache: Cache | None, *, show: bool) -> None:
        self.request = request
        self.group = group
        self.control = connect_control(group)
        self.cache = cache
        self.show = show and group.rank == 0
        self.agreed: Agreed = agree_on(request, self.control)
        self.device = self.agreed.device
        self.asynchronous = self.device.type == "cuda"
        """The device computes while the host goes on."""
        self.memory_bytes, self.held_bytes = self._together(self._memory, "reading free memory")
        self._noise = 1.0
        """How many times longer than on a quiet machine everything has to be timed."""
        self.verified: dict[str, Plan] = {}
        """Plans of this profile that fit into the present memory, by request; on every rank."""
        self._cached: dict[str, Plan] = {}
        """Those that the cache has, fitting or not."""

    def profile(self) -> ClusterProfile:
        """From the cache, or measured and kept there."""
        found = self._look_up()
        if found is not None:
            profile, self._cached = found
            return self._with_present_memory(profile)
        with progress(self.show) as tell, surroundings_kept(self.request.model, self.device):
            profile = self._measure(tell)
        self.keep(profile)
        return profile

    def keep(self, profile: ClusterProfile) -> None:
        """Write the profile and what was verified on it into the cache, on rank 0."""
        if self.cache is None or self.group.rank != 0:
            return
        try:
            self.cache.save(profile, {**self._cached, **self.verified})
        except OSError as error:
            text = f"the profile could not be kept in the cache: {error}"
            warnings.warn(text, stacklevel=2)

    def steps_of(self, plans: Sequence[Plan], *, steps: int, tell: Tell) -> tuple[Observation, ...]:
        """Run plans of one stage on the engine and take their steps apart.

        The model's parameters are afterwards as they were.
        """
        request, passes = self.request, self._passes()
        tell(f"steps at stage {plans[0].stage}")
        with parameters_kept(request.model, to_host=self.asynchronous):
            optimizer = HeteroZeroOptimizer(
                request.model,
                request.optimizer_class,
                plan=plans[0],
                process_group=self.group.process_group,
                units=request.units,
                compute_dtype=request.compute_dtype,  # type: ignore[arg-type]
                reduce_dtype=request.reduce_dtype,
                timeout=self.group.timeout,
                allow_batch_norm=request.allow_batch_norm,
                **request.optimizer_options,
            )
            observations = []
            try:
                for number, plan in enumerate(plans):
                    if number:
                        optimizer.apply_plan(plan)
                    observations.append(
                        observe(
                            optimizer,
                            plan,
                            passes,
                            self.control,
                            steps=steps,
                            warm_up=1,
                            max_norm=request.max_norm,
                        )
                    )
                optimizer.release()
            except BaseException:
                optimizer._detach()  # the error's frames hold on to it
                raise
            del optimizer
            if self.asynchronous:
                gc.collect()  # Python does not see how much device memory a cycle keeps
        return tuple(observations)

    def points_at(
        self, batches: Sequence[int | None], beside: Sequence[BatchPoint] = ()
    ) -> list[BatchPoint | None]:
        """One more point on the curve of each rank that has a batch here.

        Args:
            batches: by rank; None: nothing is asked of it.
            beside: by rank, a point of its curve to measure again, in turns with the new one, or
                alone where none is asked. Then all ranks compute for equally long, and new points
                are as fast as the old ones were: a device is a few percent faster or slower a
                minute later, which is no step in its curve.

        Returns:
            By rank, on every rank. Every rank calls it, with the same arguments.
        """
        passes, rank = self._passes(), self.group.rank
        batch, known = batches[rank], beside[rank] if beside else None
        sizes = [] if batch is None else [batch]
        sizes += [] if known is None else [known.batch]

        def first_passes() -> list[Rung]:
            return [
                Rung(
                    batch=size,
                    activation_bytes=passes.activation_bytes(size),
                    seconds=passes.seconds(size),
                )
                for size in sizes
            ]

        def measure() -> BatchPoint | None:
            if not rungs:
                return None
            points = time_rungs(passes, rungs, seconds=seconds, least=TIMES_EACH)
            if batch is None:
                return None
            return points[0] if known is None else at_speed_of(known, *points)

        with computing_in(self.request.model, self.agreed.dtype):
            rungs = self._together(first_passes, "the first passes of one more point")
            longest = max(self._everyones(sum(rung.seconds for rung in rungs)))
            seconds = TIMES_EACH * longest if beside else 0.0
            return self._everyones(self._together(measure, "measuring one more point"))

    def _look_up(self) -> tuple[ClusterProfile, dict[str, Plan]] | None:
        found = None
        if self.cache is not None and self.group.rank == 0:
            found = self.cache.load(self.agreed.identity)
        return self.control.exchange_objects(found, what="looking into the cache")[0]

    def _with_present_memory(self, profile: ClusterProfile) -> ClusterProfile:
        """A profile of the cache, with the memory that there is now: it comes and goes."""
        now = self._everyones((self.memory_bytes, self.held_bytes))
        profile = replace(
            profile,
            devices=tuple(
                replace(device, memory_bytes=memory, held_bytes=held)
                for device, (memory, held) in zip(profile.devices, now, strict=True)
            ),
        )
        self.verified = {key: plan for key, plan in self._cached.items() if fits(profile, plan)}
        return profile

    def _measure(self, tell: Tell) -> ClusterProfile:
        with computing_in(self.request.model, self.agreed.dtype):
            curves = self._measure_curves(tell)
            updates = self._measure_updates(tell)
            network = self._measure_network(tell)
        return self._with_residuals(self._assemble(curves, updates, network), tell)

    def _measure_curves(self, tell: Tell) -> list[_Curve]:
        passes, budget = self._passes(), self.request.seconds
        tell("a first pass")
        self._together(passes.check, "the profiler's first pass")
        tell("memory against batch")
        rungs = self._together(lambda: self._scout(passes), "measuring memory")
        longest = max(self._everyones(sum(rung.seconds for rung in rungs)))
        timing = min(TIMES_EACH * longest, budget * TIMING)
        tell(f"time against batch, {timing:.0f} s")
        timings = Timings(passes, rungs)
        curves = self._timed(passes, timings, timing)
        self._noise = times_to_be_sure(curve.points for curve in curves)
        more = min((self._noise - 1.0) * timing, budget * TIMING - timing)
        if more > 0.0:
            tell(f"time against batch, {more:.0f} s more: passes differ from each other")
            curves = self._timed(passes, timings, more)
        return [replace(curve, points=on_a_line(curve.points)) for curve in curves]

    def _timed(self, passes: Passes, timings: Timings, seconds: float) -> list[_Curve]:
        return self._everyones(
            self._together(lambda: self._time(passes, timings, seconds), "timing passes")
        )

    def _scout(self, passes: Passes) -> list[Rung]:
        return scout(
            passes,
            max_batch=self.request.max_batch or DEFAULT_MAX_BATCH,
            room_bytes=self.memory_bytes * (1 - MEMORY_RESERVE) - self.held_bytes,
            longest_seconds=self.request.seconds * LONGEST_PASS,
        )

    def _time(self, passes: Passes, timings: Timings, seconds: float) -> _Curve:
        before = devices.throttle_reason(self.device)
        timings.run(seconds, least=2)
        throttled = before or devices.throttle_reason(self.device)
        if throttled:  # hot or capped for a moment, perhaps: once more
            timings.forget()
            timings.run(seconds, least=2)
            throttled = devices.throttle_reason(self.device)
        points = timings.points
        return _Curve(points, passes.backward_fraction(points[len(points) // 2].batch), throttled)

    def _measure_updates(self, tell: Tell) -> list[UpdateCost]:
        tell("the optimizer step")
        checked = self.agreed.setup
        numels = sizes_of(self.agreed, gathers=False).flats

        def measure() -> UpdateCost:
            return measure_update(
                checked.shard_optimizer_class, checked.options, numels, self.device
            )

        return self._everyones(self._together(measure, "measuring the optimizer step"))

    def _measure_network(self, tell: Tell) -> NetworkProfile:
        tell("the collectives")
        value_dtype = self.agreed.dtype or next(
            p.dtype for p in self.request.model.parameters() if p.requires_grad
        )
        numels = sizes_of(self.agreed, gathers=False).flats
        usual = connect(self.group, "auto", self.device)
        collectives = Collectives(
            comm=usual,
            control=self.control,
            numels=numels,
            wire_dtype=self.request.reduce_dtype,
            value_dtype=value_dtype,
            device=self.device,
        )
        sample = sample_numels(numels)
        transports = time_transports(
            self.group, usual, lambda comm: replace(collectives, comm=comm, numels=sample)
        )
        if transports and transports[0][0] != usual.name:
            fastest = connect(self.group, transports[0][0], self.device)
            collectives = replace(collectives, comm=fastest)
        network = measure_network(collectives, self.request.seconds * NETWORK)
        return replace(network, transports=transports)

    def _with_residuals(self, profile: ClusterProfile, tell: Tell) -> ClusterProfile:
        """Run the engine at every stage, and charge it with what the plain passes know nothing of.

        The stages take turns: a device that is slower for some seconds is so for all of them.
        """
        plans, notes = {}, list(profile.notes)
        for stage in self.request.stages:
            try:
                plans[stage] = plans_to_observe(profile, stage)
            except NoPlanFits as error:
                notes.append(f"stage {stage} was not run: {error}")
        profile = replace(profile, notes=tuple(notes))
        budget = self._agreed_seconds(self.request.seconds * STEPS)
        lengths = {
            stage: self._lengths(profile, each, budget / len(plans))
            for stage, each in plans.items()
        }
        trials = {stage: Trials() for stage in plans}
        began = time.perf_counter()
        for turn in range(math.ceil(self._noise)):
            if turn:
                expected = (time.perf_counter() - began) * (turn + 1) / turn
                if self._agreed_seconds(expected) > budget:
                    break
            for stage, each in plans.items():
                steps, plain = lengths[stage]
                trials[stage].add(self._turn(profile, each, steps=steps, plain=plain, tell=tell))
        return fit(
            profile,
            {stage: seen.observations() for stage, seen in trials.items()},
            asynchronous=self.asynchronous,
            # On a CPU the collectives use the cores that compute: what looks like overlap is noise.
            fit_overlap=self.asynchronous,
        )

    def _lengths(
        self, profile: ClusterProfile, plans: Sequence[Plan], seconds: float
    ) -> tuple[int, float]:
        """Of a turn at one stage, all of whose turns have so many seconds.

        Returns:
            Steps of each plan, and seconds of plain passes before, between and after.
        """
        one_pass = max(
            device.seconds(max(sizes, default=0))
            for device, sizes in zip(profile.devices, plans[0].micro_batches, strict=True)
        )
        a_step_of_each = one_pass * sum(PASSES_OBSERVED)
        quiet = self._noise <= 1.0
        most = TIMES_EACH if quiet else FEWEST_STEPS  # else rather in more turns
        affordable = int(seconds * (1.0 - PLAIN) / a_step_of_each) - 1
        steps = max(FEWEST_STEPS, min(most, affordable))
        plain = max(SHORTEST_SAMPLE_SECONDS, PLAIN * steps * a_step_of_each)
        return steps, min(plain, PLAIN * seconds / (len(plans) + 1))

    def _turn(
        self,
        profile: ClusterProfile,
        plans: Sequence[Plan],
        *,
        steps: int,
        plain: float,
        tell: Tell,
    ) -> list[Observation]:
        """Steps of each plan, with plain passes before, between and after."""
        observations = []
        before = self._slowness(profile, plans[0], plain)
        for plan in plans:
            (seen,) = self.steps_of([plan], steps=steps, tell=tell)
            after = self._slowness(profile, plan, plain)
            beside = [
                Slowness((one.times + two.times) / 2, math.hypot(one.error, two.error) / 2)
                for one, two in zip(before, after, strict=True)
            ]
            observations.append(as_profiled(profile, seen, beside))
            before = after
        return observations

    def _slowness(self, profile: ClusterProfile, plan: Plan, seconds: float) -> list[Slowness]:
        """By rank: how long plain passes about as large as the plan's take now, over the curve.

        All ranks run them for so many seconds, or, where that is too short to tell anything, count
        as unchanged.
        """
        if seconds < SHORTEST_SAMPLE_SECONDS:
            return [Slowness(1.0, 0.0)] * self.group.size
        device, sizes = profile.devices[self.group.rank], plan.micro_batches[self.group.rank]
        first, *others = device.points
        largest = max(sizes, default=0)
        known = max([first, *(p for p in others if p.batch <= largest)], key=attrgetter("batch"))
        rung = Rung(batch=known.batch, seconds=known.seconds, activation_bytes=0)
        passes = self._passes()

        def measure() -> Slowness:
            (point,) = time_rungs(passes, [rung], seconds=seconds, least=2)
            return Slowness(point.seconds / known.seconds, point.spread_seconds / point.seconds)

        with computing_in(self.request.model, self.agreed.dtype):
            self._together(lambda: passes.run(known.batch), "a pass before timing")
            return self._everyones(self._together(measure, "timing passes beside steps"))

    def _assemble(
        self, curves: list[_Curve], updates: list[UpdateCost], network: NetworkProfile
    ) -> ClusterProfile:
        everyones = self._everyones(self._together(self._describe, "describing the device"))
        profiles = tuple(
            DeviceProfile(
                **own,
                points=curve.points,
                optimizer_seconds=update.seconds,
                optimizer_latency_seconds=update.latency_seconds,
                throttled=curve.throttled,
            )
            for own, curve, update in zip(everyones, curves, updates, strict=True)
        )
        fractions = [curve.backward_fraction for curve in curves]
        return ClusterProfile(
            devices=profiles,
            model=self._model_profile(updates[0]),
            network=network,
            backward_fraction=sum(fractions) / len(fractions),
            memory_reserve=MEMORY_RESERVE,
            identity=self.agreed.identity,
            notes=tuple(
                f"rank {rank} was throttled while it was measured ({curve.throttled}): its speed "
                "is that of a hot or capped device"
                for rank, curve in enumerate(curves)
                if curve.throttled
            ),
        )

    def _describe(self) -> dict[str, Any]:
        """What of a `DeviceProfile` is known without a pass."""
        info = devices.describe(self.device)
        return {
            "name": info.name,
            "uuid": info.uuid,
            "host": info.host,
            "memory_bytes": self.memory_bytes,
            "held_bytes": self.held_bytes,
            "peak_flops": peak_flops(self.device, self._matrix_dtype()),
        }

    def _model_profile(self, update: UpdateCost) -> ModelProfile:
        model, dtype = self.request.model, self.agreed.dtype
        trained = [p for p in model.parameters() if p.requires_grad]
        held = (dtype or trained[0].dtype).itemsize
        gathered = sizes_of(self.agreed, gathers=True)
        together = max(sizes_of(self.agreed, gathers=False).flats)
        return ModelProfile(
            unit_numels=gathered.trained,
            unit_names=gathered.names,
            unit_frozen_numels=gathered.frozen,
            resident_units=gathered.resident,
            largest_flat_numels=(together, together, together, max(gathered.flats)),
            param_bytes=float(held),
            grad_bytes=float(held),
            optimizer_bytes=update.state_bytes + (0.0 if held == 4 else 4.0),
            wire_bytes=float(self.request.reduce_dtype.itemsize),
            frozen_bytes=sum(tensor.numel() * tensor.element_size() for tensor in model.buffers()),
        )

    def _memory(self) -> tuple[int, int]:
        """Bytes that this rank may use, and what of them is held by other than tensors."""
        on_cuda = self.device.type == "cuda"
        held = 0
        total = host_limits.total_memory()
        if on_cuda:
            free, total = torch.cuda.mem_get_info(self.device)
            others = devices.describe(self.device).others_bytes
            held = total - free - others - torch.cuda.memory_reserved(self.device)
        elif self.request.memory_limit is None:
            weights = sum(p.numel() * p.element_size() for p in self.request.model.parameters())
            held = host_limits.resident_memory() - weights
        asked = self.request.memory_limit
        if asked is not None and total is not None and asked > total:
            raise ValueError(
                f"rank {self.group.rank}: a memory_limit of {format_bytes(asked)}, but "
                f"{self.device} has {format_bytes(total)}; lower it, or leave it out to use what "
                "is free"
            )
        limit = asked or devices.memory_available(self.device, self.agreed.ranks_on_this_host)
        return limit, max(0, held)

    def _matrix_dtype(self) -> torch.dtype:
        trained = next(p for p in self.request.model.parameters() if p.requires_grad)
        return self.agreed.dtype or trained.dtype

    def _passes(self) -> Passes:
        example = self.request.example
        if self.agreed.dtype is not None:
            from poplar.zero.micro_batches import BatchSplitter

            example = BatchSplitter(None, False, self.agreed.dtype).cast(example)
        return Passes(self.request.model, self.request.loss_fn, example, self.device)

    def _together(self, work: Callable[[], T], doing: str) -> T:
        """Do something that may fail on this rank alone; then all ranks raise."""
        error: Exception | None = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        raise_on_any_error(self.control, error, doing=doing)
        return result

    def _everyones(self, value: T) -> list[T]:
        return self.control.exchange_objects(value, what="sharing what was measured")

    def _agreed_seconds(self, seconds: float) -> float:
        return self._everyones(seconds)[0]


def plans_to_observe(profile: ClusterProfile, stage: int) -> list[Plan]:
    """One plan with few and one with more passes: equally long ones on all ranks, if that fits.

    Even shares where memory allows, else those that a search finds.

    Raises:
        NoPlanFits: not even a few samples fit at this stage.
    """
    target = max(device.seconds(min(2, device.max_batch)) for device in profile.devices)
    sizes = [
        max([1, *(b for b in range(1, device.max_batch + 1) if device.seconds(b) <= target)])
        for device in profile.devices
    ]
    even = (1.0 / len(sizes),) * len(sizes)
    if not fits(profile, Plan.manual(sizes, stage=stage, shares=even)):
        found = search(profile, global_batch=sum(sizes), stages=(stage,))
        even = found.shares
        if not fits(profile, Plan.manual(sizes, stage=stage, shares=even)):
            sizes = [max(passes, default=0) for passes in found.micro_batches]
    plans = [
        Plan.manual(sizes, stage=stage, passes=passes, shares=even) for passes in PASSES_OBSERVED
    ]
    return [replace(plan, transport=profile.network.transport) for plan in plans]


def fits(profile: ClusterProfile, plan: Plan) -> bool:
    """Whether every rank has the memory that a plan needs."""
    try:
        predict(profile, plan)
    except DoesNotFit:
        return False
    return True
