"""The import graph: imports point down the layers, and planning works without torch."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

import poplar

PACKAGE = Path(poplar.__file__).parent

LAYERS = (
    {"values"},
    {"step"},
    {"ops", "kernels", "system", "data"},
    {"comm", "planner", "simulator", "hardware"},
    {"zero", "checkpoint"},
    {"training"},
    {"optimizer", "drift", "elastic"},
    {"profiler"},
    {"tuning", "programmes", "monitoring", "doctor", "watch"},
    {"cli", "pair", "integrations", "__main__"},
)
"""Packages and top-level modules, from the bottom up. Imports point down or stay within a layer.

The profiler is above the optimizer because it times steps of the engine as users run it.
"""

INDEPENDENT = {
    "comm": {"planner", "simulator", "hardware"},
    "planner": {"comm", "simulator", "hardware"},
    "simulator": {"comm", "hardware"},
    "hardware": {"comm"},
    "zero": {"planner", "simulator", "hardware", "checkpoint"},
    "profiler": {"planner", "simulator"},
}
"""What a package may not import although its layer allows it."""

WITHOUT_TORCH = (
    "values",
    "step",
    "planner",
    "simulator",
    "hardware",
    "drift.replanning",
    "drift.speed_levels",
    "programmes.graph",
    "programmes.rules",
    "programmes.search",
    "watch",
)

MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
KERNELS = PACKAGE.parent / "kernels"  # installed as `poplar.kernels`
MODULES |= {
    f"poplar.kernels.{path.stem}".removesuffix(".__init__"): path
    for path in sorted(KERNELS.glob("*.py"))
}


@functools.cache
def parsed(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def imports(module: str, *, when_loaded: bool = False) -> Iterator[str]:
    """Every module that `module` imports: anywhere in it, or only what loading it needs."""
    tree = parsed(module)
    for node in tree.body if when_loaded else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = absolute(module, node)
            for alias in node.names:
                submodule = f"{source}.{alias.name}"
                known = submodule in MODULES or submodule == "poplar._core"
                yield submodule if known else source


def absolute(module: str, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return str(node.module)
    is_package = MODULES[module].name == "__init__.py"
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, node.module] if node.module else parts)


def top_name(module: str) -> str:
    """`comm` for `poplar.comm.group`; `_core` is below everything."""
    return module.partition(".")[2].partition(".")[0]


LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names} | {"_core": -1}


def test_imports_point_down_the_layers():
    wrong = [
        f"{module} in layer {LEVEL[top_name(module)]} imports {imported}"
        for module in MODULES
        if module != "poplar"
        for imported in imports(module)
        if inside(imported, "poplar") and imported != "poplar"
        if LEVEL[top_name(imported)] > LEVEL[top_name(module)]
        or top_name(imported) in INDEPENDENT.get(top_name(module), set())
    ]
    assert not wrong, f"the layers are {LAYERS}"


def test_every_module_has_a_layer():
    assert {top_name(module) for module in MODULES if module != "poplar"} <= set(LEVEL)


def test_no_module_needs_itself_to_be_loaded():
    graph = {
        module: {needed for needed in imports(module, when_loaded=True) if needed in MODULES}
        for module in MODULES
        if MODULES[module].name != "__init__.py"
    }
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"circular imports: {' -> '.join(error.args[1])}")


def test_planning_imports_no_torch():
    assert not [
        module
        for module in MODULES
        if any(inside(module, f"poplar.{one}") for one in WITHOUT_TORCH)
        and any(inside(imported, "torch") for imported in imports(module))
    ]


def test_backends_have_names_only_in_comm():
    assert not [
        f"{module}, line {node.lineno}"
        for module in MODULES
        if not inside(module, "poplar.comm") and module != "poplar"
        for node in ast.walk(parsed(module))
        if isinstance(node, ast.Constant) and node.value in ("nccl", "gloo")
    ]


# `setup` checks the stage that was asked for and picks the strategy; no module below it uses one.
BELOW_SETUP = [
    name for name in MODULES if inside(name, "poplar.zero") and name != "poplar.zero.setup"
]


def test_strategies_compare_no_stage_numbers():
    assert not [
        f"{module}, line {node.lineno}: {ast.unparse(node)}"
        for module in BELOW_SETUP
        for node in ast.walk(parsed(module))
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
        if ast.unparse(side).split(".")[-1] == "stage"
    ]


ATTRIBUTES_OF_OTHERS = {
    *("grad", "data", "training", "forward", "_buffers", "_backward_hooks", "grad_dtype"),
    *("_post_accumulate_grad_hooks", "register_parameter", "__class__", "__cause__"),
}
"""Attributes of torch and Python that are assigned."""


def test_the_engine_assigns_no_attribute_of_another_object():
    """An object is complete when its constructor returns, and changes in its own methods."""
    found = []
    for name in MODULES:
        if not name.startswith(("poplar.zero", "poplar.training", "poplar.optimizer")):
            continue
        for node in ast.walk(parsed(name)):
            own = getattr(node, "target", None)
            targets = node.targets if isinstance(node, ast.Assign) else [own]
            for target in [part for t in targets for part in getattr(t, "elts", [t])]:
                if not isinstance(target, ast.Attribute) or target.attr in ATTRIBUTES_OF_OTHERS:
                    continue
                text = ast.unparse(target)
                is_own = text.count(".") == 1 and text.startswith(("self.", "cls.", "ctx."))
                if not is_own and text not in ("step.hooked", "collective_call.is_collective"):
                    found.append(f"{name}:{target.lineno}: {text}")
    assert not found


def test_planning_loads_without_torch():
    run_fresh(
        """
        import sys
        import poplar
        import poplar.planner.search, poplar.simulator.step_simulation
        plan = poplar.Plan.manual("2,2,2,15", stage=0)
        assert plan.global_batch == 21
        assert "torch" not in sys.modules, "planning must not load torch"
        assert "numpy" not in sys.modules
        """
    )


def test_planning_works_where_torch_is_not_installed():
    run_fresh(
        """
        import sys
        sys.modules["torch"] = None  # as if it were not there: importing it raises
        from poplar import Plan
        print(Plan.proportional([3, 1], 24, 3, 8))
        """
    )


def test_the_public_names_are_where_the_package_says():
    assert len(poplar.__all__) <= 27
    assert set(poplar._HOME) == set(poplar.__all__)
    for name, home in poplar._HOME.items():
        assert getattr(import_module(home), name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        poplar.nothing  # noqa: B018


def run_fresh(program: str) -> None:
    """Run a program in a new interpreter: this one has everything loaded."""
    lines = [line.removeprefix(" " * 8) for line in program.splitlines()]
    # From the package's parent, so that it is found the way it is here.
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=PACKAGE.parent,
    )
    assert done.returncode == 0, done.stderr
