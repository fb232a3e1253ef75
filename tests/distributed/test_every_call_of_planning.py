"""An error of one rank at any call of the functions that measure and plan reaches all ranks."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import pytest
import ranks as harness
import torch
import torch.distributed as dist
from failing_calls import (
    DEADLINE,
    SECONDS,
    Calls,
    Place,
    attempt,
    gathered,
    places_to_fail,
)
from ranks import Pool
from test_every_call import RANKS, Outcome, user_loss
from torch import Tensor, nn

import poplar
from poplar import Plan

OPTIONS = {"timeout": DEADLINE, "seconds": 0.3, "cache": False, "progress": False}
PLAN = Plan(stage=1, global_batch=4, micro_batches=((2, 1), (1, 0)), shares=(0.6, 0.4))

Function = Callable[[nn.Module, Tensor, dist.ProcessGroup], object]
FUNCTIONS: dict[str, Function] = {
    "profile_cluster": lambda model, batch, group: poplar.profile_cluster(
        model, user_loss, batch, max_batch=4, process_group=group, **OPTIONS
    ),
    "autotune": lambda model, batch, group: poplar.autotune(
        model, user_loss, batch, global_batch=4, process_group=group, **OPTIONS
    ),
    "verify": lambda model, batch, group: poplar.verify(
        model, user_loss, batch, PLAN, process_group=group, timeout=DEADLINE
    ),
    "distribute": lambda model, batch, group: poplar.distribute(
        model, user_loss, batch, global_batch=4, process_group=group, **OPTIONS
    ),
}


def run(name: str, calls: Calls, group: dist.ProcessGroup) -> str | None:
    """What one call of a function raised."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(harness.device())
    batch = torch.randn(4, 8, device=harness.device())
    return attempt(lambda: FUNCTIONS[name](model, batch, group), calls)


def fail_at(name: str) -> dict[Place, Outcome]:
    """What this rank does if a rank fails at each of the places."""
    calls = Calls(None, after="of")
    with harness.separate_group() as group:
        raised = run(name, calls, group)
        assert raised is None, raised
        called = gathered(calls.names, group)
    outcomes = {}
    for place in places_to_fail(called, name, quick=1, full=20):
        harness.note(f"{name} {place}")
        calls = Calls(place if place.rank == harness.rank() else None, after="of")
        with harness.separate_group() as group:  # a stopped rank closes its connections
            raised = run(name, calls, group)
            outcomes[place] = Outcome(calls.fired, calls.fired_at, raised, time.monotonic())
        gc.collect()
    return outcomes


@pytest.mark.every_combination
@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_error_at_any_call_reaches_all_ranks(ranks: Pool, name: str) -> None:
    by_rank = ranks.run(fail_at, name, ranks=RANKS, timeout=1200)
    for place in by_rank[0]:
        outcomes = [outcomes[place] for outcomes in by_rank]
        fault = outcomes[place.rank]
        if not any(outcome.raised for outcome in outcomes):
            continue  # it was not reached this time, or in code that may fail
        # A rank that has received all that it needs does not wait for the one that fails.
        raised = [outcome.raised for outcome in outcomes if outcome.raised is not None]
        causes = (fault.fired, "the ranks are in different")
        assert all(any(cause in text for cause in causes) for text in raised), (place, outcomes)
        latest = max(outcome.raised_at for outcome in outcomes)
        assert latest - fault.fired_at < SECONDS, (place, outcomes)
