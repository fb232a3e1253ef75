"""Batches that do not fit the plan: the error names a rank whose batch is too small."""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import product

import pytest

from poplar import Plan
from poplar.zero.agreement import StepSizes
from poplar.zero.micro_batches import BatchSplitter


def check(plan: Plan, samples: tuple[int, ...]) -> None:
    ranks = range(len(samples))
    same = tuple(0 for _ in ranks)
    sizes = StepSizes(samples, float(sum(samples)), same, same, waited=0.0, has_error=False)
    BatchSplitter(plan, synchronizes_every_pass=False)._check_sizes(sizes, ranks)


def test_the_rank_with_too_few_samples_is_named() -> None:
    """The others' part of a short batch of 7 samples would be 5."""
    with pytest.raises(ValueError, match=r"rank 1: .* has 1 samples, but .* gives this rank 2;"):
        check(Plan.manual("6,2", stage=1), (6, 1))


@pytest.mark.parametrize("sizes", ["6,2", "1,5", "4,3,2", "3,0,3"])
def test_the_named_rank_has_fewer_samples_than_planned(sizes: str) -> None:
    plan = Plan.manual(sizes, stage=1)
    planned = [plan.samples(rank) for rank in range(plan.world_size)]
    for samples in product(*(range(most + 1) for most in planned)):
        allowed = [tuple(planned)]
        with suppress(ValueError):  # too few for the ranks that have samples
            allowed.append(plan.cut(sum(samples)))
        if samples in allowed:
            check(plan, samples)
            continue
        with pytest.raises(ValueError, match="this batch has") as raised:
            check(plan, samples)
        rank, size, expected = map(int, re.findall(r"\d+", str(raised.value))[:3])
        assert size == samples[rank] < expected == planned[rank]
