"""Slow tests take turns: `make test` runs one part of them, and the commit tells which.

A quarter of the tests takes five sixths of the time. A run has all fast tests and every `PARTS`-th
case of the slow ones. The part follows from the commit: the same commit always runs the same tests.

`slow_tests.txt` lists the slow tests, the slowest first. Tests that it does not list always run.
To measure again: `make test TEST_FLAGS="-n 2 --save-slow-tests"`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

PARTS = 5
ALL = "all"
"""Name of the part that has all slow tests."""
SLOW_SECONDS = 0.5
"""A test is slow if one of its cases takes longer, in the mean."""
LIST = Path(__file__).with_suffix(".txt")


def part_of_commit(folder: Path) -> str:
    """The part that the commit in this folder runs; the first one where there is no commit."""
    command = ["git", "rev-parse", "HEAD"]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return str(int(found.stdout or "0", 16) % PARTS)


def listed(path: Path = LIST) -> list[str]:
    """The slow tests, the slowest first, as `file::function`."""
    return [line.split()[1] for line in path.read_text().splitlines()]


def in_other_parts(tests: Iterable[str], slow: Sequence[str], part: str) -> set[int]:
    """Positions of the cases of slow tests that belong to other parts.

    Args:
        tests: the test of each case, as `file::function`.
        slow: see `listed`.
        part: a number below `PARTS`, or `ALL`.

    Each part has every `PARTS`-th test of the list, so that all parts take about equally long, and
    every `PARTS`-th case of a test with several.
    """
    if part == ALL:
        return set()
    turns = {test: number for number, test in enumerate(slow)}
    left_out: set[int] = set()
    for position, test in enumerate(tests):
        if test in turns:
            if turns[test] % PARTS != int(part):
                left_out.add(position)
            turns[test] += 1  # the next case is in the next part
    return left_out


def save(seconds: Mapping[str, Sequence[float]], path: Path = LIST) -> None:
    """Write the list from the seconds of the cases of each test."""
    means = {test: fmean(each) for test, each in seconds.items()}
    slow = sorted((test for test in means if means[test] > SLOW_SECONDS), key=lambda t: -means[t])
    path.write_text("".join(f"{means[test]:5.1f} {test}\n" for test in slow))
