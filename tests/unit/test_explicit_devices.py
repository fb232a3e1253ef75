"""Poplar names the device of every tensor, so `torch.set_default_device` changes nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils import _device

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("poplar", "kernels")
FACTORIES = {
    *(function.__name__ for function in _device._device_constructors()),
    "Generator",
}
"""Functions of torch that use the default device; a generator must be on the device of its use."""


def without_device(source: str) -> Iterator[ast.Call]:
    """Calls of `torch.<factory>` that do not say `device=`."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = node.func.value, node.func.attr
        if not isinstance(owner, ast.Name) or owner.id != "torch" or name not in FACTORIES:
            continue
        is_given = any(keyword.arg == "device" for keyword in node.keywords)
        if not is_given and not (name == "Generator" and node.args):
            yield node


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("torch.zeros(3)", 1),
        ("torch.tensor([1], dtype=torch.int64)", 1),
        ("torch.Generator().manual_seed(0)", 1),
        ("torch.zeros(3, device='cpu')", 0),
        ("torch.Generator(device)", 0),
        ("torch.zeros_like(x)", 0),
        ("x.new_zeros(3)", 0),
    ],
)
def test_calls_without_a_device_are_found(source, found):
    assert len(list(without_device(source))) == found


def test_every_tensor_is_created_on_an_explicit_device():
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 100
    missing = []
    for path in files:
        name = str(path.relative_to(ROOT))
        for call in without_device(path.read_text()):
            missing.append(f"{name}:{call.lineno}: {ast.unparse(call)}")
    assert not missing, "add device=:\n" + "\n".join(missing)
