"""Bytes of a layer's gradient as factors: the break-even against a reduction."""

from __future__ import annotations

import pytest

from poplar.planner.factored_layers import break_even_rows, factored_traffic, reduction_traffic

LAYERS = ((4096, 25088), (1000, 4096), (768, 3072), (37, 26), (1, 1))


def sent(traffic):
    return sum(rank.leaving for rank in traffic)


@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(("outputs", "inputs"), LAYERS)
def test_factors_are_as_many_bytes_as_a_reduction_at_the_break_even(
    outputs, inputs, ranks, replicated
):
    shares = (1 / ranks,) * ranks
    each = break_even_rows(outputs, inputs, ranks, replicated=replicated) / ranks
    reduced = reduction_traffic(outputs, inputs, shares, replicated=replicated)
    factored = factored_traffic(outputs, inputs, (each,) * ranks, shares, replicated=replicated)
    assert sent(factored) == pytest.approx(sent(reduced))
    half = factored_traffic(outputs, inputs, (each / 2,) * ranks, shares, replicated=replicated)
    assert sent(half) == pytest.approx(sent(reduced) / 2)


@pytest.mark.parametrize("replicated", [False, True])
def test_what_ranks_send_is_what_ranks_receive(replicated):
    rows, shares = (5, 0, 3), (0.6, 0.4, 0.0)
    for traffic in (
        factored_traffic(7, 11, rows, shares, replicated=replicated),
        reduction_traffic(7, 11, shares, replicated=replicated),
    ):
        assert sent(traffic) == pytest.approx(sum(rank.arriving for rank in traffic))


def test_a_rank_without_a_share_receives_nothing():
    traffic = factored_traffic(7, 11, (5, 2), (1.0, 0.0), itemsize=2)
    assert [(rank.leaving, rank.arriving) for rank in traffic] == [(0, 2 * 2 * 18), (2 * 2 * 18, 0)]


def test_break_even_of_the_first_linear_layer_of_vgg():
    assert break_even_rows(4096, 25088, 2, replicated=True) == pytest.approx(7042, abs=1)
    assert break_even_rows(4096, 25088, 2) == pytest.approx(3787, abs=1)
