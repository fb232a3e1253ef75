"""The report of a run: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import poplar
from contest.outcome import Contest
from contest.row import Row, rows_of
from contest.table import HEADINGS, cells_of, summary_cells
from poplar.report import markup

TITLE = "Poplar head to head"
HOW_TO_READ = (
    "The sum of speeds is what the ranks do in plain PyTorch passes, all at once, when working "
    "together costs nothing: the larger of a measurement before the run and one after it.",
    "Balance is Poplar's plan over Poplar's even plan, at the same stage and on the same "
    "transport: what giving each rank its due is worth. It is the only one of the three that says "
    "anything about GPUs.",
    "Transport is Poplar's even plan over the same plan on gloo, which is what the peers use: what "
    "sharing memory between CPU ranks of one host is worth.",
    "Engine is Poplar's even plan on gloo over the fastest peer of the stage: everything else.",
)


def write_page(contests: Sequence[Contest], path: Path) -> None:
    """Write the report.

    Raises:
        ImportError: matplotlib is missing; says how to install it.
    """
    body = "".join(
        [
            f"<h1>{TITLE}</h1>",
            markup.bullets(HOW_TO_READ),
            *(_cluster(contest) for contest in contests),
            _thresholds([row for contest in contests for row in rows_of(contest)]),
        ]
    )
    style = (Path(poplar.__file__).parent / "report" / "page.css").read_text(encoding="utf-8")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{TITLE}</title><style>{style}</style></head><body>{body}</body></html>\n",
        encoding="utf-8",
    )


def _cluster(contest: Contest) -> str:
    rows = rows_of(contest)
    speeds = " : ".join(f"{speed:.1f}" for speed in rows[0].calibrated_speeds)
    facts = [
        ("hardware", rows[0].device),
        ("versions", rows[0].versions),
        ("commit", rows[0].commit),
        ("ranks", contest.described),
        ("calibrated speeds", f"{speeds} samples/s"),
        ("model", f"{contest.task.model} {contest.task.size}, {contest.parameters:,} parameters"),
        ("step", f"{contest.task.global_batch} samples of {contest.task.context} bytes"),
    ]
    return markup.section(
        contest.cluster,
        markup.definitions(facts),
        markup.bullets(contest.notes),
        markup.table(HEADINGS, cells_of(rows), left=(1,)),
        *_pictures(contest),
    )


def _pictures(contest: Contest) -> Iterator[str]:
    try:
        from contest.plots import by_stage, draw_speeds, draw_timelines
        from poplar.report.theme import to_svg
    except ImportError as missing:
        raise ImportError(
            f"pictures need matplotlib ({missing}): pip install 'poplar-zero[report]'"
        ) from None
    name = "c" + "".join(letter if letter.isalnum() else "-" for letter in contest.cluster)
    yield markup.figure(
        to_svg(draw_speeds(contest), f"{name}-speeds"), "Samples a second of every entrant"
    )
    for stage in by_stage(contest):
        timeline = draw_timelines(contest, stage)
        if timeline is not None:
            yield markup.figure(
                to_svg(timeline, f"{name}-steps-{stage}"),
                f"One step of every entrant at stage {stage}; what peers wait for inside a pass "
                "is not told apart",
            )


def _thresholds(rows: Sequence[Row]) -> str:
    headings = ("cluster", "stage", "what", "value", "wanted", "")
    return markup.section(
        "What it has to show", markup.table(headings, summary_cells(rows), left=(0, 2))
    )
