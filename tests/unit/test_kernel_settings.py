"""Settings of torch that decide which kernels run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from poplar.profiler.job import Job
from poplar.system.kernel_settings import precisions, switches

BACKENDS = torch.backends


@pytest.fixture(autouse=True)
def usual_settings() -> Iterator[None]:
    precision, matmul = BACKENDS.cuda.matmul.fp32_precision, BACKENDS.mkldnn.matmul.fp32_precision
    with BACKENDS.cudnn.flags():
        yield
    BACKENDS.cuda.matmul.fp32_precision = precision
    BACKENDS.mkldnn.matmul.fp32_precision = matmul


def test_precisions_follow_both_ways_of_setting_them():
    torch.set_float32_matmul_precision("highest")
    exact = precisions()
    assert "matmul" not in exact
    torch.set_float32_matmul_precision("high")
    assert "cuda.matmul tf32" in precisions()
    torch.set_float32_matmul_precision("highest")
    assert precisions() == exact
    BACKENDS.cuda.matmul.fp32_precision = "tf32"
    assert "cuda.matmul tf32" in precisions()


def test_precision_of_one_backend_is_part_of_the_identity():
    BACKENDS.cuda.matmul.fp32_precision = "tf32"
    job = Job.of(torch.nn.Linear(2, 2), lambda model, batch: None, torch.ones(1, 2))
    assert "cuda.matmul tf32" in job.may_differ(torch.device("cpu"))["precisions"]


SWITCHES: dict[str, Any] = {
    "flash": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "cudnn.benchmark": lambda: BACKENDS.cudnn.flags(benchmark=True),
    "cudnn.deterministic": lambda: BACKENDS.cudnn.flags(deterministic=True),
    "mkldnn": lambda: BACKENDS.mkldnn.flags(enabled=False),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_switches_are_told_apart(name: str):
    before = switches()
    with SWITCHES[name]():
        changed = switches()
    assert (name in before) != (name in changed)
    assert switches() == before


def test_builds_of_one_torch_are_compared_only_in_the_identity(monkeypatch: pytest.MonkeyPatch):
    """As `poplar doctor` says, two of them work together."""
    job = Job.of(torch.nn.Linear(2, 2), lambda model, batch: None, torch.ones(1, 2))
    equal, builds = [], []
    for version in ("2.13.0+cu126", "2.13.0+cu130", "2.12.0+cu130"):
        monkeypatch.setattr(torch, "__version__", version)
        equal.append(job.must_be_equal()["versions"])
        builds.append(job.may_differ(torch.device("cpu"))["builds"])
    assert equal[0] == equal[1] != equal[2]
    assert len(set(builds)) == 3
