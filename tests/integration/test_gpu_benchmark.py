"""`make gpu` on a CPU: everything except the work on the GPU."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import ranks as harness
import torch
from collected import names_with_a_gpu

from poplar.ops import triton_backend

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu
import gpu_parts
from gpu import Part

TESTS = Path(__file__).parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, gpu.__file__, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_every_stage_agrees_with_one_process(tmp_path):
    done = run("--part", "training", "--device", "cpu", "--size", "tiny", "--output", str(tmp_path))
    assert done.stdout.endswith("4 of 4 stages agree with one process\n"), done.stderr
    rows = [json.loads(line) for line in (tmp_path / "training.jsonl").read_text().splitlines()]
    assert [row["stage"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        assert row["tolerance"] < 1e-4, "that of 16 bits"
        assert row["losses"][-1] < row["losses"][0]
        assert f"torch {importlib.metadata.version('torch')}" in row["versions"]
        assert row["commit"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["day"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_it_exits_with_a_message(tmp_path):
    done = run("--output", str(tmp_path))
    assert done.returncode == 1
    assert "sees no GPU here" in done.stderr


# Outcomes of parts

Run = Callable[..., tuple[int, str]]


def part(name: str, program: str = "print('2 passed')", **others) -> Part:
    command = [sys.executable, "-c", program]
    return Part(name=name, command=command, verdict="passed", **{"seconds": 60.0, **others})


@pytest.fixture
def run_parts(tmp_path, monkeypatch, capsys) -> Run:
    """Returns the exit status and the console output of a run of some parts."""

    def run_them(*parts: Part, seconds: float = 60.0) -> tuple[int, str]:
        monkeypatch.setattr(gpu, "parts", lambda output: list(parts))
        options = argparse.Namespace(output=tmp_path, only=None, seconds=seconds)
        return gpu.run_parts(options), capsys.readouterr().out

    return run_them


def test_passed_part_shows_its_last_matching_line(run_parts):
    status, output = run_parts(
        part("good", "print('1 passed'); print('2 passed [/a]'); print('end')")
    )
    assert status == 0
    assert "good: ok. 2 passed [/a]\n" in output
    assert "end" not in output


def test_failed_part_shows_its_log_and_the_next_part_runs(run_parts, tmp_path):
    lines = "print(*(f'[line] {i}' for i in range(100)), sep='\\n')"
    status, output = run_parts(part("bad one", f"{lines}; raise SystemExit(3)"), part("next"))
    assert status == 1
    assert f"bad one: FAILED. exit status 3; see {tmp_path / 'bad-one.log'}\n" in output
    shown = [int(number) for number in re.findall(r"\| \[line\] (\d+)\n", output)]
    assert shown == list(range(100 - gpu.LOG_LINES, 100))
    assert "next: ok" in output
    assert output.endswith("failed or left out: bad one\n")


def test_part_beyond_its_deadline_is_ended_and_fails(run_parts):
    status, output = run_parts(part("slow", "import time; time.sleep(100)", seconds=1.0))
    assert status == 1
    assert "slow: FAILED. not over after 1 s" in output


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
    status, output = run_parts(gpu_parts.of_tests("skipped", [str(skipping)], seconds=60.0))
    assert status == 1
    assert "skipped: FAILED. exit status 0, but no line matches" in output
    assert "1 skipped" in output


@pytest.mark.skipif(gpu.ops.providers()["cuda"] == gpu_parts.CPP, reason="it is built here")
def test_cpp_part_fails_with_another_provider(run_parts):
    status, output = run_parts(part("of C++", cpp=True))
    assert status == 1
    assert "of C++: FAILED. it needs the C++ library, but the provider is another" in output


# The list of parts


def part_named(name: str) -> Part:
    (found,) = (part for part in gpu_parts.parts(Path("out")) if part.name == name)
    return found


def test_most_important_parts_get_all_of_their_time(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert gpu.parse_options().seconds == gpu.SECONDS < 9 * 60
    deadlines = {part.name: part.seconds for part in gpu_parts.parts(Path("out"))}
    assert min(deadlines.values()) > gpu.LEAST_SECONDS
    first = list(deadlines)[:6]
    assert sum(deadlines[name] for name in first) <= gpu.SECONDS
    assert first[0] == "operators, C++"
    assert {
        "engine, four ranks",
        "no host synchronization",
        "kernels, C++",
        "operators, Triton",
    } < {*first}


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


def collected_tests(part: Part) -> frozenset[str]:
    """The tests that a part would run on a GPU, without their files."""
    arguments = [str(word) for word in part.command[part.command.index("pytest") + 1 :]]
    with ProcessPoolExecutor(1, mp_context=harness.forkserver()) as executor:
        return executor.submit(names_with_a_gpu, arguments, TESTS).result(timeout=120)


def test_all_operator_tests_run_except_those_that_only_need_nvcc():
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
def test_few_tests_of_each_kernel_run_under_the_sanitizer(name, expression):
    found = collected_tests(part_named(name))
    assert len(found) < 120
    assert all(name.endswith("cuda]") for name in found)
    for word in re.findall(r"\w+_\w+", expression):
        assert any(word in name for name in found), f"no test is called {word!r}"


def test_engine_tests_run_with_ranks_on_the_gpu():
    part = part_named("engine, four ranks")
    found = collected_tests(part)
    assert all(any(name in one for one in found) for name in (f"{c}-3]" for c in gpu_parts.CASES))
    source = Path(harness.__file__).read_text()
    assert all(f'"{name}"' in source for name in part.environment)


def test_host_synchronization_tests_are_found():
    found = collected_tests(part_named("no host synchronization"))
    assert len(found) == 17
    assert all("for_a_gpu" in name for name in found)
