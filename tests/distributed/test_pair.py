"""`poplar pair` on CPU ranks: figures of every engine, failures, and nothing private."""

from __future__ import annotations

import functools
import json
import os
import time
from typing import Any
from unittest import mock

import pytest
import ranks as harness
import torch
import torchrun
from test_pair_row import check_is_public, pairs

import poplar
from poplar import Plan
from poplar.hardware.model_shapes import llama
from poplar.pair import comparison, measure, speed
from poplar.pair.comparison import Case, Comparison
from poplar.pair.engines import DDP, FSDP2, Poplar
from poplar.pair.ranks import TIMEOUT, Ranks
from poplar.pair.row import DID_NOT_FIT, EVEN, NAMES, PLANNED, CaseResult, PairRow

TINY = llama("tiny", 32, 2, 2, 64, key_value_heads=1, vocabulary=64, sequence=8)
CPU = torch.device("cpu")


def measured_row() -> PairRow:
    """Of one case, with a plan that is found quickly."""
    quick = functools.partial(poplar.tune, stage=1, verify=False)
    with (
        mock.patch.object(poplar, "tune", quick),
        mock.patch.object(measure, "CPU_SIZES", (TINY,)),
        mock.patch.object(measure, "TRAININGS", {"LoRA": 2.5}),
        mock.patch.object(comparison, "MOST_ROUNDS", 1),
        mock.patch.object(comparison, "SAMPLES", 4),
    ):
        return measure.measure(CPU, 0.03, print, emulated="nothing")


def test_row_has_every_engine_and_nothing_private(tmp_path):
    row, other = harness.one_off(2, measured_row)
    (case,) = row.cases
    assert not case.missing, case.missing
    assert set(case.speeds) == set(NAMES)
    assert min(*case.speeds.values(), *case.solo_speeds) > 0
    assert case.over_even == pytest.approx(case.speeds[PLANNED] / case.speeds[EVEN])
    assert sum(map(sum, case.micro_batches)) == case.global_batch == 8
    assert row.cases == other.cases
    row.to_json(tmp_path / "row.json")
    assert PairRow.from_json(tmp_path / "row.json") == row
    check_is_public(row.to_dict())


class ShortOfMemory(DDP):
    """Rank 1 runs out of memory while rank 0 waits for its gradients."""

    largest = 0

    def step(self, batch: Any) -> Any:
        if self.rank == 1 and max(self.sizes) > self.largest:
            raise torch.OutOfMemoryError("at /home/user")
        return super().step(batch)


class HoldsFour(ShortOfMemory):
    largest = 4


class Broken(FSDP2):
    """Rank 0 fails while the engine is built."""

    def distribute(self, model: Any) -> Any:
        if self.rank == 0:
            raise RuntimeError("a message with /home/user")
        return super().distribute(model)


def turns_with_failures() -> tuple[Any, ...]:
    engines = {"ddp": ShortOfMemory, "ddp of four": HoldsFour, "fsdp2": Broken, EVEN: Poplar}
    case = Case(size=TINY, training="full", dtype=torch.float32, device=CPU)
    with mock.patch.object(comparison, "ENGINES", engines):
        compared = Comparison(case, Ranks(), seconds=0.5, report=print)
        plans = dict.fromkeys(engines, Plan.even(2, 32, 16, 1))
        rounds = compared.take_turns(plans)
    return compared.turns, compared.missing, plans, rounds


def test_engine_that_fails_on_one_rank_is_an_entry_and_the_others_are_measured():
    began = time.monotonic()
    for turns, missing, plans, rounds in harness.one_off(2, turns_with_failures):
        assert missing == {"ddp": DID_NOT_FIT, "fsdp2": "failed: RuntimeError"}
        assert set(turns) == {EVEN, "ddp of four"}
        assert len(turns[EVEN]) == rounds
        assert plans["ddp of four"] == Plan.even(2, 32, 4, 1)
        assert plans[EVEN] == Plan.even(2, 32, 16, 1)
    assert time.monotonic() - began < TIMEOUT.total_seconds(), "it waited for a deadline"


def case_that_fails(measured: Any) -> CaseResult:
    """Planning fails, if the plain passes, with this as their only outcome, do not."""
    case = Case(size=TINY, training="full", dtype=torch.float32, device=CPU)
    compared = Comparison(case, Ranks(), seconds=0.5, report=print)
    with (
        mock.patch.object(comparison, "measure_speeds", side_effect=[measured]),
        mock.patch.object(poplar, "tune", side_effect=RuntimeError("planted")),
    ):
        return compared.result()


@pytest.mark.parametrize(
    ("measured", "why"),
    [
        (torch.OutOfMemoryError("none"), "plain passes did not fit"),
        ((), "planning failed: RuntimeError"),
    ],
)
def test_engines_are_not_tried_without_speeds_or_a_plan(measured, why):
    for result in harness.one_off(2, case_that_fails, measured):
        assert result.missing == dict.fromkeys(NAMES, f"not tried: {why}")
        assert not result.speeds
        assert result.of_solo(PLANNED) is None


@pytest.mark.full
def test_command_starts_two_ranks_without_a_gpu(tmp_path):
    words = ["-m", "poplar", "pair", "--device", "cpu", "--minutes", "0.2", "--json"]
    done = torchrun.run([*words, "--output", tmp_path / "row.json"], timeout=600)
    assert done.returncode == 0, done.stderr
    row = PairRow.from_json(tmp_path / "row.json")
    assert json.loads(done.stdout) == row.to_dict()
    assert [(case.model, case.training) for case in row.cases] == [
        (model, training) for training in ("full", "LoRA") for model in ("0.1M", "0.9M")
    ]
    check_is_public(row.to_dict())


@pytest.mark.full
def test_faster_rank_under_quotas_gets_more_samples(tmp_path):
    if os.geteuid():
        pytest.skip("CPU quotas need root")
    output = tmp_path / "row.json"
    words = [pairs.__file__, "--emulate", "2:1", "--minutes", "0.5"]
    done = torchrun.run([*words, "--output", output], timeout=600)
    assert done.returncode == 0, done.stderr
    assert "emulated: CPU quotas 2:1" in done.stdout
    row = PairRow.from_json(output)
    check_is_public(row.to_dict())
    fast, slow = (sum(sum(case.micro_batches[rank]) for case in row.cases) for rank in (0, 1))
    assert fast > slow


def test_best_batch_is_among_those_that_fit():
    def loss_fn(model, batch):
        if len(batch) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model(batch).sum()

    model = torch.nn.Linear(2, 1)
    assert speed._best_batch(model, loss_fn, lambda size: torch.ones(size, 2), 8, 0.01) <= 2


def test_one_rank_is_refused():
    (failure,) = harness.one_off(1, measure.measure, CPU, 1.0, print)
    assert failure.is_a(ValueError)
    assert "compares at least two cards, but this job has one rank" in failure.message
