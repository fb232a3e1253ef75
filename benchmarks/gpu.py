r"""Check and measure what needs a GPU, in the minutes that one is rented for: `make gpu`.

Without make: `python benchmarks/gpu.py --minutes 10 --output FOLDER`. It needs a Python with a CUDA
build of torch, scikit-build-core, pybind11, cmake, ninja, pytest, hypothesis, numpy, rich and
safetensors, nvcc, and no network. Without a GPU, `--device cpu` runs all parts on the CPU.

The first part builds the package for this GPU. The others follow in order of value: two unequal
ranks on the one GPU against one process, the same under random delays, plans that change,
compressed communication, checkpoints in memory, a rank that becomes slower, quantised bases,
Triton's operators, failing ranks, memory that runs out at each allocation, steps without host
synchronization, the operators, and a step beside FSDP2. Each part is a process with its own limit
and log. After each one, all logs and rows are in one archive, FOLDER/gpu.tar.gz, also if the run is
stopped. In a copy without git, set `POPLAR_COMMIT` for the rows.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_parts import HERE, SITE, Part, parts

TESTS = HERE.parent / "tests"
ARCHIVE = "gpu.tar.gz"
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",  # all ranks are on this machine, whose host name may not resolve
    "PYTHONFAULTHANDLER": "1",
}
LEAST_SECONDS = 15.0
"""A part is not started with less time left."""
LOG_LINES = 30
"""Lines of a failed part's log on the console."""
STACK_SECONDS = 1.0
"""Time for the processes of a part to write their stacks after its limit."""


def _abort(process: int, ends: float) -> None:
    """Let Python write the stacks of a process into the log, and wait until it has, until `ends`.

    One process after the other, or their stacks would be written into each other.
    """
    with contextlib.suppress(OSError):
        os.kill(process, signal.SIGABRT)
        stat = Path(f"/proc/{process}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < ends:
            time.sleep(0.02)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a part."""

    name: str
    verdict: str
    """`ok`, `FAILED`, `not run` (not possible here) or `LEFT OUT` (no time left)."""
    message: str
    """The last line of interest, or the reason for another verdict."""
    seconds: float = 0.0
    log: Sequence[str] = ()
    """The end of its output if it has failed."""

    def __str__(self) -> str:
        shown = "".join(f"\n  | {line}" for line in self.log)
        return f"{self.name}: {self.verdict} ({self.seconds:.0f} s). {self.message}{shown}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts; the exit status is 1 if one failed or was left out."""
    options = parse_options(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    # A part that is ended by SIGABRT must not write gigabytes of memory to disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    with tempfile.TemporaryDirectory(prefix="poplar-gpu-") as name:
        folder = Path(name)
        chosen = [p for p in parts(folder, options.device) if is_chosen(p, options.only)]
        outcomes = []
        try:
            for outcome in run_parts(chosen, folder, options.minutes, options.output / ARCHIVE):
                print(outcome, flush=True)
                outcomes.append(outcome)
        finally:
            archive(folder, options.output / ARCHIVE)
    bad = [one.name for one in outcomes if one.verdict in ("FAILED", "LEFT OUT")]
    done = sum(one.verdict == "ok" for one in outcomes)
    print(f"{done} of {len(chosen)} parts ok; logs and rows in {options.output / ARCHIVE}")
    if bad:
        print(f"failed or left out: {'; '.join(bad)}")
    sys.exit(int(bool(bad)))


def _stop(number: int, frame: Any) -> None:
    sys.exit(f"stopped by signal {number}")  # the running part is ended and the archive written


def is_chosen(part: Part, words: Sequence[str] | None) -> bool:
    """Whether `--only` selects a part."""
    return not words or any(word in part.name for word in words)


def run_parts(chosen: Sequence[Part], folder: Path, minutes: float, target: Path) -> Any:
    """Run the parts one after the other; yields their outcomes, each when it is in the archive."""
    deadline = time.monotonic() + 60.0 * minutes
    for part in chosen:
        left = deadline - time.monotonic()
        if part.needs:
            yield Outcome(name=part.name, verdict="not run", message=part.needs)
        elif left < LEAST_SECONDS:
            verdict = "not run" if part.spare else "LEFT OUT"
            yield Outcome(name=part.name, verdict=verdict, message="no time was left")
        else:
            outcome = run(part, folder, min(part.seconds, left))
            archive(folder, target)
            yield outcome


def archive(folder: Path, target: Path) -> None:
    """Write all files of a folder into one archive; an earlier one is replaced at once."""
    unfinished = target.with_suffix(".part")
    with tarfile.open(unfinished, "w:gz") as file:
        file.add(folder, arcname="gpu")
    unfinished.replace(target)


def run(part: Part, folder: Path, seconds: float) -> Outcome:
    """Run a part in a separate process; at its limit, end it with all its children."""
    log = folder / (re.sub(r"\W+", "-", part.name) + ".log")
    began = time.monotonic()
    python_path = [str(SITE)] if part.name != "build" and SITE.exists() else []
    inherited = os.environ.get("PYTHONPATH")
    with log.open("w", encoding="utf-8") as file:
        started = subprocess.Popen(
            [sys.executable, *map(str, part.command)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={
                **ENVIRONMENT,
                **os.environ,
                "PYTHONPATH": os.pathsep.join([*python_path, *([inherited] if inherited else [])]),
                **part.environment,
                "COLUMNS": "160",
            },
            cwd=TESTS,  # not the folder of `poplar/`, so that the built package is tested
            start_new_session=True,
        )
        try:
            status = f"exit status {started.wait(seconds)}"
        except subprocess.TimeoutExpired:
            status = f"not over after {seconds:.0f} s"
            ends = time.monotonic() + STACK_SECONDS
            for process in processes_of(started.pid):
                _abort(process, ends)
        finally:
            with contextlib.suppress(ProcessLookupError):  # ends its ranks too
                os.killpg(started.pid, signal.SIGKILL)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    found = [line.strip() for line in lines if re.search(part.verdict, line)]
    if status == "exit status 0" and not found:
        status = f"exit status 0, but no line matches {part.verdict!r}"
    ok = status == "exit status 0"
    return Outcome(
        name=part.name,
        verdict="ok" if ok else "FAILED",
        message=found[-1] if ok else status,
        seconds=time.monotonic() - began,
        log=() if ok else lines[-LOG_LINES:],
    )


def processes_of(group: int) -> list[int]:
    """The processes of a process group, the youngest first."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if os.getpgid(int(folder.name)) == group:
                found.append(int(folder.name))
    return sorted(found, reverse=True)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="for all parts (default: 10)")
    parser.add_argument("--output", type=Path, default=Path("gpu"), metavar="FOLDER")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", help="run only parts whose name contains one of these"
    )
    options = parser.parse_args(arguments)
    options.output = options.output.resolve()
    if options.minutes <= 0:
        parser.error(f"--minutes must be above 0, got {options.minutes:g}")
    return options


if __name__ == "__main__":
    main()
