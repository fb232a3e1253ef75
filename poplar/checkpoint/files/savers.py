"""A folder of checkpoints has one saver: another one would remove what the first has saved."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from weakref import WeakValueDictionary

_SAVERS: WeakValueDictionary[str, object] = WeakValueDictionary()
"""By real path of a folder, what saves there in this process."""


def claim(folder: Path, saver: object, *, advice: str) -> None:
    """Note that an object saves in a folder, until it is deleted or releases it. Local.

    Raises:
        ValueError: another object does; the message has the advice.
    """
    path = os.path.realpath(folder)
    if _SAVERS.setdefault(path, saver) is not saver:
        gc.collect()  # the other one may be garbage in a reference cycle
    if _SAVERS.setdefault(path, saver) is not saver:
        raise ValueError(
            f"another {type(saver).__name__} has saved in {folder}, and each would remove what the "
            f"other has saved; {advice}, or delete the other one if it saves no more"
        )


def release(folder: Path, saver: object) -> None:
    """Note that an object saves in a folder no more. Local."""
    path = os.path.realpath(folder)
    if _SAVERS.get(path) is saver:
        del _SAVERS[path]
