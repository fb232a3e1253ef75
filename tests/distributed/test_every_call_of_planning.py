"""An error of one rank at any call of the functions that measure and plan reaches all ranks."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence

import pytest
import ranks as harness
import torch
import torch.distributed as dist
from ranks import Pool
from subset import choose
from test_every_call import DEADLINE, RANKS, SECONDS, Calls, Outcome, Place, attempt, user_loss
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


def run(name: str, calls: Calls) -> str | None:
    """What one call of a function raised."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(harness.device())
    batch = torch.randn(4, 8, device=harness.device())
    with harness.separate_group() as group:  # a stopped rank closes its connections
        return attempt(lambda: FUNCTIONS[name](model, batch, group), calls)


def count_calls(name: str) -> int:
    calls = Calls(None, after="of")
    raised = run(name, calls)
    assert raised is None, raised
    return calls.count


def fail_at(name: str, places: Sequence[Place]) -> list[Outcome]:
    outcomes = []
    for place in places:
        harness.note(f"{name} {place}")
        calls = Calls(place if place.rank == harness.rank() else None, after="of")
        raised = run(name, calls)
        outcomes.append(Outcome(calls.fired, calls.fired_at, raised, time.monotonic()))
        gc.collect()
    return outcomes


@pytest.mark.every_combination
@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_error_at_any_call_reaches_all_ranks(ranks: Pool, name: str) -> None:
    counts = ranks.run(count_calls, name, ranks=RANKS, timeout=120)
    number = choose(quick=2, full=20)
    places = [
        Place(rank, 1 + place * (counts[rank] - 1) // number)
        for place in range(number)
        for rank in (range(RANKS) if number > RANKS else [place % RANKS])
    ]
    by_rank = ranks.run(fail_at, name, places, ranks=RANKS, timeout=60 * len(places))
    for place, *outcomes in zip(places, *by_rank, strict=True):
        fault = outcomes[place.rank]
        if not any(outcome.raised for outcome in outcomes):
            continue  # it was not reached this time, or in code that may fail
        # A rank that has received all that it needs does not wait for the one that fails.
        raised = [outcome.raised for outcome in outcomes if outcome.raised is not None]
        causes = (fault.fired, "the ranks are in different")
        assert all(any(cause in text for cause in causes) for text in raised), (place, outcomes)
        latest = max(outcome.raised_at for outcome in outcomes)
        assert latest - fault.fired_at < SECONDS, (place, outcomes)
