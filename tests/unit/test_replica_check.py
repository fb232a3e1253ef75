"""The checksum of replicas changes with every bit, and does not depend on the order of addition."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from poplar.zero.checks import replica_check
from poplar.zero.checks.replica_check import ReplicaCheck, bit_checksum, checksum
from poplar.zero.streams import Streams

WORDS = (1 << 64) - 1


def slow_checksum(tensors: list[torch.Tensor], most_lanes: int) -> int:
    """The definition, with Python's integers."""
    total = 0
    for tensor in tensors:
        words = tensor.view(torch.int32).tolist()
        most = max(1, len(words) // replica_check._LEAST_ROWS)
        lanes = min(most_lanes, 1 << most.bit_length() - 1)
        sums = [0] * lanes
        for position, word in enumerate(words):
            sums[position % lanes] = sums[position % lanes] * replica_check._ROW + word
        own = sum(value * replica_check._LANE**lane for lane, value in enumerate(sums))
        total = total * replica_check._TENSOR + own
    return replica_check._signed(total & WORDS)


def random_tensors(blocks: list[int], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(64 * count, generator=generator) for count in blocks]


@pytest.mark.parametrize("at_once", [8, replica_check._LANES_ON_CPU])
@pytest.mark.parametrize("lanes", [32, replica_check._LANES])
@given(blocks=st.lists(st.integers(0, 9), min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_equals_its_definition(lanes, at_once, blocks, seed):
    tensors = random_tensors(blocks, seed)
    with mock.patch.multiple(replica_check, _LANES=lanes, _LANES_ON_CPU=at_once):
        assert int(checksum(tensors)) == slow_checksum(tensors, lanes)


@given(st.integers(1, 50), st.data())
def test_one_changed_bit_changes_it(blocks, data):
    values = random_tensors([blocks], seed=blocks)[0]
    before = int(checksum([values]))
    position = data.draw(st.integers(0, values.numel() - 1))
    values.view(torch.int32)[position] ^= 1 << data.draw(st.integers(0, 30))
    assert int(checksum([values])) != before


def test_small_changes_of_opposite_sign_do_not_cancel():
    """Devices that round differently change elements by one unit, up or down."""
    values = torch.ones(64 * 100)
    before = int(checksum([values]))
    for first in range(0, 64, 7):
        for second in range(first + 1, 64):
            changed = values.clone()
            changed.view(torch.int32)[first] += 1
            changed.view(torch.int32)[64 * 9 + second] -= 1
            assert int(checksum([changed])) != before


def test_nan_and_both_zeros_are_compared_by_their_bits():
    zeros, nan = torch.zeros(64), torch.full((64,), float("nan"))
    assert int(checksum([zeros])) != int(checksum([-zeros]))
    assert int(checksum([nan])) == int(checksum([nan.clone()]))


def test_tensors_in_another_order_have_another_checksum():
    first, second = random_tensors([1, 1], seed=0)
    assert int(checksum([first, second])) != int(checksum([second, first]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("size", [1, 16, 64, 1000, 1 << 15])
def test_exchanged_parts_change_it(dtype, size):
    """Models whose ranks initialize tensors of one shape in another order have such parts."""
    parts = list((30 * torch.randn(4, size)).to(dtype))
    parts[0][0] = 99  # also if they have one element
    before = int(bit_checksum(torch.cat(parts)))
    for first in range(3):
        for second in range(first + 1, 4):
            order = list(range(4))
            order[first], order[second] = second, first
            exchanged = torch.cat([parts[i] for i in order])
            is_equal = torch.equal(parts[first], parts[second])
            assert (int(bit_checksum(exchanged)) == before) == is_equal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("one", [2.0, -1.0])
def test_place_of_a_changed_upper_bit_counts(dtype, one):
    """So exchanged elements count, too, that differ in these bits only."""
    with mock.patch.object(replica_check, "_LANES", 64):
        values = torch.ones(1 << 10, dtype=dtype)
        sums = set()
        for position in range(values.numel()):
            values[position] = one
            sums.add(int(bit_checksum(values)))
            values[position] = 1.0
    assert len(sums) == values.numel()


def test_a_checksum_keeps_no_other_memory():
    assert checksum([torch.ones(1 << 14)]).untyped_storage().nbytes() == 8


def checked_updates(updates: int, ranks: int = 2) -> list[int]:
    flat = SimpleNamespace(master=torch.ones(64))
    control = SimpleNamespace(group=SimpleNamespace(size=ranks))
    strategy = SimpleNamespace(replicates_state=True, streams=Streams())
    check = ReplicaCheck([flat], control, strategy)
    checked = []
    for update in range(1, updates + 1):
        check.record_update()
        if check.outgoing is not None:
            checked.append(update)
            check.receive(torch.zeros(ranks, dtype=torch.int64))
        check.raise_if_different()
    return checked


def test_first_two_updates_and_every_hundredth_are_checked():
    assert checked_updates(305) == [1, 2, 100, 200, 300]


def test_one_rank_checks_nothing():
    assert checked_updates(3, ranks=1) == []


@pytest.mark.parametrize(
    ("sums", "expected"),
    [((5, 5, 7), [2]), ((7, 5, 5), [0]), ((5, 7), [1]), ((1, 2, 3), [1, 2])],
)
def test_ranks_that_differ_from_most_are_named(sums, expected):
    assert replica_check._minority(sums) == expected
