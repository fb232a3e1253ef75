"""Fixtures and options of the whole suite: the pool of ranks, property tests, `--full`.

`make test` runs a representative subset. Tests marked `full` are left out. Of a test with several
parameters, it runs as many combinations as `covering_subset` needs. Of a parameter `stage`, it
covers one value (`stage_of`). A test marked `every_combination` runs all of them. Random tests
draw fewer cases. Of slow tests, one part runs (`slow_tests`), unless their file is named on the
command line. `make test-all` passes `--full` and runs everything. The last line of a run says how
many tests were left out.

With `-n 2` (pytest-xdist), as `make test` passes, one worker runs tests/distributed, one test after
the other, because they share a pool of ranks. The other one runs all other files, until both share
what is left of them.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

# Worker processes inherit sys.path, and import test modules by their bare names.
sys.path.insert(0, str(Path(__file__).parent))

import fork_server
import slow_tests
from ranks import Pool
from subset import FULL_VARIABLE, covering_subset, stage_of

# Ranks share few cores with everything else on the machine, so neither an example nor drawing it
# has a time limit.
UNTIMED = {
    "deadline": None,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow],
    "derandomize": True,
}
hypothesis.settings.register_profile("subset", max_examples=20, **UNTIMED)
hypothesis.settings.register_profile("full", max_examples=200, **UNTIMED)

# As in the workers: references run with as many threads as the ranks that they are compared with.
torch.set_num_threads(1)

# Typer wraps messages to this width, by default that of the terminal; also in the workers.
os.environ["TERMINAL_WIDTH"] = "1000"

gc.disable()  # until the modules are imported

LEFT_OUT = pytest.StashKey[int]()
SECONDS = pytest.StashKey[dict[str, list[float]]]()
PART_VARIABLE = "POPLAR_TEST_PART"
"""Environment variable, the part of the slow tests: workers of xdist inherit it."""
TOGETHER = "tests/distributed/"
"""One worker runs all files in this folder. Other files run beside each other."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        default=os.environ.get(FULL_VARIABLE) == "1",
        help="run all parameter combinations and all random cases, as `make test-all` does",
    )
    parts = [*map(str, range(slow_tests.PARTS)), slow_tests.ALL]
    parser.addoption("--part", choices=parts, help="of the slow tests; default: by the commit")
    parser.addoption(
        "--save-slow-tests",
        action="store_true",
        help=f"write {slow_tests.LIST.name} from the times of this run",
    )


def pytest_configure(config: pytest.Config) -> None:
    full = config.getoption("--full")
    os.environ[FULL_VARIABLE] = "1" if full else "0"  # read by test modules and worker processes
    hypothesis.settings.load_profile("full" if full else "subset")
    saves = config.getoption("--save-slow-tests")
    if saves and _names_files(config):
        raise pytest.UsageError("--save-slow-tests is for a run of all files, but some are named")
    if part := slow_tests.ALL if full or saves else config.getoption("--part"):
        os.environ[PART_VARIABLE] = part
    elif PART_VARIABLE not in os.environ:
        os.environ[PART_VARIABLE] = slow_tests.part_of_commit(config.rootpath)
    config.stash[SECONDS] = {}
    config.pluginmanager.register(_Times(config.stash[SECONDS]))


def _names_files(config: pytest.Config) -> bool:
    return any(argument.endswith(".py") for argument in config.args)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full") or any("::" in argument for argument in config.args):
        return  # a test that is named on the command line runs in full
    selected = {id(item) for item in items if item.get_closest_marker("full") is None}
    by_test: dict[str, list[pytest.Function]] = {}
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("every_combination") is None:
            by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for test, combinations in by_test.items():
        # The same object in every combination, so its identity says which value it is.
        cases = [{k: id(v) for k, v in item.callspec.params.items()} for item in combinations]
        stages = {item.callspec.params.get("stage") for item in combinations}
        if all(isinstance(stage, int) for stage in stages):
            others = stages - {stage_of(test, stages)}
            chosen = covering_subset(cases, [("stage", id(stage)) for stage in others])
        else:
            chosen = covering_subset(cases)
        selected -= {id(item) for number, item in enumerate(combinations) if number not in chosen}
    if not _names_files(config):
        remaining = [item for item in items if id(item) in selected]
        tests = [item.nodeid.partition("[")[0] for item in remaining]
        part = os.environ[PART_VARIABLE]
        others = slow_tests.in_other_parts(tests, slow_tests.listed(), part)
        selected -= {id(remaining[number]) for number in others}
    left_out = [item for item in items if id(item) not in selected]
    items[:] = [item for item in items if id(item) in selected]
    config.hook.pytest_deselected(items=left_out)
    config.stash[LEFT_OUT] = len(left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return TOGETHER if nodeid.startswith(TOGETHER) else nodeid.partition("::")[0]

    return Scheduler(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Start the server while output is captured, so that what ranks print is of the test."""
    gc.enable()
    gc.freeze()  # what was imported is no garbage, and looking through it takes half a second
    if session.items and not session.config.option.collectonly:
        capture = session.config.pluginmanager.getplugin("capturemanager")
        capture.resume_global_capture()
        fork_server.start()
        capture.suspend_global_capture()


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()  # libraries report what is left at the end
    if session.config.getoption("--save-slow-tests") and not hasattr(session.config, "workerinput"):
        slow_tests.save(session.config.stash[SECONDS])
    if hasattr(session.config, "workeroutput"):  # a worker of xdist, which collected the tests
        session.config.workeroutput["left out"] = session.config.stash.get(LEFT_OUT, 0)


class _Times:
    """Seconds of all cases, by test."""

    def __init__(self, seconds: dict[str, list[float]]) -> None:
        self._seconds = seconds

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            test = report.nodeid.partition("[")[0]
            self._seconds.setdefault(test, []).append(report.duration)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    left_out = terminalreporter.config.stash.get(LEFT_OUT, 0)
    if left_out:
        part = os.environ[PART_VARIABLE]
        slow = "" if _names_files(terminalreporter.config) else f"; of slow tests, part {part} ran"
        terminalreporter.write_line(
            f"left out: {left_out} tests, which `make test-all` runs (pytest --full){slow}"
        )


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """The pool of worker processes that all multi-rank tests of a run share."""
    pool = Pool()
    yield pool
    pool.close()
