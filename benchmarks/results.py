"""Write `benchmarks/RESULTS.md` from rows: hardware, versions, commit, tables, missed thresholds.

python benchmarks/results.py > benchmarks/RESULTS.md
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from head_to_head.clusters import CLUSTERS
from head_to_head.columns import COLUMNS, title_of
from head_to_head.row import comparisons_of, in_order, latest_rows
from head_to_head.targets import targets
from rows import Row, Target, markdown_of, markdown_table

ROWS = Path(__file__).parent / "results/train.jsonl"
"""Rows of all published runs; of each comparison, the latest counts."""


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    """The lines of the page."""
    yield "# Head to head: results\n"
    yield (
        "`python benchmarks/results.py` writes this page from `results/train.jsonl`, which holds "
        "rows of `python benchmarks/train.py --output rows.jsonl`. `README.md` explains "
        "the columns.\n"
    )
    for name in ("device", "versions", "commit", "day"):
        yield f"- {name}: {'; '.join(sorted({row[name] for row in rows}))}"
    found = list(targets(rows))
    short = [target for target in found if not target.met]
    yield "\n## Missed thresholds\n"
    yield from (f"- {t.case}: {t.what} {t.cells[2]} ({t.cells[3]})" for t in short)
    missing = [cluster for cluster in CLUSTERS if cluster not in {row["cluster"] for row in rows}]
    if missing:
        yield f"- not measured: {', '.join(missing)}"
    if not short and not missing:
        yield "None."
    yield "\n## Thresholds\n"
    yield from markdown_table(Target.HEADINGS, [target.cells for target in found])
    for name, own in comparisons_of(rows).items():
        first = own[0]
        speeds = " : ".join(f"{speed:.1f}" for speed in first["calibrated_speeds"])
        yield f"\n## {name}\n"
        yield (
            f"{first['day']}, commit {first['commit']}. {first['described']}. {title_of(first)}. "
            f"Calibrated speeds {speeds} samples/s; single ranks changed by up to "
            f"{first['drift']:.0%}.\n"
        )
        yield from markdown_of(in_order(own), COLUMNS)
        if first["notes"]:
            yield ""
            yield from (f"- {note}" for note in first["notes"])


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "rows", type=Path, nargs="?", default=ROWS, help="rows of train.py --output"
    )
    path = parser.parse_args().rows
    try:
        rows = latest_rows(path)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not rows:
        parser.error(f"{path} has no rows of train.py")
    print("\n".join(markdown(rows)))


if __name__ == "__main__":
    main()
