"""Global batches divided by the lengths of their samples: the same samples, less padding."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from poplar.data import HeteroBatchSampler
from poplar.data.lengths import deal, passes_of
from poplar.values.plan import Plan
from tests.subset import choose

PLANS = {
    "once per step": Plan.proportional([1, 2, 3], 96, 0, max_micro_batch=4),
    "every pass": Plan.proportional([1, 2, 3], 96, 2, max_micro_batch=8),
    "with a rank without samples": Plan.proportional([1, 0, 3], 48, 3, max_micro_batch=6),
}
sizes = st.lists(st.lists(st.integers(0, 4), max_size=4), min_size=1, max_size=4)


def lognormal(count: int, seed: int = 0) -> list[int]:
    """Lengths as of sentences: the longest of 96 is about 3 times the median."""
    return [max(1, round(random.Random(seed + at).lognormvariate(5.0, 0.5))) for at in range(count)]


def plan_of(passes: Sequence[Sequence[int]], stage: int) -> Plan:
    most = max(map(len, passes))
    if stage >= 2:
        passes = [[0] * (most - len(own)) + list(own) for own in passes]
    total = sum(map(sum, passes))
    shares = (1.0 / len(passes),) * len(passes)
    return Plan(
        stage=stage, global_batch=total, micro_batches=tuple(map(tuple, passes)), shares=shares
    )


def micro_batches(plan: Plan, parts: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """By rank and pass, the samples in `parts`, which has those of each rank in a row."""
    by_pass = passes_of(plan, sum(map(len, parts)))
    return [
        [list(part[start:stop]) for start, stop in pairwise(accumulate(own, initial=0))]
        for part, own in zip(parts, by_pass, strict=True)
    ]


def step_tokens(plan: Plan, parts: Sequence[Sequence[int]], lengths: Sequence[int]) -> float:
    """Padded tokens that the step waits for, over the tokens that an even division would have."""
    padded = [
        [max((lengths[at] for at in own), default=0) * plan.global_batch for own in rank]
        for rank in micro_batches(plan, parts)
    ]
    planned = [
        [size / max(1, plan.samples(r)) for size in own]
        for r, own in enumerate(planned_sizes(plan))
    ]
    if plan.synchronizes_every_pass:
        share = [
            sum(column) / plan.global_batch for column in zip(*planned_sizes(plan), strict=True)
        ]
        steps = zip(*padded, strict=True)
        waited = sum(max(own) * part for own, part in zip(steps, share, strict=True))
    else:
        waited = max(
            sum(p * part for p, part in zip(own, parts_of, strict=True))
            for own, parts_of in zip(padded, planned, strict=True)
        )
    return waited / sum(lengths)


def planned_sizes(plan: Plan) -> list[tuple[int, ...]]:
    return passes_of(plan, plan.global_batch)


# Which rank gets which samples


@given(
    sizes=sizes.filter(lambda s: any(map(sum, s))), stage=st.sampled_from([0, 3]), data=st.data()
)
def test_every_sample_is_in_one_pass_of_the_planned_size(sizes, stage, data):
    plan = plan_of(sizes, stage)
    lengths = data.draw(
        st.lists(st.integers(1, 9), min_size=plan.global_batch, max_size=plan.global_batch)
    )
    parts = deal(plan, lengths)
    assert [len(part) for part in parts] == [plan.samples(r) for r in range(plan.world_size)]
    assert sorted(at for part in parts for at in part) == list(range(plan.global_batch))


def test_passes_are_filled_from_the_longest_samples_down():
    plan = Plan(stage=0, global_batch=6, micro_batches=((1, 2), (3,)), shares=(0.5, 0.5))
    # The longest sample is a third of rank 0 and would be part of all of rank 1. Then rank 1 has
    # no tokens yet, so it gets the next three.
    assert deal(plan, [5, 9, 6, 7, 8, 1]) == [[1, 0, 5], [4, 3, 2]]


def test_a_pass_is_filled_on_all_ranks_before_the_next():
    plan = Plan(stage=2, global_batch=6, micro_batches=((1, 2), (2, 1)), shares=(0.5, 0.5))
    first, second = zip(*micro_batches(plan, deal(plan, [1, 2, 3, 4, 5, 6])), strict=True)
    assert {at for own in first for at in own} == {3, 4, 5}
    assert {at for own in second for at in own} == {0, 1, 2}


@pytest.mark.parametrize("name", PLANS)
def test_a_step_has_less_padding_to_wait_for(name):
    plan = PLANS[name]
    drawn = [
        lognormal(plan.global_batch, 1000 * seed) for seed in range(choose(quick=20, full=200))
    ]
    bounds = list(accumulate(map(plan.samples, range(plan.world_size)), initial=0))
    in_order = [list(range(a, b)) for a, b in pairwise(bounds)]
    before = fmean(step_tokens(plan, in_order, lengths) for lengths in drawn)
    after = fmean(step_tokens(plan, deal(plan, lengths), lengths) for lengths in drawn)
    print(f"{name}: {before:.2f} -> {after:.2f} times the tokens of the samples")
    assert after < 0.75 * before


@pytest.mark.parametrize("seed", range(choose(quick=3, full=20)))
def test_ranks_have_padded_tokens_in_proportion_to_their_samples(seed):
    plan = PLANS["once per step"]
    lengths = lognormal(plan.global_batch, 1000 * seed)
    per_sample = [
        sum(len(own) * max(lengths[at] for at in own) for own in rank) / plan.samples(number)
        for number, rank in enumerate(micro_batches(plan, deal(plan, lengths)))
    ]
    assert max(per_sample) < 1.05 * fmean(per_sample)


# The sampler


def epoch(plan: Plan, length: int, **options) -> list[list[list[int]]]:
    """By step and rank, what is drawn; a rank without samples draws a placeholder."""
    samplers = [HeteroBatchSampler(length, plan, rank=r, **options) for r in range(plan.world_size)]
    return [
        [part if plan.samples(rank) else [] for rank, part in enumerate(parts)]
        for parts in zip(*samplers, strict=True)
    ]


def as_sets(steps: list[list[list[int]]]) -> list[list[int]]:
    return [sorted(index for part in parts for index in part) for parts in steps]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("drop_last", [True, False])
def test_global_batches_have_the_same_samples_with_and_without_lengths(name, drop_last):
    plan = PLANS[name]
    length = 2 * plan.global_batch + 7
    lengths = lognormal(length)
    plain = epoch(plan, length, seed=1, drop_last=drop_last)
    assert as_sets(epoch(plan, length, seed=1, drop_last=drop_last, lengths=lengths)) == as_sets(
        plain
    )


def test_each_rank_draws_what_is_dealt_to_it():
    plan = PLANS["every pass"]
    lengths = torch.tensor(lognormal(plan.global_batch))
    (step,) = epoch(plan, plan.global_batch, shuffle=False, lengths=lengths)
    assert step == deal(plan, lengths.tolist())


@pytest.mark.parametrize("drop_last", [True, False])
def test_grouped_global_batches_are_the_same_for_every_plan_and_of_similar_length(drop_last):
    plans = [Plan.proportional(speeds, 16, 0, 4) for speeds in ([1, 3], [2, 1, 1])]
    lengths = lognormal(16 * 40 + 5)
    options = {"lengths": lengths, "group_by_length": True, "drop_last": drop_last}
    first, second = (as_sets(epoch(plan, len(lengths), **options)) for plan in plans)
    assert first == second
    drawn = [index for step in first for index in step]
    assert len(set(drawn)) == len(drawn) == 16 * 40 + 5 * (not drop_last)

    def spread(steps):
        longest = [max(lengths[at] for at in step) for step in steps[:40]]
        return sum(16 * own for own in longest) / sum(lengths[at] for at in drawn)

    ungrouped = as_sets(epoch(plans[0], len(lengths), lengths=lengths, drop_last=drop_last))
    assert spread(first) < 1.3 < 2.0 < spread(ungrouped)
    means = [fmean(lengths[at] for at in step) for step in first]
    assert means not in (sorted(means), sorted(means, reverse=True))


def test_grouped_epochs_differ_and_resume():
    plan, lengths = Plan.manual("4", stage=0), lognormal(80)
    sampler = HeteroBatchSampler(80, plan, lengths=lengths, group_by_length=True)
    first, second = list(sampler), list(sampler)
    assert first != second
    resumed = HeteroBatchSampler(80, plan, lengths=lengths, group_by_length=True)
    state = {**sampler.state_dict(), "epoch": 1, "step": 3}
    resumed.load_state_dict(state)
    assert list(resumed) == second[3:]
    other = HeteroBatchSampler(80, plan, lengths=[1.0] * 80, group_by_length=True)
    with pytest.raises(ValueError, match="saved with grouped_by_length="):
        other.load_state_dict(state)


def test_a_state_without_groups_does_not_depend_on_lengths():
    plan = Plan.manual("4", stage=0)
    state = HeteroBatchSampler(80, plan).state_dict(steps_done=2)
    HeteroBatchSampler(80, plan, lengths=lognormal(80)).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"lengths": [1, 2]},
            r"the shape \[8\], one number per sample of the dataset, got .*\[2\]",
        ),
        ({"lengths": [1, 2, 3, 0, 5, 6, 7, 8]}, "finite numbers above 0"),
        ({"lengths": [1.0] * 7 + [float("nan")]}, "finite numbers above 0"),
        ({"group_by_length": True}, "needs lengths= and shuffle=True"),
        ({"lengths": [1] * 8, "group_by_length": True, "shuffle": False}, "needs lengths= and"),
    ],
)
def test_wrong_lengths_raise(options, message):
    with pytest.raises(ValueError, match=message):
        HeteroBatchSampler(8, Plan.manual("4", stage=0), **options)
