"""`poplar watch` on jobs whose cause is known: the rank, the cause, the gain and the overhead.

Ranks have CPU quotas of 2:1:1 or 4:2:1, or sleep for each sample in these proportions, which other
programs do not disturb; or one has a slow data set, or a slow link. Each job runs in turns,
with and without being watched. Then it runs with the batches of the verdict, through what the
verdict advises, and the gain that it predicted is compared with the one that is reached.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import torch
import torch.distributed as dist
from emulation import cpu_quotas
from launch import run_ranks
from network import emulated_network
from rows import Column, Kind, Row, Target, at_least, new_parser, report
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import poplar
from poplar.watch.job import run
from poplar.watch.records import read_records
from poplar.watch.verdict import judge

BENCHMARK = "watched_jobs"
QUOTAS = {"2:1:1": (0.8, 0.4, 0.4), "4:2:1": (1.0, 0.5, 0.25)}
"""By cluster, the cores of each rank."""
BATCH, TOKENS, WIDTH, LAYERS = 12, 32, 128, 3
"""Samples per rank and step, and the model: a transformer whose compute grows with the samples."""
INPUT_SECONDS = 0.02
"""Per sample of the slow data set."""
LINK_BITS = 100e6
"""Per second, of the slow link."""
WARM_UP = 5
"""Steps that are not timed."""
OVERHEAD_ROUNDS = 10
"""From so many on, the overhead has a target."""


@dataclass(frozen=True)
class Case:
    """A job, and what is slow in it."""

    engine: str
    slow: str
    """What the verdict should say: `compute` (also for `sleep`), `input pipeline` or `network`."""
    speeds: str | None = None
    """The cluster, if its ranks have unequal speeds, so that a plan gains something."""

    @property
    def ranks(self) -> int:
        """How many ranks it has."""
        return len(QUOTAS[self.speeds]) if self.speeds else 2

    def cluster(self) -> AbstractContextManager[Any]:
        """Where the ranks run."""
        if self.slow == "compute" and self.speeds:
            return cpu_quotas(QUOTAS[self.speeds])
        if self.slow == "network":
            return emulated_network(bits_per_second=LINK_BITS)
        return nullcontext()


CASES = (
    *(
        Case(engine, slow, speeds)
        for slow in ("compute", "sleep")
        for engine in ("ddp", "fsdp2", "deepspeed", "poplar")
        for speeds in QUOTAS
        if slow == "compute" or engine != "deepspeed"
    ),
    *(Case("ddp", slow) for slow in ("input pipeline", "network")),
)
SLEEP_SECONDS = 0.004
"""Per sample of a forward, on a rank that has one core."""


class Samples(Dataset[Tensor]):
    """Random inputs; those of rank 1 may take long."""

    def __init__(self, length: int, seconds: float) -> None:
        self._inputs, self._seconds = torch.randn(length, TOKENS, WIDTH), seconds

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, place: int) -> Tensor:
        if self._seconds:
            time.sleep(self._seconds)
        return self._inputs[place]


class Sleep(nn.Module):
    """Sleeps for each sample of a forward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        """Returns its input."""
        time.sleep(self._seconds * len(x))
        return x


def new_model(case: Case) -> nn.Module:
    """The model, the same on every rank."""
    torch.manual_seed(0)
    quotas = QUOTAS[case.speeds] if case.speeds and case.slow == "sleep" else None
    layers = [
        nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        for _ in range(1 if quotas else LAYERS)
    ]
    slow = [Sleep(SLEEP_SECONDS / quotas[dist.get_rank()])] if quotas else []
    return nn.Sequential(*layers, *slow)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """A mean over samples."""
    return model(batch).square().mean()


def train(case: Case, cluster: Any, batches: Sequence[int] | None, steps: int, path: str) -> None:
    """In a rank: the job with equal batches, or with `batches` through Poplar."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if case.slow == "compute":
        cluster.enter(rank)
    late = case.slow == "input pipeline" and rank == 1
    data = Samples(BATCH * ranks * (steps + WARM_UP), INPUT_SECONDS if late else 0.0)
    stage = {"ddp": 0, "fsdp2": 3, "deepspeed": 2, "poplar": 1}[case.engine]
    plan = poplar.Plan(
        stage=stage,
        global_batch=BATCH * ranks,
        micro_batches=tuple((count,) for count in batches or [BATCH] * ranks),
        shares=(1 / ranks,) * ranks,
    )
    if batches is None and case.engine != "poplar":
        loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))
        step = equal_step(case)
    else:
        loader = DataLoader(data, batch_sampler=poplar.HeteroBatchSampler(len(data), plan))
        step = planned_step(case, plan)
    times = [time.perf_counter()]
    for batch in loader:
        step(batch)
        times.append(time.perf_counter())
    seconds = [after - before for before, after in pairwise(times)]
    if rank == 0:
        Path(path).write_text(json.dumps(median(seconds[WARM_UP:])))


def equal_step(case: Case) -> Any:
    """A step as a script without Poplar has it."""
    engine, model = case.engine, new_model(case)
    if engine == "deepspeed":
        os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "DS_ACCELERATOR": "cpu"}
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        wrapped, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

        def deepspeed_step(batch: Tensor) -> None:
            wrapped.backward(loss_of(wrapped, batch))
            wrapped.step()

        return deepspeed_step
    model = in_engine(engine, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def torch_step(batch: Tensor) -> None:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return torch_step


def in_engine(engine: str, model: nn.Module) -> Any:
    """The model in DDP or FSDP2."""
    if engine == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def planned_step(case: Case, plan: poplar.Plan) -> Any:
    """A step with the plan, through what the verdict advises."""
    engine, model = case.engine, new_model(case)
    if engine in ("poplar", "deepspeed"):
        ours = poplar.HeteroZeroOptimizer(model, torch.optim.AdamW, plan=plan, lr=1e-3)
        return lambda batch: ours.train_step(loss_of, batch)
    if engine == "ddp":
        from poplar.integrations.ddp import UnequalPasses
    else:
        from poplar.integrations.fsdp2 import UnequalPasses
    model = in_engine(engine, model)
    passes = UnequalPasses(model, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(batch: Tensor) -> None:
        for micro_batch in passes(batch):
            passes.backward(loss_of(model, micro_batch))
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(case: Case, rounds: int, steps: int) -> Row:
    """Run a job in turns, and with the batches of the last verdict."""
    plain, watched, predicted, reached, whole = [], [], [], [], []
    with case.cluster() as cluster, ExitStack() as stack:
        for _ in range(rounds):
            plain.append(job_seconds(case, cluster, None, steps))
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            watched.append(job_seconds(case, cluster, None, steps, folder))
            verdict = judge(read_records(folder))
            if verdict is None:
                raise RuntimeError(f"{case}: no steps were recorded")
            if case.speeds:
                predicted.append(verdict.gain)
                planned = job_seconds(case, cluster, verdict.batches, steps)
                equal = mean((plain[-1], watched[-1]))
                whole.append(equal / planned)
                if case.engine == "deepspeed":  # Poplar's engine replaces it
                    equal = job_seconds(case, cluster, [BATCH] * case.ranks, steps)
                reached.append(equal / planned)
    overheads = [b / a - 1 for a, b in zip(plain, watched, strict=True)]
    figures = {
        "step_seconds": median(plain),
        "overhead": median(overheads),
        "overheads": overheads,
        "cause": verdict.cause,
        "waiting_rank": verdict.waiting_rank,
        "waiting_on": list(verdict.waiting_on),
        "waiting_fraction": verdict.waiting_fraction,
        "batches": list(verdict.batches),
        "predicted_gain": median(predicted) if predicted else None,
        "predicted_gains": predicted,
        "reached_gain": median(reached) if reached else None,
        "reached_gains": reached,
        "whole_gain": median(whole) if whole else None,
        "gain_spread": verdict.gain_spread,
    }
    what = {"engine": case.engine, "slow": case.slow, "speeds": case.speeds, "steps": steps}
    return Row.of(BENCHMARK, {**what, "rounds": rounds}, figures)


def job_seconds(
    case: Case, cluster: Any, batches: Any, steps: int, folder: Path | None = None
) -> float:
    """Median seconds of a step of one job, which is watched if there is a folder for records."""
    with tempfile.TemporaryDirectory() as name:
        job, result = Path(name, "job"), Path(name, "seconds")
        job.write_bytes(pickle.dumps((case, cluster, batches, steps, str(result))))
        command = [sys.executable, __file__, "--job", str(job)]
        if folder is None:
            status = subprocess.run(command, check=False).returncode
        else:
            status = run(command, folder, 1000.0, lambda: None)
        if status:
            raise RuntimeError(f"{case}: the job has ended with status {status}")
        return float(json.loads(result.read_text()))


def run_job(path: Path) -> None:
    """In the process of a job: start its ranks."""
    case, cluster, *rest = pickle.loads(path.read_bytes())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    before = cluster.enter if case.slow == "network" else None
    run_ranks(train, case.ranks, case, cluster, *rest, before=before)


def targets(rows: Sequence[Row]) -> Iterator[Target]:
    """That the cause is right, the gain as predicted, and the overhead small."""
    for row in rows:
        case = " ".join(filter(None, (row["engine"], row["slow"], row["speeds"])))
        cause = "compute" if row["slow"] == "sleep" else row["slow"]
        yield Target(case=case, what="cause found", value=float(row["cause"] == cause), wanted=1.0)
        if row["reached_gain"]:
            error = abs(row["predicted_gain"] / row["reached_gain"] - 1)
            yield Target(case=case, what="error of the gain", value=error, wanted=0.1, at_most=True)
        if row["rounds"] >= OVERHEAD_ROUNDS:  # fewer show the noise of the machine
            value = row["overhead"]
            yield Target(case=case, what="overhead", value=value, wanted=0.01, at_most=True)


def spread_of(values: Sequence[float]) -> str:
    """The lowest and the highest, in percent."""
    return f"{min(values):+.1%} to {max(values):+.1%}"


COLUMNS = (
    Column("engine", "engine"),
    Column("slow", "slow"),
    Column("speeds", "speeds"),
    Column("step, ms", lambda row: 1e3 * row["step_seconds"], "{:.1f}"),
    Column("overhead", "overhead", "{:+.1%}"),
    Column("lowest to highest", lambda row: spread_of(row["overheads"])),
    Column("cause", "cause"),
    Column("rank", "waiting_rank"),
    Column("waits for", lambda row: ",".join(map(str, row["waiting_on"]))),
    Column("of its time", "waiting_fraction", "{:.0%}"),
    Column("predicted", "predicted_gain", "{:.2f}x"),
    Column("reached", "reached_gain", "{:.2f}x"),
    Column("with the engine's", "whole_gain", "{:.2f}x"),
)


def main() -> None:
    """Measure, or show saved rows."""
    parser = new_parser(__doc__, rounds=3, quick="one job of few steps")
    parser.add_argument("--engines", nargs="+", choices=sorted({c.engine for c in CASES}))
    parser.add_argument("--slow", nargs="+", choices=sorted({c.slow for c in CASES}))
    parser.add_argument("--speeds", nargs="+", choices=[*QUOTAS])
    parser.add_argument("--steps", type=at_least(1), default=60, help="timed steps of a job")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        run_job(options.job)
        return
    cases = [
        case
        for case in CASES
        if (case.engine != "deepspeed" or find_spec("deepspeed"))
        and (not options.engines or case.engine in options.engines)
        and (not options.slow or case.slow in options.slow)
        and (not options.speeds or case.speeds in options.speeds)
    ]
    rounds, steps = options.rounds, options.steps
    if options.quick:
        cases, rounds, steps = [Case("ddp", "sleep", "2:1:1")], 1, 8
    rows = (measure(case, rounds, steps) for case in cases)
    report(options, rows, Kind(BENCHMARK, COLUMNS, targets, "watched jobs"))


if __name__ == "__main__":
    main()
