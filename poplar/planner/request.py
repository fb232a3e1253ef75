"""What a plan is searched for."""

from __future__ import annotations

from typing import NamedTuple


class Request(NamedTuple):
    """The arguments of `search` that every stage and policy needs."""

    global_batch: int
    max_micro_batch: int
    """Largest micro-batch that is allowed on any rank."""
