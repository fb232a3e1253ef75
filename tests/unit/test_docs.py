"""The documentation names files that exist; its diagrams and its layers are those of the code."""

from __future__ import annotations

import ast
import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import yaml
from test_imports import INDEPENDENT, LAYERS, MODULES, WITHOUT_TORCH

import poplar
from poplar.system.cuda_architectures import has_kernels

DOCS = Path(__file__).parents[2] / "docs"
HOW_IT_WORKS = (DOCS / "how-it-works.md").read_text("utf-8")
DIAGRAMS = re.findall(r"^```mermaid\n(.*?)^```", HOW_IT_WORKS, re.DOTALL | re.M)
MOST_MODULES = {"batch to update": 10, "profile to plan": 8}


def module_of(path: str) -> str:
    """`poplar/zero/unit.py` is `poplar.zero.unit`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def parse(diagram: str) -> tuple[dict[str, str], list[tuple[str, str, str]]]:
    """Module by node name, and the arrows: calling module, function, called module."""
    named = re.findall(r'^ *(\w+)\["(poplar/[\w/]+\.py)', diagram, re.M)
    nodes = {node: module_of(path) for node, path in named}
    arrows = re.findall(r"^ *(\w+) -->\|(\w+)\| (\w+)$", diagram, re.M)
    return nodes, [(nodes[start], function, nodes[end]) for start, function, end in arrows]


def used_names(module: str) -> set[str]:
    """Names and attributes that a module reads; annotations do not count."""
    tree = ast.parse(MODULES[module].read_text("utf-8"))
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):
            if getattr(node, field, None) is not None:
                setattr(node, field, None)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return names | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def defined_names(module: str) -> set[str]:
    """Functions and methods of a module, and callable fields of its classes."""
    tree = ast.parse(MODULES[module].read_text("utf-8"))
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    fields = {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if ast.unparse(node.annotation).startswith("Callable")
    }
    return functions | fields


@pytest.mark.parametrize(
    ("diagram", "most"),
    list(zip(DIAGRAMS, MOST_MODULES.values(), strict=True)),
    ids=list(MOST_MODULES),
)
def test_diagram_names_functions_that_are_called(diagram, most):
    nodes, arrows = parse(diagram)
    assert len(nodes) <= most
    assert set(nodes.values()) <= set(MODULES)
    assert len(arrows) == diagram.count("-->")
    assert {module for start, _, end in arrows for module in (start, end)} == set(nodes.values())
    not_called = [arrow for arrow in arrows if arrow[1] not in used_names(arrow[0])]
    not_defined = [arrow for arrow in arrows if arrow[1] not in defined_names(arrow[2])]
    assert not not_called
    assert not not_defined


def test_layers_are_those_of_the_import_test():
    section = HOW_IT_WORKS.partition("## Layers")[2]
    rows = [re.findall(r"`(\w+)`", line) for line in section.splitlines() if line.startswith("| ")]
    layers, independent = rows[2 : 2 + len(LAYERS)], rows[4 + len(LAYERS) :]
    for names, layer in zip(layers, reversed(LAYERS), strict=True):
        assert set(names) == layer
    assert {name: {*others} for name, *others in independent} == INDEPENDENT
    sentence = next(text for text in section.split("\n\n") if "import PyTorch" in text)
    assert set(re.findall(r"`([\w.]+)`", sentence)) == set(WITHOUT_TORCH)


def test_contributing_lists_every_package_and_module():
    table = (
        (DOCS.parent / "CONTRIBUTING.md").read_text("utf-8").partition("## Where to find things")[2]
    )
    listed = set(re.findall(r"`(?:poplar/)?(\w+)(?:/|\.py)`", table))
    assert set().union(*LAYERS) - {"__main__"} <= listed


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
    assert listed == set(poplar.__all__)


BUILDS = (DOCS / "guides/pytorch-builds.md").read_text("utf-8")


def table_under(page: str, heading: str) -> list[list[str]]:
    """The cells of the rows of the table that begins with this heading."""
    rows = page.partition(f"| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_builds_of_each_generation_have_kernels_for_it():
    capabilities = {
        build: tuple("sm_" + number.replace(".", "") for number in re.findall(r"\d+\.\d", numbers))
        for build, _, numbers in table_under(BUILDS, "build")
    }
    generations = table_under(BUILDS, "generation")
    assert len(generations) == 7
    for name, _, versions, builds, *_ in generations:
        for number in re.findall(r"\d+\.\d", versions):
            own = tuple(map(int, number.split(".")))
            serving = {b for b, listed in capabilities.items() if has_kernels(own, listed)}
            assert serving == set(builds.split(", ")), name


def test_messages_on_the_page_of_troubles_are_those_of_the_code():
    page = (DOCS / "troubleshooting.md").read_text("utf-8")
    code = "".join(path.read_text("utf-8") for path in MODULES.values())
    for heading, in_code in (
        ("gloo may not reach the other hosts", "gloo may not reach the other hosts"),
        ("failed, waiting for rank(s) 1 (deadline 300 s)", "failed, waiting for rank(s) {names} "),
        ("NoPlanFits: no plan fits at stage", "no plan fits at stage {closest.stage}"),
        (
            "but the devices of rank(s) [1] only emulate",
            "but the devices of rank(s) {lacking} only emulate",
        ),
        ("share one device", "share one device"),
        ("bound by communication", "bound by"),
    ):
        assert heading in page
        assert in_code in code


def test_the_image_is_installed_as_the_readme_says():
    image = (DOCS.parent / "docker/Dockerfile").read_text("utf-8")
    readme = (DOCS.parent / "README.md").read_text("utf-8")
    install = readme.partition("## Install")[2].partition("##")[0]
    commands = re.findall(r"^(pip install \S+|poplar \w+)", install, re.M)
    assert commands == ["pip install torch", "pip install .", "poplar doctor"]
    assert "cmake.define.POPLAR_CUDA=ON" in install
    assert re.findall(r"pip install .*?(\$\{TORCH\}|\"\.)", image) == ["${TORCH}", '".']
    assert 'CMD ["poplar", "doctor"]' in image
    assert "ARG TORCH=torch\n" in image
    assert "cmake.define.POPLAR_CUDA=${POPLAR_CUDA}" in image


def test_services_have_more_shared_memory_than_the_default():
    services = yaml.safe_load((DOCS.parent / "docker/compose.yaml").read_text("utf-8"))["services"]
    arguments = set(
        re.findall(r"^ARG (\w+)", (DOCS.parent / "docker/Dockerfile").read_text(), re.M)
    )
    assert set(services) == {"cpu", "cuda"}
    for service in services.values():
        assert service["shm_size"] == "8gb"
        # Relative paths are those of the file; and `-m poplar` would find sources in the folder.
        assert service["volumes"] == ["${PWD}:/workspace"]
        assert service["command"].endswith("--no-python poplar doctor")
        assert (DOCS.parent / service["build"]["dockerfile"]).exists()
        assert set(service["build"].get("args", ())) <= arguments


def test_convergence_page_has_the_figures_of_the_saved_rows():
    page = (DOCS / "convergence.md").read_text("utf-8")
    saved = DOCS.parent / "benchmarks/results/convergence.jsonl"
    for row in map(json.loads, saved.read_text("utf-8").splitlines()):
        found = row["figures"]
        losses = f"{found['last_loss']:.4f} | {found['held_out_loss']:.4f}"
        assert f"| {row['case']['run']} | {losses} | {found['largest_difference']:.1e} |" in page
