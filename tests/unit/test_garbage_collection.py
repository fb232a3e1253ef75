"""Saving and loading pause garbage collection, and leave it as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from poplar.checkpoint.collection import no_garbage_collection


@pytest.fixture(params=[True, False])
def enabled(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


@no_garbage_collection()
def save_to_a_full_disk() -> None:
    with no_garbage_collection():
        assert not gc.isenabled()
    assert not gc.isenabled()
    raise OSError("the disk is full")


def test_it_is_as_before_also_after_an_error(enabled: bool) -> None:
    with pytest.raises(OSError, match="full"):
        save_to_a_full_disk()
    assert gc.isenabled() is enabled
