"""The documentation names modules that exist, and its diagrams follow the import graph."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from test_imports import MODULES, imports

import poplar

DOCS = Path(__file__).parents[2] / "docs"
HOW_IT_WORKS = (DOCS / "how-it-works.md").read_text("utf-8")
DIAGRAMS = re.findall(r"^```mermaid\n(.*?)^```", HOW_IT_WORKS, re.DOTALL | re.M)
MOST_MODULES = {"batch to update": 10, "profile to plan": 8}


def module_of(path: str) -> str:
    """`poplar/zero/unit.py` is `poplar.zero.unit`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def parse(diagram: str) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Module by node name, and the arrows as pairs of modules."""
    named = re.findall(r'^ *(\w+)\["(poplar/[\w/]+\.py)', diagram, re.M)
    nodes = {node: module_of(path) for node, path in named}
    arrows = re.findall(r"^ *(\w+) --> (\w+)$", diagram, re.M)
    return nodes, [(nodes[start], nodes[end]) for start, end in arrows]


def imports_directly_or_from_package(module: str, imported: str) -> bool:
    """`from poplar.comm import Communicator` counts as an import of `poplar.comm.communicator`."""
    package = imported.rpartition(".")[0]
    found = set(imports(module))
    return imported in found or (
        package in found and package in MODULES and imported in imports(package)
    )


@pytest.mark.parametrize(
    ("diagram", "most"),
    list(zip(DIAGRAMS, MOST_MODULES.values(), strict=True)),
    ids=list(MOST_MODULES),
)
def test_diagram_follows_the_imports(diagram, most):
    nodes, arrows = parse(diagram)
    assert len(nodes) <= most
    assert set(nodes.values()) <= set(MODULES)
    assert arrows
    wrong = [pair for pair in arrows if not imports_directly_or_from_package(*pair)]
    assert not wrong


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.stem)
def test_files_named_on_a_page_exist(page):
    root = DOCS.parent
    named = re.findall(
        r"(?<![\w./])((?:poplar|tests|benchmarks|examples|csrc|kernels)/[\w./-]+\.\w+)",
        page.read_text("utf-8"),
    )
    missing = [name for name in named if not (root / name).exists()]
    assert not missing


def test_memory_program_prints_the_documented_figures():
    page = (DOCS / "guides/which-stage.md").read_text("utf-8")
    program = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.M)[0]
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(program, {})
    figures = re.findall(r"([\d.]+) GiB", printed.getvalue())
    assert "It prints {}, {}, {} and {} GiB".format(*figures) in page


def test_api_page_has_every_public_name():
    page = (DOCS / "api.md").read_text("utf-8")
    listed = set(re.findall(r"^::: poplar\.(\w+)$", page, re.M))
    assert listed == set(poplar.__all__) - {"autotune"}
    assert "`poplar.autotune(...)`" in page  # built from `tune`; the page says so
