"""HTML report of a run, in one self-contained file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import poplar
from head_to_head.outcome import Comparison
from head_to_head.row import Row, rows_of
from head_to_head.table import (
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
    "Every engine has the same model, data, global batch, optimizer, dtype and learning rate. "
    "All run on the same ranks, in turns of a few steps, in one run."
)
HOW_TO_READ = (
    "The sum of speeds is the speed of plain PyTorch passes on all ranks at once, without "
    "communication. These passes take turns with the engines: of sum is the median over rounds of "
    "an engine's speed over that of the plain passes in the same round.",
    "Balance is Poplar's plan over Poplar's even plan at the same stage and on the same transport: "
    "the gain from unequal batches. It is the only one of the three that says anything about GPUs.",
    "Transport is Poplar's even plan over the same plan on gloo, which the peers use: the gain "
    "from shared memory between CPU ranks of one host.",
    "Engine is Poplar's even plan on gloo over the fastest peer of the stage: the remaining gain.",
    "Over best peer is samples per second over the fastest peer of the stage, with a 90 % "
    "interval. Over uneven is samples per second over DDP or FSDP2 with hand-set uneven batches. "
    "Strong and weak ranks only are Poplar on a subset of the ranks.",
)


def write_page(comparisons: Sequence[Comparison], path: Path) -> None:
    """Write the report.

    Raises:
        ImportError: matplotlib is missing; the message says how to install it.
    """
    rows = [rows_of(comparison) for comparison in comparisons]
    body = "".join(
        [
            _head([row for own in rows for row in own]),
            *map(_cluster, comparisons, rows),
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
    """Facts about all clusters, and the thresholds."""
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
    met = (
        f"{len(cells) - len(short)} of {len(cells)} thresholds are met; the others are highlighted."
    )
    return (
        f'<header><h1>{TITLE}</h1><p class="lead">{LEAD}</p></header>'
        + markup.section("Hardware and versions", markup.definitions(facts))
        + markup.section("How to read it", markup.bullets(HOW_TO_READ))
        + markup.section(
            "Thresholds",
            markup.paragraph(met),
            markup.table(SUMMARY_HEADINGS, cells, left=(0, 2), highlighted=short),
        )
    )


def _cluster(comparison: Comparison, rows: Sequence[Row]) -> str:
    speeds = " : ".join(f"{speed:.1f}" for speed in rows[0].calibrated_speeds)
    facts = [
        ("ranks", comparison.described),
        ("speeds in plain passes", f"{speeds} samples/s, {ideals_of(rows)}"),
        (
            "sum of speeds",
            f"{comparison.sum_of_speeds:.1f} samples/s turn by turn; "
            f"before or after the run at most {comparison.largest_sum_of_speeds:.1f}",
        ),
        ("changed during the run", f"by up to {100 * comparison.drift:.0f} %"),
        (
            "model",
            f"{comparison.task.model} {comparison.task.size}, {comparison.parameters:,} parameters",
        ),
        ("step", f"{comparison.task.global_batch} samples of {comparison.task.context} bytes"),
    ]
    ordered = in_order(rows)
    exact = [number for number, row in enumerate(ordered) if row.is_plan and row.policy == "exact"]
    cells = [
        (stage, configuration, "absent" if row.absent else speed, *others)
        for row, (stage, configuration, speed, *others) in zip(ordered, cells_of(rows), strict=True)
    ]
    remarks = [*comparison.notes, *reasons_of(ordered)]
    return markup.section(
        comparison.cluster,
        markup.definitions(facts),
        markup.bullets(remarks) if remarks else "",
        markup.table(HEADINGS, cells, left=(1,), highlighted=exact),
        *_pictures(comparison),
    )


def _pictures(comparison: Comparison) -> Iterator[str]:
    try:
        from head_to_head.plots import by_stage, draw_speeds, draw_timelines
        from poplar.report.theme import to_svg
    except ImportError as missing:
        raise ImportError(
            f"pictures need matplotlib ({missing}): pip install 'poplar-zero[report]'"
        ) from None
    name = "c" + "".join(letter if letter.isalnum() else "-" for letter in comparison.cluster)
    yield markup.figure(
        to_svg(draw_speeds(comparison), f"{name}-speeds"),
        "Samples per second of every configuration, and percent of the sum of speeds",
    )
    for stage in by_stage(comparison):
        timeline = draw_timelines(comparison, stage)
        if timeline is not None:
            yield markup.figure(
                to_svg(timeline, f"{name}-steps-{stage}"),
                f"One step of every configuration at stage {stage}. Waits of peers are not "
                "recorded; their passes and updates include waiting and communication.",
            )
