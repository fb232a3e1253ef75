"""`examples/elastic.py` under `torchrun`: hosts are lost and join, and training goes on exactly.

Each "host" is an agent of torchrun with one rank. The reference is plain PyTorch in this process,
on the same global batches.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrun
from subset import choose
from torch.utils.data import default_collate

from poplar import HeteroBatchSampler, Plan

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import elastic

EXAMPLE = Path(elastic.__file__)
GLOBAL_BATCH = 16
SAVE_EVERY = 3
"""So that many random moments are in a save."""
START_SECONDS = 400.0
"""Deadline of a start of all ranks: much longer than it takes on an idle machine."""
RENDEZVOUS = "join_timeout=240,keep_alive_interval=1,keep_alive_max_attempt=10"
"""A host is lost after 10 s without a sign of life, instead of 15 s; on a busy machine less is not
enough."""
Line = dict[str, Any]


class Job:
    """Agents of torchrun on this machine, one rank each; all are killed when the job is closed."""

    def __init__(
        self, folder: Path, *, least: int, hosts: int, steps: int, last_call: int = 2
    ) -> None:
        """Start `hosts` hosts; `last_call` is how many seconds `least` hosts wait for the others.

        Where hosts join it must be longer than the time in which all agents stop their ranks.
        """
        self.folder, self.least, self.most, self.steps = folder, least, hosts, steps
        self.last_call = last_call
        self.checkpoints = folder / "checkpoints"
        self.agents: list[Any] = []
        with socket.socket() as free:
            free.bind(("localhost", 0))
            self.port = free.getsockname()[1]
        for _ in range(hosts):
            self.add_host()

    def add_host(self) -> None:
        """Start one more agent. The first one serves the rendezvous."""
        arguments = [
            f"--nnodes={self.least}:{self.most}",
            "--nproc-per-node=1",
            "--max-restarts=100",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=localhost:{self.port}",
            "--rdzv-id=test",
            f"--rdzv-conf={RENDEZVOUS},last_call_timeout={self.last_call},"
            f"is_host={int(not self.agents)}",
            str(EXAMPLE),
            f"--folder={self.checkpoints}",
            f"--steps={self.steps}",
            f"--save-every={SAVE_EVERY}",
            f"--global-batch={GLOBAL_BATCH}",
            "--tuning-seconds=0.2",
        ]
        output = self.folder / f"host-{len(self.agents)}.txt"
        environment = {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "POPLAR_CACHE": str(self.folder / "cache"),
        }
        self.agents.append(torchrun.start(arguments, output, environment))

    def kill_host(self, number: int) -> None:
        """SIGKILL an agent and its rank, as if the host lost power."""
        agent = self.agents[number]
        os.kill(agent.pid, signal.SIGSTOP)  # so that it does not start the rank again
        for child in children(agent.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        agent.kill()
        agent.join()

    def kill_rank(self, number: int) -> None:
        """SIGKILL the rank of a host whose agent goes on."""
        self._killed = children(self.agents[number].pid)
        for child in self._killed:
            os.kill(child, signal.SIGKILL)

    def wait_for_restart(self) -> None:
        """Wait until agents have started ranks in place of those that were killed."""
        for agent in self.agents:
            self.wait_for(lambda pid=agent.pid: bool({*children(pid)} - {*self._killed}), "restart")

    @property
    def lines(self) -> list[Line]:
        """What was logged so far."""
        path = self.checkpoints / "log.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until something holds.

        Raises:
            AssertionError: it does not hold at the deadline, or the job has ended before.
        """
        deadline = time.monotonic() + START_SECONDS
        while not condition():
            if time.monotonic() > deadline or not any(agent.is_alive() for agent in self.agents):
                raise AssertionError(f"no {what}, after {len(self.lines)} steps\n{self.output()}")
            time.sleep(0.01)

    def wait_for_steps(self, world_size: int, count: int = 1) -> None:
        """Wait until so many further steps were logged, the last one by so many ranks."""
        before = len(self.lines)

        def logged() -> bool:
            lines = self.lines
            return len(lines) >= before + count and lines[-1]["world_size"] == world_size

        self.wait_for(logged, f"{count} steps of {world_size} ranks")

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return any(self.checkpoints.glob("step-*.incomplete"))

    def output(self) -> str:
        """The last lines that each host has printed."""
        texts = (path.read_text()[-3000:] for path in sorted(self.folder.glob("host-*.txt")))
        return "\n".join(texts)

    def close(self) -> None:
        for number, agent in enumerate(self.agents):
            if agent.is_alive():
                self.kill_host(number)
            for memory in Path("/dev/shm").glob(f"poplar-*-{agent.pid}-*"):
                shutil.rmtree(memory)


def children(pid: int) -> list[int]:
    """The processes whose parent is `pid`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.parent.name))
    return found


@contextlib.contextmanager
def running(folder: Path, **options: int) -> Iterator[Job]:
    job = Job(folder, **options)
    try:
        yield job
    finally:
        job.close()


def undisturbed(steps: int) -> list[Line]:
    """Losses and samples of so many steps, by plain PyTorch in one process."""
    dataset, model = elastic.Numbers(), elastic.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=elastic.LEARNING_RATE)
    scheduler = elastic.build_scheduler(optimizer)
    plan = Plan.even(1, GLOBAL_BATCH, GLOBAL_BATCH, 0)
    sampler = HeteroBatchSampler(len(dataset), plan, seed=elastic.SEED, rank=0)
    lines: list[Line] = []
    while len(lines) < steps:
        for indices in sampler:
            loss = elastic.loss_fn(model, default_collate([dataset[i] for i in indices]))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            lines.append({"loss": loss.item(), "samples": elastic.digest(indices)})
    return lines[:steps]


def check(lines: list[Line], restarts: int) -> None:
    """Every step is that of an undisturbed run, also the one that a restart may do again."""
    last = max(line["step"] for line in lines)
    assert len(lines) <= last + restarts  # training has gone on from memory
    assert {line["step"] for line in lines} == set(range(1, last + 1))
    expected = undisturbed(last)
    for line in lines:
        reference = expected[line["step"] - 1]
        assert line["samples"] == reference["samples"], line
        assert line["loss"] == pytest.approx(reference["loss"], rel=1e-5, abs=1e-6), line


@pytest.mark.full
def test_job_goes_on_without_a_host_that_was_killed(tmp_path: Path) -> None:
    steps = 80  # more than an epoch
    with running(tmp_path, least=2, hosts=3, steps=steps, last_call=10) as job:
        job.wait_for_steps(world_size=3, count=random.Random(0).randrange(10, 30))
        job.kill_host(2)
        job.wait_for(lambda: not any(agent.is_alive() for agent in job.agents), "end of the job")
        assert [agent.exitcode for agent in job.agents] == [0, 0, -signal.SIGKILL], job.output()
        assert job.lines[-1]["step"] == steps
        assert job.lines[-1]["world_size"] == 2
        check(job.lines, restarts=1)


@pytest.mark.full
def test_hosts_are_killed_and_join_at_random_moments(tmp_path: Path) -> None:
    moments = random.Random(1)
    with running(tmp_path, least=3, hosts=4, steps=10**6, last_call=10) as job:
        for kill in range(10):
            job.wait_for_steps(world_size=4)
            time.sleep(moments.uniform(0.0, 1.0))
            if kill % 2:
                job.wait_for(job.is_saving, "save")
            alive = [n for n, agent in enumerate(job.agents) if agent.is_alive()]
            job.kill_host(moments.choice(alive[1:]))  # the first one serves the rendezvous
            job.wait_for_steps(world_size=3)
            job.add_host()
        job.wait_for_steps(world_size=4, count=10)
    check(job.lines, restarts=20)


def test_rank_that_was_killed_is_started_again(tmp_path: Path) -> None:
    killed = choose(quick=(1,), full=(0, 1))
    with running(tmp_path, least=2, hosts=2, steps=10**6) as job:
        for number in killed:
            job.wait_for_steps(world_size=2, count=10)
            job.kill_rank(number)
            job.wait_for_restart()
        job.wait_for_steps(world_size=2, count=10)
    check(job.lines, restarts=len(killed))
