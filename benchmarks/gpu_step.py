"""One rank: a step of plain autocast, DDP, FSDP2 and Poplar by stage, eager and compiled.

Llama models of 85M to 1.1B parameters in bf16, in interleaved rounds: time by CUDA events, memory
beside the plan's prediction, and the targets for it. A hang ends with the stacks of the rank.

    python benchmarks/gpu_step.py --output rows.jsonl
    python benchmarks/gpu_step.py --sizes 350M --modes eager --rounds 5
    python benchmarks/gpu_step.py --show benchmarks/results/h200/step.jsonl
    python benchmarks/gpu_step.py --device cpu --sizes tiny --compiler eager   # a test of the code
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from rich.console import Console
from rows import (
    Row,
    at_least,
    new_console,
    print_targets,
    read_rows,
    shown_rows,
    table_of,
    write_rows,
)
from single_gpu import ranks
from single_gpu.cases import CASES
from single_gpu.command import gpu_parser, require_device
from single_gpu.engines import WAYS
from single_gpu.step_measure import measure, new_row
from single_gpu.step_report import COLUMNS, MEMORY_OF, targets
from watchdog import Ended, unused, watch

MODES = ("eager", "compiled")
SIZES = ("350M", "1.1B", "85M", "350M x4")
"""The most important first: time may be up before the last."""
LATE_SECONDS = 45.0
"""Given to the rank beyond its budget before it counts as hung; compilation takes long."""
STEP, ROWS, BENCHMARK = "step", "rows.jsonl", "gpu_step"


def main() -> None:
    """Measure in a separate process with a deadline, then show its rows."""
    options = parse_options()
    if options.inside:
        run_cases(options)
        ranks.leave()
    console = new_console()
    if options.show:
        show(shown_rows(options.show, BENCHMARK), console)
        return
    require_device(options.device)
    with tempfile.TemporaryDirectory(prefix="poplar-step-") as name:
        folder = unused(options.logs or Path(name, STEP))
        ended = watch(
            __file__,
            [*sys.argv[1:], "--inside", folder],
            [ranks.environment(folder)],
            folder,
            seconds=options.seconds + LATE_SECONDS,
        )
        console.print((folder / "rank-0.log").read_text(encoding="utf-8"), markup=False, end="")
        found = read_rows(folder / ROWS, BENCHMARK) if (folder / ROWS).exists() else []
    if ended.verdict != "ok":
        found += rows_of_interrupted(found, ended, options)
    if options.output:
        write_rows(options.output, found)
    if found:
        show(found, console)
    if ended.verdict != "ok":
        console.print(ended.report, markup=False)
    failed = [row for row in found if row["failed"]]
    asked = len(options.sizes) * len(options.modes) * len(options.ways)
    console.print(f"{len(found) - len(failed)} of {asked} ways measured")
    sys.exit(int(ended.verdict != "ok" or bool(failed) or not found))


def run_cases(options: argparse.Namespace) -> None:
    """In the rank: measure case by case; each gets an equal part of the time that is left."""
    ends = time.monotonic() + options.seconds
    device = ranks.join(options.device, nccl=options.device == "cuda", seconds=options.seconds)
    cases = cases_of(options)
    longest = 0.0
    for number, (name, mode) in enumerate(cases):
        case = CASES[name]
        left = ends - time.monotonic()
        name = f"{case.name}, {mode}"
        if left <= longest:
            print(f"{name}: left out, no time")
            continue
        began = time.monotonic()
        found = measure(
            case,
            options.ways,
            device,
            compiler=options.compiler if mode == "compiled" else "",
            rounds=options.rounds,
            seconds=left / (len(cases) - number),
            predict=(case.name, mode) == (MEMORY_OF[0], "eager"),
            log=print,
        )
        write_rows(options.inside / ROWS, found)
        taken = time.monotonic() - began
        rounds = found[0]["rounds"]
        longest = max(longest, taken / max(1, rounds))
        print(f"{name}: {rounds} rounds in {taken:.0f} s")


def cases_of(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Size and mode of each comparison, in order."""
    return [(size, mode) for mode in options.modes for size in options.sizes]


def rows_of_interrupted(
    found: Sequence[Row], ended: Ended, options: argparse.Namespace
) -> list[Row]:
    """Rows that say that the rank hung or failed in the first case that has no rows."""
    done = {(row["size"], "compiled" if row["compiled"] else "eager") for row in found}
    left = [case for case in cases_of(options) if case not in done]
    figures = dict.fromkeys(("ms", "GiB", "over_plain", "over_fsdp2", "loss"))
    return [
        new_row(
            CASES[size],
            way,
            mode == "compiled",
            options.device,
            {**figures, "steps": 0, "failed": f"the rank ended with: {ended.verdict}"},
        )
        for size, mode in left[:1]
        for way in options.ways
    ]


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the rows and how many targets they meet."""
    console.print(table_of(rows, COLUMNS))
    print_targets(targets(rows), console)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = gpu_parser(__doc__, rounds=3)
    several = {"nargs": "+"}
    parser.add_argument("--sizes", choices=CASES, default=SIZES, help="models", **several)
    parser.add_argument("--modes", choices=MODES, default=MODES, help="of the blocks", **several)
    parser.add_argument("--ways", choices=WAYS, default=WAYS, help="engines", **several)
    parser.add_argument("--compiler", default="inductor", help="backend of torch.compile")
    parser.add_argument("--seconds", type=at_least(1.0), default=600.0, help="for all cases")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
