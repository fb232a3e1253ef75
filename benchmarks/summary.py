"""The README's table: Poplar's part of the sum of speeds, then its speed over an equal split
(`balance`) and over the fastest peer of each ZeRO stage, with ranges over runs.

python benchmarks/summary.py

Reads the rows that `benchmarks/train.py --output` appended. All runs count, not only the latest.
`in step` is the part of the sum of speeds of plain passes that only wait for each other after
every step. `over hand-set` is the speed over DDP and FSDP2 with uneven batches set by hand.
`balance`, `transport` and `engine` are the three factors of the speed over the peer.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from head_to_head.row import is_plan, over_uneven
from rows import NOTHING, Row, markdown_table, read_rows

ROWS = Path(__file__).parent / "results/train.jsonl"
STAGES = (0, 1, 2, 3)
FACTORS = ("transport", "engine")
HEADINGS = (
    *("ranks", "runs", "of the sum of speeds", "in step", "balance"),
    *(f"stage {stage}" for stage in STAGES),
    *("over hand-set", *FACTORS),
)

Cases = dict[str, dict[int, list[Row]]]
"""Rows of Poplar's plan by cluster and stage, one per run."""


def read_cases(path: Path) -> Cases:
    """Rows of the `exact` policy on all ranks and on Poplar's own transport."""
    cases: Cases = defaultdict(lambda: defaultdict(list))
    for row in read_rows(path, "train"):
        if is_plan(row, "exact") and not row["absent"]:
            cases[row["cluster"]][row["stage"]].append(row)
    return cases


def speedup(rows: Sequence[Row]) -> str:
    """Over the fastest peer: lowest to highest run; of a single run its 90 % interval."""
    ratios = [row["over_best_peer_of_stage"] for row in rows if row["over_best_peer_of_stage"]]
    if not ratios:
        return NOTHING
    medians = [median for median, _, _ in ratios]
    low, high = (min(medians), max(medians)) if len(ratios) > 1 else ratios[0][1:]
    return f"{low:.2f}–{high:.2f}x"


def times(values: Iterable[float | None]) -> str:
    """The lowest and the highest ratio of speeds, over runs and stages."""
    found = [value for value in values if value is not None]
    return f"{min(found):.2f}–{max(found):.2f}x" if found else NOTHING


def percent(values: Iterable[float | None]) -> str:
    """The lowest and the highest fraction, over runs and stages."""
    found = [100.0 * value for value in values if value is not None]
    return f"{min(found):.0f}–{max(found):.0f} %" if found else NOTHING


def markdown(cases: Cases) -> Iterator[str]:
    """The table, line by line."""
    lines = []
    for cluster, stages in sorted(cases.items()):
        rows = [row for rows in stages.values() for row in rows]
        lines.append(
            [
                cluster,
                str(len({row["run"] for row in rows})),
                percent(row["of_sum_of_speeds"] for row in rows),
                percent(row["of_sum_in_step"] for row in rows),
                times(row["balance"] for row in rows),
                *(speedup(stages[stage]) for stage in STAGES),
                times(over_uneven(row) for row in rows),
                *(times(row[factor] for row in rows) for factor in FACTORS),
            ]
        )
    return markdown_table(HEADINGS, lines)


def provenance(cases: Cases) -> str:
    """When and at which commits the rows were measured, in one sentence."""
    rows = [row for stages in cases.values() for rows in stages.values() for row in rows]
    days = sorted({row["day"] for row in rows})
    commits = sorted({row["commit"] for row in rows})
    return f"Measured from {days[0]} to {days[-1]}, at commits {', '.join(commits)}."


def main() -> None:
    """Print the table as Markdown, and the commits of its rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rows", type=Path, nargs="?", default=ROWS, help="default: all saved runs")
    cases = read_cases(parser.parse_args().rows)
    print("\n".join(markdown(cases)))
    print(f"\n{provenance(cases)}")


if __name__ == "__main__":
    main()
