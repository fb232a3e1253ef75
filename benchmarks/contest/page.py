"""The report of a run: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import poplar
from contest.outcome import Contest
from contest.row import Row, rows_of
from contest.table import (
    HEADINGS,
    SUMMARY_HEADINGS,
    cells_of,
    ideals_of,
    in_order,
    reasons_of,
    summary_cells,
)
from poplar.report import markup

TITLE = "Poplar head to head"
LEAD = (
    "The same model, data, global batch, optimizer, dtype and learning rate in every engine, on "
    "the same ranks, turn by turn in one run."
)
HOW_TO_READ = (
    "The sum of speeds is what the ranks do in plain PyTorch passes, all at once, when working "
    "together costs nothing. They take turns with the engines: of sum is the median, over rounds, "
    "of an engine's turn over the plain passes of the same round.",
    "Balance is Poplar's plan over Poplar's even plan, at the same stage and on the same "
    "transport: what giving each rank its due is worth. It is the only one of the three that says "
    "anything about GPUs.",
    "Transport is Poplar's even plan over the same plan on gloo, which is what the peers use: what "
    "sharing memory between CPU ranks of one host is worth.",
    "Engine is Poplar's even plan on gloo over the fastest peer of the stage: everything else.",
    "Over best peer is samples a second over the fastest peer of the stage, with a 90 % interval. "
    "Strong or weak ranks only are Poplar on a part of the ranks: neither peers nor balance.",
)


def write_page(contests: Sequence[Contest], path: Path) -> None:
    """Write the report.

    Raises:
        ImportError: matplotlib is missing; says how to install it.
    """
    rows = [rows_of(contest) for contest in contests]
    body = "".join(
        [
            _head([row for own in rows for row in own]),
            *map(_cluster, contests, rows),
            f"<footer>Written by Poplar {escape(poplar.__version__)}.</footer>",
        ]
    )
    style = (Path(poplar.__file__).parent / "report" / "page.css").read_text(encoding="utf-8")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{TITLE}</title><style>{style}</style></head><body>{body}</body></html>\n",
        encoding="utf-8",
    )


def _head(rows: Sequence[Row]) -> str:
    """What holds for all clusters, and what came out."""
    facts = [
        (name, "; ".join(dict.fromkeys(values)))
        for name, values in (
            ("hardware", [row.device for row in rows]),
            ("versions", [row.versions for row in rows]),
            ("commit", [row.commit for row in rows]),
            ("day", [row.day for row in rows]),
        )
    ]
    cells = list(summary_cells(rows))
    short = [number for number, line in enumerate(cells) if "short" in line[-1]]
    said = f"{len(cells) - len(short)} of {len(cells)} are met; those that are short stand out."
    return (
        f'<header><h1>{TITLE}</h1><p class="lead">{LEAD}</p></header>'
        + markup.section("Hardware and versions", markup.definitions(facts))
        + markup.section("How to read it", markup.bullets(HOW_TO_READ))
        + markup.section(
            "What it has to show",
            markup.paragraph(said),
            markup.table(SUMMARY_HEADINGS, cells, left=(0, 2), highlighted=short),
        )
    )


def _cluster(contest: Contest, rows: Sequence[Row]) -> str:
    speeds = " : ".join(f"{speed:.1f}" for speed in rows[0].calibrated_speeds)
    facts = [
        ("ranks", contest.described),
        ("speeds in plain passes", f"{speeds} samples/s, {ideals_of(rows)}"),
        (
            "sum of speeds",
            f"{contest.sum_of_speeds:.1f} samples/s turn by turn; "
            f"before or after the run at most {contest.largest_sum_of_speeds:.1f}",
        ),
        ("changed during the run", f"by up to {100 * contest.drift:.0f} %"),
        ("model", f"{contest.task.model} {contest.task.size}, {contest.parameters:,} parameters"),
        ("step", f"{contest.task.global_batch} samples of {contest.task.context} bytes"),
    ]
    ordered = in_order(rows)
    exact = [number for number, row in enumerate(ordered) if row.is_plan and row.policy == "exact"]
    cells = [
        (stage, entrant, "absent" if row.absent else speed, *others)
        for row, (stage, entrant, speed, *others) in zip(ordered, cells_of(rows), strict=True)
    ]
    said = [*contest.notes, *reasons_of(ordered)]
    return markup.section(
        contest.cluster,
        markup.definitions(facts),
        markup.bullets(said) if said else "",
        markup.table(HEADINGS, cells, left=(1,), highlighted=exact),
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
        to_svg(draw_speeds(contest), f"{name}-speeds"),
        "Samples a second of every entrant, and percent of the sum of speeds",
    )
    for stage in by_stage(contest):
        timeline = draw_timelines(contest, stage)
        if timeline is not None:
            yield markup.figure(
                to_svg(timeline, f"{name}-steps-{stage}"),
                f"One step of every entrant at stage {stage}. Peers do not tell what they wait "
                "for: what they compute and update has communication and waiting in it.",
            )
