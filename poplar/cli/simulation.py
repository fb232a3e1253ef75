"""What `poplar simulate` says: a plan for devices nobody has, every figure an interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from poplar.formatting import format_bytes
from poplar.hardware.cluster_file import ClusterFile, SimulatedCluster
from poplar.hardware.device_catalog import find_device, spread
from poplar.hardware.estimate import Estimate, Interval, gain
from poplar.plan import Plan
from poplar.planner.search import search
from poplar.simulator.event_engine import simulate

Gains = Mapping[str, Interval | str]
"""How many times as fast as each alternative, or why that one has no plan."""
_OTHER_POLICIES = ("even", "flops")

_BETWEEN = (
    "between: everything slower or faster, or one kind of device slower and the others faster, "
    "under this same plan; measured and planned again, it would be another"
)


def gains(
    described: ClusterFile,
    simulated: SimulatedCluster,
    plan: Plan,
    policy: str,
    *,
    stages: Sequence[int],
    max_micro_batch: int | None,
) -> dict[str, Interval | str]:
    """What a plan is worth beside the alternatives: other policies, and each kind of device alone.

    Mixing is no gain by itself: one kind on fast links may beat both over a slow network.
    """
    parts = {f"policy {name}": (simulated, name) for name in _OTHER_POLICIES if name != policy}
    if len(described.kinds) > 1:
        for kind in described.kinds:
            part = described.alone(kind).simulated(simulated.job, kinds=described.kinds)
            parts[f"{kind.gpu} alone"] = (part, policy)
    found: dict[str, Interval | str] = {}
    for name, (part, how) in parts.items():
        try:
            other = search(
                part.middle,
                global_batch=plan.global_batch,
                stages=stages,
                policy=how,
                max_micro_batch=max_micro_batch,
            )
        except ValueError as error:
            found[name] = str(error)
        else:
            found[name] = gain(simulated, plan, other, part)
    return found


def write_trace(simulated: SimulatedCluster, plan: Plan, path: Path) -> None:
    """One step of the plan on the expected cluster, as a Perfetto trace.

    Raises:
        OSError: the file cannot be written.
    """
    simulate(simulated.middle, plan).to_perfetto(path)


def document(
    described: ClusterFile, simulated: SimulatedCluster, plan: Plan, worth: Estimate, gains: Gains
) -> dict[str, Any]:
    """The answer in JSON's types."""
    job = simulated.job
    return {
        "simulated": True,
        "cluster": described.name,
        "model": job.architecture.name,
        "sequence": job.sequence,
        "checkpointing": job.checkpointing,
        "devices": {
            "roofline_only": list(simulated.calculated),
            "measured_curve": list(simulated.measured),
        },
        "plan": plan.to_dict(),
        "estimate": worth.to_dict(),
        "gain_over": {
            name: found if isinstance(found, str) else asdict(found)
            for name, found in gains.items()
        },
        "price_per_hour": simulated.price_per_hour,
        "currency": simulated.currency,
    }


def shown(
    described: ClusterFile, simulated: SimulatedCluster, plan: Plan, worth: Estimate, gains: Gains
) -> list[Table | Text]:
    """The answer for people."""
    job = simulated.job
    recomputing = ", activations checkpointed" if job.checkpointing else ""
    lines = [
        Text(
            f"simulated: {described.name}, {job.architecture.name} "
            f"({job.architecture.numel:,} parameters), samples of {job.sequence} tokens"
            f"{recomputing}; nothing of this was measured here",
            "bold",
        )
    ]
    if simulated.calculated:
        kinds = [f"{gpu} (±{100 * spread(find_device(gpu)):.0f} %)" for gpu in simulated.calculated]
        lines.append(Text(f"roofline only: {', '.join(kinds)}", "yellow"))
    if simulated.measured:
        lines.append(
            Text(
                "published curves of this model, their ratios only: "
                f"{', '.join(simulated.measured)}"
            )
        )
    parts: list[Table | Text] = [*lines, Text(str(plan)), _figures(simulated, worth, gains)]
    parts.append(Text(_BETWEEN))
    if worth.may_not_fit:
        parts.append(
            Text(
                "this plan may not fit, if passes keep more than expected: " + worth.may_not_fit,
                "yellow",
            )
        )
    return parts


def _figures(simulated: SimulatedCluster, worth: Estimate, gains: Gains) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("simulated", "expected", "between", "and"):
        table.add_column(heading)

    def add(what: str, figure: Interval, form: str, unit: str = "") -> None:
        values = (figure.middle, figure.low, figure.high)
        table.add_row(what, *(f"{value:{form}}{unit}" for value in values))

    add("step", worth.step_seconds, ".3g", " s")
    add("samples/s", worth.samples_per_second, ".4g")
    add("TFLOP/s, whole cluster", worth.tflops, ".4g")
    add("of the sum of speeds", worth.of_sum_of_speeds.map(lambda part: 100 * part), ".0f", " %")
    for name, found in gains.items():
        if isinstance(found, str):
            table.add_row(f"over {name}", "no plan fits", "", "")
        else:
            add(f"over {name}", found, ".2f", "x")
    if worth.samples_per_price is not None:
        add(f"samples per {simulated.currency or 'unit of price'}", worth.samples_per_price, ".4g")
    fullest = max(worth.memory_bytes, key=lambda memory: memory.middle)
    values = (fullest.middle, fullest.low, fullest.high)
    table.add_row("most memory of a rank", *(format_bytes(value) for value in values))
    return table
