"""The argument `memory_limit`: bytes or text, of one rank or by rank and device."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from poplar.profiler import memory_limit
from poplar.profiler.memory_limit import by_rank

GIB = 1 << 30
DEVICES = ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
"""Of two hosts."""


def test_each_rank_may_give_its_own_limit() -> None:
    assert by_rank([None, GIB, "2GiB", 5], DEVICES) == [None, GIB, 2 * GIB, 5]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ({"cuda:1": "10GiB", 3: 8 * GIB}, [None, 10 * GIB, None, 8 * GIB]),
        ({0: 1, 3: "1KiB"}, [1, None, None, 1024]),
        ({"cuda:0": 7}, [7, None, 7, None]),
        ({}, [None] * 4),
    ],
)
def test_mapping_is_by_rank_or_device(limit: dict[Any, Any], expected: list[int | None]) -> None:
    assert by_rank([limit] * 4, DEVICES) == expected


def test_rank_takes_precedence_over_its_device_in_any_order() -> None:
    generator = random.Random(0)
    for _ in range(50):
        ranks = {r: generator.randint(1, 99) for r in range(4) if generator.random() < 0.5}
        devices = {d: generator.randint(1, 99) for d in set(DEVICES) if generator.random() < 0.5}
        entries = [*ranks.items(), *devices.items()]
        generator.shuffle(entries)
        limit = dict(entries)
        expected = [ranks.get(r, devices.get(d)) for r, d in enumerate(DEVICES)]
        assert by_rank([limit] * 4, DEVICES) == expected


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ([{4: 1}] * 4, "entry for rank 4, which does not exist; there are ranks 0, 2 on 'cuda:0'"),
        ([{-1: 1}] * 4, "entry for rank -1"),
        ([{"cuda:2": 1}] * 4, "entry for device 'cuda:2', which does not exist; there are ranks"),
        ([{0: 1}, {0: 2}, {0: 1}, {0: 1}], "rank 0 has {0: 1} and rank 1 has {0: 2}"),
        ([5, 5, {0: 1}, {0: 1}], "rank 0 has 5 and rank 2 has {0: 1}"),
    ],
)
def test_wrong_mappings_are_explained(limits: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        by_rank(limits, DEVICES)


@pytest.mark.parametrize(
    ("limit", "kind", "message"),
    [
        (0, ValueError, "memory_limit must be an integer above 0, got 0"),
        (True, ValueError, "got True"),
        (1e9, ValueError, "got 1000000000.0"),
        ("much", ValueError, "memory_limit: expected a size above 0"),
        ({0: "much"}, ValueError, r"memory_limit\[0\]: expected a size"),
        ({"cuda:1": 0}, ValueError, r"memory_limit\['cuda:1'\] must be an integer above 0"),
        ({True: 1}, TypeError, "a rank number or a device such as 'cuda:1' as key, got True"),
        ({1.5: 1}, TypeError, "got 1.5"),
    ],
)
def test_wrong_values_are_named(limit: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        memory_limit.check(limit)
