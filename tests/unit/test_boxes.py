"""A flat range as boxes: they hold exactly the range, in order, and there are at most 2d - 1."""

from __future__ import annotations

import math
import random

import pytest
import torch

from poplar.checkpoint.state_dicts.shard_tensor import boxes_of_range
from tests.subset import choose


def elements_of(box, numbers):
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        numbers = numbers.narrow(dim, offset, size)
    return numbers.flatten().tolist()


def check(shape, start, stop):
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    boxes = boxes_of_range(shape, start, stop)
    assert [n for box in boxes for n in elements_of(box, numbers)] == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    for box in boxes:
        assert box.numel > 0
        assert elements_of(box, numbers)[0] == box.start


@pytest.mark.parametrize("shape", [(), (5,), (1,), (3, 4), (1, 4), (4, 1), (2, 3, 2), (2, 1, 3, 2)])
def test_every_range_of_small_shapes(shape):
    numel = math.prod(shape)
    for start in range(numel + 1):
        for stop in range(start, numel + 1):
            check(shape, start, stop)


@pytest.mark.parametrize("dimensions", range(5))
def test_random_ranges(dimensions):
    generator = random.Random(dimensions)
    for _ in range(choose(quick=100, full=2000)):
        shape = tuple(generator.choice((0, 1, 1, 2, 3, 5, 8)) for _ in range(dimensions))
        start, stop = sorted(generator.randint(0, math.prod(shape)) for _ in range(2))
        check(shape, start, stop)


def test_whole_tensor_is_one_box():
    assert len(boxes_of_range((3, 4, 5), 0, 60)) == 1


def test_worst_range_needs_two_boxes_per_dimension_but_one():
    assert len(boxes_of_range((3, 3, 3), 1, 26)) == 5


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_range_outside_the_tensor_raises(start, stop):
    with pytest.raises(ValueError, match=r"not a range of the 6 elements .* shape \(2, 3\)"):
        boxes_of_range((2, 3), start, stop)
