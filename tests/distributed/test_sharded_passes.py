"""Passes on the engine give the points of plain passes, for models and batches that fit nowhere."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import models
import pytest
import ranks as harness
import torch
from models import ModelSpec
from ranks import Pool
from subset import choose
from torch import Tensor, nn

from poplar.comm import Group
from poplar.profiler import batch_sizes
from poplar.profiler.batch_curves import measure_curves
from poplar.profiler.engine_passes import sharded_passes
from poplar.profiler.job import Job
from poplar.profiler.memory_budget import MEMORY_RESERVE, MemoryBudget
from poplar.profiler.model_profile import pass_memory
from poplar.profiler.session import Session

MODELS = {
    "transformer": ModelSpec(blocks=3, width=64, hidden=200),
    "frozen": ModelSpec(blocks=3, frozen=True),
    "tied and recomputed": ModelSpec(blocks=4, tied=True, checkpointing=True),
    "one block used several times": ModelSpec(kind="albert"),
    "unused parameters": ModelSpec(blocks=2, unused=True),
}


DEEP = ModelSpec(blocks=12, width=64, hidden=200)
"""Two of its units are a small part of it."""


def session_on(spec: ModelSpec, **options: Any) -> Session:
    job = Job(
        model=models.build(spec),
        loss_fn=options.get("loss_fn", models.mean_over_samples),
        example=models.data(3, seed=1),
        max_batch=options.get("max_batch", 8),
        stages=(0,),
        seconds=1.0,
        max_norm=None,
        compute_dtype=options.get("compute_dtype", "auto"),
        process_group=harness.group(),
    )
    return Session(job, Group.of(job.process_group, job.timeout))


def both_ways(spec: ModelSpec, sizes: list[list[int]], options: dict[str, Any]) -> Any:
    """Activation bytes of this rank's sizes, plain and on the engine."""
    session = session_on(spec, **options)
    own = sizes[harness.rank()]
    before = {name: value.clone() for name, value in session.job.model.state_dict().items()}
    with session.measuring():
        with session.as_in_training():
            plain = [session.passes().first(size) for size in own]
        with sharded_passes(session) as passes:
            passes.together(passes.check)
            sharded = passes.together(lambda: [passes.first(size) for size in own])
    after = session.job.model.state_dict()
    changed = [name for name, value in after.items() if not value.equal(before[name])]
    return [p.activation_bytes for p in plain], [p.activation_bytes for p in sharded], changed


@pytest.mark.parametrize("name", choose(quick=list(MODELS)[:3], full=list(MODELS)))
def test_activations_are_those_of_plain_passes(ranks: Pool, name: str) -> None:
    """Each rank measures its own sizes, and some measure none."""
    sizes = [[1, 5], [2], [], [3, 1, 4]]
    for plain, sharded, changed in ranks.run(both_ways, MODELS[name], sizes, {}):
        assert changed == []
        assert sharded == pytest.approx(plain, rel=0.03)


def test_activations_in_a_lower_precision_are_those_of_plain_passes(ranks: Pool) -> None:
    options = {"compute_dtype": torch.bfloat16}
    for plain, sharded, changed in ranks.run(
        both_ways, MODELS["transformer"], [[2], [5]], options, ranks=2
    ):
        assert changed == []
        assert sharded == pytest.approx(plain, rel=0.03)


def curves_with(
    held: float, room: list[float], *, failing: tuple[int, int] | None = None, max_batch: int = 32
) -> tuple[list[list[int]], list[int], list[int]]:
    """Batches that were measured, by rank; the largest plain ones; and all that this rank tried.

    Args:
        held: of each rank's room, in bytes of all parameters.
        room: by rank, memory in addition to that, in bytes of a sample's activations.
        failing: a rank, and the batch from which its forward raises out of memory.
    """
    tried: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        size = len(batch["tokens"])
        tried.append(size)
        value = models.mean_over_samples(model, batch)
        if failing is not None and harness.rank() == failing[0] and size >= failing[1]:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return value

    session = session_on(DEEP, loss_fn=loss, max_batch=max_batch)
    whole = 4 * sum(p.numel() for p in session.job.model.parameters())
    with session.as_in_training():
        one, two = (session.passes().first(size).activation_bytes for size in (1, 2))
    limits = [held * whole + one + (two - one) * more for more in room]
    budgets = [MemoryBudget(round(limit / (1 - MEMORY_RESERVE)), 0) for limit in limits]
    session.limit_passes(pass_memory(session, session.exchange(budgets)[0]))
    tried.clear()
    with session.measuring(), mock.patch.object(batch_sizes, "LONGEST_PASS", 100.0):
        curves, _ = measure_curves(session, lambda text: None)
    batches = [[point.batch for point in curve.points] for curve in curves]
    return batches, [curve.largest_unsharded for curve in curves], tried


def test_batches_that_fit_only_beside_a_shard_are_measured(ranks: Pool) -> None:
    for batches, unsharded, tried in ranks.run(curves_with, 1.0, [3.0, 40.0], ranks=2):
        assert unsharded[0] <= 4
        assert batches[0][-1] > 1.5 * unsharded[0]
        assert batches[1][-1] == 32
        assert max(tried) <= 32


def reports_of_slow_passes(seconds: float) -> tuple[list[str], list[int], int]:
    """What was measured of a model with much memory; batches of rank 0, and the largest plain one.

    Args:
        seconds: that a pass of one sample takes.
    """

    def loss(model: nn.Module, batch: Any) -> Tensor:
        time.sleep(seconds * len(batch["tokens"]))
        return models.mean_over_samples(model, batch)

    session = session_on(DEEP, loss_fn=loss, max_batch=64)
    session.limit_passes(pass_memory(session, [MemoryBudget(2**40, 0)] * session.group.size))
    reports: list[str] = []
    with session.measuring():
        curves, _ = measure_curves(session, reports.append)
    return reports, [point.batch for point in curves[0].points], curves[0].largest_unsharded


def test_no_larger_batches_are_tried_beside_a_shard_if_time_ended_the_plain_ones(ranks: Pool):
    for reports, batches, largest in ranks.run(reports_of_slow_passes, 0.02, ranks=2):
        assert largest == batches[-1] < 64
        assert not any("sharded" in report for report in reports)


def curves_of_a_model_elsewhere() -> tuple[list[str], list[int]]:
    """What was measured, and the largest plain batches, as if ranks had a GPU beside the model."""
    session = session_on(ModelSpec(blocks=2), max_batch=1)
    assert session.model_is_on_device
    session.model_is_on_device = False
    session.limit_passes(pass_memory(session, [MemoryBudget(2**40, 0)] * session.group.size))
    reports: list[str] = []
    with session.measuring():
        curves, _ = measure_curves(session, reports.append)
    return reports, [curve.largest_unsharded for curve in curves]


def test_a_model_in_host_memory_is_measured_on_the_engine_alone(ranks: Pool) -> None:
    for reports, unsharded in ranks.run(curves_of_a_model_elsewhere, ranks=2):
        assert "a first pass" not in reports
        assert "passes with sharded parameters" in reports
        assert unsharded == [0, 0]


def test_model_larger_than_a_rank_is_measured_with_five_sizes_at_most(ranks: Pool) -> None:
    answers = ranks.run(curves_with, 0.5, [1.0, 6.0, 30.0, 1.0])
    for batches, unsharded, _ in answers:
        assert batches == answers[0][0]
        assert unsharded == [0] * 4
        assert all(own[0] == 1 and len(own) <= 5 for own in batches)
    for own, (_, _, tried) in zip(answers[0][0], answers, strict=True):
        assert len(set(tried)) <= 5
        assert own[-1] == max(set(tried) & set(own))


@pytest.mark.parametrize("held", [0.5, 1.5])
def test_out_of_memory_in_a_probe_is_caught_on_all_ranks(ranks: Pool, held: float) -> None:
    failing = (1, 6)
    for batches, _, _ in ranks.run(curves_with, held, [1.0, 20.0, 20.0], failing=failing, ranks=3):
        assert 1 < batches[1][-1] < failing[1]
        assert batches[2][-1] > failing[1]
