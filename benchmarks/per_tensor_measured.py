"""Per-tensor decisions on real ranks: plans, factors and programmes beside data parallelism.

python benchmarks/per_tensor_measured.py

Reads rows of

    python benchmarks/train.py --policies even flops exact programme --stages 0 1 --output ROWS

and prints samples per second as Markdown: of each configuration its faster stage, in the latest run
of each cluster and model. "plan" in the column of programmes: none was predicted to be faster.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rows import NOTHING, Row, markdown_table, read_rows

ROWS = Path(__file__).parent / "results/per_tensor_measured.jsonl"
HEADINGS = (
    "ranks",
    "model",
    "DDP",
    "DeepSpeed",
    "DDP, uneven",
    "Poplar, even",
    "by FLOP/s",
    "Poplar",
    "with factors",
    "with programme",
    "over the best peer",
)


def read_cases(path: Path) -> dict[tuple[str, str], list[Row]]:
    """Rows by cluster and model, of their latest run, in the order of the file."""
    cases: dict[tuple[str, str], list[Row]] = {}
    for row in read_rows(path, "train"):
        own = cases.setdefault((row["cluster"], row["model"]), [])
        if own and own[0]["run"] != row["run"]:
            own.clear()
        if not row["absent"]:
            own.append(row)
    return cases


def fastest(rows: Sequence[Row], provider: str, *policies: str) -> float | None:
    """Samples per second at the faster stage; None if nothing ran."""
    return max(
        (
            row["p50_speed"]
            for row in rows
            if row["provider"] == provider and row["policy"] in policies and not row["over_gloo"]
        ),
        default=None,
    )


def without_factors(rows: Sequence[Row]) -> float | None:
    """Of Poplar's plans: where factors were chosen, of the plan that must not use them."""
    factored = {row["stage"] for row in rows if row["policy"] == "unfactored"}
    plain = [row for row in rows if row["policy"] != "exact" or row["stage"] not in factored]
    return fastest(plain, "poplar", "exact", "unfactored")


def with_factors(rows: Sequence[Row]) -> float | None:
    """Of Poplar's plans that send factors; None if none does."""
    factored = {row["stage"] for row in rows if row["policy"] == "unfactored"}
    return fastest([row for row in rows if row["stage"] in factored], "poplar", "exact")


def cells(rows: Sequence[Row]) -> list[str]:
    """One line of the table, without cluster and model."""
    peers = [
        fastest(rows, "ddp", "even"),
        fastest(rows, "deepspeed", "even"),
        fastest(rows, "ddp", "uneven"),
    ]
    programme = fastest(rows, "poplar", "programme")
    own = [without_factors(rows), with_factors(rows), programme]
    speeds = [*peers, fastest(rows, "poplar", "even"), fastest(rows, "poplar", "flops"), *own]
    texts = [NOTHING if speed is None else f"{speed:.0f}" for speed in speeds]
    if programme is None:
        texts[-1] = "plan"
    known, best = ([s for s in group if s is not None] for group in (peers, own))
    return [*texts, f"{max(best) / max(known):.2f}x" if known and best else NOTHING]


def errors(rows: Sequence[Row], *policies: str) -> list[float]:
    """Of predicted step times, relative to measured ones."""
    return [
        abs(row["prediction_error"])
        for row in rows
        if row["prediction_error"] is not None and (not policies or row["policy"] in policies)
    ]


def markdown(cases: Mapping[tuple[str, str], Sequence[Row]]) -> Iterator[str]:
    """The table, and how far predictions were off."""
    yield from markdown_table(HEADINGS, ([*case, *cells(rows)] for case, rows in cases.items()))
    every = [row for rows in cases.values() for row in rows]
    yield ""
    for name, policies in (
        ("plans and programmes", ()),
        ("plans with factors or without", ("exact", "unfactored")),
        ("programmes", ("programme",)),
        ("plans with compressed communication", ("int8", "int4")),
    ):
        found = errors(every, *policies)
        if found:
            yield (
                f"- step times of {name} were predicted within {100 * statistics.median(found):.0f}"
                f" % in the median, {100 * max(found):.0f} % at most, of {len(found)}"
            )
    yield f"- measured on {', '.join(sorted({row['day'] for row in every}))}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, nargs="?", default=ROWS, help="default: saved rows")
    path = parser.parse_args().rows
    if not path.is_file():
        parser.error(f"{path} is not a file; measure rows as --help says, or leave it out")
    print("\n".join(markdown(read_cases(path))))


if __name__ == "__main__":
    main()
