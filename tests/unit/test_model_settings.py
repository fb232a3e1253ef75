"""The identity of a profile tells models apart whose parameters are equal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from poplar.profiler.job import Job

CPU = torch.device("cpu")


@dataclass
class Settings:
    depth: int = 2
    inner: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Slots:
    depth: int = 2


class Config:
    """As those of transformers: `to_dict` leaves out private attributes."""

    def __init__(self, attention: str = "eager", **values: Any) -> None:
        self._attention = attention
        self.inner = None
        vars(self).update(values)

    def to_dict(self) -> dict[str, Any]:
        return {}


def with_settings(**settings: Any) -> nn.Module:
    """A model with one layer, which has these attributes."""
    model = nn.Sequential(nn.Linear(2, 2))
    for name, value in settings.items():
        setattr(model[0], name, value)
    return model


def structure(model: nn.Module) -> str:
    job = Job.of(model, lambda model, batch: None, torch.ones(1, 2))
    return str(job.may_differ(CPU)["structure"])


def of_itself() -> Config:
    config = Config()
    config.inner = config
    return config


DIFFERENT: dict[str, list[Any]] = {
    "a flag": [True, False],
    "a number": [2, 40, 2.5],
    "a text": ["eager", "sdpa"],
    "a dtype": [torch.float32, torch.bfloat16],
    "a tuple": [(2, 2), (2, 40), (2, None)],
    "a list": [[2, 2], [2, 40], [[2], [40]]],
    "a set": [{"q", "k"}, {"q", "v"}],
    "a mapping": [{"depth": 2}, {"depth": 40}, {2: "depth"}],
    "a dataclass": [Settings(), Settings(depth=40), Settings(inner={"depth": 40})],
    "a dataclass with slots": [Slots(), Slots(depth=40)],
    "a private attribute of a config": [Config(), Config("sdpa")],
    "a config in a config": [Config(inner=Settings()), Config(inner=Settings(depth=40))],
    "a function": [torch.relu, torch.tanh, nn.functional.gelu],
    "nothing": [None, 2],
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_settings_of_a_module_are_part_of_the_structure(kind: str):
    values = DIFFERENT[kind]
    assert len({structure(with_settings(given=value)) for value in values}) == len(values)


SAME: dict[str, Callable[[], Any]] = {
    "another object": object,
    "another function": lambda: lambda: None,
    "a tensor": lambda: torch.rand(2),
    "a list of modules": lambda: [nn.Linear(2, 2)],
    "keys that are objects": lambda: {object(): 1},
    "a class of configs": lambda: dataclass(type("Own", (), {})),
    "a config that has itself": of_itself,
    "a hash": lambda: Config(_original_object_hash=hash(object())),
}


@pytest.mark.parametrize("kind", SAME)
def test_what_differs_between_runs_is_not_part_of_the_structure(kind: str):
    first, second = (structure(with_settings(given=SAME[kind]())) for _ in range(2))
    assert first == second


def test_structure_does_not_depend_on_hooks_and_copies():
    model = with_settings(config=Config(inner=Settings()))
    before = structure(model)
    assert structure(copy.deepcopy(model)) == before
    handles = [
        model.register_forward_hook(lambda *_: None, with_kwargs=True),
        model.register_full_backward_hook(lambda *_: None),
    ]
    assert structure(model) == before
    for handle in handles:
        handle.remove()
    assert structure(model) == before


def test_structure_does_not_depend_on_the_order_of_a_set():
    orders = {0, 8}, {8, 0}
    assert [*orders[0]] != [*orders[1]]
    first, second = (structure(with_settings(given=each)) for each in orders)
    assert first == second
