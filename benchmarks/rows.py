"""Append rows, which are dataclasses, to a file of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any


def write_rows(path: str | Path, rows: Iterable[Any]) -> None:
    """Append one JSON object per row; missing folders are created."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as output:
        output.writelines(json.dumps(asdict(row)) + "\n" for row in rows)
