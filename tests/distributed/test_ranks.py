"""The test harness: errors are reported, deadlines hold, and a failed call does not affect the
next.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
import ranks as harness
import torch
import torch.distributed as dist
from ranks import Failure, Pool, RanksFailed, Silent, one_off


def rank_and_sum(value: float) -> tuple[int, int, float]:
    total = torch.tensor([value * (harness.rank() + 1)], device=harness.device())
    dist.all_reduce(total, group=harness.group())
    return harness.rank(), harness.size(), total.item()


def fail_on(bad: int) -> int:
    if harness.rank() == bad:
        raise ValueError(f"rank {bad} will not")
    return harness.rank()


def fail_everywhere() -> None:
    raise KeyError(harness.rank())


def fail_before_the_collective(bad: int) -> None:
    fail_on(bad)
    dist.barrier(harness.group())


def sleep_on(slow: int, seconds: float) -> int:
    if harness.rank() == slow:
        time.sleep(seconds)
    return os.getpid()


def die_on(bad: int, how: signal.Signals) -> int:
    if harness.rank() == bad:
        os.kill(os.getpid(), how)
        time.sleep(60)
    return harness.rank()


@pytest.mark.parametrize("count", [1, 3, 4])
def test_every_rank_returns_its_value_and_the_group_has_the_ranks_of_the_call(
    ranks: Pool, count: int
) -> None:
    total = sum(range(1, count + 1))
    assert ranks.run(rank_and_sum, 1.0, ranks=count) == [
        (rank, count, float(total)) for rank in range(count)
    ]


def test_errors_are_raised_with_rank_and_traceback(ranks: Pool) -> None:
    with pytest.raises(RanksFailed, match="rank 2 will not") as caught:
        ranks.run(fail_on, 2)
    (failure,) = caught.value.failures
    assert failure.rank == 2
    assert failure.type == "ValueError"
    assert failure.is_a(ValueError)
    assert not failure.is_a(TypeError)
    assert "in fail_on" in failure.traceback


def test_expected_errors_are_returned_and_missing_ones_raise(ranks: Pool) -> None:
    failures = ranks.run_expecting_errors(fail_everywhere)
    assert [failure.message for failure in failures] == ["0", "1", "2", "3"]
    with pytest.raises(AssertionError, match=r"ranks \[0, 2, 3\] raised nothing"):
        ranks.run_expecting_errors(fail_on, 1)


def test_workers_are_reused(ranks: Pool) -> None:
    first = ranks.run(sleep_on, 0, 0.0)
    ranks.run_expecting_errors(fail_everywhere)
    assert ranks.run(sleep_on, 0, 0.0) == first


def test_deadline_kills_the_workers_and_shows_their_stacks() -> None:
    pool = Pool(2, forked=True)
    try:
        before = pool.pids()
        pool.run(sleep_on, 0, 0.0)  # makes the process group, which no deadline below includes
        with pytest.raises(RanksFailed, match="did not finish: sleep_on in 3 s") as caught:
            pool.run(sleep_on, 1, 60.0, timeout=3.0)
        (silent,) = caught.value.silent
        assert silent.rank == 1
        assert "in sleep_on" in silent.stacks
        assert pool.run(rank_and_sum, 1.0) == [(0, 2, 3.0), (1, 2, 3.0)]
        assert not set(before) & set(pool.pids())
    finally:
        pool.close()


def test_failed_rank_is_shown_with_the_ranks_that_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(harness, "GRACE_SECONDS", 3.0)
    pool = Pool(2, forked=True)
    try:
        with pytest.raises(RanksFailed) as caught:
            pool.run(fail_before_the_collective, 0)
        assert [failure.rank for failure in caught.value.failures] == [0]
        assert "fail_before_the_collective" in caught.value.silent[0].stacks
    finally:
        pool.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_ranks_are_reported_with_the_results_of_the_other_ranks(how: signal.Signals) -> None:
    answers = one_off(2, die_on, 1, how, lost=[1])
    assert answers[0] == 0
    assert isinstance(answers[1], Silent)


def test_unexpected_death_of_a_rank_raises() -> None:
    with pytest.raises(RanksFailed, match="exit code -9"):
        one_off(2, die_on, 1, signal.SIGKILL)


def test_failure_on_a_one_off_rank_is_returned() -> None:
    answers = one_off(2, fail_on, 0)
    assert isinstance(answers[0], Failure)
    assert answers[1] == 1
