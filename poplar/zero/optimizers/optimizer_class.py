"""`OptimizerClass`: the class that updates a param group, its options, and what it needs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from poplar.zero.optimizers.flat_adamw import FlatAdamW
from poplar.zero.optimizers.granularity import (
    Granularity,
    OptimizerFactory,
    bases_of,
    granularity_of,
    problem_with,
)
from poplar.zero.steps.step_settings import settings_in

Groups = Sequence[dict[str, Any]]
_OF_POPLAR = ("optimizer_class", "granularity")
"""Keys of a param group with a class of its own that are no settings of the class."""
IMPLEMENTATIONS = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Options that choose how the update is computed: a load keeps those of the optimizer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OptimizerClass:
    """An optimizer class with options."""

    factory: OptimizerFactory
    """The user's class."""
    options: Mapping[str, Any]
    """Keyword arguments of the class."""
    granularity: Granularity
    shard_factory: OptimizerFactory
    """The class that updates the shards: the fastest one with the user's results; the same on all
    ranks."""
    chose_fused: bool
    """Poplar has added `fused=True`, so it is no setting of the user's."""

    @property
    def name(self) -> str:
        """The name of the user's class."""
        return str(getattr(self.factory, "__name__", repr(self.factory)))

    def problem_on(self, device: torch.device) -> str | None:
        """Why the class cannot update tensors on a device; None: it can."""
        return problem_with(self.factory, self.options, device, self.granularity)

    @classmethod
    def checked(
        cls,
        factory: OptimizerFactory,
        options: Mapping[str, Any],
        groups: Groups,
        device: torch.device,
        granularity: Granularity | None,
    ) -> OptimizerClass:
        """Check a class with its options and param groups."""
        if isinstance(factory, torch.optim.Optimizer):
            name = type(factory).__name__
            raise TypeError(
                f"optimizer_class is an instance of {name}; pass the class {name}, and its options "
                "as keyword arguments, such as lr=1e-3"
            )
        chosen = _fastest_options(factory, options)
        needs = granularity_of(factory, chosen, device, granularity)
        factory([dict(group) for group in groups], **chosen)  # it raises what the class rejects
        has_flat_kernel = factory is torch.optim.AdamW and device.type in ("cpu", "cuda")
        is_flat = has_flat_kernel and needs == "elements" and chosen.get("fused")
        return cls(
            factory=factory,
            options=chosen,
            granularity=needs,
            shard_factory=FlatAdamW if is_flat else factory,
            chose_fused="fused" in chosen and options.get("fused") is None,
        )


def optimizer_classes(
    factory: OptimizerFactory,
    options: Mapping[str, Any],
    groups: Groups,
    device: torch.device,
    granularity: Granularity | None,
) -> tuple[OptimizerClass, ...]:
    """The class of each param group, which is `factory` if the group has no `optimizer_class`.

    The keys `optimizer_class` and `granularity` are removed from the groups.
    """
    own = [{key: group.pop(key, None) for key in _OF_POPLAR} for group in groups]
    rest = [group for group, keys in zip(groups, own, strict=True) if not keys["optimizer_class"]]
    main = None
    if rest or not groups:
        main = OptimizerClass.checked(factory, options, rest, device, granularity)
    classes = []
    for group, keys in zip(groups, own, strict=True):
        if keys["optimizer_class"] is None:
            assert main is not None
            classes.append(main)
            continue
        settings = settings_in(group)
        inside = {k: v for k, v in group.items() if k not in settings}
        classes.append(
            OptimizerClass.checked(
                keys["optimizer_class"], settings, [inside], device, keys["granularity"]
            )
        )
    return tuple(classes)


def check_overrides(classes: Sequence[OptimizerClass], groups: Groups, model: nn.Module) -> None:
    """Check that bitsandbytes has no options for single parameters, which would have no effect.

    Its optimizers look for the parameter itself, and are given shards.
    """
    library = sys.modules.get("bitsandbytes.optim")  # imported, if it is one of its classes
    if library is None:
        return
    manager = library.GlobalOptimManager.get_instance()
    overrides = dict(manager.pid2config)
    for module, name, options in manager.module_weight_config_triple:
        overrides[id(getattr(module, name, None))] = options
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for cls, group in zip(classes, groups, strict=True):
        if not any(base.__module__.startswith(library.__name__) for base in bases_of(cls.factory)):
            continue
        made: Any = cls.factory([torch.zeros(1, device="cpu")], **cls.options)
        known = {**vars(made.args), **made.defaults, **group}
        for parameter in group["params"]:
            wanted = overrides.get(id(parameter), {})
            if any(known.get(key) != value for key, value in wanted.items()):
                raise ValueError(
                    f"bitsandbytes has options of its own for {names[id(parameter)]!r}, {wanted} "
                    "(by StableEmbedding or GlobalOptimManager), which HeteroZeroOptimizer does "
                    "not read; put the parameter into a param group with a class and options of "
                    "its own, as {'params': [...], 'optimizer_class': bitsandbytes.optim.AdamW, "
                    "'optim_bits': 32, 'lr': ...}"
                )


def check_option_names(
    factory: OptimizerFactory, options: Mapping[str, Any], arguments: Collection[str]
) -> None:
    """Check, as far as its signature tells, that the class has these options.

    The user's call did not know them; they may be misspelt `arguments` of that call.
    """
    known = _parameters_of(factory)
    if any(one.kind is one.VAR_KEYWORD for one in known.values()):
        return
    for name in options:
        if known and name not in known:
            similar = get_close_matches(name, {*arguments, *known}, n=1)
            hint = f"; did you mean {similar[0]!r}?" if similar else ""
            raise TypeError(
                f"{name!r} is neither an argument of this call nor of "
                f"{getattr(factory, '__name__', factory)}, which gets all others{hint}"
            )


def _parameters_of(factory: OptimizerFactory) -> Mapping[str, inspect.Parameter]:
    """Empty if they are unknown."""
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return {}


def _fastest_options(factory: OptimizerFactory, options: Mapping[str, Any]) -> dict[str, Any]:
    """Add `fused=True` if the class supports it and the user chose no implementation."""
    known = _parameters_of(factory)
    if "fused" not in known or any(options.get(choice) is not None for choice in IMPLEMENTATIONS):
        return dict(options)
    return {**options, "fused": True}
