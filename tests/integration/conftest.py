"""Fixtures of tests/integration."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Pool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Forks instead of new processes, for which importing the libraries takes longest."""
    pool = Pool(forked=True)
    yield pool
    pool.close()
