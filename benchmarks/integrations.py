"""Training through each integration against the same library's own DDP or FSDP2, and Poplar alone.

Three ranks are slowed down by CPU quotas. Each library trains the same Hugging Face model on the
same global batches: as its documentation says (even batches), through Poplar's integration, and in
Poplar's own loop with the same plan. They take turns of a few steps, each with a new model.

    python benchmarks/integrations.py --quick
    python benchmarks/integrations.py --models llama bert gpt2 --output rows.jsonl
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from emulation import EmulationUnavailable
from head_to_head.clusters import by_quota
from head_to_head.workers import WorkersFailed
from integration_runs.compare import Settings, compare
from integration_runs.row import table_of, verdicts_of
from integration_runs.task import MODELS, Task
from integration_runs.ways import INTEGRATIONS
from rich.console import Console
from rows import write_rows


def main() -> None:
    """Compare the models one after the other; write their rows as soon as they are there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    several = {"nargs": "+"}
    parser.add_argument("--models", choices=MODELS, default=["llama"], **several)
    parser.add_argument(
        "--integrations", choices=INTEGRATIONS, default=list(INTEGRATIONS), **several
    )
    parser.add_argument("--speeds", default="2:1:1", help="of the ranks (default: 2:1:1)")
    parser.add_argument("--rounds", type=int, help="turns of each (default: 5, quick: 1)")
    parser.add_argument("--steps", type=int, default=8, help="counted steps of a turn (default: 8)")
    parser.add_argument("--size", choices=("tiny", "demo"), help="(default: demo, quick: tiny)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one round")
    parser.add_argument("--output", type=Path, metavar="FILE", help="append one JSON row each")
    parser.add_argument("--verbose", action="store_true", help="print progress")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # more threads would share the rank's quota
    console = Console(width=None if sys.stdout.isatty() else 200, soft_wrap=True, highlight=False)
    settings = Settings(
        integrations=tuple(options.integrations),
        rounds=options.rounds or (1 if options.quick else 5),
        steps=options.steps,
        seconds=5.0 if options.quick else 20.0,
    )
    cluster = by_quota(options.speeds, [float(speed) for speed in options.speeds.split(":")])
    rows = []
    for model in options.models:
        task = Task(model=model, size=options.size or ("tiny" if options.quick else "demo"))
        log = console.print if options.verbose else (lambda _: None)
        try:
            fresh = compare(cluster, task, settings, log)
        except (EmulationUnavailable, WorkersFailed) as failure:
            console.print(f"{model} was skipped: {failure}", markup=False)
            raise SystemExit(1) from None
        rows += fresh
        if options.output:
            write_rows(options.output, fresh)
        console.print(table_of(fresh))
    for verdict in verdicts_of(rows):
        console.print(
            f"{'met' if verdict.met else 'missed'}: {verdict.case}, {verdict.what}: "
            f"{verdict.value:.2f} ({verdict.condition})",
            markup=False,
        )


if __name__ == "__main__":
    main()
