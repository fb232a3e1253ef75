"""`benchmarks/watchdog.py`: ranks that hang are reported with what they were doing, and ended."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import watchdog
from watchdog import Ended

SECONDS = 5.0
"""Deadline of ranks of which one hangs: the other one ends before it, also on a busy machine."""
RECORD = {
    "entries": [
        {
            "state": "completed",
            "profiling_name": "nccl:all_gather",
            "collective_seq_id": 7,
            "process_group": ("0", "default_pg"),
            "input_sizes": [[64]],
        },
        {
            "state": "started",
            "profiling_name": "nccl:all_reduce",
            "collective_seq_id": 8,
            "process_group": ("0", "default_pg"),
            "input_sizes": [[3, 5]],
        },
    ]
}


@pytest.fixture
def watch(tmp_path):
    """Returns how two ranks ended that run a program."""

    def run(program: str, seconds: float = 120.0, **more) -> Ended:
        script = tmp_path / "script.py"
        script.write_text("import os, sys, time\nrank = int(os.environ['RANK'])\n" + program)
        environments = [{"OWN": "zero"}, {"OWN": "one"}]
        return watchdog.watch(
            script, ["--word"], environments, tmp_path / "out", seconds=seconds, **more
        )

    return run


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_ranks_get_their_environment_and_the_arguments(watch, tmp_path):
    ended = watch(
        "assert __name__ == '__main__'\n"
        "print(os.environ['OWN'], os.environ['WORLD_SIZE'], sys.argv)"
    )
    assert (ended.verdict, ended.exit_codes, ended.hung) == ("ok", (0, 0), ())
    for rank, own in enumerate(("zero", "one")):
        script = tmp_path / "script.py"
        log = (tmp_path / "out" / f"rank-{rank}.log").read_text()
        assert log == f"{own} 2 ['{script}', '--word']\n"
    assert not (tmp_path / "out" / "hang.txt").exists()


def test_rank_that_hangs_is_reported_with_its_stacks_and_killed(watch, tmp_path):
    ended = watch(
        f"open(rf'{tmp_path}/pid-{{rank}}', 'w').write(str(os.getpid()))\n"
        "def wait_for_nothing():\n    time.sleep(1000)\n"
        "print('before the wait')\n"
        "if rank == 1:\n    wait_for_nothing()\n",
        seconds=SECONDS,
    )
    assert (ended.verdict, ended.exit_codes, ended.hung) == ("hang", (0, None), (1,))
    assert ended.seconds >= SECONDS
    hang = f"hang after {ended.seconds:.0f} s"  # on a busy machine, ranks are killed later
    assert ended.report.startswith(f"{hang}; still running: ranks 1\n")
    assert "in wait_for_nothing" in ended.report
    assert "before the wait" in ended.report
    assert (tmp_path / "out" / "hang.txt").read_text() == ended.report
    assert not is_running(int((tmp_path / "pid-1").read_text()))


def test_failed_rank_ends_the_others_after_a_grace_period(watch):
    ended = watch(
        "if rank == 1:\n    raise ValueError('no such thing')\ntime.sleep(1000)\n", grace=0.2
    )
    assert (ended.verdict, ended.exit_codes, ended.hung) == ("failed", (None, 1), (0,))
    assert "ValueError: no such thing" in ended.report


def test_flight_recorder_is_asked_for_a_dump(watch):
    # As torch's process groups on NCCL do, but from Python.
    ended = watch(
        "import pickle, threading\n"
        "pipe = os.environ['TORCH_NCCL_DEBUG_INFO_PIPE_FILE'] + f'{rank}.pipe'\n"
        "os.mkfifo(pipe)\n"
        "def monitor():\n"
        "    open(pipe).read(1)\n"
        f"    record = {RECORD!r}\n"
        "    path = os.environ['TORCH_FR_DUMP_TEMP_FILE'] + str(rank)\n"
        "    open(path, 'wb').write(pickle.dumps(record))\n"
        "if rank == 1:\n"
        "    threading.Thread(target=monitor, daemon=True).start()\n"
        "    time.sleep(1000)\n",
        seconds=SECONDS,
    )
    assert ended.hung == (1,)
    assert "NCCL: 1 collectives completed, 1 not" in ended.report
    assert "last completed: nccl:all_gather 7 of group 0, sizes [[64]]" in ended.report
    assert "started: nccl:all_reduce 8 of group 0, sizes [[3, 5]]" in ended.report
