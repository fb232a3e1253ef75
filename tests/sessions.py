"""Profiling sessions for a small model on `meta`, on the ranks of a test; and fakes of sessions."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import models
import ranks as harness
import torch
from models import ModelSpec

import poplar
from poplar.comm import Group
from poplar.profiler.job import Job
from poplar.profiler.memory_budget import PassMemory
from poplar.profiler.session import Session


def fake_session(size: int = 1, **more: Any) -> Any:
    """What instruments read of a session, on the first of so many CPU ranks without limits."""
    usual = {
        "group": SimpleNamespace(rank=0, size=size),
        "device": torch.device("cpu"),
        "compute_dtype": torch.float32,
        "memory": PassMemory.unlimited(size),
        "job": SimpleNamespace(reduce_dtype=torch.float32),
    }
    return SimpleNamespace(**{**usual, **more})


def session_on_meta(
    loss_fn: Any = models.mean_over_samples, timeout: timedelta | None = None
) -> Session:
    with poplar.parameters_on_meta():
        model = models.build(ModelSpec(kind="mlp", blocks=2))
    job = Job(
        model=model,
        loss_fn=loss_fn,
        example=models.data(2, seed=1),
        max_batch=2,
        stages=(3,),
        seconds=1.0,
        max_norm=None,
        device="cpu",
        process_group=harness.group(),
        timeout=timeout,
    )
    return Session(job, Group.of(job.process_group, job.timeout))
