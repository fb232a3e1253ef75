"""The names of the tests that pytest would run on a machine with a GPU."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch


class _Collected:
    """A plugin that keeps the names of the selected tests."""

    names: frozenset[str] = frozenset()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = frozenset(item.nodeid.partition("::")[2] for item in session.items)


def names_with_a_gpu(arguments: Sequence[str], folder: Path) -> frozenset[str]:
    """Collect the tests in this process, which must be a separate one: it claims to have a GPU."""
    torch.cuda.is_available = lambda: True
    for name, module in list(sys.modules.items()):  # parametrized without a GPU
        if str(getattr(module, "__file__", None)).startswith(str(folder)):
            del sys.modules[name]
    os.chdir(folder)
    collected, printed = _Collected(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = pytest.main([*arguments, "--collect-only"], plugins=[collected])
    assert status == 0, printed.getvalue()
    return collected.names
