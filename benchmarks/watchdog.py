"""Run a script on several ranks with a deadline, and report what ranks that hang were doing.

    ended = watch("train.py", ["--steps", "5"], [{"RANK": "0"}, {"RANK": "1"}], folder, seconds=60)

Ranks are processes of this process's group. Each one runs through this file, which registers a
handler that writes the stacks of all threads on SIGUSR1, even if they wait in C code. At the
deadline, running ranks write their stacks and NCCL's flight recorder, and are killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import pickle
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GRACE_SECONDS = 20.0
"""After one rank fails, the others have at most this long to end by themselves."""
DUMP_SECONDS = 5.0
"""Time for stacks and flight records to be written. A stopped process never writes them."""
FLIGHT_RECORDS = 2000
"""Collectives of which each rank keeps a record."""
LOG_LINES = 15
"""Last lines of each rank's output in the report."""
POLL_SECONDS = 0.02
STACKS = "POPLAR_STACKS"
"""The environment variable with the file for a rank's stacks."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the ranks ended."""

    verdict: str
    """`ok`, `failed` (a rank has failed) or `hang` (none has, and some were running at the end)."""
    seconds: float
    exit_codes: tuple[int | None, ...]
    """By rank; None: killed at the deadline, negative: the signal that ended it."""
    report: str
    """One line if all is well; otherwise stacks, flight records and output of the ranks."""

    @property
    def hung(self) -> tuple[int, ...]:
        """The ranks that were killed at the deadline."""
        return tuple(rank for rank, code in enumerate(self.exit_codes) if code is None)


def watch(
    script: str | Path,
    arguments: Sequence[str | Path],
    environments: Sequence[Mapping[str, str]],
    folder: Path,
    *,
    seconds: float,
    grace: float = GRACE_SECONDS,
) -> Ended:
    """Run `script` once per environment, and wait until all have ended or the deadline has passed.

    Args:
        script: a Python file.
        arguments: of the script, the same for all ranks.
        environments: by rank, in addition to this process's; `RANK` and `WORLD_SIZE` are set.
        folder: for output (`rank-0.log`), stacks and flight records; a new one for each start.
        seconds: until the deadline.
        grace: seconds until the deadline after the first rank has failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    ranks = [
        _Rank(rank, folder, _start(rank, len(environments), script, arguments, extra, folder))
        for rank, extra in enumerate(environments)
    ]
    try:
        _wait(ranks, began + seconds, grace)
        taken = time.monotonic() - began
        running = [rank for rank in ranks if rank.process.poll() is None]
        _dump(running)
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.wait()
    codes = tuple(None if rank in running else rank.process.returncode for rank in ranks)
    failed = any(codes)
    verdict = "failed" if failed else "hang" if running else "ok"
    report = _report(verdict, taken, ranks, codes)
    if verdict != "ok":
        (folder / f"{verdict}.txt").write_text(report, encoding="utf-8")
    return Ended(verdict=verdict, seconds=taken, exit_codes=codes, report=report)


def unused(folder: Path) -> Path:
    """`folder`, or with a number after its name if it exists: earlier reports are kept."""
    names = itertools.chain([folder.name], (f"{folder.name}-{n}" for n in itertools.count(2)))
    return next(path for path in map(folder.with_name, names) if not path.exists())


@dataclass(frozen=True)
class _Rank:
    """One process and its files."""

    number: int
    folder: Path
    process: subprocess.Popen[bytes]

    def file(self, kind: str) -> Path:
        return _file(self.folder, kind, self.number)


def _file(folder: Path, kind: str, rank: int) -> Path:
    names = {"log": f"rank-{rank}.log", "stacks": f"stacks-{rank}.txt"}
    return folder / names.get(kind, f"{kind}{rank}")


def _start(
    rank: int,
    size: int,
    script: str | Path,
    arguments: Sequence[str | Path],
    extra: Mapping[str, str],
    folder: Path,
) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        **flight_recorder(folder),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        STACKS: str(_file(folder, "stacks", rank)),
        "PYTHONUNBUFFERED": "1",
        **extra,
    }
    command = [sys.executable, "-X", "faulthandler", __file__, script, *arguments]
    with _file(folder, "log", rank).open("wb") as log:
        return subprocess.Popen(
            [str(word) for word in command], stdout=log, stderr=subprocess.STDOUT, env=environment
        )


def flight_recorder(folder: Path) -> dict[str, str]:
    """Environment of a rank whose process groups on NCCL record their collectives.

    Both names of each setting, because torch has renamed them. A write to the pipe asks for a dump.
    """
    trace, pipe = str(folder / "nccl-trace-"), str(folder / "nccl-pipe-")
    return {
        "TORCH_FR_BUFFER_SIZE": str(FLIGHT_RECORDS),
        "TORCH_NCCL_TRACE_BUFFER_SIZE": str(FLIGHT_RECORDS),
        "TORCH_FR_DUMP_TEMP_FILE": trace,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": trace,
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": pipe,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_ENABLE_MONITORING": "1",
    }


def _wait(ranks: Sequence[_Rank], deadline: float, grace: float) -> None:
    """Until all have ended; after the first failure at most `grace` seconds more."""
    failed = False
    while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < deadline:
        if not failed and any(rank.process.poll() for rank in ranks):
            failed = True
            deadline = min(deadline, time.monotonic() + grace)
        time.sleep(POLL_SECONDS)


def _dump(running: Sequence[_Rank]) -> None:
    """Ask ranks for their flight records and stacks, and wait for the files."""
    awaited = []
    for rank in running:
        if _ask_for_flight_record(rank):
            awaited.append(rank.file("nccl-trace-"))
        # Before the script starts there is no handler, and the signal would end the process.
        if rank.file("stacks").exists():
            rank.process.send_signal(signal.SIGUSR1)
            awaited.append(rank.file("stacks"))
    ends = time.monotonic() + DUMP_SECONDS if awaited else 0.0
    while time.monotonic() < ends:
        if all(path.exists() and path.stat().st_size for path in awaited):
            time.sleep(5 * POLL_SECONDS)  # the files may be incomplete
            break
        time.sleep(POLL_SECONDS)


def _ask_for_flight_record(rank: _Rank) -> bool:
    pipe = rank.folder / f"nccl-pipe-{rank.number}.pipe"
    try:
        channel = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # the rank has no process group on NCCL
        return False
    try:
        os.write(channel, b"1\n")
    finally:
        os.close(channel)
    return True


def _report(
    verdict: str, seconds: float, ranks: Sequence[_Rank], codes: Sequence[int | None]
) -> str:
    running = [rank.number for rank, code in zip(ranks, codes, strict=True) if code is None]
    lines = [f"{verdict} after {seconds:.0f} s"]
    if running:
        lines[0] += f"; still running: ranks {', '.join(map(str, running))}"
    if verdict == "ok":
        return lines[0]
    for rank, code in zip(ranks, codes, strict=True):
        how = "running" if code is None else f"exit code {code} (-n means signal n)"
        lines.append(f"--- rank {rank.number}: {how}")
        if code != 0:
            lines += _end_of(rank.file("log"))
        if code is None:
            stacks = _end_of(rank.file("stacks"), None)
            lines += stacks or ["no stacks: it is stopped, or the script has not started"]
            lines += describe_flight_record(rank.file("nccl-trace-"))
    return "\n".join(lines)


def _end_of(file: Path, lines: int | None = LOG_LINES) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return text if lines is None else text[-lines:]


def describe_flight_record(file: Path) -> list[str]:
    """The last completed collective of a rank's flight record, and those that are not completed."""
    if not file.exists():
        return []
    try:
        entries: list[dict[str, Any]] = pickle.loads(file.read_bytes())["entries"]
    except Exception as error:  # written in part, or in a format of another version
        return [f"NCCL's flight record in {file} cannot be read: {type(error).__name__}: {error}"]
    done = [entry for entry in entries if entry.get("state") == "completed"]
    waiting = [entry for entry in entries if entry.get("state") != "completed"]
    lines = [f"NCCL: {len(done)} collectives completed, {len(waiting)} not, in {file}"]
    lines += [f"  last completed: {_name_of(entry)}" for entry in done[-1:]]
    return lines + [f"  {entry.get('state')}: {_name_of(entry)}" for entry in waiting[:LOG_LINES]]


def _name_of(entry: Mapping[str, Any]) -> str:
    number = entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id")
    group, *_ = entry.get("process_group") or ("?",)
    return (
        f"{entry.get('profiling_name')} {number} of group {group}, sizes {entry.get('input_sizes')}"
    )


def _serve(script: str, arguments: Sequence[str]) -> None:
    """In a rank: register the handler, then run the script as the main program."""
    stacks = open(os.environ[STACKS], "w")  # noqa: SIM115 (open as long as the process runs)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        _serve(sys.argv[1], sys.argv[2:])
