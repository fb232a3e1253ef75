"""`make gpu` on a CPU: everything except the work on the GPU."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import fork_server
import pytest
import ranks as harness
import torch
import torchrun
from collected import names_with_a_gpu

from poplar.ops import triton_backend

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu
import gpu_parts
import gpu_step
import gpu_training
import gpu_unequal
from gpu import Part

TESTS = Path(__file__).parents[1]


def test_every_stage_agrees_with_one_process(tmp_path):
    options = ["--part", "training", "--device", "cpu", "--size", "tiny", "--output", str(tmp_path)]
    done = torchrun.run([gpu.__file__, *options])
    assert done.stdout.endswith("4 of 4 stages agree with one process\n"), done.stderr
    rows = [json.loads(line) for line in (tmp_path / "training.jsonl").read_text().splitlines()]
    assert [row["stage"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        assert row["tolerance"] < 1e-4, "that of 16 bits"
        assert row["losses"][-1] < row["losses"][0]
        assert f"torch {importlib.metadata.version('torch')}" in row["versions"]
        assert row["commit"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["day"])


def test_hanging_rank_of_training_is_reported_with_its_stacks(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_training, "__file__", str(tmp_path / "hangs.py"))
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(1000)\n")
    with pytest.raises(gpu_training.RanksFailed, match=r"(?s)still running: ranks 0, 1, 2.*hangs"):
        gpu_training.run(tmp_path / "rows.jsonl", "gloo", "tiny", "cpu", seconds=3.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_it_exits_with_a_message(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--output", str(tmp_path)])
    with pytest.raises(SystemExit, match="sees no GPU here"):
        gpu.main()


# Outcomes of parts

Run = Callable[..., tuple[int, str]]


def part(name: str, program: str = "print('2 passed')", **others) -> Part:
    command = [sys.executable, "-c", program]
    return Part(name=name, command=command, verdict="passed", **{"seconds": 60.0, **others})


@pytest.fixture
def run_parts(tmp_path, monkeypatch, capsys) -> Run:
    """Returns the exit status and the console output of a run of some parts."""

    def run_them(*parts: Part, seconds: float = 60.0) -> tuple[int, str]:
        monkeypatch.setattr(gpu, "parts", lambda output, nccl: list(parts))
        options = argparse.Namespace(output=tmp_path, only=None, seconds=seconds, nccl=None)
        return gpu.run_parts(options), capsys.readouterr().out

    return run_them


def test_passed_part_shows_its_last_matching_line(run_parts):
    status, output = run_parts(
        part("good", "print('1 passed'); print('2 passed [/a]'); print('end')")
    )
    assert status == 0
    assert "good: ok. 2 passed [/a]\n" in output
    assert "end" not in output


def test_part_may_show_all_of_its_output(run_parts):
    _, output = run_parts(part("shown", "print('a table'); print('2 passed')", show=True))
    assert "shown: ok. 2 passed\n  | a table\n  | 2 passed\n" in output


def test_failed_part_shows_its_log_and_the_next_part_runs(run_parts, tmp_path):
    lines = "print(*(f'[line] {i}' for i in range(100)), sep='\\n')"
    status, output = run_parts(part("bad one", f"{lines}; raise SystemExit(3)"), part("next"))
    assert status == 1
    assert f"bad one: FAILED. exit status 3; see {tmp_path / 'bad-one.log'}\n" in output
    shown = [int(number) for number in re.findall(r"\| \[line\] (\d+)\n", output)]
    assert shown == list(range(100 - gpu.LOG_LINES, 100))
    assert "next: ok" in output
    assert output.endswith("failed or left out: bad one\n")


def test_part_beyond_its_deadline_is_ended_with_the_stacks_of_its_processes(run_parts):
    program = (
        "import multiprocessing, time\n"
        "def rank_that_waits():\n"
        "    time.sleep(100)\n"
        "def parent_that_waits():\n"
        "    time.sleep(100)\n"
        "multiprocessing.get_context('fork').Process(target=rank_that_waits).start()\n"
        "parent_that_waits()\n"
    )
    status, output = run_parts(part("slow", program, seconds=4.0))
    assert status == 1
    assert "slow: FAILED. not over after 4 s" in output
    assert "in rank_that_waits" in output
    assert "in parent_that_waits" in output


def program_that_meets(own: Path, other: Path) -> str:
    """Ends well only if another program runs at the same time."""
    return (
        "import pathlib, time\n"
        f"pathlib.Path({str(own)!r}).touch()\n"
        "ends = time.monotonic() + 40\n"
        f"while not pathlib.Path({str(other)!r}).exists():\n"
        "    assert time.monotonic() < ends\n"
        "    time.sleep(0.01)\n"
        "print('1 passed')\n"
    )


def test_checks_run_beside_each_other_and_before_the_measurements(run_parts, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu.os, "sched_getaffinity", lambda process: range(8))
    left, right = tmp_path / "left", tmp_path / "right"
    status, output = run_parts(
        part("measurement", alone=True),
        part("left", program_that_meets(left, right)),
        part("right", program_that_meets(right, left)),
        seconds=120.0,
    )
    assert status == 0, output
    checks_are_over = max(output.index("left: ok"), output.index("right: ok"))
    assert output.index("measurement: ok") > checks_are_over


def test_checks_leave_time_for_the_measurements(run_parts):
    status, output = run_parts(
        part("check"), part("measurement", alone=True, seconds=50.0), seconds=60.0
    )
    assert status == 1
    assert "check: LEFT OUT" in output
    assert "measurement: ok" in output


def test_part_is_told_how_much_time_it_has(run_parts):
    program = "import sys; print(*sys.argv[1:], 'passed')"
    _, output = run_parts(part("told", program, seconds=40.0, spare_seconds=10.0))
    assert "told: ok. --seconds 30 passed" in output


def test_part_left_out_for_lack_of_time_is_not_passed(run_parts):
    status, output = run_parts(part("first"), part("second"), seconds=gpu.LEAST_SECONDS - 1)
    assert status == 1
    assert "second: LEFT OUT. no time was left" in output
    assert output.endswith("failed or left out: first; second\n")


def test_part_that_cannot_run_here_is_reported_and_not_failed(run_parts):
    status, output = run_parts(part("elsewhere", needs=lambda: "no such tool"), part("here"))
    assert status == 0
    assert "elsewhere: not run. no such tool" in output


def test_part_with_only_skipped_tests_fails(run_parts, tmp_path):
    skipping = tmp_path / "test_nothing.py"
    skipping.write_text("import pytest\n\ndef test_nothing():\n    pytest.skip('no reason')\n")
    tests = gpu_parts.of_tests("skipped", [str(skipping), "--noconftest"], seconds=60.0)
    status, output = run_parts(tests)
    assert status == 1
    assert "skipped: FAILED. exit status 0, but no line matches" in output
    assert "1 skipped" in output


@pytest.mark.skipif(gpu.ops.providers()["cuda"] == gpu_parts.CPP, reason="it is built here")
def test_cpp_part_fails_with_another_provider(run_parts):
    status, output = run_parts(part("of C++", cpp=True))
    assert status == 1
    assert "of C++: FAILED. it needs the C++ library, but the provider is another" in output


# The list of parts


def part_named(name: str, library: Path | None = None) -> Part:
    (found,) = (part for part in gpu_parts.parts(Path("out"), library) if part.name == name)
    return found


def test_most_important_parts_come_first(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert gpu.parse_options().seconds == gpu.SECONDS < 9.5 * 60, "10 minutes with the build"
    checks, measurements = gpu_parts.checks(Path("out")), gpu_parts.measurements(Path("out"))
    assert not any(part.alone for part in checks)
    assert all(part.alone for part in measurements)
    assert min(part.seconds for part in [*checks, *measurements]) > gpu.LEAST_SECONDS
    assert [part.name for part in checks][:3] == [
        "operators, C++",
        "engine, four ranks",
        "no host synchronization",
    ]
    assert [part.name for part in measurements][:3] == [
        "kernels, C++",
        "a step, one rank",
        "unequal ranks, NCCL",
    ]


def test_benchmarks_know_the_options_of_their_parts(monkeypatch, tmp_path):
    for name, module in (("a step, one rank", gpu_step), ("unequal ranks, NCCL", gpu_unequal)):
        words = [str(word) for word in part_named(name, tmp_path / "libnccl.so.2").command]
        assert words[1] == module.__file__
        options = module.parse_options(words[2:])
        assert options.output.parent == options.logs.parent == Path("out")
    assert (options.transports, options.starts) == (["nccl"], 2)
    assert options.nccl == tmp_path / "libnccl.so.2"
    worst = options.deadline + options.starts * gpu_unequal.START_SECONDS
    assert part_named("unequal ranks, NCCL").seconds > worst, "hangs are reported by the benchmark"
    step = part_named("a step, one rank")
    assert step.spare_seconds > gpu_step.LATE_SECONDS, "a hang is reported by the benchmark"


@pytest.mark.parametrize("version", [(2, 28, 9), (2, 30, 7), None])
def test_ranks_share_the_gpu_by_nccl_if_it_can(monkeypatch, version):
    monkeypatch.setattr(gpu_parts.nccl, "version_in_use", lambda path: version)
    monkeypatch.setattr(gpu_parts, "why_no_mps", lambda: "")
    gpu_parts.why_no_nccl.cache_clear()
    can = version == (2, 30, 7)
    for name in ("training, NCCL", "engine, NCCL", "failures, NCCL", "unequal ranks, NCCL"):
        assert (part_named(name).needs() == "") == can, name
    assert (part_named("unequal ranks, staged").needs() == "") != can
    gpu_parts.why_no_nccl.cache_clear()


def test_nccl_is_preloaded_into_all_of_its_parts(tmp_path):
    library = tmp_path / "libnccl.so.2"
    for name in ("training, NCCL", "engine, NCCL", "failures, NCCL"):
        environment = part_named(name, library).environment
        assert environment["LD_PRELOAD"] == str(library)
        assert environment["NCCL_MAX_CTAS"] == "2"
        assert environment["POPLAR_TEST_BACKEND"] == "nccl"


def test_path_without_nccl_is_rejected(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--nccl", str(tmp_path)])
    with pytest.raises(SystemExit):
        gpu.parse_options()
    assert "expected one libnccl.so*" in capsys.readouterr().err


@pytest.mark.filterwarnings(gpu_parts.NO_FALLBACK)
def test_triton_parts_fail_instead_of_using_plain_pytorch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(triton_backend, "launch_test", lambda kernels, device: "no C compiler")
    with pytest.raises(UserWarning, match="no C compiler"):
        triton_backend._provider_on.__wrapped__(torch.device("cuda"))
    for name in ("operators, Triton", "kernels, Triton"):
        command = list(part_named(name).command)
        assert command[command.index("-W") + 1] == gpu_parts.NO_FALLBACK
        assert part_named(name).environment == {"POPLAR_OPS": "triton"}


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
    on_gpu = collected_tests(part_named("operators, C++"))
    assert {*gpu_parts.OPERATORS} < {*part_named("operators, Triton").command}
    everything = collected_tests(
        gpu_parts.of_tests("all", ["--full", "unit/test_ops.py"], seconds=1.0)
    )
    assert {name for name in everything if name.endswith(("cuda]", "-cuda]"))} > on_gpu
    left_out = {name.partition("[")[0] for name in everything - on_gpu if "cuda]" in name}
    assert all(name.startswith("test_cuda_") for name in left_out)


@pytest.mark.parametrize(
    ("name", "expression"),
    [
        ("compute-sanitizer, operators", gpu_parts.MEMORY),
        ("compute-sanitizer, races", gpu_parts.RACES),
    ],
    ids=["memory", "races"],
)
def test_few_tests_of_each_kernel_run_under_the_sanitizer(collected_tests, name, expression):
    found = collected_tests(part_named(name))
    assert len(found) < 120
    assert all(name.endswith("cuda]") for name in found)
    for word in re.findall(r"\w+_\w+", expression):
        assert any(word in name for name in found), f"no test is called {word!r}"


def test_engine_tests_run_with_ranks_on_the_gpu(collected_tests):
    part = part_named("engine, four ranks")
    found = collected_tests(part)
    assert all(any(name in one for one in found) for name in (f"{c}-3]" for c in gpu_parts.CASES))
    source = Path(harness.__file__).read_text()
    assert all(f'"{name}"' in source for name in part.environment)


def test_failures_of_a_rank_are_tested_with_ranks_on_the_gpu(collected_tests):
    staged, by_nccl = (
        collected_tests(part_named(name)) for name in ("failures, staged", "failures, NCCL")
    )
    assert staged == by_nccl
    for name in ("exception_in_loss_of_one_rank", "survivors_raise_in_time_and_name_the_lost_rank"):
        assert any(name in found for found in staged)


def test_every_stage_is_tested_by_nccl(collected_tests):
    found = collected_tests(part_named("engine, NCCL"))
    assert {f"uneven shares-{stage}]" for stage in range(4)} <= {
        name.partition("[")[2] for name in found
    }


def test_host_synchronization_tests_are_found(collected_tests):
    found = collected_tests(part_named("no host synchronization"))
    assert len(found) == 17
    assert all("for_a_gpu" in name for name in found)
