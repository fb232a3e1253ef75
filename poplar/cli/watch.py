"""`poplar watch`: how long each rank of a job waits, for which rank, and what a plan would gain."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from poplar.cli.options import Debug, writable
from poplar.cli.output import command_output
from poplar.values.formatting import format_percent, format_seconds, format_table
from poplar.values.regular_files import naming
from poplar.values.schema import json_text
from poplar.watch.job import run
from poplar.watch.records import ENDINGS, RANKS, read_endings, read_records
from poplar.watch.verdict import Verdict, judge

NOTHING_RECORDED = (
    "poplar watch: no steps were recorded. A job is recorded from its second optimizer step on, in "
    "Python processes that use torch.distributed."
)


def watch(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="As in: -- torchrun train.py")
    ],
    every: Annotated[
        float, typer.Option(min=0.5, max=1e9, help="Seconds between two tables.")
    ] = 10.0,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the summary here.", callback=writable),
    ] = None,
    html_file: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a report here.", callback=writable),
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option("--folder", help="An empty folder that all hosts of the job share."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Watch a job: which rank waits for which, why, and what unequal batches would gain.

    The job is a script with DDP, FSDP2, DeepSpeed or Poplar, unchanged. Tables go to stderr. The
    exit code is that of the job. On several hosts, give each `poplar watch` the same --folder.
    """
    if html_file is not None and find_spec("jinja2") is None:
        raise typer.BadParameter("--html needs jinja2, which is not installed; pip install jinja2")
    with (
        command_output(as_json=False, debug=debug),
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name,
    ):
        folder = (records or Path(name)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if old := sorted([*folder.glob(RANKS), *folder.glob(ENDINGS)]):
            raise ValueError(
                f"--folder {folder} has {old[0].name} of another job; give an empty one"
            )

        def look() -> None:
            verdict = judge(read_records(folder))
            if verdict is not None:
                print(table_of(verdict), file=sys.stderr)

        status = run(command, folder, every, look)
        # An error after the end of the job is printed, and does not replace its exit code. An
        # OSError is that of printing: the disk of stderr may be full.
        with suppress(typer.Exit, OSError), command_output(as_json=False, debug=debug):
            endings = read_endings(folder)
            verdict = judge(read_records(folder), endings)
            _conclude(verdict, endings, json_file, html_file)
    raise typer.Exit(status)


def _conclude(
    verdict: Verdict | None,
    endings: Sequence[str],
    json_file: Path | None,
    html_file: Path | None,
) -> None:
    """Show the verdict on a job that has ended, and write the files."""
    if verdict is None:
        ended = f"poplar watch: no step was recorded on all ranks: {'; '.join(endings)}."
        print(ended if endings else NOTHING_RECORDED, file=sys.stderr)
        return
    print(table_of(verdict), *verdict.sentences(), sep="\n", file=sys.stderr)
    if json_file is not None:
        text = json_text(verdict.to_dict(), indent=2)
        with naming(json_file):
            json_file.write_text(text + "\n", encoding="utf-8")
    if html_file is not None:
        from poplar.monitoring.report import write_page

        write_page(html_file, "watch.html", verdict=verdict)


def table_of(verdict: Verdict) -> str:
    """What each rank does in a step."""
    header = ("rank", "step", "compute", "input", "optimizer", "network", "waiting", "for")
    rows: list[tuple[str, ...]] = [header]
    for time in verdict.ranks:
        waiting = sum(time.waiting)
        late = max(range(len(time.waiting)), key=time.waiting.__getitem__)
        parts = (time.compute, time.input, time.optimizer, time.network, waiting)
        cells = (format_percent(seconds / time.step) for seconds in parts)
        on = f"rank {verdict.ranks[late].rank}" if waiting else ""
        rows.append((str(time.rank), format_seconds(time.step), *cells, on))
    table = format_table(*rows, right=range(len(header)))
    return f"{verdict.engine}, {verdict.steps} steps\n{table}\n"
