"""The command line application, and the commands that print what one function returns."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from poplar.cli import checkpoint, pair, plan, profile, simulate, watch
from poplar.cli.options import AsJson, Debug, Device, Function, PlanFile, RunFile, output_file
from poplar.cli.output import command_output
from poplar.values.plan import Plan

_VERIFIED = ("units", "compute_dtype", "reduce_dtype", "timeout")
"""Arguments of the optimizer that change what `poplar verify` compares."""

app = typer.Typer(
    name="poplar",
    help="Train one model on unequal devices at the sum of their speeds.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def doctor(device: Device = "auto", as_json: AsJson = False, debug: Debug = False) -> None:
    """Check versions, devices, kernels, transports and memory of all ranks.

    Under torchrun, all ranks are compared before their first collective. The exit code is 1 if
    there is a problem.
    """
    with command_output(as_json=as_json, debug=debug) as output:
        from poplar.cli.process_group import chosen_device
        from poplar.doctor import examine

        report = examine(chosen_device(device))
        output.document, output.failed = report.to_dict(), not report.ok
        output.show(str(report))


app.command()(profile.profile)
app.command()(plan.plan)
app.command()(simulate.simulate)
app.command()(pair.pair)
app.command()(watch.watch)


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
    """Compare every gradient of one step under a plan with the gradient of one process.

    Start as many ranks as the plan has: torchrun --nproc-per-node 2 -m poplar verify ... The exit
    code is 1 if a gradient differs from that of the whole batch.
    """
    with command_output(as_json=as_json, debug=debug) as output:
        from poplar.cli.process_group import chosen_device, joined
        from poplar.cli.workload import load
        from poplar.tuning.verification import verify as verify_step

        checked, own_device = Plan.from_json(plan), chosen_device(device)
        with joined(own_device) as (_, world_size):
            if checked.world_size != world_size:
                raise ValueError(
                    f"{plan} is for {checked.world_size} ranks, but this job has {world_size}; "
                    f"start it with torchrun --nproc-per-node {checked.world_size} -m poplar "
                    f"verify {function} --plan {plan}"
                )
            work = load(function).to(own_device, whole=True)
            batch = work.batch_of(checked.global_batch)
            given = work.optimizer_arguments
            verification = verify_step(
                work.model,
                work.loss_fn,
                batch,
                checked,
                weight=work.weight,
                loss=work.loss,
                max_micro_batch=max_micro_batch,
                **{name: given[name] for name in _VERIFIED if name in given},
            )
        output.document, output.failed = verification.to_dict(), not verification.ok
        output.show(str(verification))


@app.command()
def report(
    run: RunFile,
    output: Annotated[Path, output_file("The HTML file to write.")] = Path("report.html"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write the report of a run as one HTML file, which opens without a network."""
    with command_output(as_json=as_json, debug=debug) as result:
        from poplar.monitoring import RunRecord, write_report

        write_report(RunRecord.from_json(run), output)
        result.document = {"report": str(output)}
        result.show(f"written to {output}")


app.add_typer(checkpoint.commands, name="checkpoint")
