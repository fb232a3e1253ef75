"""How many samples and how much state ranks hold together: in a bounded number of steps."""

from __future__ import annotations

import contextlib
import math
import random

import pytest
from all_ranks import search
from clusters import cluster_of, device

from poplar import _core
from poplar.planner import share_limits
from poplar.planner.search import NoPlanFits
from poplar.planner.share_limits import ShareLimits, largest_sum
from poplar.values.profile import ModelProfile

SIZES = range(2, 7)


def concave(draw, size):
    """Shares that fall by more with each sample."""
    losses = sorted(draw.random() for _ in range(size))
    return tuple(math.fsum(losses[i:]) for i in range(size + 1))


def descending(draw, size):
    return tuple(sorted((draw.random() for _ in range(size + 1)), reverse=True))


def sum_of(limits, parts):
    return math.fsum(own[part] for own, part in zip(limits, parts, strict=True))


@pytest.fixture
def along_hulls(monkeypatch):
    """As with so many ranks and samples that the exact results take too long."""
    return lambda: monkeypatch.setattr(share_limits, "_MOST_STEPS", 0)


@pytest.mark.parametrize("seed", range(20))
def test_samples_along_hulls_are_exact_for_concave_limits(seed, along_hulls):
    draw = random.Random(seed)
    limits = [concave(draw, draw.choice(SIZES)) for _ in range(4)]
    limits = [tuple(share * 0.3 for share in own) for own in limits]
    total = draw.randint(0, sum(len(own) - 1 for own in limits))
    exact = sum_of(limits, largest_sum(limits, total)), ShareLimits(limits, total).most
    along_hulls()
    parts = largest_sum(limits, total)
    assert sum(parts) == total
    assert sum_of(limits, parts) == pytest.approx(exact[0], abs=1e-12)
    assert ShareLimits(limits, total).most == exact[1]


@pytest.mark.parametrize("seed", range(20))
def test_samples_along_hulls_are_close_to_the_exact_ones(seed, along_hulls):
    """The bound is not below the exact number; one rank at most is below its hull."""
    draw = random.Random(seed)
    limits = [descending(draw, draw.choice(SIZES)) for _ in range(4)]
    total = draw.randint(0, sum(len(own) - 1 for own in limits))
    exact = sum_of(limits, largest_sum(limits, total)), ShareLimits(limits, total).most
    along_hulls()
    parts = largest_sum(limits, total)
    assert sum(parts) == total
    assert exact[0] - max(own[0] - own[-1] for own in limits) <= sum_of(limits, parts)
    assert sum_of(limits, parts) <= exact[0] + 1e-12
    assert ShareLimits(limits, total).most >= exact[1]


def test_no_samples_fit_beside_too_small_shares(along_hulls):
    along_hulls()
    assert ShareLimits([(0.4, 0.3), (0.5, 0.2)], 2).most == -1
    assert ShareLimits([(0.5, 0.3), (0.5, 0.5)], 2).most == 1


def largest_number_of_steps(monkeypatch, stage, *, ranks, units, numel, memory, largest):
    """Of one call while a plan of the largest batch that one pass holds is searched."""
    steps, exact = [], _core.largest_sum

    def counted(values, total):
        steps.append(sum(map(len, values)) * (total + 1))
        return exact(values, total)

    monkeypatch.setattr(_core, "largest_sum", counted)
    model = ModelProfile(unit_numels=(numel,) * units)
    cluster = cluster_of(*[device(largest=largest, memory=memory)] * ranks, model=model)
    with contextlib.suppress(NoPlanFits):
        search(cluster, global_batch=ranks * largest, stages=(stage,))
    return max(steps, default=0)


@pytest.mark.parametrize(("stage", "numel"), [(2, 10**7), (3, 25 * 10**6)])
def test_steps_do_not_grow_with_micro_batches(monkeypatch, stage, numel):
    cluster = {"ranks": 64, "units": 4, "numel": numel, "memory": 9 * 10**8, "largest": 1024}
    assert largest_number_of_steps(monkeypatch, stage, **cluster) <= 1 << 26


def test_steps_do_not_grow_with_ranks_where_no_plan_fits(monkeypatch):
    cluster = {"ranks": 192, "units": 128, "numel": 10**7, "memory": 3 * 10**8, "largest": 64}
    assert largest_number_of_steps(monkeypatch, 3, **cluster) <= 1 << 26


def test_largest_sum_refuses_a_negative_total():
    with pytest.raises(ValueError, match="total must be at least 0, got -1"):
        _core.largest_sum([[0.0, 1.0]], -1)
