"""The command line application: one command per module."""

from __future__ import annotations

import typer

from poplar.cli import checkpoint, doctor, plan, profile, report, simulate, verify

app = typer.Typer(
    name="poplar",
    help="Train one model on unequal devices at the sum of their speeds.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(doctor.doctor)
app.command()(profile.profile)
app.command()(plan.plan)
app.command()(simulate.simulate)
app.command()(verify.verify)
app.command()(report.report)
app.add_typer(checkpoint.commands, name="checkpoint")
