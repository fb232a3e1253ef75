"""Ranks for tests of what uses Accelerate, and the plans with which they train.

Accelerate has one state per process and knows only the world's process group. So these tests have
their own pool of `RANKS` workers, and `as_launched` forgets the settings of earlier calls.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import ranks as pool
from accelerate.state import AcceleratorState, GradientState
from ranks import Pool

import poplar

RANKS, BATCH = 3, 12
SHARES = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
"""The batch of one process, for three ranks."""
PLANS = {
    # The ranks differ in samples, passes and shares; the last one has fewest.
    0: poplar.Plan(
        stage=0, global_batch=BATCH, micro_batches=((6,), (2, 3), (1,)), shares=(1 / 3,) * 3
    ),
    1: poplar.Plan(
        stage=1, global_batch=BATCH, micro_batches=((4, 4), (4,), ()), shares=(0.5, 0.3, 0.2)
    ),
    2: poplar.Plan(
        stage=2, global_batch=BATCH, micro_batches=((3, 4), (1, 3), (0, 1)), shares=(0.5, 0.3, 0.2)
    ),
    3: poplar.Plan(
        stage=3, global_batch=BATCH, micro_batches=((3, 4), (1, 3), (0, 1)), shares=(0.6, 0.4, 0.0)
    ),
}


def three_ranks() -> Iterator[Pool]:
    """A pool for a module of tests; importing the libraries has its own deadline."""
    workers = Pool(RANKS, forked=True)
    workers.run(as_launched, timeout=300)
    yield workers
    workers.close()


def as_launched() -> None:
    """What a launcher sets, and a state of Accelerate without the settings of earlier calls."""
    os.environ |= {
        "RANK": str(pool.rank()),
        "LOCAL_RANK": str(pool.rank()),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "ACCELERATE_USE_CPU": "true",
    }
    fresh_state()


def fresh_state() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)


def write_for_a_while(duration: timedelta) -> None:
    """Write small pieces, as a save to a slow disk."""
    end = time.monotonic() + duration.total_seconds()
    with Path("/dev/null").open("wb") as nothing:
        while time.monotonic() < end:
            nothing.write(bytes(1 << 20))
            time.sleep(0.05)
