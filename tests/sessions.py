"""Profiling sessions for a small model on `meta`, on the ranks of a test."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import models
import ranks as harness
from models import ModelSpec

import poplar
from poplar.comm import Group
from poplar.profiler.job import Job
from poplar.profiler.session import Session


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
