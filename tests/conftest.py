"""What every test may ask for: the pool of ranks, and property tests that are not timed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

# Worker processes inherit sys.path, and import test modules by their bare names.
sys.path.insert(0, str(Path(__file__).parent))

from ranks import Pool

# Ranks share few cores with everything else on the machine: a slow example says nothing.
hypothesis.settings.register_profile("poplar", deadline=None, derandomize=True)
hypothesis.settings.load_profile("poplar")

# As in the workers: oracles run with as many threads as the ranks that they are compared with.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """The pool of worker processes that all multi-rank tests of a run share."""
    pool = Pool()
    yield pool
    pool.close()
