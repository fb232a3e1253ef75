"""Measures every rank in the training job and assembles the profile, without residuals.

All ranks measure at once, in this order: plain passes (time and memory against the batch), the
optimizer step, the collectives. The model, its gradients and buffers, and all random state are
unchanged afterwards. After Poplar (AAAI 2025), which measures a curve for each ZeRO stage; here the
stages share one curve, and steps of the engine (`trial_runs`) give what each stage adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from poplar.comm import Group, connect
from poplar.observation import Observation
from poplar.plan import Plan
from poplar.profile import BatchPoint, ClusterProfile, DeviceProfile, NetworkProfile
from poplar.profiler import batch_curves, trial_runs
from poplar.profiler.batch_curves import BatchCurves, measure_curves
from poplar.profiler.collectives import Collectives, measure_network
from poplar.profiler.memory_budget import MEMORY_RESERVE, memory_budgets
from poplar.profiler.model_profile import compute_dtype, flat_numels, model_profile
from poplar.profiler.noise import noise_notes
from poplar.profiler.optimizer_step import UpdateCost, measure_update
from poplar.profiler.peak_flops import peak_flops
from poplar.profiler.preserved_state import computing_in
from poplar.profiler.progress import Report
from poplar.profiler.request import Request
from poplar.profiler.session import Session
from poplar.profiler.transports import sample_numels, time_transports
from poplar.system import devices

NETWORK = 0.08
"""Part of the time budget for the collectives."""
STEPS = 0.4
"""Part of the time budget for steps of the engine, over all stages."""


class Profiler:
    """The instruments on one request; all methods are collective."""

    def __init__(self, request: Request, group: Group) -> None:
        self.session = Session(request, group)
        self.budgets = memory_budgets(self.session)
        self._noise = 1.0

    def measure(self, report: Report) -> ClusterProfile:
        """The profile of all ranks, without residuals of any stage."""
        session = self.session
        with computing_in(session.request.model, session.agreed.dtype):
            curves = measure_curves(session, self.budgets[session.group.rank], report)
            report("the optimizer step")
            updates = session.on_all_ranks(self._measure_update, "measuring the optimizer step")
            report("the collectives")
            network = self._measure_network()
        self._noise = curves.noise
        return self._assemble(curves, updates, network)

    def observe(
        self, profile: ClusterProfile, groups: Sequence[Sequence[Plan]], report: Report
    ) -> list[list[Observation]]:
        """Run groups of plans in turns: more turns if `measure` met noise. See `run_in_turns`."""
        seconds = self.session.request.seconds * STEPS
        return trial_runs.run_in_turns(
            self.session, profile, groups, seconds=seconds, noise=self._noise, report=report
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
        return replace(
            profile,
            devices=tuple(
                replace(device, memory_bytes=now.memory_bytes, held_bytes=now.held_bytes)
                for device, now in zip(profile.devices, self.budgets, strict=True)
            ),
        )

    def _measure_update(self) -> UpdateCost:
        agreed = self.session.agreed
        optimizer = agreed.setup.shard_optimizer_class, agreed.setup.options
        return measure_update(*optimizer, flat_numels(self.session), agreed.device)

    def _measure_network(self) -> NetworkProfile:
        session, numels = self.session, flat_numels(self.session)
        usual = Collectives(
            comm=connect(session.group, "auto", session.device),
            control=session.control,
            numels=numels,
            wire_dtype=session.request.reduce_dtype,
            value_dtype=compute_dtype(session),
            device=session.device,
        )
        transports = time_transports(replace(usual, numels=sample_numels(numels)))
        fastest = usual.over(transports[0][0]) if transports else usual
        network = measure_network(fastest, session.request.seconds * NETWORK)
        return replace(network, transports=transports)

    def _assemble(
        self, curves: BatchCurves, updates: list[UpdateCost], network: NetworkProfile
    ) -> ClusterProfile:
        session = self.session

        def describe() -> dict[str, Any]:
            info = devices.describe(session.device)
            peak = peak_flops(session.device, compute_dtype(session))
            return {"name": info.name, "uuid": info.uuid, "host": info.host, "peak_flops": peak}

        descriptions = session.on_all_ranks(describe, "describing the device")
        profiles = tuple(
            DeviceProfile(
                **description,
                memory_bytes=budget.memory_bytes,
                held_bytes=budget.held_bytes,
                points=curve.points,
                optimizer_seconds=update.seconds,
                optimizer_latency_seconds=update.latency_seconds,
                throttled=curve.throttled,
            )
            for description, budget, curve, update in zip(
                descriptions, self.budgets, curves.by_rank, updates, strict=True
            )
        )
        fractions = [curve.backward_fraction for curve in curves.by_rank]
        return ClusterProfile(
            devices=profiles,
            model=model_profile(session, updates[0].state_bytes),
            network=network,
            backward_fraction=sum(fractions) / len(fractions),
            memory_reserve=MEMORY_RESERVE,
            identity=session.agreed.identity,
            notes=tuple(_notes(profiles, curves)),
        )


def _notes(profiles: Sequence[DeviceProfile], curves: BatchCurves) -> Iterable[str]:
    for rank, device in enumerate(profiles):
        if device.throttled:
            yield (
                f"rank {rank} was throttled while it was measured ({device.throttled}): its times "
                "are those of a hot or capped device"
            )
    yield from noise_notes(
        [device.host for device in profiles],
        [device.points for device in profiles],
        [curve.cpu_use for curve in curves.by_rank],
    )
