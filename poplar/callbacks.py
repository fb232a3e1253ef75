"""Deprecated name of `poplar.monitoring`, for one release."""

from __future__ import annotations

import warnings
from typing import Any

from poplar import monitoring


def __getattr__(name: str) -> Any:
    value = getattr(monitoring, name)
    warnings.warn(
        f"poplar.callbacks is now poplar.monitoring; import {name} from there",
        DeprecationWarning,
        stacklevel=2,
    )
    return value
