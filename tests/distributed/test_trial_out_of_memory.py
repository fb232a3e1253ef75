"""A plan that runs out of memory in a trial: all ranks learn of it, and the next plan can run."""

from __future__ import annotations

from typing import Any

import models
import ranks as harness
import torch
from models import ModelSpec
from ranks import Pool
from torch import Tensor, nn

import poplar
from poplar import Plan
from poplar.comm import Group
from poplar.profiler.request import Request
from poplar.profiler.session import Session
from poplar.profiler.trial_runs import OutOfMemoryInTrial, run_plan

SHORT = 1
"""The rank that runs out of memory."""
PLAN = Plan.even(3, 6, 2, stage=3)


class Shortage:
    """A loss that raises on one rank, and leaves a reference cycle that holds its graph."""

    active = True

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        loss = models.mean_over_samples(model, batch)
        if self.active and harness.rank() == SHORT:
            cycle: list[Any] = [loss]
            cycle.append(cycle)
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return loss


def session_on_meta(loss_fn: Any) -> Session:
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
        allow_batch_norm=False,
        device="cpu",
    )
    return Session(request, Group.of(harness.group(), None))


def run_twice() -> tuple[tuple[int, ...], bool, int]:
    """The ranks that ran out of memory; whether the model was on meta then; passes of the next."""
    loss_fn = Shortage()
    session = session_on_meta(loss_fn)
    with session.measuring():
        try:
            run_plan(session, PLAN, steps=1, report=lambda text: None)
        except OutOfMemoryInTrial as error:
            short = error.ranks
        on_meta = all(parameter.is_meta for parameter in session.request.model.parameters())
        loss_fn.active = False
        seen = run_plan(session, PLAN, steps=1, report=lambda text: None)
    return short, on_meta, len(seen.pass_seconds)


def test_model_on_meta_is_put_back_on_meta(ranks: Pool) -> None:
    assert ranks.run(run_twice, ranks=3) == [((SHORT,), True, 3)] * 3
