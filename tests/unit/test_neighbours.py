"""Plans similar to a given one: samples moved between ranks, or another number of passes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from poplar import Plan

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from neighbours import moved, recut


@pytest.mark.parametrize("stage", [0, 1])
def test_samples_move_from_the_longest_to_the_shortest_pass(stage):
    plan = Plan(stage=stage, global_batch=20, micro_batches=((3, 5), (4, 2, 6)), shares=(0.5, 0.5))
    assert moved(plan, 0, 1).micro_batches == ((3, 4), (4, 3, 6))
    assert moved(plan, 1, 0, 2).micro_batches == ((5, 5), (4, 2, 4))


@pytest.mark.parametrize("stage", [2, 3])
def test_both_ranks_change_in_one_pass_at_stages_2_and_3(stage):
    plan = Plan(stage=stage, global_batch=20, micro_batches=((3, 5), (8, 4)), shares=(0.5, 0.5))
    assert moved(plan, 0, 1).micro_batches == ((3, 4), (8, 5))
    assert moved(plan, 1, 0, 2).micro_batches == ((5, 5), (6, 4))


def test_stage_and_shares_stay_and_the_prediction_is_dropped():
    plan = Plan(
        stage=1,
        global_batch=8,
        micro_batches=((5,), (3,)),
        shares=(0.25, 0.75),
        prediction={"step_seconds": 1.0},
    )
    near = moved(plan, 0, 1)
    assert (near.stage, near.global_batch, near.shares) == (1, 8, (0.25, 0.75))
    assert near.prediction is None


def test_a_rank_may_give_its_last_sample_but_no_more():
    plan = Plan.manual((1, 7), stage=0)
    assert moved(plan, 0, 1).micro_batches == ((0,), (8,))
    assert moved(plan, 0, 1, 2) is None


def test_a_rank_without_passes_neither_gives_nor_receives():
    plan = Plan(stage=0, global_batch=8, micro_batches=((8,), ()), shares=(0.5, 0.5))
    assert moved(plan, 0, 1) is None
    assert moved(plan, 1, 0) is None


def test_samples_are_split_into_passes_of_nearly_equal_size():
    plan = Plan(stage=0, global_batch=20, micro_batches=((3, 5), (4, 2, 6)), shares=(0.5, 0.5))
    assert recut(plan, [1], 5).micro_batches == ((3, 5), (2, 2, 2, 3, 3))
    assert recut(plan, [0, 1], 1).micro_batches == ((8,), (12,))
