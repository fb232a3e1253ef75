"""`search` is compared with exhaustive search and checked for expected behaviour."""

from __future__ import annotations

import dataclasses
import math
import random
import time

import planning_oracle
import pytest
from all_ranks import alternatives, search
from clusters import cluster_of, device, network_of
from hypothesis import example, given
from hypothesis import strategies as st
from planning_oracle import STAGES, Oracle
from subset import choose

from poplar import _core
from poplar.planner import persistent_units
from poplar.planner.batch_allocation import RankPasses, kth_smallest
from poplar.planner.prediction import predict
from poplar.planner.search import NoPlanFits
from poplar.planner.shard_allocation import normalized
from poplar.values.curve import MonotoneCurve
from poplar.values.errors import PoplarError
from poplar.values.profile import ModelProfile

LARGEST_GLOBAL_BATCH = {1: 8, 2: 6, 3: 4}
SHARE_STEPS = {1: 1, 2: 12, 3: 5}
SEEDS_PER_TEST = choose(quick=15, full=80)
LARGER_CLUSTERS = choose(quick=20, full=250)


def best_found(cluster, **wanted):
    """The fastest plan, without rounding to simple plans; None if no plan fits."""
    try:
        return search(cluster, preference=0.0, **wanted)
    except NoPlanFits:
        return None


def seconds_of(plan):
    return math.inf if plan is None else plan.prediction["step_seconds"]


def some_shares(oracle, global_batch, draw):
    """A grid of shares, and shares at which one rank is just full; even shares at stage 0."""
    if oracle.stage == 0:
        return [(1 / oracle.n,) * oracle.n]
    shares = planning_oracle.share_grid(oracle.n, SHARE_STEPS[oracle.n])
    shares += planning_oracle.critical_shares(oracle, global_batch)
    return shares if len(shares) <= 40 else draw.sample(shares, 40)


@pytest.mark.parametrize("first_seed", range(0, 4 * SEEDS_PER_TEST, SEEDS_PER_TEST))
@pytest.mark.parametrize("stage", STAGES)
def test_no_plan_is_faster_than_the_one_that_search_finds(stage, first_seed):
    fitting = 0
    for seed in range(first_seed, first_seed + SEEDS_PER_TEST):
        draw = random.Random(4 * seed + stage)
        ranks = draw.choice((1, 2, 2, 2, 3, 3))
        global_batch = draw.randint(1, LARGEST_GLOBAL_BATCH[ranks])
        cluster = planning_oracle.random_cluster(draw, ranks, stage)
        oracle = Oracle(cluster, stage)
        plan = best_found(cluster, global_batch=global_batch, stages=(stage,))
        shares = some_shares(oracle, global_batch, draw)
        if plan is not None:
            fitting += 1
            shares.append(plan.shares)
            assert oracle.fits(plan.micro_batches, plan.shares, slack=1.0), seed
            own = oracle.seconds(plan.micro_batches, plan.shares)
            assert seconds_of(plan) == pytest.approx(own, rel=1e-9)
        least = oracle.best(global_batch, shares)
        assert seconds_of(plan) <= least * (1 + 1e-9), f"seed {seed}: {ranks} ranks"
    assert fitting > SEEDS_PER_TEST / 2


@pytest.mark.parametrize("stage", STAGES)
def test_no_plan_is_faster_with_more_ranks_and_samples(stage):
    """There are too many plans to list, so a naive dynamic program is the reference."""
    fitting = 0
    for seed in range(LARGER_CLUSTERS):
        draw = random.Random(9 * seed + stage)
        ranks, global_batch = draw.choice((2, 3, 3, 4)), draw.randint(5, 24)
        cluster = planning_oracle.random_cluster(draw, ranks, stage)
        oracle = Oracle(cluster, stage)
        plan = best_found(cluster, global_batch=global_batch, stages=(stage,))
        shares = [(1 / ranks,) * ranks]
        if stage:
            several = planning_oracle.share_grid(ranks, 4)
            several += planning_oracle.critical_shares(oracle, global_batch)
            shares += draw.sample(several, min(8, len(several)))
        if plan is not None:
            fitting += 1
            shares.append(plan.shares)
            own = oracle.seconds(plan.micro_batches, plan.shares)
            assert seconds_of(plan) == pytest.approx(own, rel=1e-9), seed
        least = oracle.best_by_dynamic_program(global_batch, shares)
        gap = 0.0 if plan is None else plan.prediction["optimality_gap"]
        assert seconds_of(plan) * (1 - gap) <= least * (1 + 1e-9), f"seed {seed}: {ranks} ranks"
        if plan is not None and oracle.fits(plan.micro_batches, plan.shares):  # to the last byte
            assert least <= own * (1 + 1e-9), f"seed {seed}: the reference missed a plan"
    assert fitting > LARGER_CLUSTERS / 2


# Expected behaviour


@pytest.mark.parametrize("stage", STAGES)
def test_equal_ranks_get_an_even_plan(stage):
    plan = search(cluster_of(device(), device(), device()), global_batch=48, stages=(stage,))
    assert plan.micro_batches == ((16,), (16,), (16,))
    assert plan.shares == pytest.approx((1 / 3,) * 3)
    assert plan.prediction["optimality_gap"] == 0.0


def test_even_shares_are_chosen_if_other_shares_gain_less_than_the_preference():
    slow_optimizer = device(optimizer_seconds=0.0105)
    cluster = cluster_of(slow_optimizer, device(), communication=0.0)
    plan = search(cluster, global_batch=32, stages=(1,))
    assert plan.shares == (0.5, 0.5)
    assert 0.0 < plan.prediction["optimality_gap"] < 1e-3
    fastest = search(cluster, global_batch=32, stages=(1,), preference=0.0)
    assert fastest.shares[0] < 0.5
    assert seconds_of(fastest) < seconds_of(plan) < seconds_of(fastest) * 1.001


@pytest.mark.parametrize("stage", [0, 1])
def test_fewer_passes_are_chosen_if_more_passes_gain_less_than_the_preference(stage):
    noisy = device(latency=0.0, largest=32)
    points = list(noisy.points)
    points[2] = dataclasses.replace(points[2], seconds=points[2].seconds * 0.9995)
    noisy = dataclasses.replace(noisy, points=tuple(points))
    plan = search(cluster_of(noisy, noisy), global_batch=96, stages=(stage,))
    assert plan.micro_batches == ((24, 24), (24, 24))
    fastest = best_found(cluster_of(noisy, noisy), global_batch=96, stages=(stage,))
    assert fastest.micro_batches == ((4,) * 12, (4,) * 12)


def test_the_fastest_stage_is_chosen_and_ties_go_to_less_memory():
    plans = alternatives(cluster_of(device(), device()), global_batch=32)
    assert [seconds_of(plan) for plan in plans] == sorted(map(seconds_of, plans))
    assert {plan.stage for plan in plans} == set(STAGES)
    assert plans[0] == search(cluster_of(device(), device()), global_batch=32)
    alone = alternatives(cluster_of(device(), communication=0.0), global_batch=8)
    assert len({seconds_of(plan) for plan in alone}) == 1
    needs = [sum(plan.prediction["memory_bytes"]) for plan in alone]
    assert needs == sorted(needs)


def test_by_default_only_stages_of_which_steps_were_observed_are_planned():
    cluster = cluster_of(device(), device())
    observed = dataclasses.replace(cluster, observed_stages=(1, 2))
    assert {plan.stage for plan in alternatives(observed, global_batch=32)} == {1, 2}
    assert search(observed, global_batch=32, stages=(3,)).stage == 3
    assert {plan.stage for plan in alternatives(cluster, global_batch=32)} == set(STAGES)


def test_stages_that_do_not_fit_are_skipped():
    small = device(memory=78 * 10**6)
    plans = alternatives(cluster_of(small, small), global_batch=8)
    assert 0 not in {plan.stage for plan in plans}
    assert {1, 3} <= {plan.stage for plan in plans}


def test_a_stage_far_from_the_best_one_is_not_searched_to_its_end(monkeypatch):
    searched = []
    plan_of = persistent_units.fastest_plan
    monkeypatch.setattr(
        persistent_units,
        "fastest_plan",
        lambda costs, *given, **how: searched.append(costs.stage) or plan_of(costs, *given, **how),
    )
    some = device(memory=100 * 10**6, sample_bytes=4 * 10**6)
    model = ModelProfile(unit_numels=(10**6,) * 4, unit_names=("a", "b", "c", "d"))
    cluster = cluster_of(some, some, model=model, communication=5.0)
    best, *_, last = alternatives(cluster, global_batch=64)
    assert (best.stage, last.stage, searched.count(3)) == (1, 3, 1)
    assert 0.5 < last.prediction["optimality_gap"] < 1.0
    *_, last = alternatives(cluster, global_batch=64, within=math.inf)
    assert searched.count(3) > 2
    assert last.prediction["optimality_gap"] == 0.0


def test_max_micro_batch_limits_every_rank():
    plan = search(cluster_of(device(), device()), global_batch=32, max_micro_batch=3)
    assert max(map(max, plan.micro_batches)) <= 3
    assert plan.global_batch == 32


def test_the_prediction_names_devices_limits_and_policy():
    plan = search(cluster_of(device(2.0), device()), global_batch=8)
    assert plan.prediction["digest"] == plan.digest()
    assert plan.prediction["devices"] == ["device of speed 2.0", "device of speed 1.0"]
    assert plan.prediction["memory_limit_bytes"] == [10**9, 10**9]
    assert plan.prediction["policy"] == "exact"
    assert type(plan).from_dict(plan.to_dict()).prediction == plan.prediction


def test_eight_unequal_ranks_with_little_memory_are_planned_close_to_the_optimum():
    draw = random.Random(3)
    devices = [
        device(draw.choice((1.0, 2.0, 4.0)) * (1 + 0.02 * draw.random()), memory=memory * 10**6)
        for memory in (50, 60, 80, 120) * 2
    ]
    plan = search(cluster_of(*devices, overlap=0.5), global_batch=128, stages=(3,))
    assert plan.prediction["optimality_gap"] < 0.03
    assert predict(cluster_of(*devices, overlap=0.5), plan).step_seconds == seconds_of(plan)


def test_a_global_batch_of_thousands_is_planned():
    plan = search(cluster_of(device(4.0), device(), largest := device(2.0)), global_batch=5000)
    assert plan.global_batch == 5000
    assert max(map(max, plan.micro_batches)) <= largest.max_batch


# Where no plan fits


def test_the_error_names_the_rank_and_the_missing_memory():
    small = device(memory=10 * 10**6)
    message = r"rank 0 \(device of speed 1.0\) needs .* may use 9.1 MiB of 9.5 MiB: .* too little"
    for stages in (STAGES, *((stage,) for stage in STAGES)):
        with pytest.raises(NoPlanFits, match=message):
            search(cluster_of(small, small), global_batch=4, stages=stages)
    assert issubclass(NoPlanFits, (PoplarError, ValueError))


def test_the_error_says_that_all_ranks_together_cannot_hold_the_state():
    full = device(memory=64 * 10**6)
    with pytest.raises(
        NoPlanFits, match=r"needs at least .* for 2 samples and .* % of the sharded"
    ):
        search(cluster_of(full, full), global_batch=4, stages=(2,))


def test_the_error_says_that_no_rank_can_hold_a_sample():
    full = device(memory=100 * 10**6, sample_bytes=10**9)
    with pytest.raises(NoPlanFits, match="for one sample"):
        search(cluster_of(full, full), global_batch=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch": True}, "global_batch must be an integer of at least 1, got True"),
        ({"global_batch": 0}, "global_batch must be an integer of at least 1, got 0"),
        ({"global_batch": 2.0}, r"global_batch must be an integer of at least 1, got 2\.0"),
        ({"max_micro_batch": 0}, "max_micro_batch must be an integer of at least 1, got 0"),
        ({"stages": ()}, r"stages must be a non-empty subset of \(0, 1, 2, 3\), got \(\)"),
        ({"stages": (4,)}, r"stages must be a non-empty subset of .* got \(4,\)"),
        ({"stages": 2}, r"stages must be a non-empty subset of .* got 2$"),
        ({"stages": "01"}, r"stages must be a non-empty subset of .* got '01'"),
        ({"stages": (True,)}, r"stages must be a non-empty subset of .* got \(True,\)"),
        ({"stages": (0, "a")}, r"stages must be a non-empty subset of .* got \(0, 'a'\)"),
        ({"preference": -0.1}, r"preference must be finite and at least 0, got -0\.1"),
        ({"preference": math.nan}, "preference must be finite and at least 0, got nan"),
        (
            {"policy": "best"},
            "policy must be one of exact, even, flops, paper, even_shares, got 'best'",
        ),
    ],
)
def test_invalid_arguments_raise(changes, message):
    with pytest.raises(ValueError, match=message):
        search(cluster_of(device()), **{"global_batch": 8, **changes})


# Properties

seeds = st.integers(0, 2**32)
stages = st.sampled_from(STAGES)


def drawn(seed, stage, ranks=(1, 2, 3)):
    draw = random.Random(seed)
    return draw, planning_oracle.random_cluster(draw, draw.choice(ranks), stage)


@given(seed=seeds, stage=stages, global_batch=st.integers(1, 40))
def test_search_is_deterministic(seed, stage, global_batch):
    _, cluster = drawn(seed, stage)
    first = best_found(cluster, global_batch=global_batch, stages=(stage,))
    again = best_found(cluster, global_batch=global_batch, stages=(stage,))
    assert first == again
    assert first is None or first.prediction == again.prediction


def within_gap(faster, slower):
    """An upper bound on `faster`, given that it must not be slower than `slower`."""
    gap = 0.0 if faster is None else faster.prediction["optimality_gap"]
    return seconds_of(slower) * (1 + 1e-9) / (1 - gap)


@given(seed=seeds, stage=stages, global_batch=st.integers(1, 24))
def test_the_order_of_ranks_does_not_change_the_step_time(seed, stage, global_batch):
    draw, cluster = drawn(seed, stage, ranks=(2, 3, 4))
    order = list(range(cluster.world_size))
    draw.shuffle(order)
    network = cluster.network
    shuffled = dataclasses.replace(
        cluster,
        devices=tuple(cluster.devices[rank] for rank in order),
        network=dataclasses.replace(
            network,
            send_seconds_per_byte=tuple(network.send_seconds_per_byte[r] for r in order),
            receive_seconds_per_byte=tuple(network.receive_seconds_per_byte[r] for r in order),
        ),
    )
    plan = best_found(cluster, global_batch=global_batch, stages=(stage,))
    other = best_found(shuffled, global_batch=global_batch, stages=(stage,))
    assert seconds_of(plan) <= within_gap(plan, other)
    assert seconds_of(other) <= within_gap(other, plan)


# Parts of the search


@given(
    parts=st.dictionaries(st.integers(1, 12), st.floats(0, 10), min_size=1),
    first=st.dictionaries(st.integers(1, 12), st.floats(0, 10), min_size=1),
    total=st.integers(2, 40),
    more=st.floats(0, 3),
    multiple=st.sampled_from((1, 1, 2)),
)
@example(parts={1: 1.0, 3: 1.0}, first={1: 0.0}, total=4, more=1.0, multiple=1)
def test_cheapest_cover_matches_a_naive_dynamic_program(parts, first, total, more, multiple):
    first_sizes, first_costs = sorted(first), sorted(first.values())
    sizes = sorted(parts)
    costs = sorted(parts.values())
    last_costs = [cost + more * size for size, cost in zip(sizes, costs, strict=True)]
    total *= 20 if multiple == 2 else 1  # larger than what the program tabulates

    def least_of(size, table, column):
        return min((c for m, c in zip(table, column, strict=True) if m >= size), default=math.inf)

    before = [math.inf] * total
    for n in range(1, total):
        ways = [before[n - m] + least_of(m, sizes, costs) for m in range(1, min(n, max(sizes) + 1))]
        before[n] = min([least_of(n, first_sizes, first_costs), *ways])
    expected = min(before[total - m] + least_of(m, sizes, last_costs) for m in range(1, total))
    arguments = first_sizes, first_costs, sizes, costs, last_costs, total
    found, (begin, *others, last) = _core.cheapest_cover(*arguments)
    assert begin + sum(others) + last == total
    assert others == sorted(others)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
    own = [least_of(begin, first_sizes, first_costs), least_of(last, sizes, last_costs)]
    own += [least_of(size, sizes, costs) for size in others]
    assert found == pytest.approx(sum(own), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("first_sizes", "sizes", "costs", "last_costs", "total"),
    [
        ([], [1, 2], [1.0, 2.0], [1.0, 2.0], 3),
        ([1, 2], [], [], [], 3),
        ([1, 2], [1, 2], [1.0], [1.0, 2.0], 3),
        ([1, 2], [1, 2], [1.0, 2.0], [1.0], 3),
        ([1, 2], [0, 2], [1.0, 2.0], [1.0, 2.0], 3),
        ([1, 2], [1, 2], [1.0, 2.0], [1.0, 2.0], 1),
    ],
)
def test_cheapest_cover_refuses_invalid_parts(first_sizes, sizes, costs, last_costs, total):
    first_costs = [1.0, 2.0][: len(first_sizes)]
    with pytest.raises(ValueError, match="cheapest_cover"):
        _core.cheapest_cover(first_sizes, first_costs, sizes, costs, last_costs, total)


curves = st.dictionaries(st.integers(1, 25), st.floats(0, 5), min_size=1).map(
    lambda points: MonotoneCurve(tuple(sorted(points)), tuple(sorted(points.values())))
)
"""Of passes: few straight pieces, as measured ones have."""


@given(
    seconds=st.lists(st.floats(0, 5), min_size=0, max_size=7).map(sorted)
    | curves.map(lambda curve: curve.up_to(curve.batches[-1])[1:]),
    later=st.integers(-1, 25),
    most=st.integers(1, 90),
)
@example(seconds=[float(n) for n in range(1, 26)], later=20, most=90)
@example(seconds=[0.1 * n for n in range(1, 26)], later=25, most=25)
@example(seconds=[0.0] * 25, later=12, most=60)
def test_cheapest_passes_match_a_naive_dynamic_program(seconds, later, most):
    passes = [0.0, *seconds]
    expected = [0.0]
    rest = [0.0]
    for n in range(1, most + 1):
        ways = [rest[n - m] + passes[m] for m in range(1, min(n, len(seconds)) + 1)]
        expected.append(min(ways, default=math.inf))
        ways = [rest[n - m] + passes[m] for m in range(1, min(n, later, len(seconds)) + 1)]
        rest.append(min(ways, default=math.inf))
    own = RankPasses(passes, later, most, 0.5)
    fitting = [n for n in range(most + 1) if expected[n] < math.inf]
    assert own.most == max(fitting)
    for n in fitting:
        assert own.seconds(n) == pytest.approx(expected[n])
        sizes = own.passes(own.cut(n, 0.0, 0.0)) if n else ()
        assert sum(sizes) == n
        assert sum(passes[m] for m in sizes) == pytest.approx(expected[n])
        assert all(m <= later for m in sizes[1:])


def test_passes_on_a_measured_curve_match_a_naive_dynamic_program():
    """With enough sizes that rounding adds up."""
    draw = random.Random(1)
    for largest in (255, 256, 301):
        points = [2**power for power in range(8)] + [largest]
        seconds = [(1.0 + 0.01 * size) * draw.uniform(0.9, 1.1) for size in points]
        passes = MonotoneCurve(tuple(points), tuple(sorted(seconds))).up_to(largest)
        expected = [0.0]
        for n in range(1, 701):
            expected.append(min(expected[n - m] + passes[m] for m in range(1, min(n, largest) + 1)))
        table, _, last = _core.cheapest_passes(passes, largest, 700)
        assert table == pytest.approx(expected, rel=1e-12)
        for n in range(1, 701):
            assert passes[last[n]] + table[n - last[n]] == pytest.approx(table[n], rel=1e-12)


def test_planning_time_grows_in_proportion_to_the_largest_micro_batch():
    """Not with its square: then this takes many seconds."""
    largest = 1 << 17
    points = tuple(2**power for power in range(18))
    draw = random.Random(0)
    curve = MonotoneCurve(points, tuple(1.0 + n * draw.uniform(0.01, 0.0105) for n in points))
    passes = curve.up_to(largest)
    begin = time.process_time()
    _core.cheapest_passes(passes, largest, largest)
    _core.cheapest_passes(passes, largest // 3, largest)
    sizes, costs = range(1, largest + 1), passes[1:]
    _core.cheapest_cover(sizes, costs, sizes, costs, [cost + 0.1 for cost in costs], largest)
    assert time.process_time() - begin < 2.0


@given(curve=curves, part=st.floats(0, 1))
def test_values_up_to_a_batch_are_those_of_each_batch(curve, part):
    most = int(part * curve.batches[-1])
    assert curve.up_to(most) == list(map(curve.at, range(most + 1)))


@given(
    parts=st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(0.0, 0.5)), min_size=1, max_size=40),
    off=st.floats(-1e-12, 1e-12),
)
def test_settled_shares_sum_to_1_within_their_bounds(parts, off):
    total = math.fsum(part for part, _ in parts)
    shares = [part / total * (1.0 + off) for part, _ in parts]
    upper = [share + room for share, (_, room) in zip(shares, parts, strict=True)]
    settled = normalized(shares, upper)
    assert all(0.0 <= share <= bound for share, bound in zip(settled, upper, strict=True))
    if math.fsum(upper) >= 1.0 + 1e-9:
        assert math.fsum(settled) == pytest.approx(1.0, abs=1e-15)
    assert settled == pytest.approx(shares, abs=1e-11)


@given(
    sequences=st.lists(
        st.tuples(st.lists(st.integers(0, 9)).map(sorted), st.integers(1, 3)),
        min_size=1,
        max_size=4,
    ),
    count=st.integers(1, 40),
)
def test_smallest_matches_the_sorted_union(sequences, count):
    union = sorted(value for values, copies in sequences for value in values * copies)
    expected = union[count - 1] if count <= len(union) else math.inf
    values = [lambda i, s=sequence: s[i - 1] for sequence, _ in sequences]
    tops = [len(sequence) for sequence, _ in sequences]
    assert kth_smallest(values, tops, [copies for _, copies in sequences], count) == expected


def test_a_hundred_slightly_different_ranks_are_planned():
    """Measured profiles look like this: the linear programs have hundreds of rows."""
    draw, ranks = random.Random(0), 96
    devices = tuple(
        device(
            memory=int(30e9 * (1 + 0.01 * draw.random())),
            latency=0.0,
            sample=0.01 * pace,
            batches=(1, 4, 16, 64),
            sample_bytes=1 << 28,
            optimizer_seconds=0.05,
            optimizer_latency_seconds=0.0005,
        )
        for pace in ((1 + rank % 3) * (1 + 0.02 * draw.random()) for rank in range(ranks))
    )
    sent, received = (
        tuple(1e-10 * (1 + 0.05 * draw.random()) for _ in range(ranks)) for _ in range(2)
    )
    network = network_of(sent, reduce=0.1, gather=0.05, receive_seconds_per_byte=received)
    model = ModelProfile(unit_numels=(50_000_000,) * 22, param_bytes=2, optimizer_bytes=12)
    cluster = cluster_of(*devices, model=model, network=network, overlap=0.5)
    plan = search(cluster, global_batch=8 * ranks, stages=(3,))
    assert plan.prediction["optimality_gap"] < 0.01


@pytest.mark.parametrize("stage", [0, 3])
def test_a_plan_may_fit_because_the_base_is_quantised(stage):
    """Adapters on 8 billion weights, on four ranks of 9 GiB, or of 3 GiB at stage 3."""
    numel, units = 8 * 10**9, 32
    memory = (9 if stage == 0 else 3) << 30
    small = device(
        memory=memory,
        latency=0.0,
        sample=1.0,
        batches=(1,),
        sample_bytes=1 << 30,
        optimizer_seconds=0.001,
    )

    def plan_on(bytes_each):
        frozen = (int(bytes_each * numel / units),) * units
        model = ModelProfile(unit_numels=(1_000_000,) * units, unit_frozen_bytes=frozen)
        cluster = cluster_of(*[small] * 4, model=model, communication=0.1)
        return search(cluster, global_batch=4, stages=(stage,))

    assert plan_on(0.55).samples(0) == 1
    with pytest.raises(NoPlanFits, match=r"the model has 14.90 GiB of frozen parameters"):
        plan_on(2.0)
