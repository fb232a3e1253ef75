"""Profiles as values: monotone curves, JSON round trips, and errors for invalid values."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from itertools import pairwise

import planning_oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poplar.values.profile import (
    BatchPoint,
    ClusterProfile,
    DeviceProfile,
    ModelProfile,
    NetworkProfile,
)

points = st.lists(
    st.tuples(st.integers(1, 200), st.floats(1e-6, 10.0), st.integers(0, 10**9)),
    min_size=1,
    max_size=8,
    unique_by=lambda point: point[0],
).map(
    lambda drawn: tuple(
        BatchPoint(batch=batch, seconds=seconds, activation_bytes=size)
        for batch, seconds, size in sorted(drawn)
    )
)


def profile_of(points, **changes) -> DeviceProfile:
    return DeviceProfile(
        **{
            "name": "a device",
            "memory_bytes": 10**9,
            "points": points,
            "optimizer_seconds": 0.1,
            **changes,
        }
    )


def three_points(*seconds) -> tuple[BatchPoint, ...]:
    return tuple(
        BatchPoint(batch=batch, seconds=time, activation_bytes=100 * batch)
        for batch, time in zip((2, 4, 8), seconds, strict=True)
    )


def a_cluster(seed=1, ranks=3) -> ClusterProfile:
    cluster = planning_oracle.random_cluster(random.Random(seed), ranks, 2)
    return dataclasses.replace(cluster, identity={"model": "a model"}, notes=("rank 0 was hot",))


# Curves


def test_curves_are_linear_between_points():
    device = profile_of(three_points(1.0, 1.5, 3.5))
    assert [device.seconds(batch) for batch in (2, 3, 4, 6, 8)] == [1.0, 1.25, 1.5, 2.5, 3.5]
    assert [device.activation_bytes(batch) for batch in (2, 3, 8)] == [200, 300, 800]
    assert device.max_batch == 8


def test_first_line_is_extended_down_to_proportionality():
    assert profile_of(three_points(1.0, 1.5, 3.5)).seconds(1) == 0.75
    steep = profile_of(three_points(1.0, 5.0, 9.0))
    assert steep.seconds(1) == 0.5
    single = profile_of((BatchPoint(batch=4, seconds=1.0, activation_bytes=8),))
    assert [single.seconds(batch) for batch in (0, 1, 4)] == [0.0, 1.0, 1.0]


def test_curves_are_infinite_past_the_largest_batch():
    device = profile_of(three_points(1.0, 1.5, 3.5))
    assert device.seconds(9) == math.inf
    assert device.activation_bytes(9) == math.inf
    assert device.seconds(0) == device.activation_bytes(0) == 0.0


def test_points_out_of_order_take_their_mean():
    device = profile_of(three_points(1.0, 3.0, 2.0))
    assert [device.seconds(batch) for batch in (2, 4, 8)] == [1.0, 2.5, 2.5]


@given(points=points)
def test_curves_are_monotone(points):
    device = profile_of(points)
    batches = range(device.max_batch + 1)
    for curve in (device.seconds, device.activation_bytes):
        values = [curve(batch) for batch in batches]
        assert all(a <= b + 1e-9 * abs(b) for a, b in pairwise(values))
        assert values[0] == 0.0
    assert all(device.seconds(batch) > 0 for batch in batches[1:])
    assert all(device.activation_bytes(p.batch) >= p.activation_bytes for p in device.points)


def test_optimizer_time_is_linear_in_the_share():
    device = profile_of(three_points(1, 2, 3), optimizer_latency_seconds=0.02)
    shares = (0.0, 0.5, 1.0)
    assert [device.optimizer_step_seconds(s) for s in shares] == pytest.approx([0.02, 0.06, 0.1])
    only = profile_of(three_points(1, 2, 3), optimizer_latency_seconds=0.5)
    assert [only.optimizer_step_seconds(s) for s in shares] == pytest.approx([0.1, 0.1, 0.1])


# Invalid values


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: BatchPoint(batch=0, seconds=1.0, activation_bytes=0), "batch must be at least 1"),
        (lambda: BatchPoint(batch=1, seconds=0.0, activation_bytes=0), "above 0, got 0.0"),
        (lambda: BatchPoint(batch=1, seconds=math.nan, activation_bytes=0), "above 0, got nan"),
        (lambda: BatchPoint(batch=1, seconds=1.0, activation_bytes=-1), "activation_bytes must be"),
        (lambda: BatchPoint(batch=1, seconds=math.inf, activation_bytes=0), "above 0, got inf"),
        (lambda: BatchPoint(batch=1, seconds=-1.0, activation_bytes=0), "above 0, got -1.0"),
        (
            lambda: with_error(-0.1),
            "spread_seconds must be finite and at least 0, got -0.1",
        ),
        (
            lambda: with_error(math.nan),
            "spread_seconds must be finite and at least 0, got nan",
        ),
        (
            lambda: profile_of(three_points(1, 2, 3), optimizer_seconds=-1.0),
            "finite and at least 0, got -1.0",
        ),
        (lambda: profile_of(three_points(1, 2, 3), peak_flops=0.0), "peak_flops must be finite"),
        (lambda: profile_of(three_points(1, 2, 3), peak_flops=math.nan), "peak_flops must be"),
        (lambda: profile_of(()), "points must be at least one measurement"),
        (lambda: profile_of(three_points(1, 2, 3)[::-1]), "ascending batches, got .8, 4, 2."),
        (lambda: profile_of(three_points(1, 2, 3), memory_bytes=-1), "memory_bytes must be"),
        (lambda: profile_of(three_points(1, 2, 3), optimizer_seconds=math.inf), "must be finite"),
        (
            lambda: profile_of(three_points(1, 2, 3), pass_overhead_seconds=(0.0,)),
            "pass_overhead_seconds must be one finite number per stage",
        ),
        (lambda: ModelProfile(unit_numels=()), "must be at least one trained element"),
        (lambda: ModelProfile(unit_numels=(0,)), "must be at least one trained element"),
        (lambda: ModelProfile(unit_numels=(2, -1)), r"unit_numels\[1\] must be at least 0"),
        (
            lambda: ModelProfile(unit_numels=(1,), grad_bytes=-1.0),
            "grad_bytes must be finite and at least 0",
        ),
        (lambda: ModelProfile(unit_numels=(1,), param_bytes=math.nan), "at least 0, got nan"),
        (
            lambda: ModelProfile(unit_numels=(1, 2), unit_names=("a",)),
            "unit_names must have 2 entries or none, got 1",
        ),
        (
            lambda: ModelProfile(unit_numels=(1, 2), unit_names=("a", "a")),
            r"unit_names must be all different, got \('a', 'a'\)",
        ),
        (
            lambda: ModelProfile(unit_numels=(1, 2), unit_forward_fraction=(1.0,)),
            "unit_forward_fraction must have 2 entries or none, got 1",
        ),
        (
            lambda: ModelProfile(unit_numels=(1, 2), unit_backward_fraction=(0.5, 0.5)),
            "unit_backward_fraction must have 0 entries or none, got 2",
        ),
        (
            lambda: ModelProfile(
                unit_numels=(1, 2),
                unit_forward_fraction=(0.1, 0.2),
                unit_backward_fraction=(0.3, 0.3),
            ),
            "must sum to 1 together, each to more than 0, got 0.3 and 0.6",
        ),
        (lambda: dataclasses.replace(a_cluster(), devices=()), "at least one device"),
        (
            lambda: dataclasses.replace(a_cluster(), devices=a_cluster().devices[:2]),
            "the network profile is for 3 ranks, but there are 2 devices",
        ),
        (lambda: dataclasses.replace(a_cluster(), overlap=1.5), "overlap must be from 0 to 1"),
        (
            lambda: dataclasses.replace(a_cluster().network, receive_buffers="always"),
            "freed, step or kept",
        ),
    ],
)
def test_invalid_values_raise(make, complaint):
    with pytest.raises(ValueError, match=complaint):
        make()


def test_values_of_the_wrong_type_raise():
    with pytest.raises(TypeError, match=r"ModelProfile\.unit_names\[0\] must be a string, got 1"):
        ModelProfile(unit_numels=(1,), unit_names=(1,))
    with pytest.raises(TypeError, match=r"BatchPoint\.batch must be a whole number, got True"):
        BatchPoint(batch=True, seconds=1.0, activation_bytes=0)


def test_network_needs_both_rates_of_every_rank():
    with pytest.raises(ValueError, match="one entry per rank"):
        NetworkProfile(
            reduce_scatter_seconds=0.1,
            all_gather_seconds=0.1,
            send_seconds_per_byte=(1e-9, 1e-9),
            receive_seconds_per_byte=(1e-9,),
        )


def with_error(spread) -> DeviceProfile:
    return profile_of(
        tuple(dataclasses.replace(p, spread_seconds=spread) for p in three_points(1, 2, 3))
    )


def test_standard_errors_change_neither_curve_nor_costs():
    sure, unsure = with_error(0.0), with_error(0.2)
    assert [sure.seconds(b) for b in range(10)] == [unsure.seconds(b) for b in range(10)]
    assert sure.costs == unsure.costs


# Files


@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 4))
def test_json_round_trip(seed, ranks):
    cluster = a_cluster(seed, ranks)
    again = ClusterProfile.from_dict(json.loads(json.dumps(cluster.to_dict())))
    assert again == cluster
    assert hash(again) == hash(cluster)


def test_file_round_trip(tmp_path):
    a_cluster().to_json(tmp_path / "profile.json")
    assert ClusterProfile.from_json(tmp_path / "profile.json") == a_cluster()


def test_memory_by_unit_follows_the_curve_between_points():
    def point(batch, *by_unit):
        return BatchPoint(
            batch=batch,
            seconds=1.0,
            activation_bytes=1000 * batch,
            unit_bytes=by_unit,
            bytes_after_unit=tuple(value // 2 for value in by_unit),
        )

    device = DeviceProfile(
        name="",
        memory_bytes=0,
        optimizer_seconds=0.0,
        points=(point(2, 200, 800), point(4, 400, 1000)),
    )
    assert device.unit_bytes(3) == ((300, 900), (150, 450))
    assert device.unit_bytes(0) == ((0, 0), (0, 0))
    assert device.with_largest_batch(3).points[-1] == dataclasses.replace(
        point(3, 300, 900), activation_bytes=3000
    )


def test_memory_by_unit_is_unknown_unless_all_points_have_it():
    known = BatchPoint(
        batch=1, seconds=1.0, activation_bytes=9, unit_bytes=(5,), bytes_after_unit=(1,)
    )
    unknown = BatchPoint(batch=2, seconds=1.0, activation_bytes=9)
    device = DeviceProfile(name="", memory_bytes=0, optimizer_seconds=0.0, points=(known, unknown))
    assert device.unit_bytes(1) == ((), ())


def test_memory_by_unit_has_an_entry_for_each_unit():
    with pytest.raises(ValueError, match="same number of entries"):
        BatchPoint(batch=1, seconds=1.0, activation_bytes=9, unit_bytes=(5,))
    point = BatchPoint(
        batch=1, seconds=1.0, activation_bytes=9, unit_bytes=(5,), bytes_after_unit=(1,)
    )
    device = DeviceProfile(name="", memory_bytes=0, optimizer_seconds=0.0, points=(point,))
    network = NetworkProfile(
        reduce_scatter_seconds=0.0,
        all_gather_seconds=0.0,
        send_seconds_per_byte=(0.0,),
        receive_seconds_per_byte=(0.0,),
    )
    ClusterProfile(devices=(device,), model=ModelProfile(unit_numels=(7,)), network=network)
    with pytest.raises(ValueError, match="unit_bytes must have 2 entries or none"):
        ClusterProfile(devices=(device,), model=ModelProfile(unit_numels=(7, 8)), network=network)
