"""A profile says when the machine was too busy or its times too noisy."""

from __future__ import annotations

import pytest

from poplar.profiler.noise import MOST_OTHER_USE, MOST_SPREAD, CpuUse, noise_notes, other_use
from poplar.values.profile import BatchPoint, DeviceProfile


def device(spreads: dict[int, float], host: str = "a", throttled: str = "") -> DeviceProfile:
    """A device whose passes of these batches have these relative standard errors."""
    points = tuple(
        BatchPoint(batch=n, seconds=2.0 * n, activation_bytes=0, spread_seconds=2.0 * n * spread)
        for n, spread in spreads.items()
    )
    return DeviceProfile(
        name="x", memory_bytes=1, points=points, optimizer_seconds=0, host=host, throttled=throttled
    )


def use(busy: dict[int, float], own: float, seconds: float = 10.0) -> CpuUse:
    return CpuUse(seconds, own, busy)


def test_use_since_a_moment_is_a_difference():
    before, after = CpuUse(100.0, 5.0, {0: 50.0, 1: 60.0}), CpuUse(110.0, 12.0, {0: 58.0, 1: 61.0})
    assert after.since(before) == CpuUse(10.0, 7.0, {0: 8.0, 1: 1.0})


def test_use_of_this_process_is_measured():
    began = CpuUse.now()
    sum(range(10**6))
    taken = CpuUse.now().since(began)
    assert taken.own > 0.0
    assert taken.seconds >= 0.0


def test_other_use_excludes_all_ranks_of_the_host():
    """Two ranks on two cores, 20 core seconds: 16 busy, 12 of them in the ranks."""
    both = {0: 9.0, 1: 7.0}
    assert other_use([use(both, own=8.0), use(both, own=4.0)]) == pytest.approx(0.2)
    pinned = [use({0: 9.0}, own=8.0), use({1: 7.0}, own=4.0)]
    assert other_use(pinned) == pytest.approx(0.2)


def test_other_use_is_zero_if_unknown():
    assert other_use([use({}, own=3.0)]) == 0.0
    assert other_use([use({0: 1.0}, own=3.0)]) == 0.0


def test_quiet_machine_has_no_notes():
    profiles = [device({1: 0.01, 2: 0.9 * MOST_SPREAD})] * 2
    uses = [use({0: 10.0, 1: 10.0}, own=9.5)] * 2
    assert list(noise_notes(profiles, uses)) == []


def test_notes_name_the_busy_host_and_the_noisy_rank_with_figures():
    profiles = [device({1: 0.0}), device({1: 0.0, 4: 0.08}, host="b")]
    uses = [use({0: 10.0}, own=6.0), use({0: 10.0}, own=10.0)]
    busy, noisy = noise_notes(profiles, uses)
    assert "the machine a was busy: other processes used 40%" in busy
    assert f"more than {MOST_OTHER_USE:.0%}" in busy
    assert "rank 1 are noisy: the median time of 4 samples has a standard error of 8.0%" in noisy
    assert f"more than {MOST_SPREAD:.0%}" in noisy


def test_gpus_are_judged_by_their_times_only():
    (note,) = noise_notes([device({1: 0.1})], [None])
    assert "rank 0 are noisy" in note


def test_notes_name_the_throttled_rank_and_the_reason():
    (note,) = noise_notes([device({1: 0.0}), device({1: 0.0}, throttled="too hot")], [None] * 2)
    assert "rank 1 was throttled while it was measured (too hot)" in note
