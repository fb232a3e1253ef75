"""Ranks that are killed at random moments: steps lost, and seconds until training has gone on.

An agent of torchrun starts two ranks on this machine. One of them gets SIGKILL at a random moment,
again and again; the agent starts both again, and they load the newest step from memory, or the
last checkpoint from disk. With spares, each rank plays a host of its own, whose memory is erased
when its rank is killed. Losses of all steps are compared with those of a job that nothing disturbs.
Ranks are forks of the agent, so a start has no imports of torch, which take as long in each case.

    python benchmarks/elastic.py --kills 3
    python benchmarks/elastic.py --stages 0 3 --output rows.jsonl
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from rows import Column, Kind, Row, at_least, new_parser, report
from torch import nn
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import poplar
from poplar.elastic import MemoryCheckpoints

BENCHMARK = "elastic"
LAYERS, TOKENS, BATCH = 2, 64, 16
DISK_EVERY = 20
"""Steps from one checkpoint on disk to the next."""
LONGEST_SECONDS = 600.0
"""Deadline of a restart, and of all steps of the job that nothing disturbs."""
COLUMNS = (
    Column("stage", "stage"),
    Column("goes on from", "source"),
    Column("kills", "kills"),
    Column("steps lost", "steps_lost"),
    Column("redone, mean", "redone_mean", "{:.1f}"),
    Column("most", "redone_most"),
    Column("loss differs by", "largest_difference", "{:.1e}"),
    Column("stall s, p50", "stall_seconds_p50", "{:.2f}"),
    Column("p20", "stall_seconds_p20", "{:.2f}"),
    Column("p80", "stall_seconds_p80", "{:.2f}"),
    Column("step ms", lambda row: row["step_seconds"] * 1e3, "{:.0f}"),
    Column("save ms", lambda row: row["save_seconds"] * 1e3, "{:.1f}"),
    Column("save %", lambda row: row["save_fraction"] * 100, "{:.1f}"),
)


@dataclass(frozen=True)
class Case:
    """One job."""

    stage: int
    source: str
    """What ranks load after a restart: "memory", "spares" or "disk"; "nothing": no kills."""
    width: int
    """Of the model."""


class Job:
    """A job whose log and whose ranks this process can see."""

    def __init__(self, case: Case, steps: int) -> None:
        self.case = case
        self.folder = Path(tempfile.mkdtemp(prefix="poplar-elastic-"))
        self.memory = Path(tempfile.mkdtemp(prefix="poplar-elastic-", dir="/dev/shm"))
        arguments = case, steps, self.folder, self.memory
        self.agent = multiprocessing.get_context("fork").Process(target=agent, args=arguments)
        self.agent.start()

    def close(self) -> None:
        """End the agent, which ends its ranks, and remove all files."""
        self.agent.terminate()
        self.agent.join()
        shutil.rmtree(self.folder)
        shutil.rmtree(self.memory)

    def lines(self, name: str = "log") -> list[dict[str, Any]]:
        """By step, also those that were done again, what rank 0 has logged."""
        path = self.folder / f"{name}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait_for(self, start: int, step: int) -> list[dict[str, Any]]:
        """The log, once the ranks of this start or a later one have done a step."""
        deadline = time.monotonic() + LONGEST_SECONDS
        while time.monotonic() < deadline and self.agent.is_alive():
            lines = self.lines()
            if lines and lines[-1]["start"] >= start and lines[-1]["step"] >= step:
                return lines
            time.sleep(0.005)
        if (lines := self.lines()) and lines[-1]["step"] >= step:  # the job has ended
            return lines
        raise SystemExit(f"{self.case}: no step {step} after start {start}: {lines[-3:]}")

    def kill(self, rank: int, start: int) -> None:
        """SIGKILL a rank of this start, and erase the memory of its host if it plays one."""
        os.kill(int((self.folder / f"{start}-{rank}.pid").read_text()), signal.SIGKILL)
        if self.case.source == "spares":
            shutil.rmtree(self.memory / str(rank))


@contextmanager
def running(case: Case, steps: int) -> Iterator[Job]:
    """A job that is closed afterwards."""
    job = Job(case, steps)
    try:
        yield job
    finally:
        job.close()


def agent(case: Case, steps: int, folder: Path, memory: Path) -> None:
    """In a process of its own: what `torchrun --nproc-per-node 2 --max-restarts 1000` does."""
    os.environ |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        max_restarts=1000,
        run_id=BENCHMARK,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        start_method="fork",
    )
    with suppress(SignalException):  # the job is closed
        elastic_launch(config, train)(case, steps, str(folder), str(memory))


def train(case: Case, steps: int, folder: str, memory_folder: str) -> None:
    """In a rank."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the fork has the agent's handler
    torch.set_num_threads(1)
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    Path(folder, f"{start}-{rank}.pid").write_text(str(os.getpid()))
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(case.width, 4, 4 * case.width, dropout=0.1, batch_first=True)
        for _ in range(LAYERS)
    ]
    plan = poplar.Plan(
        stage=case.stage, global_batch=BATCH, micro_batches=((6,), (10,)), shares=(0.6, 0.4)
    )
    optimizer = poplar.HeteroZeroOptimizer(
        nn.Sequential(*layers), torch.optim.AdamW, plan=plan, lr=1e-4
    )
    torch.manual_seed(rank)  # of dropout
    saver: Any = None
    if case.source == "disk":
        saver = poplar.CheckpointManager(Path(folder, "checkpoints"), optimizer, keep=1)
    elif case.source != "nothing":
        spares = case.source == "spares"
        own = Path(memory_folder, str(rank if spares else 0))
        saver = MemoryCheckpoints(optimizer, spare_shards=int(spares), folder=own)
    done = (saver.load_latest() or 0) if saver else 0
    for step in range(done + 1, steps + 1):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(BATCH, TOKENS, case.width, generator=generator)
        began = time.monotonic()
        result = optimizer.train_step(loss_of, batch[:6] if rank == 0 else batch[6:])
        loss, ended = float(result.loss), time.monotonic()
        line = {"start": start, "step": step, "loss": loss, "time": ended, "step_s": ended - began}
        if rank == 0:
            append(Path(folder, "log.jsonl"), line)
        if saver is not None and (case.source != "disk" or step % DISK_EVERY == 0):
            began = time.monotonic()
            saver.save(step)
            append(Path(folder, "saves.jsonl"), {"save_s": time.monotonic() - began})


def append(path: Path, line: dict[str, Any]) -> None:
    """Append one line, whole or not at all."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A mean over samples."""
    return (model(batch) - batch.roll(1, 1)).square().mean()


@dataclass(frozen=True)
class Killed:
    """What a job has shown whose ranks were killed."""

    case: Case
    lines: list[dict[str, Any]]
    save_seconds: float
    stalls: list[float]
    redone: list[int]


def kill_ranks(case: Case, kills: int) -> Killed:
    """Kill ranks of a job at random moments."""
    draw = random.Random(case.stage)
    stalls, redone, start = [], [], 0
    with running(case, 10**6) as job:
        lines = job.wait_for(0, 5)
        for _ in range(kills):
            lines = job.wait_for(start, lines[-1]["step"] + draw.randrange(2, 6))
            time.sleep(draw.uniform(0.0, 2 * lines[-1]["step_s"]))
            killed = time.monotonic()
            job.kill(draw.randrange(2), start)
            before = [line for line in job.lines() if line["time"] <= killed][-1]["step"]
            start += 1
            lines = job.wait_for(start, before + 1)
            again = [line for line in lines if line["start"] == start]
            redone.append(before + 1 - again[0]["step"])
            stalls.append(next(line["time"] for line in again if line["step"] > before) - killed)
        lines = job.wait_for(start, max(lines[-1]["step"] + 3, DISK_EVERY + 1))  # after a save
        save_seconds = median(line["save_s"] for line in job.lines("saves"))
    return Killed(case, lines, save_seconds, stalls, redone)


def row_of(killed: Killed, undisturbed: Sequence[float]) -> Row:
    """Compare the losses of a job with those of one without kills."""
    case, lines, redone = killed.case, killed.lines, killed.redone
    last = lines[-1]["step"]
    differences = [abs(line["loss"] - undisturbed[line["step"] - 1]) for line in lines]
    ordered = sorted(killed.stalls)
    step_seconds = median(line["step_s"] for line in lines)
    every = DISK_EVERY if case.source == "disk" else 1
    return Row.of(
        BENCHMARK,
        {**asdict(case), "saved_every": every, "parameters": 12 * LAYERS * case.width**2},
        {
            "kills": len(redone),
            "steps_lost": last - len({line["step"] for line in lines}),
            "redone_mean": mean(redone),
            "redone_most": max(redone),
            "largest_difference": max(differences),
            "stall_seconds_p20": ordered[len(ordered) // 5],
            "stall_seconds_p50": median(ordered),
            "stall_seconds_p80": ordered[len(ordered) * 4 // 5],
            "step_seconds": step_seconds,
            "save_seconds": killed.save_seconds,
            "save_fraction": killed.save_seconds / step_seconds / every,
        },
    )


def main() -> None:
    """Measure all cases, print a table, append rows."""
    options = parse_options()
    report(options, measure(options), Kind(BENCHMARK, COLUMNS))


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """One row per stage and source."""
    for stage in options.stages:
        cases = [Case(stage, source, options.width) for source in options.sources]
        killed = [kill_ranks(case, options.kills) for case in cases]
        last = max(one.lines[-1]["step"] for one in killed)
        with running(Case(stage, "nothing", options.width), last) as job:
            undisturbed = [line["loss"] for line in job.wait_for(0, last)]
        yield from (row_of(one, undisturbed) for one in killed)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--kills", type=at_least(1), default=20, help="of each job")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 3], choices=range(4))
    parser.add_argument("--width", type=at_least(64), default=256, help="of the model")
    sources = ["memory", "spares", "disk"]
    parser.add_argument("--sources", nargs="+", default=sources, choices=sources)
    return parser.parse_args()


if __name__ == "__main__":
    main()
