"""`poplar.tokens` counts the labels over which a language model's loss is a mean."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import poplar
from poplar.data import pytree
from poplar.zero.micro_batches import _counts

IGNORED = -100


class Pair(NamedTuple):
    inputs: Tensor
    labels: Tensor


@dataclass
class Fields:
    labels: Tensor


def random_labels(samples: int, length: int, seed: int) -> Tensor:
    """Rows of labels of different lengths; some of them are ignored in the middle."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 5, (samples, length), generator=generator)
    return labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.4, IGNORED)


def counted_one_by_one(labels: Tensor, ignore_index: int, shift: bool) -> int:
    rows = labels.tolist()
    return sum(label != ignore_index for row in rows for label in (row[1:] if shift else row))


@given(
    samples=st.integers(0, 5),
    length=st.integers(0, 7),
    seed=st.integers(0, 99),
    shift=st.booleans(),
    ignore_index=st.sampled_from([IGNORED, 0]),
)
def test_count_equals_a_count_label_by_label(samples, length, seed, shift, ignore_index):
    labels = random_labels(samples, length, seed)
    weight = poplar.tokens(ignore_index, shift=shift)
    assert int(weight({"labels": labels})) == counted_one_by_one(labels, ignore_index, shift)


@given(seed=st.integers(0, 99), shift=st.booleans(), cut=st.integers(0, 5))
def test_counts_of_micro_batches_sum_to_that_of_the_batch(seed, shift, cut):
    batch = {"labels": random_labels(5, 6, seed)}
    weight = poplar.tokens(shift=shift)
    parts = pytree.split(batch, [cut, 5 - cut])
    assert sum(int(weight(part)) for part in parts) == int(weight(batch))


def test_count_is_the_number_of_terms_of_the_cross_entropy():
    labels = random_labels(4, 9, seed=1)
    ones = torch.zeros(4, 9, 5)  # every label has the loss log(5)
    total = nn.functional.cross_entropy(ones[:, :-1].mT, labels[:, 1:], reduction="sum")
    count = int(poplar.tokens()({"labels": labels}))
    torch.testing.assert_close(float(total), count * torch.tensor(5.0).log().item())


@pytest.mark.parametrize(
    ("batch", "where"),
    [
        ({"labels": torch.ones(2, 3, dtype=torch.long)}, "labels"),
        (UserDict(labels=torch.ones(2, 3, dtype=torch.int32)), "labels"),
        ({"targets": torch.ones(2, 3, dtype=torch.uint8)}, "targets"),
        ((torch.rand(2, 3), torch.ones(2, 3, dtype=torch.long)), 1),
        ([torch.ones(2, 3, dtype=torch.long)], 0),
        (Pair(torch.rand(2, 3), torch.ones(2, 3, dtype=torch.long)), "labels"),
        (Pair(torch.rand(2, 3), torch.ones(2, 3, dtype=torch.long)), -1),
        (Fields(torch.ones(2, 3, dtype=torch.long)), "labels"),
    ],
)
def test_labels_are_found_in_every_container(batch, where):
    assert int(poplar.tokens(labels=where)(batch)) == 4
    assert int(poplar.tokens(labels=where, shift=False)(batch)) == 6


def test_labels_that_are_all_ignored_have_weight_0():
    batch = {"labels": torch.full((2, 3), IGNORED)}
    assert int(poplar.tokens()(batch)) == 0


def test_packed_samples_count_every_label_that_is_not_ignored():
    """Two samples in one row: a collator may ignore the first label of each, or not."""
    row = torch.tensor([[1, 2, 3, 1, 2]])
    marked = torch.tensor([[IGNORED, 2, 3, IGNORED, 2]])
    assert int(poplar.tokens()({"labels": row, "position_ids": row})) == 4
    assert int(poplar.tokens()({"labels": marked, "position_ids": row})) == 3


@pytest.mark.parametrize(
    ("batch", "options", "kind", "message"),
    [
        ({"input_ids": torch.ones(2, 3)}, {}, ValueError, "has no labels 'labels', it has 'input"),
        ((torch.ones(2, 3),), {}, ValueError, "has no labels 'labels', it has positions 0 to 0"),
        ((torch.ones(2, 3),), {"labels": 1}, ValueError, "has no labels 1"),
        (torch.ones(2, 3), {}, ValueError, "the batch is one tensor"),
        ({"labels": torch.ones(2, 3)}, {}, TypeError, "tensor of integers, got torch.float32"),
        ({"labels": torch.ones(2, 3) > 0}, {}, TypeError, "tensor of integers, got torch.bool"),
        ({"labels": [1, 2]}, {}, TypeError, "tensor of integers, got list"),
        ({"labels": torch.ones(2, dtype=torch.long)}, {}, ValueError, r"shift=False"),
    ],
)
def test_other_batches_raise_with_the_fix(batch, options, kind, message):
    with pytest.raises(kind, match=message):
        poplar.tokens(**options)(batch)


class OnDevice(Tensor):
    """Counts reads, each of which would wait for the device."""

    reads: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func.__name__ in ("item", "tolist", "__float__", "__int__", "__bool__", "__index__"):
            cls.reads.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_the_counts_of_all_micro_batches_are_read_from_the_device_at_once():
    labels = random_labels(12, 7, seed=3)
    parts = [*pytree.split({"labels": labels.as_subclass(OnDevice)}, [4, 2, 6]), None]
    OnDevice.reads.clear()
    counts = _counts(poplar.tokens(), parts, [4, 2, 6, 0])
    assert OnDevice.reads == ["tolist"]
    expected = [counted_one_by_one(part, IGNORED, True) for part in labels.split([4, 2, 6])]
    assert counts == [*expected, 0.0]


def test_weights_may_be_numbers_and_tensors_of_any_dtype():
    weights = iter([torch.tensor(2), 3, torch.tensor([0.5]), True])
    assert _counts(lambda part: next(weights), [()] * 4, [1] * 4) == [2.0, 3.0, 0.5, 1.0]
