"""Poplar: the plan that `poplar.planner.search` finds on a profile of these costs.

The profile has one unit per group of operators, and its seconds, bytes and links are those of
`Costs`, so the search and the simulation differ only in their model of a step.
"""

from __future__ import annotations

from collections.abc import Iterator

from poplar.hardware.simulated_cluster import network_profile
from poplar.planner.search import search
from poplar.values.plan import Plan, UnitPlan
from poplar.values.profile import (
    BatchPoint,
    ClusterProfile,
    DeviceProfile,
    LinearLayer,
    ModelProfile,
)
from published_clusters.costs import Costs
from published_clusters.decision import Decision, Decisions
from published_clusters.layer import BYTES, Layer, groups

_HELD_BYTES = 1 << 30


def poplar_plan(costs: Costs, layers: tuple[Layer, ...], global_batch: int) -> Plan:
    """The plan.

    Raises:
        NoPlanFits: the model does not fit.
    """
    return search(
        profile(costs, layers, global_batch), global_batch=global_batch, leave_out="never"
    )


def profile(costs: Costs, layers: tuple[Layer, ...], global_batch: int) -> ClusterProfile:
    """The cluster as the planner would have measured it."""
    cluster, units = costs.cluster, groups(layers)
    work = [costs.pass_seconds(0, unit, 1.0) for unit in units]
    total = sum(work)
    model = ModelProfile(
        unit_numels=tuple(unit.parameters for unit in units),
        unit_names=tuple(f"{number} {unit.name}" for number, unit in enumerate(units)),
        unit_forward_fraction=tuple(one / total / 3.0 for one in work),
        unit_backward_fraction=tuple(2.0 * one / total / 3.0 for one in work),
        linear_layers=tuple(
            LinearLayer(
                name=layer.name,
                unit=_unit_of(layer, units),
                outputs=layer.fan_out,
                inputs=layer.fan_in,
                rows_per_sample=layer.rows,
            )
            for layer in layers
            if layer.fan_in
        ),
    )
    numel = sum(unit.parameters for unit in units)
    largest = min(global_batch, 1024)
    batches = sorted({*(1 << power for power in range(largest.bit_length())), largest})
    activations = BYTES * sum(unit.produced for unit in units)
    devices = [
        DeviceProfile(
            name=device.name,
            memory_bytes=int(device.memory_gib * 2**30),
            points=tuple(
                BatchPoint(
                    batch=batch,
                    seconds=sum(costs.pass_seconds(rank, layer, batch) for layer in layers),
                    activation_bytes=int(activations * batch),
                )
                for batch in batches
                if batch <= largest
            ),
            optimizer_seconds=costs.update_seconds(rank, numel),
            held_bytes=_HELD_BYTES,
            peak_flops=device.fp32_tflops * 1e12,
            host=str(cluster.host_of[rank]),
        )
        for rank, device in enumerate(cluster.devices)
    ]
    return ClusterProfile(
        devices=tuple(devices),
        model=model,
        network=network_profile(cluster.hosts, model),
        overlap=cluster.overlap,
        notes=("simulated: no device of this cluster was measured",),
    )


def decisions_of(plan: Plan, layers: tuple[Layer, ...], global_batch: int) -> Decisions:
    """The plan as decisions, for the simulation that all policies share.

    Ranks with several passes are simulated with one of as many samples; parameters and gradients
    move as often as in the plan.
    """
    batch = tuple(plan.samples(rank) / global_batch for rank in range(plan.world_size))
    units = groups(layers)
    layers = layers if plan.factored else units
    numbers = {unit.name: number for number, unit in enumerate(units)}
    settings = {unit.name: unit for unit in plan.units}
    decisions = []
    for layer in layers:
        name = layer.block or layer.name
        unit = settings.get(f"{numbers[name]} {name}")
        decisions.append(_decision(plan, layer, batch, unit))
    passes = max(map(len, plan.micro_batches)) if plan.synchronizes_every_pass else 1
    return Decisions(
        layers=layers,
        decisions=tuple(decisions),
        global_batch=global_batch,
        gradients_of_passes=passes,
    )


def description(plan: Plan) -> str:
    """Of the plan, in a few words."""
    return ", ".join(_words(plan))


def _words(plan: Plan) -> Iterator[str]:
    yield f"stage {plan.stage}"
    if plan.factored:
        yield f"{len(plan.factored)} factored layers"
    owned = sum(unit.shares is not None for unit in plan.units)
    if owned:
        yield f"{owned} units with owners"
    passes = max(map(len, plan.micro_batches))
    if passes > 1:
        yield f"{passes} passes"


def _decision(
    plan: Plan, layer: Layer, batch: tuple[float, ...], unit: UnitPlan | None
) -> Decision:
    factored = layer.name in plan.factored
    if plan.stage == 0:
        return Decision(batch=batch, factored=factored)
    return Decision(
        batch=batch,
        parameters="sharded_optimizer" if plan.stage < 3 else "sharded",
        shares=(unit and unit.shares) or plan.shares,
        factored=factored,
        gathers_again=plan.stage == 3 and not (unit and unit.persistent),
    )


def _unit_of(layer: Layer, units: tuple[Layer, ...]) -> int:
    return next(i for i, unit in enumerate(units) if unit.name == (layer.block or layer.name))
