"""The README's table: Poplar's part of the sum of speeds, then its speed over an equal split
(`balance`) and over the fastest peer of each ZeRO stage, with ranges over runs.

python benchmarks/summary.py

Reads the rows that `benchmarks/train.py --output` appended. All runs count, not only the latest.
`balance`, `transport` and `engine` are the three factors of the speed over the peer.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from head_to_head.row import is_plan
from rows import NOTHING, Row, markdown_table, read_rows

ROWS = Path(__file__).parent / "results/train.jsonl"
STAGES = (0, 1, 2, 3)
FACTORS = ("transport", "engine")

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


def factor(rows: Sequence[Row], name: str) -> str:
    """The lowest and the highest value of a factor of the speed-up, over runs and stages."""
    values = [row[name] for row in rows if row[name] is not None]
    return f"{min(values):.2f}–{max(values):.2f}x" if values else NOTHING


def fraction_of_sum(rows: Sequence[Row]) -> str:
    """Lowest and highest fraction of the sum of speeds."""
    values = [row["of_sum_of_speeds"] for row in rows]
    return f"{100 * min(values):.0f}–{100 * max(values):.0f} %"


def markdown(cases: Cases) -> Iterator[str]:
    """The table, line by line."""
    by_stage = [f"stage {stage}" for stage in STAGES]
    headings = ["ranks", "runs", "of the sum of speeds", "balance", *by_stage, *FACTORS]
    lines = []
    for cluster, stages in sorted(cases.items()):
        rows = [row for rows in stages.values() for row in rows]
        runs = str(len({row["run"] for row in rows}))
        speedups = [speedup(stages[stage]) for stage in STAGES]
        balance, *factors = (factor(rows, name) for name in ("balance", *FACTORS))
        lines.append([cluster, runs, fraction_of_sum(rows), balance, *speedups, *factors])
    return markdown_table(headings, lines)


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
