"""Memory that runs out while passes are measured on the engine: all ranks learn of it at once."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import ranks as harness
from ranks import Failure, one_off
from sessions import session_on_meta

from poplar.profiler.engine_passes import sharded_passes
from poplar.values.errors import CollectiveTimeout, PoplarError
from poplar.zero.stages.sharded_parameters import ShardedParameters

SHORT = 1
"""The rank that runs out of memory."""
MESSAGE = "DefaultCPUAllocator: can't allocate memory"
ONE_PASS = 4
"""Units that are unsharded in it, at least."""


def measure(failing: Collection[int], passes_before: int) -> Failure | None:
    """Measure passes; on one rank, these calls of unshard fail in the last one."""
    unshard, calls = ShardedParameters.unshard, 0

    def limited(strategy: ShardedParameters, *args: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if harness.rank() == SHORT and calls in failing:
            raise RuntimeError(MESSAGE)
        unshard(strategy, *args, **options)

    session = session_on_meta(timeout=timedelta(minutes=10))
    with harness.catching() as caught, session.measuring(), sharded_passes(session) as passes:
        for _ in range(passes_before):
            session.on_all_ranks(lambda: passes.together(passes.check), "a pass")
        with mock.patch.object(ShardedParameters, "unshard", limited):
            session.on_all_ranks(lambda: passes.together(passes.check), "a pass")
    session.exchange(None)  # the ranks are at the same exchange
    return caught[0] if caught else None


@pytest.mark.parametrize("passes_before", [0, 1])
@pytest.mark.parametrize("first", [1, ONE_PASS])
def test_all_ranks_learn_that_a_pass_did_not_fit(first: int, passes_before: int) -> None:
    failures = one_off(3, measure, {first}, passes_before)
    for failure in failures:
        assert failure is not None
        assert MESSAGE in failure.message


@pytest.mark.parametrize("passes_before", [0, 1])
@pytest.mark.parametrize("first", [1, ONE_PASS])
def test_all_ranks_learn_that_a_pass_cannot_even_be_completed(
    first: int, passes_before: int
) -> None:
    failing = range(first, first + 3)  # also when the pass is completed without gradients
    for rank, failure in enumerate(one_off(3, measure, failing, passes_before)):
        assert failure is not None
        assert failure.is_a(PoplarError if rank == SHORT else CollectiveTimeout), failure
        assert f"rank {SHORT} is out of memory and cannot complete a pass" in failure.message
