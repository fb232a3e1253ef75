"""Memory that runs out while passes are measured on the engine: all ranks learn of it at once."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Any
from unittest import mock

import models
import pytest
import ranks as harness
import torch
from models import ModelSpec
from ranks import Failure, one_off

import poplar
from poplar.comm import Group
from poplar.errors import CollectiveTimeout, PoplarError
from poplar.profiler.engine_passes import sharded_passes
from poplar.profiler.request import Request
from poplar.profiler.session import Session
from poplar.zero.stages.sharded_parameters import ShardedParameters

SHORT = 1
"""The rank that runs out of memory."""
MESSAGE = "DefaultCPUAllocator: can't allocate memory"
ONE_PASS = 4
"""Units that are unsharded in it, at least."""


def session_on_meta() -> Session:
    with poplar.parameters_on_meta():
        model = models.build(ModelSpec(kind="mlp", blocks=2))
    request = Request(
        model=model,
        loss_fn=models.mean_over_samples,
        example=models.data(2, seed=1),
        optimizer_class=torch.optim.AdamW,
        optimizer_options={},
        max_batch=4,
        memory_limit=None,
        stages=(3,),
        seconds=0.01,
        max_norm=None,
        units=None,
        compute_dtype="auto",
        reduce_dtype=torch.float32,
        allow_batch_norm=False,
        device="cpu",
    )
    return Session(request, Group.of(harness.group(), timedelta(minutes=10)))


def measure(failing: Collection[int], passes_before: int) -> Failure | None:
    """Measure passes; on one rank, these calls of unshard fail in the last one."""
    unshard, calls = ShardedParameters.unshard, 0

    def limited(strategy: ShardedParameters, *args: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if harness.rank() == SHORT and calls in failing:
            raise RuntimeError(MESSAGE)
        unshard(strategy, *args, **options)

    session = session_on_meta()
    with harness.catching() as caught, session.measuring(), sharded_passes(session) as passes:
        for _ in range(passes_before):
            session.on_all_ranks(lambda: passes.together(passes.check), "a pass")
        with mock.patch.object(ShardedParameters, "unshard", limited):
            session.on_all_ranks(lambda: passes.together(passes.check), "a pass")
    session.exchange(None)  # the ranks are at the same exchange
    return caught[0] if caught else None


@pytest.mark.parametrize("passes_before", [0, 1])
@pytest.mark.parametrize("first", range(1, ONE_PASS + 1))
def test_all_ranks_learn_that_a_pass_did_not_fit(first: int, passes_before: int) -> None:
    failures = one_off(3, measure, {first}, passes_before, timeout=120)
    for failure in failures:
        assert failure is not None
        assert MESSAGE in failure.message


@pytest.mark.parametrize("passes_before", [0, 1])
@pytest.mark.parametrize("first", range(1, ONE_PASS + 1))
def test_all_ranks_learn_that_a_pass_cannot_even_be_completed(
    first: int, passes_before: int
) -> None:
    failing = range(first, first + 3)  # also when the pass is completed without gradients
    for rank, failure in enumerate(one_off(3, measure, failing, passes_before, timeout=120)):
        assert failure is not None
        assert failure.is_a(PoplarError if rank == SHORT else CollectiveTimeout), failure
        assert f"rank {SHORT} is out of memory and cannot complete a pass" in failure.message
