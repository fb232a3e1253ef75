"""What a plan is searched for."""

from __future__ import annotations

import math
from typing import NamedTuple


class Request(NamedTuple):
    """The arguments of `search` that every stage and policy needs."""

    global_batch: int
    max_micro_batch: int
    """Largest micro-batch that is allowed on any rank."""
    below: float = math.inf
    """Slower plans than this many seconds need not be told apart."""
