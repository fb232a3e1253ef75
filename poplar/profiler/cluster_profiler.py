"""Measures every rank in the training job and assembles the profile, without residuals.

All ranks measure at once: passes, the optimizer step, the collectives. After Poplar (AAAI 2025),
which measures a curve for each ZeRO stage; here the stages share one curve, and steps of the engine
(`trial_runs`) give what each stage adds.

[Note: what profiling costs]
With `n` ranks on `h` hosts and `P` parameters, one rank

    plain passes  holds the model in the compute dtype beside its parameters, one batch per size,
                  and the gradient of one parameter; runs about 2 log2(batch) sizes
    passes on     holds its share of the parameters, two unsharded units and the root, one batch per
    the engine    size, and the gradient of one parameter; runs 5 sizes at most. Only where the
                  model, or larger batches, fit beside a shard and not beside the whole model
    recomputing   as above, plain or on the engine; times 3 sizes at most, then runs one size with
    passes        the last repeated unit not recomputed. Only where memory may limit a plan
    optimizer     steps and allocates at most 2^26 elements of parameters, gradients and state, and
                  less where less memory is free
    collectives   reduces and gathers at most 2^26 elements, 2^24 at once (fewer where less memory
                  is free), a bounded number of times: once for all, once for each of up to 8
                  ranks or, if there are more, 64 hosts, and once within hosts; then small buffers
                  of 64 elements per rank. Allocates up to 4 (8 + 2 n) bytes per element at once,
                  and tries that first. Between CPU hosts, 15 reductions more, beside passes, of at
                  most what the engine has in flight
    engine steps  trains as the engine does, from one host copy of the parameters on CUDA
    a model on    is initialized again for each engine: two or three for passes, and one for each
    `meta`        plan that runs

and results of `O(n)` values are exchanged a number of times that depends on `h` and the stages, but
neither on `n` nor on `P`. Only the model itself, its passes and the engine's own steps grow with
`P`. `tests/unit/test_profiling_cost.py` counts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean

import torch

from poplar.comm import Group
from poplar.profiler import batch_curves, trial_runs
from poplar.profiler.collectives import measure_network
from poplar.profiler.element_costs import (
    host_memory,
    measure_codec,
    measure_host_update,
    measure_update,
)
from poplar.profiler.job import Job
from poplar.profiler.memory import model_bytes
from poplar.profiler.memory_budget import MemoryBudget
from poplar.profiler.model_profile import linear_layers, model_profile, pass_memory
from poplar.profiler.overlap import measure_overlap
from poplar.profiler.progress import Report
from poplar.profiler.recomputed_passes import with_recomputed_curves
from poplar.profiler.session import Session
from poplar.profiler.timing import peak_flops
from poplar.profiler.unit_hooks import combined
from poplar.system import devices, host_limits
from poplar.values.curve import DEVIATIONS
from poplar.values.formatting import NOISY, format_bytes
from poplar.values.observation import Observation
from poplar.values.plan import Plan
from poplar.values.profile import BatchPoint, ClusterProfile, DeviceProfile, NetworkProfile
from poplar.zero.opaque_parameter import opaque_bytes
from poplar.zero.setup import multiplication_on

NETWORK = 0.08
"""Part of the time budget for the collectives."""
OVERLAP = 0.05
"""Part of the time budget for collectives beside passes."""
STEPS = 0.4
"""Part of the time budget for steps of the engine, over all stages."""


class Profiler:
    """The instruments on one job; all methods are collective."""

    def __init__(self, job: Job, group: Group) -> None:
        self.session = Session(job, group)
        self._budgets = self._read_budgets()
        self.session.limit_passes(pass_memory(self.session, self._budgets))
        self._noise = 1.0

    def measure_devices(self, report: Report) -> ClusterProfile:
        """The profile of all ranks, without a network and without residuals of any stage."""
        session, rank = self.session, self.session.group.rank
        budget = self._budgets[rank]
        curves, self._noise = batch_curves.measure_curves(session, report)
        report("the optimizer step")
        updates = session.on_all_ranks(
            lambda: measure_update(session), "measuring the optimizer step"
        )
        codecs = session.on_all_ranks(lambda: measure_codec(session), "measuring the codec")
        on_host = session.on_all_ranks(
            lambda: measure_host_update(session), "measuring the optimizer step on the host"
        )

        def own_profile() -> DeviceProfile:
            info = devices.describe(session.device)
            return DeviceProfile(
                name=info.name,
                uuid=info.uuid,
                host=info.host,
                **budget._asdict(),
                points=tuple(curves[rank].points),
                optimizer_seconds=updates[rank].seconds,
                optimizer_latency_seconds=updates[rank].latency_seconds,
                **on_host[rank],
                **codecs[rank],
                peak_flops=peak_flops(session.device, session.compute_dtype),
                throttled=curves[rank].throttled,
                multiplication=multiplication_on(session.device),
            )

        profiles = session.on_all_ranks(own_profile, "describing the device")
        forward, backward = combined([curve.parts.units for curve in curves], fmean)
        profile = ClusterProfile(
            devices=tuple(profiles),
            model=replace(
                model_profile(session, updates[0].state_bytes),
                unit_forward_fraction=forward,
                unit_backward_fraction=backward,
                linear_layers=linear_layers(session, curves[0].parts.linear_rows),
            ),
            network=NetworkProfile(  # not measured yet
                reduce_scatter_seconds=0.0,
                all_gather_seconds=0.0,
                send_seconds_per_byte=(0.0,) * session.group.size,
                receive_seconds_per_byte=(0.0,) * session.group.size,
            ),
            backward_fraction=fmean(curve.parts.backward_fraction for curve in curves),
            identity=session.identity,
            budget_seconds=session.job.profile_seconds,
        )
        session.limit_plain_passes([curve.largest_unsharded for curve in curves])
        return with_recomputed_curves(session, profile, report)

    def with_network(self, profile: ClusterProfile, report: Report) -> ClusterProfile:
        """The profile with the times of the collectives, measured now."""
        report("the collectives")
        session, budget = self.session, self.session.job.profile_seconds
        profile = replace(profile, network=measure_network(session, budget * NETWORK))
        report("collectives beside passes")
        overlap = measure_overlap(session, profile, budget * OVERLAP)
        return self.with_later_memory(replace(profile, overlap=overlap))

    def use(self, profile: ClusterProfile) -> None:
        """Measure further batches of a profile of an earlier session.

        Its activations show which batches plain passes can run with in the present memory.
        """
        pairs = zip(profile.devices, self.session.memory.unsharded, strict=True)
        self.session.limit_plain_passes(
            [
                bisect_right(range(1, device.max_batch + 1), limit, key=device.activation_bytes)
                for device, limit in pairs
            ]
        )

    def longest_observed_pass(self, passes: int) -> float:
        """Seconds of a pass at which one turn of `observe` fills its time; 0 without overlap.

        Args:
            passes: in one step of each plan of a stage, together.
        """
        if not self.session.asynchronous:
            return 0.0
        job = self.session.job
        seconds = (1 - trial_runs.PLAIN_PASSES) * STEPS * job.profile_seconds
        return seconds / (passes * len(job.stages) * (1 + trial_runs.STEPS))

    def observe(
        self, profile: ClusterProfile, plans: Sequence[Plan], report: Report
    ) -> trial_runs.Turns:
        """Run plans in turns: more turns if `measure_devices` met noise. See `run_in_turns`."""
        seconds = self.session.job.profile_seconds * STEPS
        return trial_runs.run_in_turns(
            self.session, profile, plans, seconds=seconds, noise=self._noise, report=report
        )

    def run_plan(self, plan: Plan, *, steps: int, report: Report) -> Observation:
        """Time so many steps of a plan on the engine."""
        return trial_runs.run_plan(self.session, plan, steps=steps, report=report)

    def measure_points(
        self, batches: Sequence[Sequence[int]], references: Sequence[BatchPoint]
    ) -> list[list[BatchPoint]]:
        """Measure more batch sizes. See `batch_curves.measure_points`."""
        return batch_curves.measure_points(self.session, batches, references)

    def with_present_memory(self, profile: ClusterProfile) -> ClusterProfile:
        """A profile measured earlier, with the memory that is available now."""
        budgets = self._budgets
        if self.session.asynchronous:  # kernels and NCCL's buffers may not be loaded yet
            known = map(_budget_of, profile.devices)
            budgets = [
                now._replace(held_bytes=now.tightened(then).held_bytes)
                for now, then in zip(budgets, known, strict=True)
            ]
        profile, ranks = _with_budgets(profile, budgets), self.session.ranks_on_this_host
        on_host = self.session.on_all_ranks(lambda: host_memory(ranks), "reading free host memory")
        refreshed = tuple(
            device
            if device.host_optimizer_seconds is None
            else replace(device, host_memory_bytes=free)
            for device, free in zip(profile.devices, on_host, strict=True)
        )
        return replace(profile, devices=refreshed)

    def within_present_memory(self, profile: ClusterProfile) -> ClusterProfile:
        """A given profile, with no more memory than is available now."""
        present = self.with_present_memory(profile).devices
        pairs = zip(profile.devices, present, strict=True)
        return replace(profile, devices=tuple(_smaller_memory(*pair) for pair in pairs))

    def with_later_memory(self, profile: ClusterProfile) -> ClusterProfile:
        """A profile measured now, with what devices hold after everything has run once.

        A device loads kernels at their first use, and NCCL allocates its buffers in the first
        collectives. On the CPU nothing is read again, because glibc keeps freed memory.
        """
        if not self.session.asynchronous:
            return profile
        both = zip(self._budgets, self._read_budgets(), strict=True)
        self._budgets = [before.tightened(now) for before, now in both]
        return _with_budgets(profile, self._budgets)

    def _read_budgets(self) -> list[MemoryBudget]:
        session = self.session
        if session.asynchronous:
            session.on_all_ranks(torch.cuda.empty_cache, "returning cached memory")
        return session.on_all_ranks(lambda: memory_budget(session), "reading free memory")


def noise_notes(profiles: Sequence[DeviceProfile]) -> Iterable[str]:
    """Sentences for `ClusterProfile.notes` on devices that were throttled or unsteady."""
    for rank, device in enumerate(profiles):
        if device.throttled:
            yield (
                f"rank {rank} was throttled while it was measured ({device.throttled}): its times "
                "are those of a hot or capped device"
            )
    for rank, device in enumerate(profiles):
        noise = DEVIATIONS * device.noise
        if noise > NOISY:
            yield (
                f"rank {rank} is noisy: its passes took between {1.0 - noise:.0%} and "
                f"{1.0 + noise:.0%} of their usual time (80 %); profile again on a quieter machine "
                "with cache=False, or with twice the seconds="
            )


def _budget_of(device: DeviceProfile) -> MemoryBudget:
    return MemoryBudget(device.memory_bytes, device.held_bytes)


def _smaller_memory(device: DeviceProfile, other: DeviceProfile) -> DeviceProfile:
    """The device with the budget that leaves less, and the smaller host memory, of the two."""
    budgets = _budget_of(device), _budget_of(other)
    least = min(budgets, key=lambda budget: budget.activation_bytes)
    on_host = min(device.host_memory_bytes, other.host_memory_bytes)
    return replace(device, **least._asdict(), host_memory_bytes=on_host)


def _with_budgets(profile: ClusterProfile, budgets: Sequence[MemoryBudget]) -> ClusterProfile:
    pairs = zip(profile.devices, budgets, strict=True)
    devices = tuple(replace(device, **budget._asdict()) for device, budget in pairs)
    return replace(profile, devices=devices)


def memory_budget(session: Session) -> MemoryBudget:
    """The budget of this rank at the moment; all ranks of a host should ask at the same time.

    The budgets of ranks that share memory, without a `memory_limit`, do not exceed it together.

    On CUDA, memory in the cache of torch's allocator counts as free: call it after
    `torch.cuda.empty_cache()` on all ranks, because other processes cannot use what is cached.

    Raises:
        ValueError: the `memory_limit` of this rank is larger than its memory.
    """
    device, limit = session.device, session.memory_limit
    limits = host_limits.total_memory(), host_limits.process_limit()
    held, total = 0, min((each for each in limits if each is not None), default=None)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        own = total - free - devices.describe(device).others_bytes
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        held = own - cached - model_bytes(session.job.model, device)
    elif limit is None:
        weights = sum(map(opaque_bytes, session.job.model.parameters()))
        held = host_limits.resident_memory() - weights
    if limit is not None and total is not None and limit > total:
        raise ValueError(
            f"rank {session.group.name}: a memory_limit of {format_bytes(limit)}, but {device} has "
            f"{format_bytes(total)}; lower it, or leave it out to use what is free"
        )
    available = limit or devices.memory_available(device, session.ranks_sharing_memory)
    return MemoryBudget(available, max(0, held))
