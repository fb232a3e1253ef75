"""Messages name ranks by their numbers in the job (`Group.name`), not in a group of some ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def group_ranks(source: str) -> Iterator[ast.FormattedValue]:
    """Values `<group>.rank` after "rank " in f-strings."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.JoinedStr):
            continue
        for text, value in zip(node.values, node.values[1:], strict=False):
            is_named = isinstance(text, ast.Constant) and str(text.value).endswith("rank ")
            if is_named and isinstance(value, ast.FormattedValue):
                expression = ast.unparse(value.value)
                if expression == "group.rank" or expression.endswith(
                    ("_group.rank", ".group.rank")
                ):
                    yield value


def test_messages_have_no_group_ranks() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{value.lineno}"
        for path in sorted((ROOT / "poplar").rglob("*.py"))
        for value in group_ranks(path.read_text())
    ]
    assert not wrong, "use Group.name in:\n" + "\n".join(wrong)
