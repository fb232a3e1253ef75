"""`poplar simulate`: a plan for a described cluster; every figure is an interval."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from poplar.cli.options import (
    AsJson,
    Debug,
    GlobalBatch,
    MaxMicroBatch,
    Policy,
    Stages,
    parse_stages,
    writable,
)
from poplar.cli.output import Output, command_output
from poplar.hardware.cluster_file import ClusterFile
from poplar.hardware.estimate import Estimate, Interval, estimate, gain
from poplar.hardware.model_shapes import TrainingJob, architecture
from poplar.hardware.simulated_cluster import SimulatedCluster, simulated_cluster
from poplar.planner.search import plan_or_error, search
from poplar.simulator.step_simulation import simulate as simulate_step
from poplar.values.formatting import format_bytes
from poplar.values.plan import Plan
from poplar.values.schema import to_json_types

_OTHER_POLICIES = ("even", "flops")
_ABOUT_INTERVALS = (
    "intervals: all devices slower or faster, or one type of device slower and the others faster, "
    "under this plan; after measuring, the best plan may differ"
)


def simulate(
    cluster: Annotated[
        Path,
        typer.Argument(
            metavar="CLUSTER.toml", exists=True, dir_okay=False, help="A description of a cluster."
        ),
    ],
    model: Annotated[str, typer.Option(help="Name of a model, for example llama-1.1b.")],
    global_batch: GlobalBatch,
    sequence: Annotated[
        int | None, typer.Option(min=1, help="Tokens per sample; default: that of the model.")
    ] = None,
    stage: Stages = "auto",
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Recompute activations in the backward.")
    ] = False,
    policy: Policy = "exact",
    max_micro_batch: MaxMicroBatch = None,
    write_profile: Annotated[
        Path | None,
        typer.Option(
            help="Where to write the simulated profile, for poplar plan.", callback=writable
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where to write a simulated step of the plan, for ui.perfetto.dev.",
            callback=writable,
        ),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Plan for devices that are not at hand, from published figures.

    The plan is the best one for the expected speeds. Every figure has an interval, because devices
    may be slower or faster than expected.
    """
    request: dict[str, Any] = {"stages": parse_stages(stage), "max_micro_batch": max_micro_batch}
    with command_output(as_json=as_json, debug=debug) as output:
        job = TrainingJob(
            architecture=architecture(model), sequence=sequence or 0, checkpointing=checkpointing
        )
        simulated = simulated_cluster(ClusterFile.read(cluster), job)
        if write_profile is not None:
            simulated.middle.to_json(write_profile)
        request["global_batch"] = global_batch
        plan = search(simulated.middle, policy=policy, **request)
        gains = _gains(simulated, plan, policy, request)
        figures = estimate(simulated, plan)
        output.document = {
            "simulated": True,
            "cluster": simulated.described.name,
            "model": job.architecture.name,
            "sequence": job.sequence,
            "checkpointing": job.checkpointing,
            "assumed_speed_errors": dict(simulated.spreads),
            "plan": plan.to_dict(),
            "estimate": to_json_types(figures),
            "gain_over": to_json_types(gains),
        }
        _show(output, simulated, plan, figures, gains)
        if write_profile is not None:
            output.show(
                f"written to {write_profile}; next: poplar plan {write_profile} --global-batch B"
            )
        if trace is not None:
            simulate_step(simulated.middle, plan).to_perfetto(trace)
            output.show(f"written to {trace}; open it in ui.perfetto.dev")


def _gains(
    simulated: SimulatedCluster, plan: Plan, policy: str, request: Mapping[str, Any]
) -> dict[str, Interval | str]:
    """How many times as fast a plan is as other policies, and as each type of device alone.

    A reason instead of an interval: the alternative has no plan. Below 1 is possible: one type of
    device on fast links may be faster than all devices over a slow network.
    """
    others = {f"policy {name}": (simulated, name) for name in _OTHER_POLICIES if name != policy}
    types = simulated.described.device_types
    if len(types) > 1:
        for one in types:
            described = simulated.described.only(one)
            part = simulated_cluster(described, simulated.job, vary=types)
            others[f"{one.gpu} alone"] = (part, policy)
    gains: dict[str, Interval | str] = {}
    for name, (part, other_policy) in others.items():
        found = plan_or_error(part.middle, policy=other_policy, **request)
        if isinstance(found, Plan):
            gains[name] = gain(simulated, plan, found, part)
        else:
            gains[name] = str(found)
    return gains


def _show(
    output: Output,
    simulated: SimulatedCluster,
    plan: Plan,
    figures: Estimate,
    gains: Mapping[str, Interval | str],
) -> None:
    job = simulated.job
    recomputing = ", activations checkpointed" if job.checkpointing else ""
    errors = [f"{gpu} (±{100 * error:.0f} %)" for gpu, error in simulated.spreads.items()]
    output.show(
        f"simulated: {simulated.described.name}, {job.architecture.name} "
        f"({job.architecture.numel:,} parameters), samples of {job.sequence} tokens{recomputing}; "
        "nothing was measured here",
        f"roofline only: {', '.join(errors)}",
        str(plan),
    )
    memory = max(figures.memory_bytes, key=lambda memory: memory.middle)
    rows = [
        _row("step", figures.step_seconds, "{:.3g} s".format),
        _row("samples/s", figures.samples_per_second, "{:.4g}".format),
        _row("TFLOP/s, whole cluster", figures.tflops, "{:.4g}".format),
        _row("of the sum of speeds", figures.of_sum_of_speeds.scaled(100), "{:.0f} %".format),
        *(
            (f"over {name}", "no plan fits", "", "")
            if isinstance(found, str)
            else _row(f"over {name}", found, "{:.2f}x".format)
            for name, found in gains.items()
        ),
        _row("most memory of a rank", memory, format_bytes),
    ]
    output.show_table(("simulated", "expected", "from", "to"), *rows)
    output.show(_ABOUT_INTERVALS)
    if figures.may_not_fit:
        output.show(f"this plan may not fit if passes need more memory: {figures.may_not_fit}")


def _row(name: str, interval: Interval, form: Callable[[float], str]) -> tuple[str, str, str, str]:
    return name, form(interval.middle), form(interval.low), form(interval.high)
