"""Losses that a stage cannot train: it is not planned, and the reason is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ranks as harness
import torch
from clusters import cluster_of, device
from ranks import Pool
from torch import Tensor, nn

import poplar
from poplar import ClusterProfile, Plan
from poplar.planner.explain import explain
from poplar.planner.search import alternatives, search
from poplar.profiler import batch_sizes
from poplar.profiler.cluster_profiler import Profiler

STAGES = (0, 1, 2, 3)


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)])


def with_penalty(model: nn.Module, x: Tensor) -> Tensor:
    """A second-order gradient, as of a PINN or WGAN-GP."""
    x = x.clone().requires_grad_()
    y = model(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.square().mean() + gradient.square().mean()


def only_plain(model: nn.Module, x: Tensor) -> Tensor:
    """Fails on the engine, whatever the stage."""
    if model._forward_pre_hooks:
        raise KeyError("in the loss")
    return model(x).square().mean()


def options(**changes: Any) -> dict[str, Any]:
    usual = {
        "process_group": harness.group(),
        "units": ["0", "1", "2"],
        "seconds": 0.5,
        "max_batch": 4,
        "cache": False,
        "progress": False,
    }
    return {**usual, **changes}


def profiled(loss: Any, **changes: Any) -> ClusterProfile:
    with mock.patch.object(batch_sizes, "LONGEST_PASS", 100.0):
        return poplar.profile_cluster(layers(), loss, torch.ones(3, 6), **options(**changes))


def test_a_profile_knows_the_stages_that_cannot_train_the_loss(ranks: Pool) -> None:
    first, *others = ranks.run(profiled, with_penalty, ranks=2)
    assert others == [first]
    assert (first.observed_stages, first.failed_stages) == ((0, 1, 2), (3,))
    (note,) = (note for note in first.notes if "cannot train" in note)
    assert note.startswith("stage 3 cannot train this model with this loss: rank 0:")
    assert "use stage 2" in note
    assert ClusterProfile.from_dict(first.to_dict()) == first


def test_the_error_of_the_loss_is_raised_if_no_stage_can_train_it(ranks: Pool) -> None:
    for loss, stages in ((only_plain, STAGES), (with_penalty, (3,))):
        for failure in ranks.run_expecting_errors(profiled, loss, stages=stages, ranks=2):
            assert ("in the loss" if loss is only_plain else "use stage 2") in failure.message


def tuned_twice(folder: str) -> list[Plan]:
    """The second time the profile is in the cache, but no plan for this global batch."""

    def tuned(global_batch: int, **more: Any) -> Plan:
        given = options(cache=folder, max_batch=8, weight=len, **more)
        x = torch.ones(3, 6)
        return poplar.autotune(layers(), with_penalty, x, global_batch=global_batch, **given)

    first = tuned(8)
    with mock.patch.object(Profiler, "measure_devices", side_effect=AssertionError):
        return [first, tuned(6)]


def test_autotune_plans_other_stages(ranks: Pool, tmp_path: Path) -> None:
    for plans in ranks.run(tuned_twice, str(tmp_path), ranks=2):
        assert all(plan.stage < 3 for plan in plans)


def known(*failed: int) -> ClusterProfile:
    notes = tuple(f"stage {stage} cannot train" for stage in failed)
    return replace(cluster_of(device(), device()), failed_stages=failed, notes=notes)


def test_no_plan_of_a_failed_stage_is_searched_for() -> None:
    assert {plan.stage for plan in alternatives(known(3), global_batch=32)} == {0, 1, 2}
    wanted = alternatives(known(3, 1), global_batch=32, stages=STAGES)
    assert {plan.stage for plan in wanted} == {0, 2}
    with pytest.raises(ValueError, match=r"steps of stage 3 failed .* stage 3 cannot train"):
        search(known(3), global_batch=32, stages=(3,))


def test_no_failed_stage_is_suggested() -> None:
    def message(*failed: int) -> str:
        small = device(memory=78 * 10**6)
        cluster = replace(cluster_of(small, small), failed_stages=failed)
        with pytest.raises(poplar.NoPlanFits) as raised:
            search(cluster, global_batch=8, stages=(0,))
        return str(raised.value)

    assert "what would fit: stage 1, or" in message()
    assert "what would fit: stage 3, or" in message(1)


def test_explain_does_not_ask_for_a_failed_stage() -> None:
    cluster = replace(known(3), observed_stages=(0, 1, 2))
    text = str(explain(cluster, search(cluster, global_batch=32)))
    assert "was compared" not in text
