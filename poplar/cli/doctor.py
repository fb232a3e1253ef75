"""`poplar doctor`: whether the ranks can train together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from poplar.cli.options import AsJson, Debug, Device
from poplar.cli.output import command_output, table

if TYPE_CHECKING:
    from poplar.doctor import Report

_COLORS = {"problem": "bold red", "advice": "yellow"}


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
        output.show(*_shown(report))


def _shown(report: Report) -> list[Table | Text]:
    """A table of the ranks, the facts that they share, and the findings."""
    header, *rows = report.table()
    ranks = table(*header)
    for row in rows:
        ranks.add_row(*row)
    facts = Table.grid(padding=(0, 2))
    for name, value in report.shared():
        facts.add_row(Text(name, style="bold"), Text(value))
    findings = [
        Text.assemble((finding.kind, _COLORS[finding.kind]), str(finding)[len(finding.kind) :])
        for finding in report.findings
    ]
    return [
        ranks,
        facts,
        *(findings or [Text("no problems found: these ranks can train", "green")]),
    ]
