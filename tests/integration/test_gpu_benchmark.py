"""`make gpu` on a CPU: the same parts, with ranks on gloo."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import fork_server
import pytest
import ranks
import torch
import torchrun
from collected import names_with_a_gpu
from ranks import Pool
from subset import choose

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu
import gpu_parts
import gpu_ranks
from gpu import Part
from rows import read_rows

TESTS = Path(__file__).parents[1]


def part(name: str, program: str = "print('2 passed')", **others) -> Part:
    return Part(name=name, command=["-c", program], verdict="passed", **{"seconds": 60.0, **others})


Run = Callable[..., tuple[int, str, dict[str, str]]]


@pytest.fixture
def run_parts(tmp_path, monkeypatch, capsys) -> Iterator[Run]:
    """Returns the exit status, the console output and the archived files of a run of some parts."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}

    def run_them(*parts: Part, minutes: float = 1.0) -> tuple[int, str, dict[str, str]]:
        monkeypatch.setattr(gpu, "parts", lambda folder, device: list(parts))
        with pytest.raises(SystemExit) as ended:
            gpu.main(["--output", str(tmp_path), "--minutes", str(minutes)])
        return ended.value.code, capsys.readouterr().out, archived(tmp_path / gpu.ARCHIVE)

    yield run_them
    for number, handler in handlers.items():  # the script's would end the tests
        signal.signal(number, handler)


def archived(path: Path) -> dict[str, str]:
    with tarfile.open(path) as file:
        members = [member for member in file.getmembers() if member.isfile()]
        return {one.name: file.extractfile(one).read().decode() for one in members}


def test_passed_part_shows_its_last_matching_line(run_parts):
    status, output, files = run_parts(
        part("good", "print('1 passed'); print('2 passed [/a]'); print('end')")
    )
    assert status == 0
    assert re.search(r"good: ok \(\d+ s\)\. 2 passed \[/a\]\n", output)
    assert files == {"gpu/good.log": "1 passed\n2 passed [/a]\nend\n"}


def test_failed_part_shows_its_log_and_the_next_part_runs(run_parts):
    lines = "print(*(f'[line] {i}' for i in range(100)), sep='\\n')"
    status, output, files = run_parts(
        part("bad one", f"{lines}; raise SystemExit(3)"), part("next")
    )
    assert status == 1
    assert re.search(r"bad one: FAILED \(\d+ s\)\. exit status 3\n", output)
    shown = [int(number) for number in re.findall(r"\| \[line\] (\d+)\n", output)]
    assert shown == list(range(100 - gpu.LOG_LINES, 100))
    assert "next: ok" in output
    assert output.endswith("failed or left out: bad one\n")
    assert set(files) == {"gpu/bad-one.log", "gpu/next.log"}


def test_part_beyond_its_limit_is_ended_with_the_stacks_of_its_processes(run_parts):
    program = (
        "import multiprocessing, time\n"
        "def rank_that_waits():\n"
        "    time.sleep(100)\n"
        "def parent_that_waits():\n"
        "    time.sleep(100)\n"
        "multiprocessing.get_context('fork').Process(target=rank_that_waits).start()\n"
        "parent_that_waits()\n"
    )
    status, output, files = run_parts(part("slow", program, seconds=8.0))
    assert status == 1
    assert "not over after 8 s" in output
    assert "in rank_that_waits" in files["gpu/slow.log"]
    assert "in parent_that_waits" in files["gpu/slow.log"]


STOPPED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
import sys
sys.path.insert(0, {folder!r})
import gpu
from gpu_parts import Part
slow = "import time; open({begun!r}, 'w'); time.sleep(100)  # {output}"
gpu.parts = lambda folder, device: [
    Part(name="done", command=["-c", "print('1 passed')"], seconds=60, verdict="passed"),
    Part(name="slow", command=["-c", slow], seconds=60, verdict="passed"),
]
gpu.main(["--output", {output!r}])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_stopped_run_leaves_an_archive_of_what_it_has_done(tmp_path, number):
    output, begun = tmp_path / "output", tmp_path / "begun"
    folder = str(Path(gpu.__file__).parent)
    program = STOPPED.format(folder=folder, output=str(output), begun=str(begun))
    run = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert run.stdout.readline().startswith(b"done: ok")
    while not begun.exists():
        assert run.poll() is None
        time.sleep(0.02)
    run.send_signal(number)
    assert run.wait(timeout=120)
    run.stdout.close()
    files = archived(output / gpu.ARCHIVE)
    assert files["gpu/done.log"] == "1 passed\n"
    if number != signal.SIGKILL:
        assert "gpu/slow.log" in files
        assert not [
            command
            for command in Path("/proc").glob("[0-9]*/cmdline")
            if f"time.sleep(100)  # {output}" in command.read_text(errors="replace")
        ]


def named(name: str, device: str = "cuda") -> Part:
    (found,) = (one for one in gpu_parts.parts(Path("out"), device) if one.name == name)
    return found


def test_parts_are_the_same_on_every_device():
    names = [[one.name for one in gpu_parts.parts(Path("out"), kind)] for kind in ("cuda", "cpu")]
    assert names[0] == names[1]
    assert names[0][:11] == [
        "build",
        "two ranks: exact",
        "two ranks: delays",
        "two ranks: plans",
        "two ranks: codecs",
        "two ranks: elastic",
        "two ranks: drift",
        "two ranks: quantised bases",
        "two ranks: Triton",
        "two ranks: failures",
        "two ranks: short memory",
    ]


@pytest.fixture(scope="module")
def collected_tests() -> Iterator[Callable[[Part], frozenset[str]]]:
    """Returns the tests that a part would run on a GPU, without their files.

    One process collects for all parts, because importing the test modules takes long.
    """
    with ProcessPoolExecutor(1, mp_context=fork_server.context()) as executor:

        def collect(part: Part) -> frozenset[str]:
            arguments = [str(word) for word in part.command[part.command.index("pytest") + 1 :]]
            return executor.submit(names_with_a_gpu, arguments, TESTS).result(timeout=120)

        yield collect


def test_all_operator_tests_run_except_those_that_only_need_nvcc(collected_tests):
    on_gpu = collected_tests(named("operators"))
    files = ["unit/test_ops.py", "unit/test_codec.py"]
    everything = collected_tests(gpu_parts.of_tests("all", ["--full", *files], seconds=1.0))
    assert {name for name in everything if name.endswith(("cuda]", "-cuda]"))} > on_gpu
    left_out = {name.partition("[")[0] for name in everything - on_gpu if "cuda]" in name}
    assert all(name.startswith("test_cuda_") for name in left_out)


def test_few_tests_of_each_kernel_run_under_the_sanitizer(collected_tests):
    found = collected_tests(named("compute-sanitizer"))
    assert len(found) < 140
    assert all(name.endswith("cuda]") for name in found)
    for word in re.findall(r"\w+_\w+", gpu_parts.MEMORY):
        assert any(word in name for name in found), f"no test is called {word!r}"


def check_rows(path: Path) -> None:
    rows = read_rows(path, gpu_ranks.BENCHMARK)
    assert rows
    for row in rows:
        assert row["ok"], row
        assert row["commit"]
        assert "torch" in row["versions"]


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Pool]:
    """Ranks that are reused by the tasks which do not end them."""
    with contextlib.closing(Pool(gpu_ranks.RANKS, forked=True)) as pool:
        yield pool


def run_task(task: str, folder: Path) -> None:
    ends = time.monotonic() + 200.0
    own = gpu_ranks.Rank(torch.device("cpu"), ranks.rank(), folder, ends, tries=4)
    gpu_ranks.TASKS[task](own)


TASKS = ["exact", "delays", "plans", "codecs", "elastic", "drift", "bases", "raises", "memory"]
"""Those whose ranks live on. `exits` and `late` have ranks of their own."""


@pytest.mark.parametrize("task", choose(quick=["exact"], full=TASKS))
def test_task_of_two_ranks_passes_on_the_cpu(two_ranks, tmp_path, task):
    two_ranks.run(run_task, task, tmp_path)
    check_rows(tmp_path / gpu_ranks.ROWS)


@pytest.mark.full  # new processes import all, and these tasks wait for deadlines
@pytest.mark.parametrize("task", ["exits", "late"])
def test_script_starts_the_ranks_of_a_task(tmp_path, task):
    output = tmp_path / "rows.jsonl"
    options = [task, "--device", "cpu", "--seconds", "200", "--output", str(output)]
    done = torchrun.run([gpu_ranks.__file__, *options])
    assert done.stdout.endswith("1 of 1 tasks passed\n"), done.stdout + done.stderr
    check_rows(output)
