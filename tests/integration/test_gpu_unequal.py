"""`benchmarks/gpu_unequal.py` on a CPU: ranks that share cores stand in for MPS percentages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_unequal
import provenance
from rows import Row
from single_gpu import ranks
from single_gpu.unequal_report import targets
from watchdog import Ended

FINE = Ended(verdict="ok", seconds=7.0, exit_codes=(0, 0), report="ok")
HUNG = Ended(verdict="hang", seconds=90.0, exit_codes=(None, None), report="[stacks] of both")


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


def on_a_gpu(monkeypatch, tmp_path):
    """As if there were a GPU, a library of NCCL, and an MPS daemon."""
    (tmp_path / "libnccl.so.2").touch()
    clients = {"CUDA_MPS_PIPE_DIRECTORY": "pipe", "CUDA_MPS_LOG_DIRECTORY": "log"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(provenance, "device", lambda kind: kind)
    monkeypatch.setattr(gpu_unequal, "mps_daemon", lambda: gpu_unequal.nullcontext(clients))


def test_ranks_on_a_gpu_differ_in_their_percentage(monkeypatch, tmp_path, launched):
    on_a_gpu(monkeypatch, tmp_path)
    arguments = ("--nccl", str(tmp_path), "--max-ctas", "3", "--transports", "nccl")
    call_main(monkeypatch, *arguments, "--percent", "60", "40")
    ((arguments, environments, seconds),) = launched[0]
    assert arguments[-2:] == ["--transports", "nccl"]
    assert seconds == 240.0
    for environment, percent in zip(environments, ("60", "40"), strict=True):
        assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == percent
        assert environment["CUDA_MPS_PIPE_DIRECTORY"] == "pipe"
        assert environment["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
        assert environment["NCCL_MAX_CTAS"] == "3"
        assert environment["LD_PRELOAD"] == str(tmp_path / "libnccl.so.2")
    assert len({environment[ranks.RENDEZVOUS] for environment in environments}) == 1


def test_comparison_that_hangs_is_reported(monkeypatch, launched, capsys):
    launched[1].append(HUNG)
    assert call_main(monkeypatch, "--device", "cpu") == 1
    assert "staged: [stacks] of both" in capsys.readouterr().out


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


def row(**values: object) -> Row:
    case = {"ranks": 3, "mps_percent": [50.0, 25.0, 25.0], "backend": "nccl 2.30.7"}
    given = case | {"planned_ms": 100.0, "predicted_ms": 100.0} | values
    return Row.of(
        "gpu_unequal",
        {name: given.pop(name) for name in case},
        given,
    )


def test_percentages_must_be_above_0(capsys):
    with pytest.raises(SystemExit):
        gpu_unequal.parse_options(["--percent", "50", "0"])
    assert "--percent must be above 0, got [50.0, 0.0]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "met"),
    [
        ({"ideal_ms": 97.0}, [True, True]),
        ({"ideal_ms": 96.0}, [False, True]),
        ({"predicted_ms": 97.5}, [True]),
        ({"predicted_ms": 104.0}, [False]),
    ],
)
def test_targets(values, met):
    assert [target.met for target in targets([row(**values)])] == met
