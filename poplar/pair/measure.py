"""The standard measurement: for each case, solo speeds, a plan, and the engines in turns.

Every engine is built, timed and closed in each turn, so that each has the whole memory. What fails
in a turn is an entry of the row, and the measurement goes on with a new process group.
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import poplar
from poplar.comm import Group
from poplar.comm.point_to_point import close_when_aborted
from poplar.pair.engines import DDP, FSDP2, Engine, Poplar, autocast
from poplar.pair.llama import (
    CPU_SIZES,
    TRAININGS,
    Llama,
    Size,
    chosen_sizes,
    new_model,
    next_token_loss,
)
from poplar.pair.row import DID_NOT_FIT, EVEN, PLANNED, Card, CaseResult, PairRow
from poplar.pair.speed import Speed, control_group, measure_speeds, sum_of_speeds
from poplar.planner.memory_shortfall import DoesNotFit, NoPlanFits
from poplar.system import devices
from poplar.system.out_of_memory import free_cached_memory, free_failed_pass, is_out_of_memory
from poplar.values.plan import Plan

T = TypeVar("T")

ENGINES: dict[str, type[Engine]] = {PLANNED: Poplar, EVEN: Poplar, "ddp": DDP, "fsdp2": FSDP2}
EVEN_STAGES = {"ddp": 0, "fsdp2": 3}
"""The stage whose memory bounds an engine's equal micro-batches; Poplar's has that of the plan."""
LEARNING_RATE = 1e-4
SAMPLES = 16
"""Of a step, per rank on average."""
WARMUP_STEPS = 3
TURN_STEPS = range(2, 11)
MOST_ROUNDS = 7
SOLO_PART, TUNE_PART = 0.1, 0.35
"""Of a case's seconds: plain passes, before and after the turns; the search for a plan."""
TURN_PART = 0.02
"""Of a case's seconds: the timed steps of a turn."""
TIMEOUT = timedelta(minutes=2)
"""Of collectives."""


class TurnFailed(Exception):
    """On some rank; the same on all ranks. The message is an entry of the row."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a way to train it, on this rank's device."""

    size: Size
    training: str
    dtype: torch.dtype
    device: torch.device

    def new_model(self) -> Llama:
        """A model with the same weights on all ranks."""
        return new_model(self.size, self.training, self.device, self.dtype)

    def new_batch(self, samples: int) -> Tensor:
        """Random tokens, others on each rank."""
        generator = torch.Generator(self.device).manual_seed(dist.get_rank())
        shape = (samples, self.size.context + 1)
        return torch.randint(self.size.vocabulary, shape, device=self.device, generator=generator)


def measure(
    device: torch.device, minutes: float, report: Callable[[str], None], emulated: str = ""
) -> PairRow:
    """The row of the cards in the default process group. Collective.

    Args:
        device: of this rank.
        minutes: for all cases together, about.
        report: receives one line per case and round.
        emulated: what stands for unequal cards, for the row.

    Raises:
        ValueError: there is one rank, or the smallest card holds none of the models.
    """
    if dist.get_world_size() < 2:
        raise ValueError(
            "poplar pair compares at least two cards, but this job has one rank; on a machine with "
            "several cards start it without torchrun, or with torchrun --nproc-per-node 2 -m "
            "poplar pair"
        )
    ends = time.monotonic() + 60.0 * minutes
    ranks = Ranks()
    info = devices.describe(device)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    facts = ranks.gather((info, devices.memory_available(device, local), own_peers(device)))
    infos = [each for each, _, _ in facts]
    dtype = torch.float32
    if device.type == "cuda":
        dtype = torch.bfloat16 if all(each.has_bf16 for each in infos) else torch.float16
    memory = min(each for _, each, _ in facts)
    cases = [
        Case(size=size, training=training, dtype=dtype, device=device)
        for training in TRAININGS
        for size in (CPU_SIZES if device.type == "cpu" else chosen_sizes(training, memory))
    ]
    results = []
    for number, case in enumerate(cases):
        left = ranks.from_first(ends - time.monotonic())
        seconds = max(left, 1.0) / (len(cases) - number)
        report(f"{case.size.name}, {case.training}: {seconds:.0f} s")
        results.append(Comparison(case, ranks, seconds, report).result())
    peers = [each for _, _, each in facts]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else ""
    return PairRow(
        cards=tuple(
            Card(
                name=each.name,
                memory_gib=round(each.total_bytes / 2**30, 1),
                compute_capability=".".join(map(str, each.capability or ())),
                links=each.links,
            )
            for each in infos
        ),
        peer_to_peer=None if None in peers else all(peers),
        hosts=len({each.host for each in infos}),
        emulated=emulated,
        versions=_versions(info.driver, nccl),
        cases=tuple(results),
    )


def own_peers(device: torch.device) -> bool | None:
    """Whether this card can access the memory of all others; None: a CPU, or of other hosts."""
    if device.type == "cpu" or os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        return None
    count = min(dist.get_world_size(), torch.cuda.device_count())
    others = [other for other in range(count) if other != device.index]
    return all(torch.cuda.can_device_access_peer(device.index, other) for other in others)


class Ranks:
    """All ranks: a group on the host, and the engines' process group, which a turn may break."""

    def __init__(self) -> None:
        self.control = control_group()
        self.renew()

    def renew(self) -> None:
        """Make a process group for the next turns. Collective."""
        self.process_group = dist.new_group(timeout=TIMEOUT)
        self._guard = Group.of(self.process_group, TIMEOUT)
        close_when_aborted(self._guard, self.process_group)

    def gather(self, value: T) -> list[T]:
        """The value of every rank. Collective."""
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self.control)
        return values

    def from_first(self, value: T) -> T:
        """The value of rank 0. Collective."""
        return self.gather(value)[0]

    def together(self, work: Callable[[], T]) -> T:
        """What `work` returns on this rank, if it does not raise on any. Collective.

        Raises:
            TurnFailed: it has raised on some rank. Others may have waited for that rank in
                collectives of the process group, which are aborted.
        """
        failed = ""
        try:
            value = work()
        except Exception as error:
            does_not_fit = is_out_of_memory(error) or isinstance(error, DoesNotFit | NoPlanFits)
            failed = DID_NOT_FIT if does_not_fit else f"failed: {type(error).__name__}"
            self._guard.abort(f"rank {dist.get_rank()}: {error}")
            free_failed_pass(error)
        failures = [each for each in self.gather(failed) if each]
        if failures:
            self._guard.abort("another rank failed")
            self.renew()
            # Ranks that waited for one that ran out of memory have failed in another way.
            raise TurnFailed(DID_NOT_FIT if DID_NOT_FIT in failures else failures[0])
        return value


class Comparison:
    """One case; all methods are collective."""

    def __init__(
        self, case: Case, ranks: Ranks, seconds: float, report: Callable[[str], None]
    ) -> None:
        self.case, self.ranks, self.report = case, ranks, report
        self.seconds, self.ends = seconds, time.monotonic() + seconds
        self.rank, self.global_batch = dist.get_rank(), SAMPLES * dist.get_world_size()
        self.turns: dict[str, list[float]] = {}
        """Samples per second by engine."""
        self.missing: dict[str, str] = {}

    def result(self) -> CaseResult:
        """Measure the case. What does not fit or fails is part of the result."""
        case = self.case
        common: dict[str, Any] = {
            "model": case.size.name,
            "training": case.training,
            "dtype": str(case.dtype).removeprefix("torch."),
            "context": case.size.context,
            "global_batch": self.global_batch,
        }
        try:
            before = self.solo()
            plans = self.plans()
        except TurnFailed as failed:
            return CaseResult(**common, speeds={}, missing=dict.fromkeys(ENGINES, str(failed)))
        rounds = self.take_turns(plans)
        try:
            best = max(before, self.solo(), key=sum_of_speeds)
        except TurnFailed:
            best = before
        return CaseResult(
            **common,
            stage=plans[PLANNED].stage,
            micro_batches=plans[PLANNED].micro_batches,
            shares=plans[PLANNED].shares,
            solo_speeds=tuple(speed.samples_per_second for speed in best),
            speeds={name: statistics.median(turns) for name, turns in self.turns.items()},
            missing=self.missing,
            rounds=rounds,
        )

    def solo(self) -> tuple[Speed, ...]:
        """Speed of each rank in plain passes."""
        case = self.case

        def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
            with autocast(case.device, case.dtype):
                return next_token_loss(model, tokens)

        def measured() -> tuple[Speed, ...]:
            return measure_speeds(
                model,
                loss_fn,
                case.new_batch,
                max_batch=2 * SAMPLES,
                seconds=SOLO_PART * self.seconds,
                group=self.ranks.control,
            )

        self.free()
        model = self.ranks.together(case.new_model)
        return self.ranks.together(measured)

    def plans(self) -> dict[str, Plan]:
        """By engine; engines for which none fits are missing."""

        def work() -> tuple[dict[str, Plan], dict[str, str]]:
            tuned = poplar.tune(
                self.case.new_model(),
                next_token_loss,
                self.case.new_batch(SAMPLES),
                global_batch=self.global_batch,
                seconds=TUNE_PART * self.seconds,
                max_norm=None,
                compute_dtype=self.case.dtype,
                process_group=self.ranks.process_group,
                cache=False,
                progress=False,
                lr=LEARNING_RATE,
            )
            plans, missing = {PLANNED: tuned.plan}, {}
            for name in (EVEN, *EVEN_STAGES):
                try:
                    plans[name] = poplar.search(
                        tuned.profile,
                        global_batch=self.global_batch,
                        stages=(EVEN_STAGES.get(name, tuned.plan.stage),),
                        policy="even",
                    )
                except NoPlanFits:
                    missing[name] = DID_NOT_FIT
            return plans, missing

        self.free()
        plans, self.missing = self.ranks.together(work)
        return plans

    def take_turns(self, plans: dict[str, Plan]) -> int:
        """Time the engines, in alternating order, until the time is up; returns the rounds."""
        ends = self.ends - SOLO_PART * self.seconds
        for number in range(MOST_ROUNDS):
            began = time.monotonic()
            for name in list(ENGINES)[:: 1 if number % 2 else -1]:
                if name not in self.missing:
                    try:
                        speed = self.turn(name, plans[name])
                        self.turns.setdefault(name, []).append(speed)
                    except TurnFailed as failed:
                        self.missing[name] = str(failed)
                        self.turns.pop(name, None)
            now = time.monotonic()
            self.report(f"  round {number + 1}: {now - began:.1f} s")
            if self.ranks.from_first(now + (now - began) > ends):
                break
        return number + 1

    def turn(self, name: str, plan: Plan) -> float:
        """Samples per second of an engine, from the first rank's start to the last rank's end."""
        case, ranks = self.case, self.ranks

        def build() -> Engine:
            model = case.new_model()
            return ENGINES[name](
                model,
                next_token_loss,
                plan,
                self.rank,
                learning_rate=LEARNING_RATE,
                dtype=case.dtype,
                blocks=list(model.blocks),
                process_group=ranks.process_group,
            )

        def run(steps: int) -> float:
            began = time.perf_counter()
            for _ in range(steps):
                engine.step(batch)
            devices.synchronize(case.device)
            return time.perf_counter() - began

        self.free()
        engine = ranks.together(build)
        batch = ranks.together(lambda: case.new_batch(max(1, plan.samples(self.rank))))
        ranks.together(lambda: run(WARMUP_STEPS))
        one = max(ranks.gather(ranks.together(lambda: run(1))))
        steps = min(max(int(TURN_PART * self.seconds / one), TURN_STEPS[0]), TURN_STEPS[-1])
        seconds = max(ranks.gather(ranks.together(lambda: run(steps))))
        ranks.together(engine.close)
        return steps * self.global_batch / seconds

    def free(self) -> None:
        """Free what the functions before have left."""
        gc.collect()
        free_cached_memory(self.case.device)


def _versions(driver: str, nccl: str) -> dict[str, str]:
    """Of this package and of what it runs on; what does not exist is left out."""
    found = {
        "poplar": poplar.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "",
        "NCCL": nccl,
        "driver": driver,
    }
    return {name: version for name, version in found.items() if version}


def _commit() -> str:
    """Of the checkout that this package is in; empty for an installed package."""
    if "POPLAR_COMMIT" in os.environ:
        return os.environ["POPLAR_COMMIT"]
    root = Path(poplar.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # git is not installed
        return ""
