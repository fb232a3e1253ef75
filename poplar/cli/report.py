"""`poplar report`: a recorded run as an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from poplar.cli.options import AsJson, Debug, RunFile
from poplar.cli.output import command_output


def report(
    run: RunFile,
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")] = Path(
        "report.html"
    ),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write the report of a run as one HTML file, which opens without a network."""
    with command_output(as_json=as_json, debug=debug) as result:
        from poplar.monitoring import RunRecord, write_report

        write_report(RunRecord.from_json(run), output)
        result.document = {"report": str(output)}
        result.show(f"written to {output}")
