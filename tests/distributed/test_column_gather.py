"""Gathering the rows of a matrix, of which each rank needs some columns, on every transport."""

from __future__ import annotations

import random
from contextlib import nullcontext
from itertools import accumulate

import pytest
import ranks as harness
import torch
from native_calls import native_calls
from ranks import Pool
from subset import choose
from torch import Tensor

from poplar.comm import Group, connect
from poplar.comm.shard_layout import Layout

TRANSPORTS = ("shared_memory", "process_group", "native calls")


def random_columns(draw: random.Random, width: int) -> tuple[int, int]:
    """Whole rows, nothing, or a random part."""
    cuts = sorted((draw.randint(0, width), draw.randint(0, width)))
    return draw.choice([(0, width), (0, 0), (cuts[0], cuts[1])])


def matrix_of(number: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(rows, width, generator=generator).to(dtype)


def gather_many(transport: str, times: int, depth: int) -> list[str]:
    """Random gathers, several in flight; returns those with wrong columns."""
    group, draw, wrong, in_flight = Group.of(harness.group(), None), random.Random(5), [], []
    native = transport == "native calls"
    comm = connect(group, "process_group" if native else transport)
    for number in range(times):
        rows = Layout((0, *accumulate(draw.choice((0, 1, 3, 17)) for _ in range(group.size))))
        width, dtype = draw.randint(1, 40), draw.choice((torch.float32, torch.bfloat16))
        columns = [random_columns(draw, width) for _ in range(group.size)]
        expected = matrix_of(number, rows.numel, width, dtype)
        data, own = torch.full_like(expected, torch.nan), slice(*rows.bounds(group.rank))
        data[own] = expected[own]
        with native_calls() if native else nullcontext():
            work = comm.gather_columns(data, rows, columns, what=f"gather {number}")
        in_flight.append((work, data, expected, columns))
        if len(in_flight) == depth or number == times - 1:
            for work, data, expected, columns in in_flight:
                work.wait()
                needed = slice(*columns[group.rank])
                if not torch.equal(data[:, needed], expected[:, needed]):
                    wrong.append(f"rank {group.rank}: {expected.shape}, columns {columns}")
            in_flight = []
    return wrong


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_rank_gets_the_columns_that_it_needs(ranks: Pool, transport: str) -> None:
    for wrong in ranks.run(gather_many, transport, choose(quick=20, full=100), 3):
        assert wrong == []
