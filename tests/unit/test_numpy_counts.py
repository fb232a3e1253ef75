"""Counts may be integers of NumPy wherever plans and measurements take them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from records import cluster

from poplar import search
from poplar.profiler.memory_limit import in_bytes
from poplar.tuning.autotune import TuningJob
from poplar.values.schema import positive_count


def test_search_has_the_plan_of_the_same_counts() -> None:
    profile = cluster((2.0, 1.0), ("fast", "slow"))
    found = search(profile, global_batch=np.int64(8), max_micro_batch=np.uint8(4))
    assert found == search(profile, global_batch=8, max_micro_batch=4)


def test_autotune_measures_with_the_same_counts() -> None:
    model, counts = torch.nn.Linear(2, 2), {"global_batch": np.int64(8), "max_batch": np.int32(4)}
    job = TuningJob.of(model, lambda model, batch: None, torch.ones(1, 2), **counts)
    job.check()
    assert (job.global_batch, job.max_batch) == (8, 4)
    assert {type(job.global_batch), type(job.max_batch)} == {int}


def test_memory_is_limited_to_the_same_bytes() -> None:
    assert in_bytes(np.int64(1 << 30), "memory_limit") == 1 << 30


@pytest.mark.parametrize("value", [0, -1, True, np.True_, 2.0, np.float32(2.0), "2", None])
def test_what_counts_nothing_is_none(value: Any) -> None:
    assert positive_count(value) is None
