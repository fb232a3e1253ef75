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


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (20_000, "19.5 KiB"),
        (3 * 2**20, "3.0 MiB"),
        (700 * 2**20, "700.0 MiB"),
        (8.5 * 2**30, "8.50 GiB"),
        (-3 * 2**20, "-3.0 MiB"),
    ],
)
def test_bytes_have_the_largest_unit_that_fits(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1024", 1024),
        ("7 b", 7),
        ("8GiB", 8 * 2**30),
        (" 1.5 gib ", 1.5 * 2**30),
        ("500MB", 500_000_000),
        ("2 TiB", 2 * 2**40),
    ],
)
def test_sizes_are_read_with_or_without_a_unit(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "0", "-1", "GiB", "8 apples", "0GiB", "1e9", "8GiB,4GiB"])
def test_other_text_is_no_size(text):
    with pytest.raises(ValueError, match="expected a size above 0, as in 8GiB or 500MB"):
        parse_bytes(text)


def test_bytes_are_rounded_up_where_they_have_to_be_enough():
    assert format_bytes(1.231 * 2**30) == "1.23 GiB"
    assert format_bytes(1.231 * 2**30, round_up=True) == "1.24 GiB"
    assert format_bytes(14 * 2**20, round_up=True) == "14.0 MiB"


def test_usage_names_the_unit_once_if_both_have_the_same():
    assert format_usage(3.1 * 2**30, 8 * 2**30) == "3.10 of 8.00 GiB"
    assert format_usage(700 * 2**20, 8 * 2**30) == "700.0 MiB of 8.00 GiB"
    assert format_usage(12, 2**10) == "12 B of 1.0 KiB"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1234.5, "1234 s"),
        (1.046, "1.05 s"),
        (0.123, "0.123 s"),
        (0.0042, "4.2 ms"),
        (42e-6, "42 µs"),
        (0.0, "0 ms"),
    ],
)
def test_seconds_have_three_digits(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("fraction", "text"),
    [
        (0.123, "+12 %"),
        (-0.034, "-3.4 %"),
        (0.0, "+0.0 %"),
        (-0.0001, "+0.0 %"),
        (2.5, "+250 %"),
    ],
)
def test_signed_percents_have_two_digits_and_no_negative_zero(fraction, text):
    assert format_signed_percent(fraction) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(1234.5, "1234 samples/s"), (27.64, "27.6 samples/s"), (0.5, "0.5 samples/s")],
)
def test_rates_have_three_digits_or_are_whole(rate, text):
    assert format_rate(rate) == text


def test_percents_are_whole():
    assert format_percent(0.954) == "95 %"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((3,), "rank 3"),
        ((5, 0, 1, 2), "ranks 0-2, 5"),
        (tuple(range(0, 20, 2)), "10 ranks from 0 to 18"),
    ],
)
def test_ranks_are_written_as_ranges(ranks, text):
    assert format_ranks(ranks) == text


@pytest.mark.parametrize(
    ("sizes", "text"), [((3, 8, 8), "1x3 + 2x8"), ((10,), "1x10"), ((), "none")]
)
def test_equal_passes_in_a_row_are_counted(sizes, text):
    assert format_passes(sizes) == text


@pytest.mark.parametrize(
    ("value", "text"), [(1_106_080, "1.1 million"), (7e9, "7.0 billion"), (51_234, "51,234")]
)
def test_large_counts_have_a_unit_name(value, text):
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], "none"),
        (["a", "b"], "'a', 'b'"),
        (list("abcdefg"), "'a', 'b', 'c', 'd', 'e' and 2 more"),
    ],
)
def test_long_lists_of_names_are_cut(names, text):
    assert format_names(names) == text


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["first"], "first"),
        (["blocks.3.up"], "blocks.3.up"),
        (
            ["first", "blocks.0.up", "blocks.1.up", "blocks.1.down"],
            "first, blocks.*.up (2), blocks.1.down",
        ),
        (["0", "2"], "* (2)"),
    ],
)
def test_layers_that_differ_in_numbers_are_counted(names, text):
    assert format_layers(names) == text


def test_columns_of_a_table_are_aligned():
    table = format_table(("rank", "device"), ("0", "A100"), ("11", "T4"), right=[0])
    assert table == "rank  device\n   0  A100\n  11  T4"
