"""Write `benchmarks/RESULTS.md` from rows: hardware, versions, commit, tables, missed thresholds.

python benchmarks/results.py > benchmarks/RESULTS.md
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from head_to_head.clusters import CLUSTERS
from head_to_head.row import Row, comparisons_of, read_rows
from head_to_head.table import HEADINGS, cells_of, summary_cells
from head_to_head.targets import verdicts

ROWS = Path(__file__).parent / "results/train.jsonl"
"""Rows of all published runs; of each comparison, the latest counts."""


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    """The lines of the page."""
    first = rows[0]
    yield "# Head to head: results\n"
    yield (
        "`python benchmarks/results.py` writes this page from `results/train.jsonl`, which holds "
        "rows of `python benchmarks/train.py --output rows.jsonl`. `README.md` explains "
        "the columns.\n"
    )
    for name, values in (
        ("hardware", {row.device for row in rows}),
        ("versions", {row.versions for row in rows}),
        ("commit", {row.commit for row in rows}),
        ("day", {row.day for row in rows}),
        ("model", {f"{r.model} {r.size}, {r.parameters:,} parameters" for r in rows}),
    ):
        yield f"- {name}: {'; '.join(sorted(values))}"
    short = [verdict for verdict in verdicts(rows) if not verdict.met]
    yield "\n## Missed thresholds\n"
    yield from (
        f"- {v.cluster}, {'all stages' if v.stage is None else f'stage {v.stage}'}: {v.what} {v}"
        for v in short
    )
    missing = [cluster for cluster in CLUSTERS if cluster not in {row.cluster for row in rows}]
    if missing:
        yield f"- not measured: {', '.join(missing)}"
    if not short and not missing:
        yield "None."
    yield "\n## Thresholds\n"
    yield from _table(("cluster", "stage", "what", "value", "wanted", ""), summary_cells(rows))
    for name, own in comparisons_of(rows).items():
        first = own[0]
        yield f"\n## {name}\n"
        speeds = " : ".join(f"{speed:.1f}" for speed in first.calibrated_speeds)
        yield f"{first.day}, commit {first.commit}.\n"
        yield (
            f"{first.described}. Global batch {first.global_batch} samples of {first.context} "
            f"bytes; calibrated speeds {speeds} samples/s (sum {first.sum_of_speeds:.1f}; before "
            f"or after the run at most {first.largest_sum_of_speeds:.1f}, single ranks changed by "
            f"up to {100 * first.drift:.0f} %).\n"
        )
        yield from _table(HEADINGS, cells_of(own))
        if first.notes:
            yield ""
            yield from (f"- {note}" for note in first.notes)


def _table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(headings) + " |"
    yield "|" + " --- |" * len(headings)
    for line in lines:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "rows", type=Path, nargs="?", default=ROWS, help="rows of train.py --output"
    )
    path = parser.parse_args().rows
    try:
        rows = read_rows(path)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not rows:
        parser.error(f"{path} has no rows of train.py")
    print("\n".join(markdown(rows)))


if __name__ == "__main__":
    main()
