"""`benchmarks/memory.py`: limits that are enforced, the bisection, a trial, and targets."""

from __future__ import annotations

import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import memory
from memory_limits import process_memory
from memory_limits.bisection import largest_that_fits
from memory_limits.clusters import MIB, MemoryCluster
from memory_limits.configurations import EVEN, configuration_of, even_plan
from memory_limits.row import PLANNED, LargestRow, PeakRow, RecomputationRow
from memory_limits.targets import verdicts
from memory_limits.task import GrowingLlama
from memory_limits.trial import Outcome, attempt

from poplar import Plan

TASK = GrowingLlama(blocks_count=3, width=64, heads=2)


@given(largest=st.integers(0, 300), guess=st.integers(1, 300))
def test_bisection_finds_the_largest_size(largest, guess):
    tried = []

    def fits(size):
        tried.append(size)
        return size <= largest

    assert largest_that_fits(fits, guess) == largest
    assert len(tried) == len(set(tried)) <= 20


def test_bisection_stops_within_the_tolerance():
    found = largest_that_fits(lambda size: size <= 100, 90, tolerance=0.1)
    assert 90 <= found <= 100


def test_cluster_has_limits_in_proportion_to_its_name():
    cluster = MemoryCluster.of("8:4:2:2", 800 * MIB)
    assert [limit // MIB for limit in cluster.limits] == [800, 400, 200, 200]
    assert cluster.ideal_ratio == 2.0
    assert MemoryCluster.of("8:1:1:1", 800 * MIB).ideal_ratio == 2.75


@pytest.mark.parametrize("name", ["", "8", "8:0", "8:x", "8:-1"])
def test_command_rejects_a_name_that_is_no_cluster(name, capsys):
    with pytest.raises(SystemExit):
        memory.parse_options(["--clusters", name])
    assert "whole numbers and colons, as 8:4:2:2" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is one of Linux")
def test_allocation_beyond_the_limit_raises():
    large = 1024 * MIB  # more than freed memory of other tests that malloc may have kept
    with process_memory.limited_to(16 * MIB), pytest.raises(RuntimeError, match="allocate memory"):
        torch.empty(large, dtype=torch.uint8)
    torch.empty(large, dtype=torch.uint8)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is one of Linux")
@pytest.mark.parametrize(("limit", "fits"), [(64, True), (1, False)])
def test_model_trains_if_the_limits_allow_it(limit, fits):
    cluster = MemoryCluster.of("1:1", limit * MIB)
    outcome = attempt(cluster, TASK, configuration_of(EVEN, even_plan(cluster)))
    assert outcome.fits == fits
    if fits:
        assert all(0 < peak < limit * MIB for peak in outcome.peaks)
    else:
        assert "rank" in outcome.reason


def row(engine: str, blocks: int) -> LargestRow:
    cluster = MemoryCluster.of("8:4:2:2", 8 * MIB)
    return LargestRow.of(
        cluster=cluster,
        engine=engine,
        task=TASK.with_blocks(blocks),
        plan=Plan.even(4, 4, 1, 3),
        outcomes={blocks: Outcome(fits=True, seconds=1.0, peaks=(MIB,) * 4)},
        reason="",
    )


def test_targets_compare_with_the_best_even_engine():
    absent = LargestRow.absent_engine(MemoryCluster.of("8:4:2:2", 8 * MIB), "DeepSpeed", "none")
    (verdict,) = verdicts([row(PLANNED, 20), row(EVEN, 10), row("FSDP2", 8), absent])
    assert verdict.value == pytest.approx(2.0, rel=0.05)
    assert verdict.met


def test_targets_of_predicted_peaks():
    plan = Plan.even(2, 2, 1, 3)
    rows = [
        PeakRow.of("llama", "even", plan, 1, 0, 104, 100),
        PeakRow.of("llama", "even", plan, 1, 1, 97, 100),
    ]
    error, under = verdicts(rows)
    assert (error.value, error.met) == (pytest.approx(0.04), True)
    assert (under.value, under.met) == (pytest.approx(0.03), False)


def compared(speed_up: float | None) -> RecomputationRow:
    plan = Plan.even(2, 2, 1, 3)
    return RecomputationRow.of(
        cluster=MemoryCluster.of("8:1", 8 * MIB),
        task=TASK,
        global_batch=2,
        plans={"never": ValueError("no plan fits") if speed_up is None else plan, "auto": plan},
        seconds={"auto": 1.0},
        speed_up=speed_up,
        predicted_speed_up=None,
        peaks={"never": (0, 0), "auto": (MIB, MIB)},
    )


@pytest.mark.parametrize(
    ("speed_up", "met"), [(1.2, [True, True]), (1.0, [True, False]), (0.9, [False, False])]
)
def test_targets_of_recomputation(speed_up, met):
    assert [verdict.met for verdict in verdicts([compared(speed_up)])] == met


def test_recomputation_without_which_no_plan_fits_has_no_speed_up():
    assert not list(verdicts([compared(None)]))
