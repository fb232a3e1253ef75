r"""Run all checks that need a GPU, in one command: `make gpu`.

Without make, in this repository's folder:

    export PATH=/usr/local/cuda/bin:$PATH
    python -m pip install --no-index --no-deps --no-build-isolation --upgrade \
      --target build/gpu/site -C build-dir=build/gpu/cmake -C cmake.define.POPLAR_CUDA=ON \
      -C cmake.define.CMAKE_CUDA_ARCHITECTURES=native .
    PYTHONPATH=$PWD/build/gpu/site python benchmarks/gpu.py --output gpu

The operators' tests with the C++ library and with Triton, exact steps with several ranks on the
GPU, training at every stage with ranks of unequal memory against one process, the kernel benchmark,
and compute-sanitizer. Each part runs in a separate process with a deadline, and a failure does not
stop the next part. A short table comes last; logs and rows are in the output folder. A part passes
only if its output shows that it checked what it should: not if all of its tests were skipped, nor
if another provider ran the operators. In a copy without git, set `POPLAR_COMMIT` for the rows.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from gpu_parts import CPP, HERE, Part, parts
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import poplar
from poplar import ops

TESTS = HERE.parent / "tests"
SECONDS = 480.0
"""For all parts together. The first six may use all of their time; the others share the rest."""
LEAST_SECONDS = 15.0
"""A part is not started with less time left."""
LOG_LINES = 30
"""Lines of a failed part's log on the console."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a part."""

    name: str
    verdict: str
    """`ok`, `FAILED`, `not run` (not possible here) or `LEFT OUT` (no time left)."""
    message: str
    """The last line of interest, or the reason for another verdict."""
    seconds: float | None = None
    log: Sequence[str] = ()
    """The end of the log of a failed part."""


def main() -> None:
    """Run the parts; the exit status is 0 if everything that can run here passed."""
    options = parse_options()
    options.output = options.output.resolve()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.part == "training":
        sys.exit(train(options))
    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} sees no GPU here: `python -m poplar doctor` says more")
    sys.exit(run_parts(options))


def run_parts(options: argparse.Namespace) -> int:
    """Run the parts in order; returns 1 if one failed or was left out."""
    console = Console(width=max(100, shutil.get_terminal_size().columns))
    plainly = {"highlight": False, "markup": False, "soft_wrap": True}
    console.print(f"poplar in {Path(poplar.__file__).parent}; {ops.describe()}", **plainly)
    deadline = time.monotonic() + options.seconds
    outcomes = []
    for part in parts(options.output):
        if options.only and not any(word in part.name for word in options.only):
            continue
        outcome = attempt(part, options.output, deadline - time.monotonic())
        console.print(f"{part.name}: {outcome.verdict}. {outcome.message}", **plainly)
        for line in outcome.log:
            console.print(f"  | {line}", **plainly)
        outcomes.append(outcome)
    console.print(table_of(outcomes))
    bad = [one.name for one in outcomes if one.verdict in ("FAILED", "LEFT OUT")]
    if bad:
        console.print(f"failed or left out: {'; '.join(bad)}", **plainly)
    return int(bool(bad))


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """One line per part."""
    table = Table("part", "seconds", "", "last word")
    for one in outcomes:
        seconds = "" if one.seconds is None else f"{one.seconds:.0f}"
        table.add_row(one.name, seconds, one.verdict, escape(one.message))
    return table


def attempt(part: Part, output: Path, left: float) -> Outcome:
    """Run a part if it can run here."""
    why_not = part.needs()
    if why_not:
        return Outcome(name=part.name, verdict="not run", message=why_not)
    if part.cpp and ops.providers()["cuda"] != CPP:
        message = f"it needs the C++ library, but the provider is another: {ops.describe()}"
        return Outcome(name=part.name, verdict="FAILED", message=message)
    if left < LEAST_SECONDS:
        message = "no time was left: select it with --only, or raise --seconds"
        return Outcome(name=part.name, verdict="LEFT OUT", message=message)
    return run(part, output, min(part.seconds, left))


def run(part: Part, output: Path, seconds: float) -> Outcome:
    """Run a part in a separate process; at the deadline, end it with all its children."""
    log = output / (re.sub(r"\W+", "-", part.name) + ".log")
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        started = subprocess.Popen(
            [str(word) for word in part.command],
            stdout=file,
            stderr=subprocess.STDOUT,
            # All ranks are on this machine, whose host name may not resolve.
            env={"GLOO_SOCKET_IFNAME": "lo", **os.environ, **part.environment, "COLUMNS": "160"},
            cwd=TESTS,  # not the folder of `poplar/`, so that the built package is tested
            start_new_session=True,
        )
        try:
            status = f"exit status {started.wait(seconds)}"
        except subprocess.TimeoutExpired:
            status = f"not over after {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # ends its ranks too
                os.killpg(started.pid, signal.SIGKILL)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    message = [line.strip() for line in lines if re.search(part.verdict, line)]
    for pattern in (part.verdict, part.besides):
        if status == "exit status 0" and not any(re.search(pattern, line) for line in lines):
            status += f", but no line matches {pattern!r}"
    ok = status == "exit status 0"
    return Outcome(
        name=part.name,
        verdict="ok" if ok else "FAILED",
        message=message[-1] if ok else f"{status}; see {log}",
        seconds=time.monotonic() - began,
        log=() if ok else lines[-LOG_LINES:],
    )


def train(options: argparse.Namespace) -> int:
    """Train at every stage; one row each."""
    import gpu_training

    rows = gpu_training.run(
        options.output / "training.jsonl", options.backend, options.size, options.device
    )
    for row in rows:
        print(
            f"stage {row.stage}: gradient off by {row.relative_error:.1e} (tolerance "
            f"{row.tolerance:.0e}), loss {row.losses[0]:.3f} -> {row.losses[-1]:.3f}, "
            f"{row.step_seconds * 1e3:.0f} ms a step, MiB by rank "
            + " / ".join(f"{peak / 2**20:.0f}" for peak in row.peak_bytes)
        )
    well = [row for row in rows if gpu_training.agrees(row)]
    print(f"{len(well)} of {len(rows)} stages agree with one process")
    return int(len(well) < len(rows))


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, default=Path("gpu"), metavar="FOLDER")
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", help="run only parts whose name contains one of these"
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="time for all parts together"
    )
    parser.add_argument("--part", choices=("training",), help="run only this part, in this process")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--size", default="small", help="size of the trained Llama model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    return parser.parse_args()


if __name__ == "__main__":
    main()
