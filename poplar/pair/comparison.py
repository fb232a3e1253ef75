"""One model, trained in one way: solo speeds, a plan, and the engines in turns.

Every engine is built, timed and closed in each turn, so that each has the whole memory. What fails
in a turn is an entry of the row, and the measurement goes on with a new process group.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import poplar
from poplar.hardware.model_shapes import Architecture
from poplar.pair.engines import DDP, FSDP2, Engine, Poplar, autocast
from poplar.pair.llama import Llama, new_model, next_token_loss
from poplar.pair.ranks import Ranks, TurnFailed
from poplar.pair.row import DID_NOT_FIT, EVEN, NOT_TRIED, PLANNED, CaseResult
from poplar.pair.speed import Speed, measure_speeds, sum_of_speeds
from poplar.planner.memory_shortfall import NoPlanFits
from poplar.system import devices
from poplar.system.out_of_memory import free_cached_memory
from poplar.values.plan import Plan

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


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a way to train it, on this rank's device."""

    size: Architecture
    training: str
    dtype: torch.dtype
    device: torch.device

    def new_model(self) -> Llama:
        """A model with the same weights on all ranks."""
        return new_model(self.size, self.training, self.device, self.dtype)

    def new_batch(self, samples: int) -> Tensor:
        """Random tokens, others on each rank."""
        generator = torch.Generator(self.device).manual_seed(dist.get_rank())
        shape = (samples, self.size.sequence + 1)
        return torch.randint(self.size.vocabulary, shape, device=self.device, generator=generator)


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
            "context": case.size.sequence,
            "global_batch": self.global_batch,
        }
        doing = "plain passes"
        try:
            before = self.solo()
            doing = "planning"
            plans = self.plans()
        except TurnFailed as failed:
            why = f"{NOT_TRIED}{doing} {failed}"
            return CaseResult(**common, speeds={}, missing=dict.fromkeys(ENGINES, why))
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

        model = self.new_model()
        return self.ranks.together(measured)

    def plans(self) -> dict[str, Plan]:
        """By engine. Engines that are not Poplar may hold more or less than its profile says."""

        def work() -> dict[str, Plan]:
            tuned = poplar.tune(
                model,
                next_token_loss,
                self.case.new_batch(SAMPLES),
                global_batch=self.global_batch,
                seconds=TUNE_PART * self.seconds,
                max_norm=None,
                compute_dtype=self.case.dtype,
                process_group=self.ranks.process_group,
                cache=False,
                progress=False,
                leave_out="never",  # the sum of speeds is that of all ranks
                lr=LEARNING_RATE,
            )
            plans = {PLANNED: tuned.plan}
            for name in (EVEN, *EVEN_STAGES):
                stage = EVEN_STAGES.get(name, tuned.plan.stage)
                try:
                    plans[name] = poplar.search(
                        tuned.profile,
                        global_batch=self.global_batch,
                        stages=(stage,),
                        policy="even",
                    )
                except NoPlanFits:
                    plans[name] = self.even(1, stage)
            return plans

        model = self.new_model()
        return self.ranks.together(work)

    def even(self, micro_batch: int, stage: int) -> Plan:
        """Equal batches and shares."""
        return Plan.even(dist.get_world_size(), self.global_batch, micro_batch, stage)

    def take_turns(self, plans: dict[str, Plan]) -> int:
        """Time the engines, in alternating order, until the time is up; returns the rounds."""
        ends = self.ends - SOLO_PART * self.seconds
        for number in range(MOST_ROUNDS):
            began = time.monotonic()
            for name in list(ENGINES)[:: 1 if number % 2 else -1]:
                if name not in self.missing:
                    self.add_turn(name, plans)
            now = time.monotonic()
            self.report(f"  round {number + 1}: {now - began:.1f} s")
            if self.ranks.from_first(now + (now - began) > ends):
                break
        return number + 1

    def add_turn(self, name: str, plans: dict[str, Plan]) -> None:
        """Time an engine. If it runs out of memory, smaller equal micro-batches take over."""
        try:
            self.turns.setdefault(name, []).append(self.turn(name, plans[name]))
        except TurnFailed as failed:
            del self.turns[name]
            plan = plans[name]
            largest = max(map(max, plan.micro_batches))
            if name == PLANNED or str(failed) != DID_NOT_FIT or largest == 1:
                self.missing[name] = str(failed)
                return
            plans[name] = self.even(largest // 2, plan.stage)
        else:
            return
        self.add_turn(name, plans)

    def turn(self, name: str, plan: Plan) -> float:
        """Samples per second of an engine, from the first rank's start to the last rank's end."""
        case, ranks = self.case, self.ranks

        def build() -> Engine:
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

        model = self.new_model()
        engine = ranks.together(build)
        batch = ranks.together(lambda: case.new_batch(max(1, plan.samples(self.rank))))
        ranks.together(lambda: run(WARMUP_STEPS))
        one = max(ranks.gather(ranks.together(lambda: run(1))))
        steps = min(max(int(TURN_PART * self.seconds / one), TURN_STEPS[0]), TURN_STEPS[-1])
        seconds = max(ranks.gather(ranks.together(lambda: run(steps))))
        ranks.together(engine.close)
        return steps * self.global_batch / seconds

    def new_model(self) -> Llama:
        """The model of the case, in the memory that what came before has left."""
        gc.collect()
        free_cached_memory(self.case.device)
        return self.ranks.together(self.case.new_model)
