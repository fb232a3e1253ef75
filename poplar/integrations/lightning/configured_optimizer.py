"""What `configure_optimizers` returned, rebuilt around a `HeteroZeroOptimizer`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from poplar.optimizer import HeteroZeroOptimizer


@dataclass(frozen=True)
class OptimizerRecipe:
    """The class, options and param groups of a plain optimizer."""

    optimizer_class: type[torch.optim.Optimizer]
    options: dict[str, Any]
    """Those that differ from the defaults of the class."""
    groups: list[dict[str, Any]]
    """With the options that differ from `options`."""

    @staticmethod
    def of(optimizer: torch.optim.Optimizer) -> OptimizerRecipe:
        """The recipe of an optimizer that has not stepped."""
        known = inspect.signature(type(optimizer).__init__).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
        defaults = optimizer.defaults
        options = {
            name: value
            for name, value in defaults.items()
            if (name in known and value != known[name].default) or (takes_any and name not in known)
        }
        groups = [
            {
                name: value
                for name, value in group.items()
                if name != "param_names" and not (name in defaults and value == defaults[name])
            }
            for group in optimizer.param_groups
        ]
        return OptimizerRecipe(type(optimizer), options, groups)


def check_configured(optimizers: Iterable[Any]) -> torch.optim.Optimizer:
    """The one optimizer that `configure_optimizers` returned.

    Raises:
        TypeError, ValueError: it returned none, several, or one that is not plain.
    """
    found = list(optimizers)
    if len(found) != 1 or not isinstance(found[0], torch.optim.Optimizer):
        names = [type(optimizer).__name__ for optimizer in found]
        raise ValueError(
            f"PoplarStrategy needs one optimizer from configure_optimizers(), got {names}; use "
            "param groups for different hyper-parameters"
        )
    if isinstance(found[0], HeteroZeroOptimizer):
        raise TypeError(
            "configure_optimizers() returned a HeteroZeroOptimizer; return the plain optimizer, "
            "AdamW(self.parameters(), ...): PoplarStrategy builds the HeteroZeroOptimizer from it"
        )
    return found[0]


def attach(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Make a scheduler of a plain optimizer write to another one with the same param groups.

    Raises:
        TypeError: it has no `optimizer`.
    """
    if not hasattr(scheduler, "optimizer"):
        raise TypeError(
            f"scheduler {type(scheduler).__name__} has no attribute `optimizer`, so it cannot "
            "follow the optimizer that PoplarStrategy builds; use a torch.optim.lr_scheduler"
        )
    scheduler.optimizer = optimizer
    for nested in getattr(scheduler, "_schedulers", ()):
        attach(nested, optimizer)


class StepCounter(LRScheduler):
    """Changes nothing. As every scheduler, it lets `optimizer.step` count its calls.

    Other schedulers that were built for another optimizer warn if it does not.
    """

    def get_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]
