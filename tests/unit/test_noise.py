"""A profile says when a device was throttled or its times were too noisy."""

from __future__ import annotations

from poplar.profiler.cluster_profiler import MOST_SPREAD, noise_notes
from poplar.values.profile import BatchPoint, DeviceProfile


def device(spreads: dict[int, float], throttled: str = "") -> DeviceProfile:
    """A device whose passes of these batches have these relative standard errors."""
    points = tuple(
        BatchPoint(batch=n, seconds=2.0 * n, activation_bytes=0, spread_seconds=2.0 * n * spread)
        for n, spread in spreads.items()
    )
    return DeviceProfile(
        name="x", memory_bytes=1, points=points, optimizer_seconds=0, throttled=throttled
    )


def test_steady_devices_have_no_notes():
    assert list(noise_notes([device({1: 0.01, 2: 0.9 * MOST_SPREAD})] * 2)) == []


def test_note_names_the_noisy_rank_with_figures():
    (noisy,) = noise_notes([device({1: 0.0}), device({1: 0.0, 4: 0.08})])
    assert "rank 1 are noisy: the median time of 4 samples has a standard error of 8.0%" in noisy
    assert f"more than {MOST_SPREAD:.0%}" in noisy


def test_notes_name_the_throttled_rank_and_the_reason():
    (note,) = noise_notes([device({1: 0.0}), device({1: 0.0}, throttled="too hot")])
    assert "rank 1 was throttled while it was measured (too hot)" in note
