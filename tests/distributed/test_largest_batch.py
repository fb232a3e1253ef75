"""The largest micro-batch that fits, found with few passes in a process whose memory is limited.

`pytest -s` prints what was tried. Libraries allocate up to 4 MiB for larger batches, which no count
contains; a plan's reserve covers it, and it is little of these limits. Probes of simulated memory
are counted in `test_measured_passes.py`.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import limited_memory
import pytest
import torch
from ranks import one_off
from subset import choose
from torch import nn

from poplar.profiler.batch_sizes import SizeLimits, probe
from poplar.profiler.memory_budget import MEMORY_RESERVE
from poplar.profiler.passes import Passes
from poplar.system.out_of_memory import free_frames, is_out_of_memory
from poplar.values.profile import BatchPoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA limits memory")

MIB = 1 << 20
PROBES = 5
ERROR = 0.03
MOST = 1 << 16


def transformer() -> nn.Module:
    layer = partial(nn.TransformerEncoderLayer, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(64, 32), *(layer(32, 2, 64) for _ in range(2)))


def perceptron() -> nn.Module:
    layers = (nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6))
    return nn.Sequential(nn.Embedding(64, 64), *layers)


def normalized() -> nn.Module:
    layers = (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(3))
    return nn.Sequential(nn.Embedding(64, 64), *layers)


class Found(NamedTuple):
    """Results of one search."""

    tried: list[int]
    largest: int
    true: int
    """Found by bisection near `largest`, with passes that fail above it."""


class Counted(Passes):
    """Passes that record the sizes that are probed."""

    tried: list[int]

    def first(self, size: int) -> BatchPoint:
        self.tried.append(size)
        return super().first(size)


def fits(passes: Passes, size: int) -> bool:
    try:
        passes.run(size)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        free_frames(error)
        passes.model.zero_grad()
        return False
    finally:
        passes._batches.clear()
    return True


def search(build: Callable[[], nn.Module], room: int) -> Found:
    """Search within a limit as a profile does, which leaves a reserve; then make that the limit."""
    limited_memory.return_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    example = torch.randint(64, (1, 64))
    passes = Counted(
        build(), lambda model, batch: model(batch).square().mean(), example, torch.device("cpu")
    )
    passes.tried = []
    passes.run(1)  # libraries allocate what they keep
    usable, before = int(room * (1 - MEMORY_RESERVE)), limited_memory.private_bytes()
    limited_memory.limit_to(room)
    limits = SizeLimits(max_batch=MOST, activation_bytes=usable, longest_seconds=float("inf"))
    *_, sizes = probe(passes, limits)
    largest = sizes[-1].batch
    passes._batches.clear()
    limited_memory.limit_to(usable + before - limited_memory.private_bytes())
    near = range(int(0.9 * largest), int(1.1 * largest))
    fitting = bisect_left(near, True, key=lambda size: not fits(passes, size))
    return Found(passes.tried, largest, near[0] + fitting - 1)


CASES = [(build, room) for build in (transformer, perceptron, normalized) for room in (192, 320)]


@pytest.mark.parametrize(("build", "room"), choose(quick=CASES[:1], full=CASES))
def test_the_largest_batch_under_a_real_limit(build: Callable[[], nn.Module], room: int) -> None:
    (found,) = one_off(1, search, build, room * MIB)
    assert isinstance(found, Found), found
    error = found.largest / found.true - 1
    print(f"\n{build.__name__}, {room} MiB: tried {found.tried}, true {found.true}, {error:+.1%}")
    assert len(found.tried) <= PROBES
    assert abs(error) <= ERROR
