"""A folder of checkpoints has one saver: another one would remove what the first has saved."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

_SAVERS: dict[str, weakref.ref[object]] = {}
"""By real path of a folder, what saves there in this process."""


def claim(folder: Path, saver: object, *, advice: str) -> None:
    """Note that an object saves in a folder, until it is deleted or releases it. Local.

    Raises:
        ValueError: another object does; the message has the advice.
    """
    path = os.path.realpath(folder)
    if _has_other(path, saver):
        gc.collect()  # it may be garbage in a reference cycle
        if _has_other(path, saver):
            raise ValueError(
                f"another {type(saver).__name__} has saved in {folder}, and each would remove what "
                f"the other has saved; {advice}, or delete the other one if it saves no more"
            )
    _SAVERS[path] = weakref.ref(saver)


def release(folder: Path, saver: object) -> None:
    """Note that an object saves in a folder no more. Local."""
    path = os.path.realpath(folder)
    if path in _SAVERS and not _has_other(path, saver):
        del _SAVERS[path]


def _has_other(path: str, saver: object) -> bool:
    known = _SAVERS.get(path)
    return known is not None and known() not in (None, saver)
