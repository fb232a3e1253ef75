"""The identity of a profile has the code of the model and of the loss, not its lines and file."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from poplar.profiler.job import Job

PROGRAM = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

SIZES = 2

def scaled(x):
    return x * 2

def helper(x):
    return scaled(x)

class Base(nn.Module):
    def inherited(self, x):
        return x + 1

class Block(Base):
    @property
    def size(self):
        return 3

    @staticmethod
    def fixed(x):
        return x

    @torch.no_grad()
    def decorated(self, x):
        return x.sum()

    def unused(self, x, parts=4):
        return [x for kind in range(2) if kind in {"q", "k", "v"}]

    def forward(self, x):
        return checkpoint(lambda y: helper(y), x)

def loss(model, batch):
    return model(batch).mean()

class Loss:
    def part(self, x):
        return x.mean()

    def __call__(self, model, batch):
        return self.part(model(batch))
"""

CHANGES = {
    "checkpointing": ("checkpoint(lambda y: helper(y), x)", "helper(x)"),
    "a function that the forward names": ("x * 2", "x * x"),
    "an inherited method": ("x + 1", "x + x"),
    "a number": ("return 3", "return 4"),
    "a static method": ("return x\n", "return x.clone()\n"),
    "a decorated method": ("x.sum()", "x.mean()"),
    "a default": ("parts=4", "parts=5"),
    "a set": ('{"q", "k", "v"}', '{"q", "k"}'),
    "the loss": ("model(batch).mean()", "model(batch).sum()"),
}
SAME = {
    "a comment": ("class Block", "# A comment\n\nclass Block"),
    "lines": ("checkpoint(lambda y: helper(y), x)", "checkpoint(\n  lambda y: helper(y),\n x)"),
    "a function that is not named": ("SIZES = 2", "def other():\n    return 1"),
}


def defined(change: tuple[str, str] = ("", ""), file: str = "train.py") -> dict[str, Any]:
    """What the program defines, with one text replaced."""
    before, after = change
    assert before in PROGRAM
    names: dict[str, Any] = {"__name__": "user_program"}
    exec(compile(PROGRAM.replace(before, after), file, "exec"), names)
    return names


def code(model: nn.Module, loss: Callable[..., Any]) -> str:
    job = Job.of(model, loss, torch.ones(1, 2))
    return str(job.may_differ(torch.device("cpu"))["code"])


def code_of_program(change: tuple[str, str] = ("", ""), file: str = "train.py") -> str:
    names = defined(change, file)
    return code(nn.Sequential(names["Block"](), names["Block"]()), names["loss"])


@pytest.mark.parametrize("change", CHANGES)
def test_changed_code_is_another_identity(change: str):
    assert code_of_program(CHANGES[change]) != code_of_program()


@pytest.mark.parametrize("change", SAME)
def test_text_that_does_not_run_is_the_same_identity(change: str):
    assert code_of_program(SAME[change]) == code_of_program()


def test_code_may_be_in_another_file():
    assert code_of_program(file="moved.py") == code_of_program()


def test_code_does_not_depend_on_the_order_of_a_set():
    def looks(model: nn.Module, batch: Any) -> bool:
        return batch in {0, 8}

    codes = set()
    for order in (frozenset([0, 8]), frozenset([8, 0])):
        constants = [order if isinstance(c, frozenset) else c for c in looks.__code__.co_consts]
        changed = looks.__code__.replace(co_consts=tuple(constants))
        codes.add(code(nn.Linear(2, 2), FunctionType(changed, globals())))
    assert len(codes) == 1


def test_code_does_not_depend_on_calls():
    names = defined()
    model = nn.Sequential(names["Block"]())
    before = code(model, names["loss"])
    for _ in range(40):  # Python specializes what runs often
        names["loss"](model, torch.ones(1, 2))
    assert code(model, names["loss"]) == before


def mean(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).mean()


def made(reduce: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda model, batch: reduce(model(batch))


LOSSES: dict[str, Callable[[dict[str, Any]], Callable[..., Any]]] = {
    "a partial": lambda names: functools.partial(names["loss"]),
    "an object": lambda names: names["Loss"](),
    "a method": lambda names: names["Loss"]().__call__,
    "a closure": lambda names: made(names["loss"]),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_code_behind_a_loss_is_part_of_the_identity(kind: str):
    model, of = nn.Linear(2, 2), LOSSES[kind]
    changes = CHANGES["the loss"], ("return x.mean()", "return x.sum()")
    codes = [code(model, of(defined(change))) for change in changes]
    assert codes[0] != codes[1]
    assert codes[0] == code(model, of(defined(changes[0])))


def test_forward_of_one_object_is_part_of_the_identity():
    model, changed = nn.Linear(2, 2), nn.Linear(2, 2)
    changed.forward = functools.partial(lambda self, x: x, changed)  # type: ignore[method-assign]
    assert code(model, mean) != code(changed, mean)
