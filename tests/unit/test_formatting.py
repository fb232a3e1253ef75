"""Numbers are written with few digits and a unit, the same way everywhere."""

from __future__ import annotations

import pytest

from poplar.values.formatting import (
    format_bytes,
    format_count,
    format_layers,
    format_names,
    format_passes,
    format_percent,
    format_ranks,
    format_rate,
    format_seconds,
    format_signed_percent,
    format_table,
    format_usage,
    parse_bytes,
)

GIB = 2**30
LAYERS = ["first", "blocks.0.up", "blocks.1.up", "blocks.1.down"]


@pytest.mark.parametrize(
    ("written", "text"),
    [
        # The largest unit that fits
        (format_bytes(0), "0 B"),
        (format_bytes(1023), "1023 B"),
        (format_bytes(20_000), "19.5 KiB"),
        (format_bytes(3 * 2**20), "3.0 MiB"),
        (format_bytes(700 * 2**20), "700.0 MiB"),
        (format_bytes(8.5 * GIB), "8.50 GiB"),
        (format_bytes(-3 * 2**20), "-3.0 MiB"),
        # Rounded up where they have to be enough
        (format_bytes(1.231 * GIB), "1.23 GiB"),
        (format_bytes(1.231 * GIB, round_up=True), "1.24 GiB"),
        (format_bytes(14 * 2**20, round_up=True), "14.0 MiB"),
        # The unit once if both have the same
        (format_usage(3.1 * GIB, 8 * GIB), "3.10 of 8.00 GiB"),
        (format_usage(700 * 2**20, 8 * GIB), "700.0 MiB of 8.00 GiB"),
        (format_usage(12, 2**10), "12 B of 1.0 KiB"),
        # Three digits
        (format_seconds(1234.5), "1234 s"),
        (format_seconds(1.046), "1.05 s"),
        (format_seconds(0.123), "0.123 s"),
        (format_seconds(0.0042), "4.2 ms"),
        (format_seconds(42e-6), "42 µs"),
        (format_seconds(0.0), "0 ms"),
        (format_rate(1234.5), "1234 samples/s"),
        (format_rate(27.64), "27.6 samples/s"),
        (format_rate(0.5), "0.5 samples/s"),
        # Two digits and no negative zero
        (format_signed_percent(0.123), "+12 %"),
        (format_signed_percent(-0.034), "-3.4 %"),
        (format_signed_percent(0.0), "+0.0 %"),
        (format_signed_percent(-0.0001), "+0.0 %"),
        (format_signed_percent(2.5), "+250 %"),
        (format_percent(0.954), "95 %"),
        # Ranges, and equal values in a row
        (format_ranks((3,)), "rank 3"),
        (format_ranks((5, 0, 1, 2)), "ranks 0-2, 5"),
        (format_ranks(tuple(range(0, 20, 2))), "10 ranks from 0 to 18"),
        (format_passes((3, 8, 8)), "1x3 + 2x8"),
        (format_passes((10,)), "1x10"),
        (format_passes(()), "none"),
        (format_count(1_106_080), "1.1 million"),
        (format_count(7e9), "7.0 billion"),
        (format_count(51_234), "51,234"),
        # Long lists are cut; layers that differ in numbers are counted
        (format_names([]), "none"),
        (format_names(["a", "b"]), "'a', 'b'"),
        (format_names(list("abcdefg")), "'a', 'b', 'c', 'd', 'e' and 2 more"),
        (format_layers([]), ""),
        (format_layers(["first"]), "first"),
        (format_layers(["blocks.3.up"]), "blocks.3.up"),
        (format_layers(LAYERS), "first, blocks.*.up (2), blocks.1.down"),
        (format_layers(["0", "2"]), "* (2)"),
    ],
)
@pytest.mark.every_combination
def test_values_are_short(written: str, text: str) -> None:
    assert written == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1024", 1024),
        ("7 b", 7),
        ("8GiB", 8 * GIB),
        (" 1.5 gib ", 1.5 * GIB),
        ("500MB", 500_000_000),
        ("2 TiB", 2 * 2**40),
    ],
)
def test_sizes_are_read_with_or_without_a_unit(text: str, count: float) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "GiB", "8 apples", "0GiB", "0.5B", "1e9", "8GiB,4GiB"]
)
def test_other_text_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size above 0, as in 8GiB or 500MB"):
        parse_bytes(text)


def test_columns_of_a_table_are_aligned() -> None:
    table = format_table(("rank", "device"), ("0", "A100"), ("11", "T4"), right=[0])
    assert table == "rank  device\n   0  A100\n  11  T4"
