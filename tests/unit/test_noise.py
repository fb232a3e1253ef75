"""A profile says when a device was throttled or its times were too noisy."""

from __future__ import annotations

import pytest

from poplar.profiler.cluster_profiler import noise_notes
from poplar.values.curve import DEVIATIONS
from poplar.values.formatting import NOISY, format_interval, is_noisy
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
    assert list(noise_notes([device({1: 0.01, 2: 0.9 * NOISY / DEVIATIONS})] * 2)) == []


def test_note_names_the_noisy_rank_with_figures():
    (noisy,) = noise_notes([device({1: 0.0}), device({1: 0.2, 4: 0.2})])
    assert "rank 1 is noisy: its passes took between 74% and 126% of their usual time" in noisy


@pytest.mark.parametrize(("high", "text"), [(1.09, "80 %: 0.91 to 1.09 s"), (1.2, ", noisy")])
def test_step_is_noisy_if_its_interval_is_wide(high, text):
    interval = (2.0 - high, high)
    assert format_interval(1.0, interval).endswith(text)
    assert is_noisy(1.0, interval) == text.endswith("noisy")


def test_notes_name_the_throttled_rank_and_the_reason():
    (note,) = noise_notes([device({1: 0.0}), device({1: 0.0}, throttled="too hot")])
    assert "rank 1 was throttled while it was measured (too hot)" in note
