"""Profiling sessions for a small model on `meta`, on the ranks of a test."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import models
import ranks as harness
import torch
from models import ModelSpec

import poplar
from poplar.comm import Group
from poplar.profiler.request import Request
from poplar.profiler.session import Session


def session_on_meta(
    loss_fn: Any = models.mean_over_samples, timeout: timedelta | None = None
) -> Session:
    with poplar.parameters_on_meta():
        model = models.build(ModelSpec(kind="mlp", blocks=2))
    request = Request(
        model=model,
        loss_fn=loss_fn,
        example=models.data(2, seed=1),
        optimizer_class=torch.optim.AdamW,
        optimizer_options={},
        max_batch=2,
        memory_limit=None,
        stages=(3,),
        seconds=1.0,
        max_norm=None,
        units=None,
        compute_dtype="auto",
        reduce_dtype=torch.float32,
        allow_forward_state=False,
        device="cpu",
    )
    return Session(request, Group.of(harness.group(), timeout))
