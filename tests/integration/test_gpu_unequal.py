"""`benchmarks/gpu_unequal.py` on a CPU: ranks that share cores stand in for MPS percentages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchrun

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_unequal
from single_gpu import mps, nccl, ranks
from single_gpu.unequal_row import StartsRow, UnequalRow, load_rows, verdicts
from watchdog import Ended

BENCHMARKS = Path(gpu_unequal.__file__).parent
FINE = Ended(verdict="ok", seconds=7.0, exit_codes=(0, 0), report="ok")
HUNG = Ended(verdict="hang", seconds=90.0, exit_codes=(None, None), report="[stacks] of both")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return torchrun.run([gpu_unequal.__file__, "--device", "cpu", *arguments])


@pytest.mark.full  # only a GPU needs the script; starts, rows and verdicts are tested below
@pytest.mark.slow
def test_plans_and_peers_run_on_the_same_ranks(tmp_path):
    output = tmp_path / "rows.jsonl"
    done = run(
        *("--case", "tiny ranks", "--percent", "50", "50", "--stage", "1", "--rounds", "1"),
        *("--seconds", "0.5", "--speed-seconds", "0.2", "--turn-seconds", "0.1", "--starts", "1"),
        *("--output", str(output)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    row, starts = load_rows(output)
    assert isinstance(row, UnequalRow)
    assert sum(row.samples) == row.global_batch == 16
    assert (row.ranks, row.mps_percent, row.backend, row.stage_chosen) == (2, [50, 50], "gloo", 1)
    assert {*row.peers_ms} == {"ddp", "fsdp2"}
    assert not row.absent
    assert min(row.even_ms, row.planned_ms, row.predicted_ms, row.ideal_ms, *row.speeds) > 0
    assert starts == StartsRow(
        ranks=2,
        mps_percent=[50, 50],
        backend="gloo",
        starts=1,
        hung=0,
        failed=0,
        seconds=starts.seconds,
        device=row.device,
        versions=row.versions,
        commit=row.commit,
        day=row.day,
    )


# The start of the ranks


@pytest.fixture
def launched(monkeypatch):
    """Records what would be started, and answers with the outcomes in `ends`."""
    calls, ends = [], []

    def watch(script, arguments, environments, folder, *, seconds):
        calls.append((arguments, environments, seconds))
        return ends.pop(0) if ends else FINE

    monkeypatch.setattr(gpu_unequal, "watch", watch)
    return calls, ends


def call_main(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu_unequal.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        gpu_unequal.main()
    return ended.value.code


def on_a_gpu(monkeypatch, tmp_path, version):
    """As if there were a GPU, this NCCL, and an MPS daemon."""
    (tmp_path / "libnccl.so.2").touch()
    clients = {"CUDA_MPS_PIPE_DIRECTORY": "pipe", "CUDA_MPS_LOG_DIRECTORY": "log"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_unequal.provenance, "device", lambda kind: kind)
    monkeypatch.setattr(nccl, "version_of", lambda library: version)
    monkeypatch.setattr(gpu_unequal, "mps_daemon", lambda: gpu_unequal.nullcontext(clients))


def test_ranks_on_a_gpu_differ_in_their_percentage(monkeypatch, tmp_path, launched):
    on_a_gpu(monkeypatch, tmp_path, (2, 30, 7))
    arguments = ("--nccl", str(tmp_path), "--max-ctas", "3", "--transports", "nccl")
    call_main(monkeypatch, *arguments, "--percent", "60", "40")
    ((arguments, environments, seconds),) = launched[0]
    assert arguments[-4:] == ["--transports", "nccl", "--task", "comparison"]
    assert seconds == 240.0
    for environment, percent in zip(environments, ("60", "40"), strict=True):
        assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == percent
        assert environment["CUDA_MPS_PIPE_DIRECTORY"] == "pipe"
        assert environment["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
        assert environment["NCCL_MAX_CTAS"] == "3"
        assert environment["LD_PRELOAD"] == str(tmp_path / "libnccl.so.2")
    assert len({environment[ranks.RENDEZVOUS] for environment in environments}) == 1


def test_ranks_of_an_old_nccl_pass_for_hosts(monkeypatch, tmp_path, launched):
    on_a_gpu(monkeypatch, tmp_path, (2, 28, 9))
    call_main(monkeypatch, "--nccl", str(tmp_path), "--transports", "nccl", "--max-ctas", "4")
    ((_, environments, _),) = launched[0]
    assert [one["NCCL_HOSTID"] for one in environments] == ["rank0", "rank1", "rank2"]
    assert {one["NCCL_MAX_CTAS"] for one in environments} == {"4"}


def test_missing_daemon_is_said(monkeypatch, tmp_path, launched, capsys):
    on_a_gpu(monkeypatch, tmp_path, (2, 30, 7))
    monkeypatch.setattr(gpu_unequal, "mps_daemon", mps.mps_daemon)
    monkeypatch.setenv("PATH", "")
    assert call_main(monkeypatch, "--transports", "staged") == 1
    assert f"staged: not run. {mps.CONTROL} is not on the path" in capsys.readouterr().out
    assert not launched[0]


def test_without_percentages_there_is_no_daemon(monkeypatch, tmp_path, launched):
    on_a_gpu(monkeypatch, tmp_path, (2, 30, 7))
    monkeypatch.setattr(gpu_unequal, "mps_daemon", mps.mps_daemon)
    monkeypatch.setenv("PATH", "")
    call_main(monkeypatch, "--transports", "staged", "--ranks", "4", "--percent")
    ((_, environments, _),) = launched[0]
    assert len(environments) == 4
    assert all("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in one for one in environments)


def test_starts_that_hang_are_counted_and_reported(monkeypatch, tmp_path, launched, capsys):
    calls, ends = launched
    ends += [FINE, HUNG, FINE, FINE, FINE]
    output = tmp_path / "rows.jsonl"
    arguments = ("--device", "cpu", "--no-comparison", "--starts", "5")
    assert call_main(monkeypatch, *arguments, "--output", str(output)) == 1
    assert [arguments[-1] for arguments, _, _ in calls] == ["0", "1", "2", "3", "0"], "stages"
    (row,) = load_rows(output)
    assert (row.starts, row.hung, row.failed, row.seconds) == (5, 1, 0, 7.0)
    printed = capsys.readouterr().out
    assert "short  3 ranks, gloo: 1 hung and 0 failed of 5 starts" in printed
    assert "staged, start 1, stage 1: [stacks] of both" in printed


def test_comparison_that_hangs_is_a_row(monkeypatch, tmp_path, launched):
    launched[1].append(HUNG)
    output = tmp_path / "rows.jsonl"
    arguments = ("--device", "cpu", "--output", str(output))
    assert call_main(monkeypatch, *arguments) == 1
    (row,) = load_rows(output)
    assert (row.what, row.starts, row.hung) == ("comparison", 1, 1)


@pytest.mark.parametrize(
    ("percent", "cores", "expected"),
    [
        ((50, 25, 25), (0, 1), (0, 1, 1)),
        ((50, 25, 25), (3,), (3, 3, 3)),
        ((40, 20, 20, 20), (4, 5, 6, 7, 8), (4, 6, 7, 8)),
        ((10, 10), (0, 1), (0, 1)),
    ],
)
def test_percentages_become_shared_cores(percent, cores, expected):
    assert ranks.cores_of(percent, cores) == expected


# Rows and targets


def row(**values) -> UnequalRow:
    given = {
        "ranks": 3,
        "mps_percent": [50.0, 25.0, 25.0],
        "backend": "nccl 2.30.7",
        "model": "llama",
        "global_batch": 384,
        "stage_chosen": 1,
        "samples": [192, 96, 96],
        "even_ms": 200.0,
        "planned_ms": 100.0,
        "predicted_ms": 100.0,
        "tune_seconds": 40.0,
    }
    return UnequalRow(**given | values)


@pytest.mark.parametrize(
    ("values", "met"),
    [
        ({"ideal_ms": 97.0}, [True, True]),
        ({"ideal_ms": 96.0}, [False, True]),
        ({"predicted_ms": 97.5}, [True]),
        ({"predicted_ms": 104.0}, [False]),
        ({"mps_percent": None, "ideal_ms": 50.0}, []),
    ],
)
def test_targets(values, met):
    assert [verdict.met for verdict in verdicts([row(**values)])] == met


def test_rows_measured_before_the_script_are_shown(monkeypatch, capsys):
    saved = BENCHMARKS / "results" / "h100" / "unequal.jsonl"
    assert len(load_rows(saved)) == len(saved.read_text().splitlines())
    monkeypatch.setattr(sys, "argv", ["gpu_unequal.py", "--show", str(saved)])
    gpu_unequal.main()
    printed = capsys.readouterr().out
    assert "50/25/25" in printed
    assert printed.endswith("2 of 2 targets met\n")


def test_unknown_fields_of_newer_rows_are_ignored(tmp_path):
    file = tmp_path / "rows.jsonl"
    values = {"starts": 3, "hung": 0, "failed": 0, "seconds": 1.0, "ranks": 2, "new": 1}
    file.write_text(json.dumps({**values, "mps_percent": None, "backend": "gloo"}) + "\n")
    (found,) = load_rows(file)
    assert (found.starts, found.backend) == (3, "gloo")
