"""MkDocs hook: pages show the README's quickstart instead of a copy of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"
PLACEHOLDER = "{{ quickstart }}"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the placeholder by the README's Python block."""
    if PLACEHOLDER not in markdown:
        return markdown
    found = re.search(r"^```python\n.*?^```", README.read_text("utf-8"), re.DOTALL | re.M)
    if found is None:
        raise ValueError(f"{README} has no Python block for {PLACEHOLDER}")
    return markdown.replace(PLACEHOLDER, found[0])
