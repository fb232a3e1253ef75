"""The commands themselves: each reads like its own help."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from poplar.cli import parse, tables
from poplar.cli.answer import answering
from poplar.hardware.cluster_file import ClusterFile
from poplar.hardware.estimate import estimate
from poplar.hardware.model_shapes import TrainingJob, architecture
from poplar.plan import Plan
from poplar.planner.baselines import POLICIES
from poplar.planner.explain import PREDICTION_ERROR, explain
from poplar.planner.search import alternatives, search
from poplar.profile import ClusterProfile

if TYPE_CHECKING:
    import torch

    from poplar.workload import Workload

# torch is imported by the commands that need it: `plan` answers at once, and where there is none.

app = typer.Typer(
    name="poplar",
    help="Train one model on unequal devices at the sum of their speeds.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="KIND",
        parser=parse.one_of(("auto", "cuda", "cpu")),
        help="auto (CUDA where there is any), cuda or cpu.",
    ),
]
Function = Annotated[
    str,
    typer.Argument(
        metavar="FILE.py:FUNCTION",
        help="A function that returns a poplar.workload.Workload, or (model, loss_fn, batch).",
    ),
]
ProfileFile = Annotated[
    Path, typer.Argument(metavar="CLUSTER.json", exists=True, dir_okay=False, help="A profile.")
]
PlanFile = Annotated[
    Path, typer.Option("--plan", metavar="PLAN.json", exists=True, dir_okay=False, help="A plan.")
]
RunFile = Annotated[
    Path, typer.Argument(metavar="RUN.json", exists=True, dir_okay=False, help="A recorded run.")
]
Policy = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="NAME",
        parser=parse.one_of(POLICIES),
        help=f"How to decide: {', '.join(POLICIES)}.",
    ),
]


@app.command()
def doctor(device: Device = "auto", as_json: AsJson = False, debug: Debug = False) -> None:
    """Will these ranks work together? Versions, devices, kernels, transports, memory.

    Under torchrun all ranks are compared, before their first collective. Ends with 1 if there is a
    problem.
    """
    with answering(as_json=as_json, debug=debug) as answer:
        from poplar.cli.world import chosen_device
        from poplar.doctor import examine

        report = examine(chosen_device(device))
        answer.document, answer.failed = report.to_dict(), not report.ok
        answer.show(*tables.doctor(report))


@app.command()
def profile(
    function: Function,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where to write; without --json cluster.json."),
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(min=1, help="Largest micro-batch to try.")
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option(help="What a rank may use: 8GiB, or 8GiB,4GiB by rank.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long it may take, about.")] = 60.0,
    stages: Annotated[str, typer.Option(help="ZeRO stages to measure: auto, or 0,2.")] = "auto",
    cache: Annotated[
        bool, typer.Option(help="Use what was measured before of the same job.")
    ] = True,
    device: Device = "auto",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure every rank, and the network between them.

    Alone, or on all ranks: torchrun --nproc-per-node 2 -m poplar profile train.py:workload
    """
    limits = parse.sizes(memory_limit) if memory_limit is not None else None
    chosen = parse.stages(stages)
    with answering(as_json=as_json, debug=debug) as answer:
        from poplar.cli.world import chosen_device, joined
        from poplar.profiling import profile_cluster

        own = chosen_device(device)
        with joined(own) as world:
            work = _loaded(function, own)
            cluster = profile_cluster(
                work.model,
                work.loss_fn,
                work.example_batch,
                optimizer_class=work.optimizer_class,
                max_batch=max_batch,
                memory_limit=parse.of_rank(limits, world.rank, world.size),
                stages=chosen,
                seconds=seconds,
                cache=cache,
                **work.optimizer_arguments,
            )
        answer.document = cluster.to_dict()
        answer.show(*tables.profile(cluster))
        path = output if output is not None else None if as_json else Path("cluster.json")
        if path is not None and world.rank == 0:
            cluster.to_json(path)
            answer.show(f"written to {path}; next: poplar plan {path} --global-batch B")


@app.command()
def plan(
    cluster: ProfileFile,
    global_batch: Annotated[int, typer.Option(min=1, help="Samples of one optimizer step.")],
    stage: Annotated[str, typer.Option(help="ZeRO stage: auto, or some, as in 1 or 0,2.")] = "auto",
    policy: Policy = "exact",
    max_micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Most samples of one pass.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write the plan.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Show all stages and all policies, too.")
    ] = False,
    explained: Annotated[
        bool, typer.Option("--explain", help="Say what bounds it, what helps, who is worth it.")
    ] = False,
    prediction_error: Annotated[
        float, typer.Option(min=0, max=99, help="Percent; less than that is no gain to --explain.")
    ] = 100 * PREDICTION_ERROR,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Find the fastest plan for a measured cluster."""
    stages = parse.stages(stage)
    with answering(as_json=as_json, debug=debug) as answer:
        measured = ClusterProfile.from_json(cluster)
        by_stage = alternatives(
            measured,
            global_batch=global_batch,
            stages=stages,
            policy=policy,
            max_micro_batch=max_micro_batch,
        )
        chosen = by_stage[0]
        answer.document = chosen.to_dict()
        answer.show(str(chosen))
        if compare:
            by_policy = _by_policy(measured, stages, global_batch, max_micro_batch)
            answer.document = {
                "plan": chosen.to_dict(),
                "stages": [best.to_dict() for best in by_stage],
                "policies": {
                    name: found if isinstance(found, str) else found.to_dict()
                    for name, found in by_policy.items()
                },
            }
            answer.show(
                tables.plans({f"stage {best.stage}": best for best in by_stage}, "best of"),
                tables.plans(by_policy, "policy"),
            )
        if explained:
            reasons = explain(
                measured,
                chosen,
                stages=stages,
                max_micro_batch=max_micro_batch,
                error=prediction_error / 100,
            )
            beside = answer.document if compare else {"plan": chosen.to_dict()}
            answer.document = {**beside, "explanation": reasons.to_dict()}
            answer.show(*tables.explanation(reasons))
        if output is not None:
            chosen.to_json(output)
            answer.show(f"written to {output}")


@app.command()
def simulate(
    cluster: Annotated[
        Path,
        typer.Argument(
            metavar="CLUSTER.toml", exists=True, dir_okay=False, help="A described cluster."
        ),
    ],
    model: Annotated[str, typer.Option(help="A model by name, as llama-1.1b.")],
    global_batch: Annotated[int, typer.Option(min=1, help="Samples of one optimizer step.")],
    sequence: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sample; the model's own.")
    ] = None,
    stage: Annotated[str, typer.Option(help="ZeRO stage: auto, or some, as in 1 or 0,2.")] = "auto",
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Recompute activations in the backward.")
    ] = False,
    policy: Policy = "exact",
    max_micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Most samples of one pass.")
    ] = None,
    write_profile: Annotated[
        Path | None, typer.Option(help="Where to write the simulated profile, for poplar plan.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where to write the plan's simulated step, for ui.perfetto.dev: what each rank "
            "does when.",
        ),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Plan for devices nobody here has: a described cluster, published figures, intervals.

    The plan is the best one for the expected cluster; every figure comes with what it is if the
    devices turn out slower or faster.
    """
    stages = parse.stages(stage)
    with answering(as_json=as_json, debug=debug) as answer:
        from poplar.cli import simulation

        job = TrainingJob(
            architecture=architecture(model), sequence=sequence or 0, checkpointing=checkpointing
        )
        described = ClusterFile.read(cluster)
        simulated = described.simulated(job)
        if write_profile is not None:
            simulated.middle.to_json(write_profile)
        chosen = search(
            simulated.middle,
            global_batch=global_batch,
            stages=stages,
            policy=policy,
            max_micro_batch=max_micro_batch,
        )
        gains = simulation.gains(
            described, simulated, chosen, policy, stages=stages, max_micro_batch=max_micro_batch
        )
        worth = estimate(simulated, chosen)
        answer.document = simulation.document(described, simulated, chosen, worth, gains)
        answer.show(*simulation.shown(described, simulated, chosen, worth, gains))
        if write_profile is not None:
            answer.show(
                f"written to {write_profile}; next: poplar plan {write_profile} --global-batch B"
            )
        if trace is not None:
            simulation.write_trace(simulated, chosen, trace)
            answer.show(f"written to {trace}; open it in ui.perfetto.dev")


@app.command()
def verify(
    function: Function,
    plan: PlanFile,
    max_micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Most samples that the one process runs at once.")
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Check one step under a plan against one process: the gradient error of every parameter.

    On as many ranks as the plan has: torchrun --nproc-per-node 2 -m poplar verify ... Ends with 1
    if a gradient is not the one of the whole batch.
    """
    with answering(as_json=as_json, debug=debug) as answer:
        from poplar.cli.world import chosen_device, joined
        from poplar.verification import verify as verify_step

        checked, own = Plan.from_json(plan), chosen_device(device)
        with joined(own) as world:
            if checked.world_size != world.size:
                raise ValueError(
                    f"{plan} is for {checked.world_size} ranks, but this job has {world.size}; "
                    f"start it with torchrun --nproc-per-node {checked.world_size} -m poplar "
                    f"verify {function} --plan {plan}"
                )
            work = _loaded(function, own)
            batch = work.batch_of(checked.global_batch)
            verification = verify_step(
                work.model, work.loss_fn, batch, checked, max_micro_batch=max_micro_batch
            )
        answer.document, answer.failed = verification.to_dict(), not verification.ok
        answer.show(str(verification))


@app.command()
def report(
    run: RunFile,
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")] = Path(
        "report.html"
    ),
    pictures: Annotated[
        Path | None, typer.Option(help="A folder for the same pictures as PNG files.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write a run's report: one HTML file, without a network."""
    with answering(as_json=as_json, debug=debug) as answer:
        from poplar.report import RunRecord, write_report

        write_report(RunRecord.from_json(run), output, pictures)
        answer.document = {
            "report": str(output),
            "pictures": None if pictures is None else str(pictures),
        }
        answer.show(f"written to {output}")


def _loaded(function: str, device: torch.device) -> Workload:
    from poplar.workload import load

    return load(function).to(device)


def _by_policy(
    measured: ClusterProfile, stages: Sequence[int], global_batch: int, most: int | None
) -> dict[str, Plan | str]:
    """Each policy's best plan, or why it has none."""
    found: dict[str, Plan | str] = {}
    for name in POLICIES:
        try:
            found[name] = search(
                measured,
                global_batch=global_batch,
                stages=stages,
                policy=name,
                max_micro_batch=most,
            )
        except ValueError as error:
            found[name] = str(error)
    return found
