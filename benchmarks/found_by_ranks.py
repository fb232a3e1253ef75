"""What functions find that run on ranks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from launch import run_ranks


def found_by_ranks(function: Callable[..., Any], ranks: int, *given: Any, **options: Any) -> Any:
    """What a function returns on the first of so many ranks, as JSON has it; see `run_ranks`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        run_ranks(_write_found, ranks, function, given, path, **options)
        return json.loads(path.read_text("utf-8"))


def _write_found(function: Callable[..., Any], given: tuple[Any, ...], path: Path) -> None:
    found = function(*given)
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found), encoding="utf-8")
