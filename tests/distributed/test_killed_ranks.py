"""If a rank is killed, stopped or absent, the others raise and name the cause.

The timeout of their process group is longer than the deadline of a call: none waits for that.
"""

from __future__ import annotations

import gc
import os
import re
import select
import signal
import threading
import time
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import ranks as harness
import torch
import torch.distributed as dist
import training
from communicators import on_host
from native_calls import native_calls, streams_wait
from ranks import Failure, one_off
from reference import Recipe
from training import Run

from poplar import CollectiveTimeout, Plan, PoplarError
from poplar.comm import Control, Group, connect, subgroup
from poplar.comm.shard_layout import Layout

TIMEOUT = timedelta(seconds=2)
LOST = 1


def timeout_after(how: signal.Signals) -> timedelta:
    """Ranks need not wait for the deadline to learn that a process has exited."""
    return TIMEOUT if how == signal.SIGSTOP else timedelta(minutes=2)


def train_until(run: Run, how: signal.Signals) -> Failure | None:
    """Train; one rank is killed or stopped in its loss function in the second step."""
    model, optimizer = training.prepare(run)
    loss = training.loss_of(run.recipe)
    training.take_step(run, model, optimizer, 0)

    def kill_one(model, micro_batch):
        if harness.rank() == LOST:
            os.kill(os.getpid(), how)
        return loss(model, micro_batch)

    with harness.catching() as caught:
        optimizer.train_step(kill_one, training.batch_of(run, 1))
    return (caught or [None])[0]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_survivors_raise_and_name_the_lost_rank(how: signal.Signals, stage: int) -> None:
    plan = Plan.manual("1,1,2", stage=stage)
    run = Run(Recipe(batches=(4, 4)), plan, engine={"timeout": timeout_after(how)})
    for rank, failure in enumerate(one_off(3, train_until, run, how, lost=[LOST])):
        if rank == LOST:
            continue
        assert failure is not None, f"rank {rank} took the step without rank {LOST}"
        assert failure.is_a(PoplarError), failure
        assert re.search(rf"rank(\(s\))? {LOST}\b", failure.message), failure


def build_until_killed(slow: int) -> Failure | None:
    """One rank dies after its address is known, and before another one has connected to it."""
    make = subgroup._new_process_group_helper
    processes = [0] * harness.size()
    dist.all_gather_object(processes, os.getpid(), harness.group())
    lost = os.pidfd_open(processes[LOST])

    def make_late(*arguments: Any, **options: Any) -> Any:
        if harness.rank() == LOST:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if harness.rank() == slow:
            select.select([lost], [], [])  # until it has exited
        return make(*arguments, **options)

    with (
        harness.catching() as caught,
        mock.patch.object(subgroup, "_new_process_group_helper", make_late),
    ):
        Group.of(harness.group(), TIMEOUT)
    return (caught or [None])[0]


@pytest.mark.parametrize("slow", [0, 2])
def test_a_rank_that_dies_while_the_control_channel_is_made_is_named(slow: int) -> None:
    for rank, failure in enumerate(one_off(3, build_until_killed, slow, lost=[LOST])):
        if rank != LOST:
            assert failure is not None
            assert failure.is_a(CollectiveTimeout), failure
            assert re.search(rf"waiting for rank\(s\) .*{LOST}\b", failure.message), failure


def train_on_streams_until(run: Run, how: signal.Signals) -> tuple[Failure | None, bool]:
    """As `train_until` on devices; also returns whether the collectives there were aborted."""
    with native_calls():
        model, optimizer = training.prepare(run)
        loss = training.loss_of(run.recipe)
        training.take_step(run, model, optimizer, 0)

    def kill_one(model, micro_batch):
        if harness.rank() == LOST:
            os.kill(os.getpid(), how)
        return loss(model, micro_batch)

    with streams_wait() as aborted, harness.catching() as caught:
        float(optimizer.train_step(kill_one, training.batch_of(run, 1)).loss)
    return (caught or [None])[0], harness.group() in aborted


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_collectives_on_devices_are_aborted_and_the_lost_rank_is_named(
    how: signal.Signals, stage: int
) -> None:
    """Their streams wait for the lost rank, and the host finds out in the control channel."""
    engine = {"timeout": timeout_after(how), "communicator": "process_group"}
    run = Run(Recipe(batches=(4, 4)), Plan.manual("1,1,2", stage=stage), engine=engine)
    answers = one_off(3, train_on_streams_until, run, how, lost=[LOST])
    for rank, answer in enumerate(answers):
        if rank == LOST:
            continue
        assert not isinstance(answer, Failure), answer
        failure, is_aborted = answer
        assert failure is not None, f"rank {rank} took the step without rank {LOST}"
        assert failure.is_a(CollectiveTimeout), failure
        assert re.search(rf"waiting for rank\(s\) {LOST} ", failure.message), failure
        assert is_aborted


def train_without_memory(run: Run, on_streams: bool) -> Failure | None:
    """One rank has no memory to unshard anything in the second step."""
    with native_calls() if on_streams else nullcontext():
        model, optimizer = training.prepare(run)
        training.take_step(run, model, optimizer, 0)
    real = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> None:
        if size and harness.rank() == LOST:
            raise torch.OutOfMemoryError("no memory to unshard")
        real(storage, size)

    with (
        streams_wait() if on_streams else nullcontext(),
        mock.patch.object(torch.UntypedStorage, "resize_", resize),
        harness.catching() as caught,
    ):
        training.take_step(run, model, optimizer, 1)
    return (caught or [None])[0]


@pytest.mark.parametrize("on_streams", [False, True], ids=["shared memory", "streams"])
def test_a_rank_that_cannot_complete_a_pass_tells_the_others_why(on_streams: bool) -> None:
    """They do not wait for the deadline, which is longer than this test may take."""
    communicator = "process_group" if on_streams else "shared_memory"
    engine = {"timeout": timedelta(minutes=10), "communicator": communicator}
    run = Run(Recipe(batches=(4, 4)), Plan.manual("1,1,2", stage=3), engine=engine)
    for rank, failure in enumerate(one_off(3, train_without_memory, run, on_streams)):
        assert failure is not None, f"rank {rank} took the step"
        assert failure.is_a(PoplarError), failure
        assert f"rank {LOST} is out of memory" in failure.message, failure


def forward_on_one_rank(run: Run) -> Failure | None:
    """Call the model on rank 0 only, outside a step."""
    model, _optimizer = training.prepare(run)
    with harness.catching() as caught:
        if harness.rank() == 0:
            model(training.batch_of(run, 0)["tokens"])
        else:
            time.sleep(2 * TIMEOUT.total_seconds())
    return (caught or [None])[0]


def test_forward_on_one_rank_at_stage_3_names_the_cause() -> None:
    run = Run(Recipe(batches=(4,)), Plan.even(2, 4, 2, 3), engine={"timeout": TIMEOUT})
    failure = one_off(2, forward_on_one_rank, run)[0]
    assert failure is not None, "the forward returned"
    assert failure.is_a(CollectiveTimeout), failure
    assert "at stage 3 the parameters are sharded" in failure.message, failure
    assert "full_parameters()" in failure.message, failure


class Failing(torch.optim.SGD):
    """Its update may fail, after all ranks have agreed on the step."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if Failing.fails:
            raise ZeroDivisionError("planted")
        return super().step(closure)


def stop(run: Run, how: str) -> Failure:
    """The error that stops all ranks of an optimizer."""
    model, optimizer = training.prepare(run)
    training.take_step(run, model, optimizer, 0)

    def interrupt(_model: Any, _batch: Any) -> Any:
        raise KeyboardInterrupt

    Failing.fails = how == "update" and harness.rank() == LOST
    loss = training.loss_of(run.recipe)
    interrupted = how == "interrupt" and harness.rank() == LOST
    with harness.catching() as caught, suppress(KeyboardInterrupt):
        while True:  # ranks whose own update succeeds learn it in the next step
            optimizer.train_step(interrupt if interrupted else loss, training.batch_of(run, 1))
    Failing.fails = False
    return (caught or [None])[0]


def build_again(run: Run, how: str, times: int) -> Any:
    """Train after one rank has stopped all of them, some times."""
    with mock.patch.object(torch.optim, "SGD", Failing):
        for _ in range(times):
            failure = stop(run, how)
            gc.collect()
            dist.barrier()  # so that no rank builds while another one trains
        return failure, training.train(run)


@pytest.mark.parametrize("how", ["update", "interrupt"])
@pytest.mark.parametrize("stage", [0, 3])
def test_an_optimizer_can_be_built_again_after_all_ranks_were_stopped(stage: int, how: str) -> None:
    recipe = Recipe(batches=(12,) * 2, optimizer="SGD", options=(("lr", 0.1),))
    run = Run(recipe, Plan.manual("5,4,3", stage=stage))
    found = one_off(3, build_again, run, how, 2)
    assert found[0][0].is_a(CollectiveTimeout), found[0][0]
    training.assert_exact([trained for _, trained in found], recipe)


def build_again_after(absence: str, again: int) -> tuple[list[Failure], list[float]]:
    """Build groups after one rank was absent from a call, then run a broadcast of the user."""
    group = harness.group()
    if absence == "an exchange":
        control = Control(Group.of(group, TIMEOUT))
        control.exchange(torch.zeros(1), what="the first exchange")()
    if harness.rank() != LOST:
        with harness.catching() as missed:
            if absence == "an exchange":
                control.exchange(torch.zeros(1), what="the second exchange")()
            else:
                Group.of(group, TIMEOUT)
        assert missed[0].is_a(CollectiveTimeout), missed[0]
    dist.barrier(group)
    with harness.catching() as caught:
        for _ in range(again):
            built = Group.of(group, timedelta(seconds=20))
            Control(built).exchange_objects(1, what="an exchange of the new group")
    value = torch.full((4,), 7.0 if harness.rank() == 0 else 0.0)  # of 16 bytes, as UUIDs are
    dist.broadcast(value, group=group, group_src=0)
    return caught, value.tolist()


@pytest.mark.parametrize("absence", ["an exchange", "the constructor"])
def test_groups_can_be_built_again_after_a_rank_was_absent(absence: str) -> None:
    """The ranks that were not absent alone know of a failure."""
    answers = one_off(3, build_again_after, absence, 2, timeout=90)
    assert answers == [([], [7.0] * 4)] * 3


def gather_again_after_a_failure() -> list[float]:
    """Connect to hosts, again after one rank has noted a failure."""
    group = harness.group()
    with on_host("aabb"[harness.rank()]):
        for _ in range(2):
            built = Group.of(group, timedelta(seconds=20))
            comm = connect(built, "hierarchical:process_group")
            data = torch.full((256,), float(harness.rank()))
            comm.all_gather(data, Layout.even(256, 4), what="a gather").wait()
            dist.barrier(group)
            if harness.rank() == LOST:
                built.note_failure(CollectiveTimeout("planted"))
    return data.view(4, 64)[:, 0].tolist()


def test_groups_of_hosts_can_be_built_again_after_one_rank_has_noted_a_failure() -> None:
    answers = one_off(4, gather_again_after_a_failure, timeout=90)
    assert answers == [[0.0, 1.0, 2.0, 3.0]] * 4


def exchange_among_the_last_ranks(how: str) -> Failure | None:
    """Ranks 2 and 3 have a process group of their own, in which rank 3 is lost."""
    group = dist.new_group([2, 3])
    if harness.rank() < 2:
        return None
    with harness.catching() as caught:
        if how == "absent" and harness.rank() == 3:
            return None
        control = Control(Group.of(group, TIMEOUT))
        if harness.rank() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        control.exchange(torch.zeros(1), what="an exchange")()
    return (caught or [None])[0]


@pytest.mark.parametrize("how", ["absent", "killed"])
def test_errors_in_a_part_of_the_job_also_give_the_rank_in_the_job(how: str) -> None:
    failure = one_off(4, exchange_among_the_last_ranks, how, lost=[3])[2]
    assert failure is not None
    assert failure.is_a(CollectiveTimeout), failure
    assert "waiting for rank(s) 1 (3 of the job) " in failure.message, failure
    assert "Check the log of rank(s) 1 (3 of the job):" in failure.message, failure
