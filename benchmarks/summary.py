"""The README's table: Poplar over the fastest peer of each ZeRO stage, with ranges over runs.

python benchmarks/summary.py

Reads the rows that `benchmarks/train.py --output` appended. All runs count, not only the latest.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROWS = Path(__file__).parent / "results/train.jsonl"
STAGES = (0, 1, 2, 3)

JsonRow = Mapping[str, Any]
Cases = dict[str, dict[int, list[JsonRow]]]
"""Rows of Poplar's plan by cluster and stage, one per run."""


def read_cases(path: Path) -> Cases:
    """Rows of the `exact` policy on all ranks and on Poplar's own transport."""
    cases: Cases = defaultdict(lambda: defaultdict(list))
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        is_plan = row["provider"] == "poplar" and row["policy"] == "exact"
        uses_all_ranks = len(row["ranks"]) == len(row["calibrated_speeds"])
        if is_plan and uses_all_ranks and not row["over_gloo"] and not row["absent"]:
            cases[row["cluster"]][row["stage"]].append(row)
    return cases


def speedup(rows: Sequence[JsonRow]) -> str:
    """Over the fastest peer: lowest to highest run; of a single run its 90 % interval."""
    ratios = [row["over_best_peer_of_stage"] for row in rows if row["over_best_peer_of_stage"]]
    if not ratios:
        return "–"
    medians = [median for median, _, _ in ratios]
    low, high = (min(medians), max(medians)) if len(ratios) > 1 else ratios[0][1:]
    return f"{low:.2f}–{high:.2f}x"


def fraction_of_sum(rows: Sequence[JsonRow]) -> tuple[float, float]:
    """Lowest and highest fraction of the sum of speeds."""
    values = [row["of_sum_of_speeds"] for row in rows]
    return min(values), max(values)


def markdown(cases: Cases) -> Iterator[str]:
    """The table, line by line."""
    headings = ["ranks", "runs", *(f"stage {stage}" for stage in STAGES), "of the sum of speeds"]
    yield "| " + " | ".join(headings) + " |"
    yield "|" + " --- |" * len(headings)
    for cluster, stages in sorted(cases.items()):
        ends = [fraction_of_sum(stages[stage]) for stage in STAGES if stages[stage]]
        low, high = min(low for low, _ in ends), max(high for _, high in ends)
        cells = [
            cluster,
            str(len({row["run"] for rows in stages.values() for row in rows})),
            *(speedup(stages[stage]) for stage in STAGES),
            f"{100 * low:.0f}–{100 * high:.0f} %",
        ]
        yield "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rows", type=Path, nargs="?", default=ROWS, help="default: all saved runs")
    print("\n".join(markdown(read_cases(parser.parse_args().rows))))


if __name__ == "__main__":
    main()
